"""Losses over split classes: compiled and eager, against NumPy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec

RANDOM = np.random.default_rng(11)
ROWS, IGNORED = 6, -100
MARGINS = (0.9, 0.4, 0.15, 5.0)


def mesh(ranks):
    return pc.Placement("cpu", np.arange(ranks).reshape(-1))


GRID = pc.Placement("cpu", [[0, 1, 2], [3, 4, 5]], axes=("dp", "tp"))
# Placement, layout of logits, layout of labels.
LAYOUTS = {
    "two": (mesh(2), ["S(1)"], ["B"]),
    "three": (mesh(3), ["S(1)"], ["S(0)"]),
    "grid": (GRID, ["S(0)", "S(1)"], ["S(0)", "B"]),
}


def arrays(classes, dtype="float64"):
    logits = (RANDOM.uniform(-0.95, 0.95, (ROWS, classes))).astype(dtype)
    labels = RANDOM.integers(0, classes, ROWS)
    labels[2] = IGNORED
    return logits, labels


def dense_softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def dense_cross_entropy(logits, labels, dloss):
    """Losses, softmax, and the gradient of losses @ dloss."""
    softmax, counts = dense_softmax(logits), labels != IGNORED
    rows = np.flatnonzero(counts)
    losses = np.zeros(len(labels))
    losses[rows] = -np.log(softmax[rows, labels[rows]])
    grad = softmax.copy()
    grad[rows, labels[rows]] -= 1
    return losses, softmax, grad * (dloss * counts)[:, None]


def dense_margin(cosines, labels, margins, dloss):
    """The same with a margin on the cosine of the label."""
    first, second, third, scale = margins
    rows = np.flatnonzero(labels != IGNORED)
    x = cosines[rows, labels[rows]]
    angle = np.arccos(x)
    logits, slope = cosines * scale, np.full(cosines.shape, scale)
    logits[rows, labels[rows]] = scale * (np.cos(first * angle + second) - third)
    slope[rows, labels[rows]] *= first * np.sin(first * angle + second) / np.sin(angle)
    losses, softmax, grad = dense_cross_entropy(logits, labels, dloss)
    return losses, softmax, grad * slope


def plain(x, y):
    return pc.c_softmax_with_cross_entropy(x, y, return_softmax=True)


def with_margin(x, y):
    first, second, third, scale = MARGINS
    return pc.margin_cross_entropy(
        x, y, first, second, third, scale, reduction="none", return_softmax=True
    )


CASES = {
    "plain": (plain, dense_cross_entropy),
    "margin": (with_margin, lambda x, y, d: dense_margin(x, y, MARGINS, d)),
}
WEIGHTS = np.linspace(-1, 2, ROWS)


def compiled(function, where, classes, dtype="float64", with_softmax=True):
    placement, split, beside = where
    with pc.job("j") as job:
        x = pc.input("x", (ROWS, classes), dtype, placement, split)
        y = pc.input("y", (ROWS,), "int64", placement, beside)
        losses, softmax = function(x, y)
        pc.output("losses", losses)
        if with_softmax:
            pc.output("softmax", softmax)
        weights = pc.constant(WEIGHTS.astype(dtype), dtype, placement)
        (dx,) = pc.gradients((losses * weights).sum(), [x])
        pc.output("dx", dx)
    return job


def collectives(plan):
    """(primitive, shape of the result) of the plan's collectives, counted."""
    registers = {register.id: register for register in plan.registers}
    return Counter(
        (task.spec.primitive.value, registers[register].shape)
        for task in plan.tasks
        if isinstance(task.spec, CollectiveSpec)
        for register in task.outputs
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("classes", [7, 2])
def test_compiled_losses_are_the_dense_ones(case, layout, classes):
    """7 classes split unevenly; with 2, devices of three hold none."""
    function, dense = CASES[case]
    where = LAYOUTS[layout]
    logits, labels = arrays(classes)
    job = compiled(function, where, classes)
    with LocalWorld(compile_plans(job, where[0].size, "rank_per_iter").plans) as world:
        outputs = world.step({"x": logits, "y": labels})
    for name, wanted in zip(
        ("losses", "softmax", "dx"), dense(logits, labels, WEIGHTS), strict=True
    ):
        np.testing.assert_allclose(outputs[name], wanted, 1e-9, 1e-12, err_msg=name)


def test_compiled_losses_reduce_three_numbers_per_row_and_nothing_backward():
    for function in (plain, with_margin):
        job = compiled(function, LAYOUTS["two"], 7, with_softmax=False)
        counts = collectives(compile_plans(job, 2, "rank_per_iter").plans[0])
        # The one gather is for the report of the gradient.
        assert counts == {("all_reduce", (ROWS,)): 3, ("all_gather", (ROWS, 7)): 1}


def eager_step(case, layout, classes, logits, labels, dtype="float64"):
    placement, split, beside = LAYOUTS[layout]
    x = pc.tensor(logits.astype(dtype), placement, split, requires_grad=True)
    # Labels and weights lie as the rows of the logits do.
    rows = ["B"] if placement.ndim == 1 else beside
    y = pc.tensor(labels, placement, rows)
    weights = pc.tensor(WEIGHTS.astype(dtype), placement, rows)
    with pc.comm_trace() as forward:
        losses, softmax = CASES[case][0](x, y)
    with pc.comm_trace() as backward:
        losses.backward(weights)
    return losses.numpy(), softmax.numpy(), x.grad.numpy(), forward, backward


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager_losses_are_the_dense_ones_with_three_reductions(layout):
    placement = LAYOUTS[layout][0]
    shapes = [(case, classes, *arrays(classes)) for case in CASES for classes in (7, 2)]

    def rank():
        return [eager_step(case, layout, classes, *given) for case, classes, *given in shapes]

    for of_rank in spawn(rank, placement.size):
        for (case, _, logits, labels), (*values, forward, backward) in zip(
            shapes, of_rank, strict=True
        ):
            wanted = CASES[case][1](logits, labels, WEIGHTS)
            for got, expected in zip(values, wanted, strict=True):
                np.testing.assert_allclose(got, expected, 1e-9, 1e-12, err_msg=case)
            assert forward.counts() == {"all_reduce": 3}
            # One number per row of this rank.
            rows = ROWS // placement.hierarchy[0] if placement.ndim > 1 else ROWS
            assert {each.nbytes for each in forward.collectives} == {8 * rows}
            assert backward.counts() == {}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_losses_keep_their_dtype(dtype):
    logits, labels = arrays(7, dtype)

    def rank():
        return eager_step("margin", "two", 7, logits, labels, dtype)[:3]

    for of_rank in spawn(rank, 2):
        wanted = dense_margin(logits.astype("float64"), labels, MARGINS, WEIGHTS)
        bound = 2e-2 if dtype == "float16" else 1e-4
        for got, expected in zip(of_rank, wanted, strict=True):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, expected, bound, bound)


def test_the_softmax_can_be_differentiated():
    logits, labels = arrays(5)
    weights = RANDOM.normal(size=logits.shape)

    def rank():
        x = pc.tensor(logits, mesh(3), "S(1)", requires_grad=True)
        losses, softmax = plain(x, pc.tensor(labels, mesh(3)))
        (losses.sum() + (softmax * pc.tensor(weights, mesh(3), "S(1)")).sum()).backward()
        return x.grad.numpy()

    softmax = dense_softmax(logits)
    through = softmax * (weights - (weights * softmax).sum(-1, keepdims=True))
    wanted = dense_cross_entropy(logits, labels, np.ones(ROWS))[2] + through
    for of_rank in spawn(rank, 3):
        np.testing.assert_allclose(of_rank, wanted, 1e-9, 1e-12)


def test_reductions_count_the_rows_that_have_a_loss():
    x, labels = arrays(7)
    losses = dense_margin(x, labels, (1.0, 0.5, 0.0, 64.0), np.ones(ROWS))[0]
    x, y = pc.tensor(x, mesh(1)), pc.tensor(labels, mesh(1))
    assert pc.margin_cross_entropy(x, y).item() == pytest.approx(losses.sum() / (ROWS - 1))
    assert pc.margin_cross_entropy(x, y, reduction="sum").item() == pytest.approx(losses.sum())
    none = pc.tensor(np.full(ROWS, IGNORED), mesh(1))
    assert pc.margin_cross_entropy(x, none).item() == 0
    every = pc.tensor(np.abs(labels) % 7, mesh(1))
    actual = pc.margin_cross_entropy(x, every, ignore_index=None, reduction="none")
    average = pc.margin_cross_entropy(x, every, ignore_index=None)
    assert average.item() == pytest.approx(actual.numpy().mean())
