"""Groups of parameters with numbers of their own, and what an optimizer without a list moves."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.errors import AttributeValueError, UsageError

ONE = pc.Placement("cpu", [0])


def pair():
    """Two weights of 1, and a function that gives a loss whose gradients are 1 by both."""
    weights = [nn.Parameter((2,), init="ones", name=name).place(ONE) for name in ("a", "b")]

    def loss():
        return (weights[0].value + weights[1].value).sum()

    return weights, loss


def values(weights):
    return [round(each.value.numpy()[0].item(), 6) for each in weights]


def test_groups_have_numbers_of_their_own():
    weights, loss = pair()
    optimizer = pc.optim.SGD(
        [{"params": weights[:1]}, {"params": weights[1], "lr": 0.5, "weight_decay": 1.0}],
        lr=0.25,
    )
    loss().backward()
    optimizer.step()
    assert values(weights) == [0.75, 0.0]
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"], first["weight_decay"], second["weight_decay"]) == (
        *(0.25, 0.5),
        *(0.0, 1.0),
    )
    assert first["params"] == weights[:1]
    assert "lr=0.5" in repr(second)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    second["weight_decay"] = 0.0
    optimizer.step()
    assert values(weights) == [0.625, -0.25]
    assert (optimizer.lr, optimizer.weight_decay) == (0.125, 0.0)


@pytest.mark.parametrize("make", [pc.optim.AdamW, pc.optim.LAMB, pc.optim.DistributedFusedLamb])
def test_a_group_trains_as_an_optimizer_of_its_own(make):
    def trained(optimizers_of):
        weights, _ = pair()
        optimizers = optimizers_of(weights)
        for step in range(3):
            ((weights[0].value * weights[1].value).sum() * (step + 1.0)).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return values(weights)

    together = trained(
        lambda weights: [
            make([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.1, "betas": (0.5, 0.5)}])
        ]
    )
    apart = trained(lambda weights: [make(weights[:1]), make(weights[1:], 0.1, (0.5, 0.5))])
    assert together == apart


@pytest.mark.parametrize("make", [pc.optim.Adam, pc.optim.LAMB, pc.optim.Adafactor])
def test_a_late_group_trains_as_a_fresh_optimizer(make):
    def trained(late):
        weights, _ = pair()
        optimizers = [make(weights[:1])]
        for step in range(6):
            if step == 3:
                optimizers += late(optimizers[0], weights[1:])
            sum((each.value * each.value).sum() for each in weights).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            weights[1].value.grad = None
        return values(weights)

    together = trained(lambda first, more: first.add_param_group({"params": more}) or [])
    assert together == trained(lambda first, more: [make(more)])


def test_fused_lamb_takes_no_late_group():
    weights, loss = pair()
    optimizer = pc.optim.DistributedFusedLamb(weights[:1])
    loss().backward()
    optimizer.step()
    optimizer.add_param_group({"params": weights[1:]})
    with pytest.raises(UsageError, match="every step must update the same parameters"):
        optimizer.step()


def test_rates_of_groups_in_a_compiled_function():
    weights, loss = pair()
    optimizer = pc.optim.SGD([{"params": [weights[0]]}], lr=0.25)
    optimizer.add_param_group({"params": [weights[1]], "lr": 0.5})

    @pc.compile
    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert values(weights) == [0.75, 0.5]
    optimizer.param_groups[1]["lr"] = 0.125
    step()
    assert values(weights) == [0.5, 0.375]
    assert len(step.programs()) == 1
    optimizer.param_groups[0]["weight_decay"] = 2.0
    step()
    assert values(weights) == [0.0, 0.25]
    assert len(step.programs()) == 2


def test_rates_of_groups_in_a_job():
    weights, loss = pair()
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5, "momentum": 0.5}]
    with pc.job("groups") as job:
        pc.optim.SGD(groups, lr=0.25).minimize(loss())
        pc.output("a", weights[0].value)
    assert sorted(job.variables) == ["a", "b", "b.momentum"]
    with pc.run(job) as session:
        assert session.lr == (0.25, 0.5)
        session.step()
        session.lr = (0.5, 1.0)
        session.step()
        state = session.variables()
    assert (state["a"][0], state["b"][0]) == (0.25, -1.0)


def test_states_of_groups_are_saved_by_the_names_of_parameters(tmp_path):
    def made():
        net = nn.Linear(2, 1).place(ONE)
        groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}]
        return net, pc.optim.Adam(groups, lr=0.25)

    def step(net, optimizer):
        net(pc.tensor(np.ones((1, 2), np.float32), ONE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = made()
    optimizer.param_groups[1]["lr"] = 0.125
    step(net, optimizer)
    state = optimizer.state_dict()
    assert state["lr.1"] == 0.125
    assert "lr" not in state
    pc.eager.save(tmp_path, {"model": net.state_dict(), "optimizer": state})
    other, again = made()
    saved = {"model": other.state_dict(), "optimizer": again.state_dict()}
    saved = pc.eager.load(tmp_path, saved)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert again.param_groups[1]["lr"] == 0.125
    for each in ((net, optimizer), (other, again)):
        step(*each)
    np.testing.assert_array_equal(net.weight.value.numpy(), other.weight.value.numpy())
    np.testing.assert_array_equal(net.bias.value.numpy(), other.bias.value.numpy())


def test_what_an_optimizer_without_a_list_moves_is_said(caplog):
    net = nn.Linear(2, 1).place(ONE)
    x = pc.tensor(np.ones((1, 2), np.float32), ONE)
    with caplog.at_level(logging.INFO, "plancompiler.optim"):
        pc.optim.SGD(net, lr=0.1).minimize(net(x).sum())
        assert not caplog.records
        with pc.job("said"):
            x = pc.input("x", (1, 2), "float32", ONE)
            loss = nn.Linear(2, 1).place(ONE)(x).sum()
            pc.optim.SGD(lr=0.1).minimize(loss)
            pc.output("loss", loss)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "2 parameters of 1 models (Linear)" in caplog.text


def test_what_is_typed_in_other_ways():
    weights, _ = pair()
    for first in (weights, iter(weights), [("a", weights[0]), ("b", weights[1])]):
        assert pc.optim.Adam(first).parameters == weights
    assert pc.optim.Adam(0.5, parameters=weights).parameters == weights
    old = pc.optim.SGD(0.5, 0.9, True, 0.25)
    assert (old.lr, old.momentum, old.nesterov, old.weight_decay) == (0.5, 0.9, True, 0.25)
    weights[0].value.grad = weights[0].value.detach()
    optimizer = pc.optim.SGD(weights)
    optimizer.zero_grad(set_to_none=False)
    assert weights[0].value.grad.numpy().tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert weights[0].value.grad is None


def test_wrong_groups_are_refused():
    weights, loss = pair()
    sgd = pc.optim.SGD(weights)
    for wrong in (
        lambda: pc.optim.SGD([{"lr": 0.1}]),
        lambda: pc.optim.SGD([{"params": weights, "beta": 1}]),
        lambda: pc.optim.SGD([{"params": weights}, {"params": weights[:1]}]),
        lambda: pc.optim.SGD(weights, parameters=weights),
        lambda: pc.optim.SGD().add_param_group({"params": weights}),
        lambda: pc.optim.SGD([{"params": weights, "momentum": "much"}]),
        lambda: pc.optim.SGD(weights).param_groups[0].update(beta=1),
        lambda: pc.optim.SGD(weights).param_groups[0].pop("lr"),
        lambda: pc.optim.SGD([{"params": weights, "nesterov": True}]),
        lambda: pc.optim.SGD(weights[:1]).add_param_group(
            {"params": weights[1:], "nesterov": True}
        ),
        lambda: sgd.param_groups[0].update(nesterov=True),
    ):
        with pytest.raises(UsageError):
            wrong()
    optimizer = pc.optim.SGD(weights)
    loss().backward()
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(UsageError, match="cannot have other states"):
        optimizer.step()


@pytest.mark.parametrize(
    "number", [{"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -0.1}], ids=str
)
@pytest.mark.parametrize("make", [pc.optim.Adam, pc.optim.LAMB])
def test_numbers_out_of_range_are_refused_where_they_are_given(make, number):
    weights, _ = pair()
    optimizer = make(weights[:1])
    for give in (
        lambda: make(weights, **number),
        lambda: optimizer.add_param_group({"params": weights[1:], **number}),
        lambda: optimizer.param_groups[0].update(number),
    ):
        with pytest.raises(AttributeValueError, match="wrong value"):
            give()
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0].numbers == make().defaults


def test_numbers_that_were_set_are_part_of_the_state(tmp_path):
    def made():
        weights, loss = pair()
        groups = [{"params": weights[:1]}, {"params": weights[1:], "eps": 0.25}]
        return weights, loss, pc.optim.Adam(groups, 0.5, maximize=True)

    _, loss, optimizer = made()
    assert set(optimizer.state_dict()) & {"lr", "betas_1", "eps.1", "weight_decay"} == set()
    optimizer.param_groups[0].update(betas=(0.5, 0.75), maximize=False)
    optimizer.param_groups[1]["weight_decay"] = 0.125
    loss().backward()
    optimizer.step()
    pc.eager.save(tmp_path, optimizer.state_dict())
    *_, other = made()
    other.load_state_dict(pc.eager.load(tmp_path, other.state_dict()))
    first, second = other.param_groups
    assert (first["betas"], first["maximize"], first["weight_decay"]) == ((0.5, 0.75), False, 0.0)
    assert (second["betas"], second["maximize"], second["eps"]) == ((0.9, 0.999), True, 0.25)
    assert second["weight_decay"] == 0.125
    assert other.state_dict().keys() == optimizer.state_dict().keys()


@pytest.mark.parametrize("make", [pc.optim.SGD, pc.optim.Adam, pc.optim.LAMB, pc.optim.Adafactor])
@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_to_maximize_is_to_minimize_the_opposite(make, shape):
    def moved(sign):
        weight = nn.Parameter(shape, init="ones", name="w").place(ONE)
        optimizer = make([weight], maximize=sign < 0)
        for _ in range(2):
            ((weight.value * weight.value).sum() * sign).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.value.numpy().tolist()

    assert moved(1.0) == moved(-1.0) != np.ones(shape).tolist()


def test_words_of_pytorch_for_how_a_step_is_made():
    weights, loss = pair()
    words = {"foreach": True, "fused": None, "capturable": False, "differentiable": False}
    optimizer = pc.optim.SGD([{"params": weights[:1], **words}], lr=0.25, **words)
    optimizer.add_param_group({"params": weights[1:], **words})
    with pytest.raises(UsageError, match="not differentiated"):
        pc.optim.SGD(weights, differentiable=True)
    with pytest.raises(UsageError, match="not differentiated"):
        optimizer.add_param_group({"params": [], "differentiable": True})

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    assert optimizer.step(closure).item() == 4.0
    assert values(weights) == [0.75, 0.75]
    assert optimizer.step(closure=closure).item() == 3.0
    assert values(weights) == [0.5, 0.5]
    assert optimizer.step() is None


def test_none_in_place_of_parameters_is_no_rate():
    assert pc.optim.SGD(None, 0.25).lr == 0.25
    assert pc.optim.SGD(None, 0.25).parameters is None


def test_groups_of_tensors_in_a_job():
    weights, _ = pair()
    asked = []

    def rate(step):
        asked.append(step)
        return 0.5

    with pc.job("tensors") as job:
        first, second = (each.value for each in weights)
        groups = [{"params": [first]}, {"params": [second], "lr": rate}]
        pc.optim.SGD(groups, lr=0.25).minimize((first + second).sum())
        pc.output("a", first)
    assert not asked  # the job is traced only
    with pc.run(job) as session:
        session.step()
        state = session.variables()
    assert (state["a"][0], state["b"][0]) == (0.75, 0.5)


def test_states_are_not_taken_for_others():
    weights, loss = pair()
    optimizer = pc.optim.RMSprop(weights, momentum=0.9)
    loss().backward()
    optimizer.step()
    # As many states as before, and the second is the mean of gradients in place of the momentum.
    optimizer.param_groups[0].update(momentum=0.0, centered=True)
    with pytest.raises(UsageError, match="cannot have other states"):
        optimizer.step()
