"""Schedulers of learning rates, against the rules that move a rate from epoch to epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import UsageError
from plancompiler.frontend.optim import lr_scheduler

EPOCHS = 12
FIRST = 0.5


def sgd(*rates: float) -> Any:
    mesh = pc.Placement("cpu", [0])
    return pc.optim.SGD(
        [
            {"params": [pc.tensor(np.ones(2), mesh, requires_grad=True)], "lr": rate}
            for rate in rates or (FIRST,)
        ]
    )


def recurrence(step: Callable[[int, float], float], first: float = FIRST) -> list[float]:
    """The rates where each follows from the one before it and its epoch."""
    rates = [first]
    for epoch in range(1, EPOCHS):
        rates.append(step(epoch, rates[-1]))
    return rates


def cosine_step(epoch: int, rate: float) -> float:
    """As the paper's annealing goes on: the quotient of two neighbouring cosines."""
    now, before = (1 + math.cos(math.pi * each / 20) for each in (epoch, epoch - 1))
    return 0.1 + (rate - 0.1) * now / before


def one_cycle(epoch: int) -> float:
    """0.3 of 12 steps up from 1/25 to 1 in a cosine, then down to 1/250000."""
    if epoch <= 2.6:
        return 1 + (0.04 - 1) * (1 + math.cos(math.pi * epoch / 2.6)) / 2
    low = 0.04 / 1e4
    return low + (1 - low) * (1 + math.cos(math.pi * (epoch - 2.6) / (11 - 2.6))) / 2


CASES: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "StepLR": (
        lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        recurrence(lambda epoch, rate: rate / 2 if epoch % 3 == 0 else rate),
    ),
    "MultiStepLR": (
        lambda o: lr_scheduler.MultiStepLR(o, [7, 2]),
        recurrence(lambda epoch, rate: rate / 10 if epoch in (2, 7) else rate),
    ),
    "ExponentialLR": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        recurrence(lambda epoch, rate: rate * 0.9),
    ),
    "LambdaLR": (
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        [FIRST / (1 + epoch) for epoch in range(EPOCHS)],
    ),
    "LinearLR": (
        lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 4),
        recurrence(lambda epoch, rate: rate + 0.2 * FIRST if epoch <= 4 else rate, 0.2 * FIRST),
    ),
    "ConstantLR": (
        lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
        [0.5 * FIRST] * 3 + [FIRST] * (EPOCHS - 3),
    ),
    "PolynomialLR": (
        lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
        recurrence(lambda e, rate: rate * ((4 - e) / (5 - e)) ** 2 if e < 4 else 0.0),
    ),
    "CosineAnnealingLR": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1),
        recurrence(cosine_step),
    ),
    "OneCycleLR": (
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, EPOCHS, cycle_momentum=False),
        [one_cycle(epoch) for epoch in range(EPOCHS)],
    ),
    "MultiplicativeLR": (
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 1 / (1 + epoch)),
        recurrence(lambda epoch, rate: rate / (1 + epoch)),
    ),
    "CosineAnnealingWarmRestarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, 0.1),
        [
            0.1 + (FIRST - 0.1) * (1 + math.cos(math.pi * place / length)) / 2
            for length in (2, 4, 8)
            for place in range(length)
        ][:EPOCHS],
    ),
    "CyclicLR": (
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 2, 3, "triangular2", cycle_momentum=False),
        [0.1 + 0.4 * share for share in (0, 1 / 2, 1, 2 / 3, 1 / 3)]
        + [0.1 + 0.2 * share for share in (0, 1 / 2, 1, 2 / 3, 1 / 3)]
        + [0.1, 0.1 + 0.1 / 2],
    ),
    "CyclicLR by steps": (
        lambda o: lr_scheduler.CyclicLR(
            o, 0.0, 1.0, 1, mode="exp_range", gamma=0.5, cycle_momentum=False
        ),
        [0.5**epoch if epoch % 2 else 0.0 for epoch in range(EPOCHS)],
    ),
    "SequentialLR": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.1, 99), lr_scheduler.ExponentialLR(o, 0.5)], [3]
        ),
        [0.1 * FIRST] * 3 + [FIRST * 0.5**epoch for epoch in range(EPOCHS - 3)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_go_on_as_their_rule_says(name: str) -> None:
    make, wanted = CASES[name]
    optimizer = sgd()
    scheduler, rates = make(optimizer), [optimizer.param_groups[0]["lr"]]
    for _ in range(EPOCHS - 1):
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == rates[-1:]
    np.testing.assert_allclose(rates, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_a_scheduler_goes_on_from_its_state(name: str) -> None:
    make, wanted = CASES[name]
    scheduler = make(sgd())
    for _ in range(5):
        scheduler.step()
    other = make(sgd())
    other.load_state_dict(scheduler.state_dict())
    np.testing.assert_allclose(other.get_last_lr(), wanted[5:6], rtol=1e-12, atol=1e-15)
    other.step()
    np.testing.assert_allclose(other.get_last_lr(), wanted[6:7], rtol=1e-12, atol=1e-15)


def test_a_plateau_lowers_the_rates_of_all_groups() -> None:
    optimizer = sgd(1.0, 0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, cooldown=1, min_lr=[0.0, 0.04]
    )
    lowered = []
    for value in (5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0):
        scheduler.step(value)
        lowered.append(scheduler.get_last_lr())
    first = [[1.0, 0.1]] * 3
    # Two epochs that are not better than 4: lowered; one epoch of cooldown; two more: lowered.
    assert lowered == [*first, *[[0.5, 0.05]] * 3, *[[0.25, 0.04]] * 2]
    best = lr_scheduler.ReduceLROnPlateau(sgd(), mode="max", patience=0)
    for value in (1.0, 2.0, 2.0):
        best.step(value)
    assert best.get_last_lr() == [FIRST * 0.1]


def test_a_compiled_step_reads_the_rates_without_being_compiled_again() -> None:
    mesh = pc.Placement("cpu", [0])
    w = pc.tensor(np.ones(1), mesh, requires_grad=True)
    optimizer = pc.optim.SGD([w], lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

    @pc.compile
    def step() -> None:
        optimizer.minimize(w.sum())

    moved = []
    for _ in range(3):
        before = w.item()
        step()
        moved.append(before - w.item())
        scheduler.step()
    assert moved == [1.0, 0.5, 0.25]
    assert len(step.programs()) == 1


def test_what_is_wrong_is_refused() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(UsageError, match="not those that their scheduler has set"):
        scheduler.step()
    with pytest.raises(UsageError, match="a schedule or a function already"):
        lr_scheduler.StepLR(sgd(lambda step: 0.1), 3)  # type: ignore[arg-type]  # as a user may
    with pytest.raises(UsageError, match="is not cycled"):
        lr_scheduler.OneCycleLR(sgd(), 1.0, 9)
    cycle = lr_scheduler.OneCycleLR(sgd(), 1.0, 2, cycle_momentum=False)
    cycle.step()
    cycle.step()
    with pytest.raises(UsageError, match="is over"):
        cycle.step()
    with pytest.raises(UsageError, match="step_size is at least 1"):
        lr_scheduler.StepLR(sgd(), 0)
    with pytest.raises(UsageError, match="not the state"):
        lr_scheduler.StepLR(sgd(), 3).load_state_dict({})
    with pytest.raises(UsageError, match="of an optimizer"):
        lr_scheduler.StepLR(3, 3)  # type: ignore[arg-type]  # as a user may
