"""Data normalisation: compiled and eager, whole and in groups, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError, JobError, ShapeError, UsageError
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec

RANDOM = np.random.default_rng(4)
CHANNELS, DECAY, EPS, FIRST = 3, 0.9, 1e-2, 5.0
STEPS = 3


def mesh(ranks):
    return pc.Placement("cpu", range(ranks))


def dense_steps(batches, groups):
    """What each step gives, by the definition, and the statistics at the end."""
    parts = 1 if groups is None else groups
    count, square = (np.full((parts, CHANNELS), FIRST) for _ in range(2))
    total = np.zeros((parts, CHANNELS))
    dense_steps = []
    for x in batches:
        mean, scale = total / count, np.sqrt(count / square)
        pieces, parted = np.array_split(x, parts), []
        for number, piece in enumerate(pieces):
            around = (1, CHANNELS, *(1,) * (x.ndim - 2))
            centre = mean[number].reshape(around)
            parted.append((piece - centre) * scale[number].reshape(around))
            rest = (0, *range(2, x.ndim))
            total[number] = DECAY * total[number] + piece.mean(rest)
            square[number] = DECAY * square[number] + ((piece - centre) ** 2).mean(rest) + EPS
        count = DECAY * count + 1
        dense_steps.append((np.concatenate(parted), np.repeat(scale, [len(p) for p in pieces], 0)))
    states = (count, total, square)
    return dense_steps, [each if groups else each[0] for each in states]


def layer(groups):
    return nn.DataNorm(CHANNELS, groups, DECAY, EPS, FIRST, dtype="float64")


CASES = {
    "whole": ((7, CHANNELS), None, 3, "S(0)", {}),
    "whole space": ((4, CHANNELS, 5), None, 3, "S(2)", {}),
    "channels": ((4, CHANNELS), None, 2, "S(1)", {}),
    "groups": ((7, CHANNELS), 3, 3, "S(0)", {}),
    "groups of own": ((7, CHANNELS), 3, 3, "S(0)", "S(0)"),
    "groups, few ranks": ((7, CHANNELS, 2), 3, 2, "S(0)", "S(0)"),
}
NAMES = ("batch_count", "batch_sum", "batch_square_sum")


def parts_of(case):
    shape, groups, ranks, split, states = CASES[case]
    batches = [RANDOM.normal(2.0, 3.0, shape) for _ in range(STEPS)]
    placed = dict.fromkeys(NAMES, states) if states else {}
    return batches, groups, mesh(ranks), split, placed


@pytest.mark.parametrize("case", CASES)
def test_compiled_statistics_are_those_of_the_definition(case):
    batches, groups, place, split, placed = parts_of(case)
    with pc.job("norm") as job:
        x = pc.input("x", batches[0].shape, "float64", place, split)
        norm = layer(groups).place(place, placed)
        y = norm(x)
        pc.output("y", y)
        (dx,) = pc.gradients(y.sum(), [x])
        pc.output("dx", dx)
    plans = compile_plans(job, place.size, "rank_per_iter").plans
    with pc.run(job, place.size, cache=False) as session:
        outputs = [session.step(x=batch) for batch in batches]
        states = session.variables()
    wanted, last = dense_steps(batches, groups)
    for step, (y, scale) in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(step["y"], y, 1e-9, 1e-12)
        scale = scale.reshape(*scale.shape, *(1,) * (y.ndim - 2))
        np.testing.assert_allclose(step["dx"], np.broadcast_to(scale, y.shape), 1e-9)
    for name, expected in zip(NAMES, last, strict=True):
        np.testing.assert_allclose(states[name], expected, 1e-9, err_msg=name)
    registers = {register.id: register for register in plans[0].registers}
    reduced = [
        registers[register].shape
        for task in plans[0].tasks
        if isinstance(task.spec, CollectiveSpec) and task.spec.primitive.value == "all_reduce"
        for register in task.outputs
    ]
    if case.startswith("whole"):
        # The two means, and nothing else.
        assert reduced == [(CHANNELS,)] * 2
    if case == "groups of own":
        assert reduced == []


@pytest.mark.parametrize("case", CASES)
def test_eager_statistics_are_those_of_the_definition(case):
    batches, groups, place, split, placed = parts_of(case)

    def rank():
        norm = layer(groups).place(place, placed)
        actual, traces = [], []
        for batch in batches:
            x = pc.tensor(batch, place, split, requires_grad=True)
            with pc.comm_trace() as trace:
                y = norm(x)
            y.sum().backward()
            actual.append((y.numpy(), x.grad.numpy()))
            traces.append(trace.counts())
        norm.eval()
        last = norm(pc.tensor(batches[0], place, split)).numpy()
        return actual, traces, [getattr(norm, name).value.numpy() for name in NAMES], last

    wanted = dense_steps([*batches, batches[0]], groups)[0]
    states = dense_steps(batches, groups)[1]
    for actual, traces, held, last in spawn(rank, place.size):
        for (y, dx), (expected, scale) in zip(actual, wanted, strict=False):
            np.testing.assert_allclose(y, expected, 1e-9, 1e-12)
            scale = scale.reshape(*scale.shape, *(1,) * (y.ndim - 2))
            np.testing.assert_allclose(dx, np.broadcast_to(scale, y.shape), 1e-9)
        for got, expected in zip(held, states, strict=True):
            np.testing.assert_allclose(got, expected, 1e-9)
        # In eval mode the statistics stay as they are.
        np.testing.assert_allclose(last, wanted[-1][0], 1e-9, 1e-12)
        if case.startswith("whole"):
            assert traces == [{"all_reduce": 2}] * STEPS
        if case == "groups of own":
            assert traces == [{}] * STEPS


def test_a_batch_counts_once_however_many_rows_it_has():
    """What differs between devices elsewhere: sums of rows or means of batches."""
    x = RANDOM.normal(size=(4, CHANNELS))
    ends = []
    for batch in (x, np.concatenate([x, x, x])):
        norm = layer(None)
        norm(pc.tensor(batch, mesh(1)))
        ends.append([getattr(norm, name).value.numpy() for name in NAMES])
    np.testing.assert_allclose(*ends, 1e-12)


def test_micro_batches_count_as_one_batch():
    batches = [RANDOM.normal(2.0, 3.0, (8, CHANNELS)) for _ in range(STEPS)]
    with pc.job("norm", config=pc.Config(microbatches=4)) as job:
        norm = layer(None).place(mesh(2))
        pc.output("y", norm(pc.input("x", (8, CHANNELS), "float64", mesh(2), "S(0)")))
    with pc.run(job, 2, cache=False) as session:
        outputs = [session.step(x=batch)["y"] for batch in batches]
        states = session.variables()
    wanted, last = dense_steps(batches, None)
    for got, (expected, _) in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(got, expected, 1e-9, 1e-12)
    for name, expected in zip(NAMES, last, strict=True):
        np.testing.assert_allclose(states[name], expected, 1e-9)


@pytest.mark.processes
def test_float32_statistics_and_ranks_that_are_processes():
    x = RANDOM.normal(size=(5, CHANNELS)).astype(np.float32)
    with pc.job("norm") as job:
        norm = nn.DataNorm(CHANNELS).place(mesh(2))
        pc.output("y", norm(pc.input("x", x.shape, "float32", mesh(2), "S(0)")))
    with pc.run(job, ranks=2, backend="processes", cache=False) as session:
        for _ in range(2):
            outputs = session.step(x=x)["y"]
        states = session.variables()
    np.testing.assert_allclose(outputs, x - x.mean(0) / 1e4, 1e-3, 1e-4)
    assert states["batch_count"] == pytest.approx(np.full(CHANNELS, 1e4 + 2 - 2e-3), rel=1e-6)
    assert states["batch_sum"] == pytest.approx(2 * x.mean(0), rel=1e-5)


def test_bad_input_is_named():
    x, state = (pc.tensor(np.ones(shape), mesh(1)) for shape in ((4, 3), (3,)))
    other, groups = (pc.tensor(np.ones(shape), mesh(1)) for shape in ((4,), (5, 3)))
    with pytest.raises(ShapeError, match="data_norm needs statistics per channel"):
        pc.data_norm(x, other, other, other)
    with pytest.raises(ShapeError, match="data_norm_update needs statistics"):
        pc.data_norm_update(x, state, state, groups)
    with pytest.raises(ShapeError, match="data_norm needs rows"):
        pc.data_norm(state, state, state, state)
    with pytest.raises(ShapeError, match="a row for every group"):
        pc.data_norm(x, groups, groups, groups)
    with pytest.raises(AttributeValueError, match="0 < decay <= 1"):
        pc.data_norm_update(x, state, state, state, decay=1.5)
    with pytest.raises(UsageError, match="eps of data_norm_update"):
        pc.data_norm_update(x, state, state, state, eps="small")
    with pytest.raises(AttributeValueError, match="group"):
        nn.DataNorm(3, groups=0)
    with pytest.raises(AttributeValueError, match="more than 0"):
        nn.DataNorm(3, initial_count=0.0)
    with pc.job("j"):
        value = pc.input("x", (4, 3), "float32", mesh(1))
        norm = nn.DataNorm(3)
        pc.output("y", norm(value))
        with pytest.raises(JobError, match=r"batch_count.*updated twice"):
            norm(value)
