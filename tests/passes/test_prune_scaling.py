"""Factors on gradients go into the loss gradient's seed or the updates, or stay with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.ir import Job
from plancompiler.ops import apply
from plancompiler.passes import run_passes
from tests.dense import run_dense
from tests.passes.worlds import Tower, configured, losses, mesh, record_of

Change = Callable[[list[pc.Value]], Sequence[pc.Value]]
PASSES = ("prune_scaling", "dce")


def job_of(
    change: Change,
    optimizer: pc.optim.Optimizer | None = None,
    ranks: int = 1,
    report: bool = False,
) -> Job:
    """A tower whose gradients the function changes before they are applied."""
    placement = mesh(ranks)
    with pc.job("scaled") as job:
        model = Tower(2, 6).place(placement)
        x = pc.normal((8, 6), placement=placement).redistribute(sbp="S(0)")
        loss = pc.square(model(x) - 0.5).sum()
        parameters = [parameter.value for _, parameter in model.named_parameters()]
        gradients = [grad for grad in pc.gradients(loss, parameters) if grad is not None]
        changed = change(gradients)
        (optimizer or pc.optim.SGD(1e-2)).apply(parameters, changed)
        pc.output("loss", loss)
        if report:
            pc.output("norm", sum_of_squares(changed))
    return job


def sum_of_squares(tensors: Sequence[pc.Value]) -> pc.Value:
    total = pc.square(tensors[0]).sum()
    for each in tensors[1:]:
        total = total + pc.square(each).sum()
    return total


def pruned(job: Job) -> Job:
    rewritten, _ = run_passes(configured(job, passes=PASSES))
    return rewritten


def scales(job: Job) -> int:
    """Ops that multiply by 1/4 or 1/2."""
    return sum(
        op.kind in ("mul_scalar", "div_scalar") and op.attr("scalar") in (0.25, 0.5, 4.0)
        for op in job.ops
    )


def factors(job: Job) -> list[object]:
    return [op.attr("grad_scale", 1.0) for op in job.ops if op.kind.endswith("_update")]


def seed_value(job: Job) -> object:
    return next(op.attr("value") for op in job.ops if op.kind == "fill" and not op.outputs[0].shape)


def same_losses(job: Job) -> None:
    before = [each["loss"] for each in run_dense(job, 4)]
    after = [each["loss"] for each in run_dense(pruned(job), 4)]
    np.testing.assert_allclose(after, before, rtol=1e-5)


def summary(job: Job) -> str:
    return record_of(job, "prune_scaling", passes=PASSES).summary


def notes(job: Job) -> tuple[str, ...]:
    return record_of(job, "prune_scaling", passes=PASSES).notes


OPTIMIZERS = [
    pc.optim.SGD(1e-2, weight_decay=0.1),
    pc.optim.SGD(1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    pc.optim.Adam(1e-2, weight_decay=0.1),
    pc.optim.AdamW(1e-2),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_factor_goes_into_the_seed(optimizer: pc.optim.Optimizer) -> None:
    job = job_of(lambda grads: [grad * 0.25 for grad in grads], optimizer)
    after = pruned(job)
    assert (scales(job), scales(after)) == (4, 0)
    assert seed_value(after) == 0.25
    assert factors(after) == [1.0] * 4
    assert summary(job) == "moved 4 factors into 1 gradient seed and 0 into updates"
    same_losses(job)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_different_factors_go_into_the_updates(optimizer: pc.optim.Optimizer) -> None:
    job = job_of(
        lambda grads: [
            grad * 0.25 if place else grad / 4.0 * 2.0 for place, grad in enumerate(grads)
        ],
        optimizer,
    )
    after = pruned(job)
    assert sorted(map(str, factors(after))) == ["0.25", "0.25", "0.25", "2.0"]
    assert seed_value(after) == 1.0
    assert "2 different factors" in notes(job)[0]
    same_losses(job)


EVERY = [
    pc.optim.Lion(1e-2),
    pc.optim.LARS(1e-1),
    pc.optim.LAMB(1e-2),
    pc.optim.Adafactor(1e-2),
    pc.optim.DistributedFusedLamb(1e-2, max_norm=0.1),
    pc.optim.DistributedFusedLamb(1e-2, accumulate=2),
    pc.optim.RMSprop(1e-2, centered=True, momentum=0.5, maximize=True),
]


@pytest.mark.parametrize("optimizer", EVERY, ids=lambda each: type(each).__name__)
def test_every_optimizer_takes_factors(optimizer: pc.optim.Optimizer) -> None:
    job = job_of(
        lambda grads: [grad * (0.25 if place else 0.5) for place, grad in enumerate(grads)],
        optimizer,
    )
    assert (scales(job), scales(pruned(job))) == (4, 0)
    assert summary(job) == "moved 0 factors into 0 gradient seeds and 4 into updates"
    assert not any("stays" in note for note in notes(job))
    same_losses(job)


def test_a_factor_that_not_all_readers_of_one_op_have_stays() -> None:
    lamb = pc.optim.DistributedFusedLamb(1e-2, max_norm=0.1, clip="before")
    job = job_of(lambda grads: [grad * 0.25 for grad in grads], lamb)
    different = job_of(
        lambda grads: [grad * (0.25 if place else 0.5) for place, grad in enumerate(grads)], lamb
    )
    assert (scales(pruned(job)), scales(pruned(different))) == (0, 4)
    for each in (job, different):
        same_losses(each)


def test_two_losses_have_seeds_of_their_own() -> None:
    with pc.job("two") as job:
        for name, degree in (("a", 2), ("b", 4)):
            placement = mesh(1)
            weight = pc.nn.Parameter((6,), "float32", "ones")
            weight.name = name
            weight.place(placement)
            loss = pc.square(weight.value * pc.normal((6,), placement=placement)).sum()
            (grad,) = pc.gradients(loss, [weight.value])
            assert grad is not None
            pc.optim.SGD(0.1).apply([weight], [grad / degree])
            pc.output(f"loss {name}", loss)
    after = pruned(job)
    seeds = [op.attr("value") for op in after.ops if op.kind == "fill" and op.name.startswith("f")]
    assert {0.5, 0.25} <= set(seeds)
    assert summary(job) == "moved 2 factors into 2 gradient seeds and 0 into updates"
    for ours, theirs in zip(run_dense(after, 3), run_dense(job, 3), strict=True):
        assert ours == pytest.approx(theirs)


def test_a_gradient_without_factor_keeps_the_seed() -> None:
    job = job_of(lambda grads: [grads[0], *(grad * 0.25 for grad in grads[1:])])
    after = pruned(job)
    assert sorted(map(str, factors(after))) == ["0.25", "0.25", "0.25", "1.0"]
    assert any("takes a gradient without a factor" in note for note in notes(job))
    same_losses(job)


def test_a_reported_gradient_keeps_its_op() -> None:
    job = job_of(lambda grads: [grad * 0.25 for grad in grads], report=True)
    after = pruned(job)
    assert (scales(after), factors(after)) == (4, [1.0] * 4)
    assert sum("must see the scaled gradient" in note for note in notes(job)) == 4
    assert summary(job) == "no gradient has a factor of its own to move"
    same_losses(job)


def test_clipping_sees_the_values_it_saw() -> None:
    def clip(grads: list[pc.Value]) -> list[pc.Value]:
        scaled = [grad * 0.25 for grad in grads]
        norm = sum_of_squares(scaled).sqrt()
        factor = pc.minimum(1.0 / norm, pc.full((), 1.0, "float32", norm.placement))
        return [grad * factor for grad in scaled]

    job = job_of(clip)
    assert scales(pruned(job)) == 4
    assert sum("must see the scaled gradient" in note for note in notes(job)) == 4
    same_losses(job)


def test_clipping_before_scaling_keeps_the_seed_and_frees_the_ops() -> None:
    def clip(grads: list[pc.Value]) -> list[pc.Value]:
        factor = 1.0 / (sum_of_squares(grads).sqrt() + 1.0)
        return [grad * factor * 0.25 for grad in grads]

    job = job_of(clip)
    after = pruned(job)
    assert (seed_value(after), factors(after)) == (1.0, [0.25] * 4)
    assert any("is not linear in it" in note for note in notes(job))
    same_losses(job)


def test_an_update_that_takes_no_factor_keeps_its_op() -> None:
    with pc.job("average") as job:
        average = pc.nn.Parameter((6,), "float32", "zeros")
        average.name = "average"
        average.place(mesh(1))
        # A moving average is an update too, of a kind without gradients.
        half = pc.normal((6,), placement=mesh(1)) * 0.5
        apply("moving_average_update", average.value, half, decay=0.5)
        pc.output("sum", average.value.sum())
    assert scales(pruned(job)) == 1
    assert any("cannot scale its gradient" in note for note in notes(job))


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_on_several_ranks(ranks: int) -> None:
    job = job_of(lambda grads: [grad * 0.25 for grad in grads], pc.optim.AdamW(1e-2), ranks)
    np.testing.assert_allclose(losses(job, 5, passes=PASSES), losses(job, 5, passes=()), rtol=1e-5)


def test_weights_used_twice_and_gradients_summed() -> None:
    def job_of_shared() -> Job:
        with pc.job("shared") as job:
            layer = pc.nn.Linear(6, 6).place(mesh(1))
            x = pc.normal((8, 6), placement=mesh(1))
            loss = pc.square(layer(layer(x).tanh())).sum()
            parameters = [each.value for _, each in layer.named_parameters()]
            grads = [grad for grad in pc.gradients(loss, parameters) if grad is not None]
            pc.optim.SGD(1e-2).apply(parameters, [grad * 0.25 for grad in grads])
            pc.output("loss", loss)
        return job

    job = job_of_shared()
    assert seed_value(pruned(job)) == 0.25
    same_losses(job)
