"""Every change of layout on one and two mesh axes: values, and the collectives that run."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn

LINE = pc.Placement("cpu", [0, 1, 2])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])
ENTRIES = ("S(0)", "S(1)", "B", "P", "P(max)")
EXPECTED = {
    ("S", "B"): {"all_gather": 1},
    ("S", "S"): {"all_to_all": 1},
    ("P", "B"): {"all_reduce": 1},
    ("P", "S"): {"reduce_scatter": 1},
    ("B", "S"): {},
    ("B", "P"): {},
    ("B", "B"): {},
}


def test_one_axis_with_counts():
    value = np.random.default_rng(0).normal(size=(5, 7))

    def rank():
        found = {}
        for before, after in product(ENTRIES, repeat=2):
            x = pc.tensor(value, LINE, before)
            with pc.comm_trace() as trace:
                y = x.redistribute(sbp=after)
            found[before, after] = (trace.counts(), y.sbp, y.local_shape, y.numpy())
        return found

    for found in spawn(rank, 3):
        for (before, after), (counts, sbp, _, result) in found.items():
            np.testing.assert_allclose(result, value, 1e-12, err_msg=f"{before} to {after}")
            assert str(sbp) == f"[{after}]"
            if before == after:
                assert counts == {}
            elif (before[0], after[0]) in EXPECTED:
                assert counts == EXPECTED[before[0], after[0]], f"{before} to {after}"
    assert [each["B", "S(0)"][2] for each in spawn(rank, 3)] == [(2, 7), (2, 7), (1, 7)]


def test_two_axes_and_uneven_shards():
    value = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    layouts = [[a, b] for a, b in product(("S(0)", "S(1)", "B", "P"), repeat=2)]

    def rank():
        worst = 0.0
        for before, after in product(layouts, repeat=2):
            y = pc.tensor(value, GRID, before).redistribute(sbp=after)
            worst = max(worst, float(np.abs(y.numpy() - value).max()))
        with pc.comm_trace() as trace:
            pc.tensor(value, GRID, ["P", "P"]).redistribute(sbp=["B", "B"])
        return worst, trace.counts()

    for worst, counts in spawn(rank, 4):
        assert worst < 1e-6
        assert counts == {"all_reduce": 1}  # over both axes at once


@pytest.mark.parametrize("after", ["S(0)", "B", "P"])
def test_between_placements(after):
    value = np.arange(10.0)
    first, second = pc.Placement("cpu", [0, 1]), pc.Placement("cpu", [1, 2, 3])

    def rank():
        x = pc.tensor(value, first, "P", requires_grad=True)
        y = x.redistribute(second, after)
        (y * 2.0).sum().redistribute(first, "B").backward()
        inside = pc.eager.current_world().rank in second
        return (
            y.numpy() if inside else y.local.size,
            x.grad.numpy() if pc.eager.current_world().rank in first else None,
        )

    results = spawn(rank, 4)
    assert results[0][0] == 0
    for result, _ in results[1:]:
        np.testing.assert_array_equal(result, value)
    for _, grad in results[:2]:
        np.testing.assert_array_equal(grad, np.full(10, 2.0))


def test_gradients_of_changes_of_layout():
    def rank():
        found = {}
        for before, after in (("P", "B"), ("P", "S(0)"), ("S(0)", "B"), ("B", "S(0)")):
            x = pc.tensor(np.arange(4.0), LINE, before, requires_grad=True)
            y = x.redistribute(sbp=after)
            with pc.comm_trace() as trace:
                y.backward(pc.tensor(np.ones(4), LINE, after))
            found[before, after] = (str(x.grad.sbp), trace.counts(), x.grad.numpy().tolist())
        return found

    for found in spawn(rank, 3):
        assert found["P", "B"] == ("[B]", {}, [1.0] * 4)
        assert found["P", "S(0)"] == ("[B]", {"all_gather": 1}, [1.0] * 4)
        assert found["S(0)", "B"] == ("[S(0)]", {}, [1.0] * 4)
        assert found["B", "S(0)"][2] == [1.0] * 4
