"""One seed gives one set of initial weights and dropout masks, to the bit: on one to four ranks, in
any layout, eagerly, through `pc.compile` and through `pc.run`."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn

SEED, STEPS = 13, 3
ROWS, COLUMNS = 5, 7
"""Uneven on all meshes, and empty on some ranks of the last."""
LINES = [pc.Placement("cpu", list(range(ranks))) for ranks in (1, 2, 3, 4)]
GRIDS = [pc.Placement("cpu", [[0, 1], [2, 3]]), pc.Placement("cpu", [[2], [0], [1]])]
TABLE = pc.Placement("cpu", [[0, 2], [3, 1]])
CASES = [
    *((line, [sbp]) for line in LINES for sbp in ("B", "S(0)", "S(1)")),
    *((grid, list(sbp)) for grid in GRIDS for sbp in product(("B", "S(0)", "S(1)"), repeat=2)),
    (TABLE, ["S(0)", "S(0)"]),
    (TABLE, ["S(1)", "S(0)"]),
]


class Net(nn.Module):
    """Parameters of every initialiser, and two layers of dropout."""

    def __init__(self, mesh, sbp):
        self.normal = nn.Parameter((COLUMNS, ROWS), "float32", "normal", (0.0, 0.5))
        self.uniform = nn.Parameter((ROWS, COLUMNS), "float64", "uniform", (-1.0, 3.0))
        self.linear = nn.Linear(COLUMNS, ROWS)
        self.first, self.second = nn.Dropout(0.4), nn.Dropout(0.75)
        layout = dict.fromkeys(("normal", "uniform", "linear.weight"), sbp)
        self.place(mesh, layout)

    def forward(self, x):
        return self.first(x), self.second(x)


def bits(arrays):
    return [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]


def ones():
    return np.ones((ROWS, COLUMNS), np.float32)


def eager(wrap, placement, sbp):
    """Initial weights, and the masks of each step, on a rank."""
    generator = pc.manual_seed(SEED)
    net = Net(placement, sbp)
    function = wrap(net.forward)
    x = pc.tensor(ones(), placement, sbp)
    rows = [[each.value.numpy() for each in (net.normal, net.uniform, net.linear.weight)]]
    for step in range(STEPS):
        generator.start_step(step)
        rows.append([each.numpy() for each in function(x)])
    return [bits(row) for row in rows]


def compiled(placement, sbp):
    """The same from a job."""
    net = Net(placement, sbp)
    with pc.job("bits", seed=SEED) as job:
        x = pc.input("x", (ROWS, COLUMNS), "float32", placement, sbp)
        for name, value in zip("abc", (net.normal, net.uniform, net.linear.weight), strict=True):
            pc.output(name, value.value)
        for name, value in zip("de", net(x), strict=True):
            pc.output(name, value)
    with pc.run(job, cache=False) as session:
        steps = [session.step(x=ones()) for _ in range(STEPS)]
    weights = [steps[0][name] for name in "abc"]
    return [bits(weights), *(bits([each[name] for name in "de"]) for each in steps)]


@pytest.fixture(scope="module")
def one_rank():
    (actual,) = spawn(eager, 1, lambda function: function, LINES[0], ["B"])
    return actual


def test_what_is_compared_differs_where_it_should(one_rank):
    masks = [data for step in one_rank[1:] for _, _, data in step]
    assert len(set(masks)) == len(masks)
    dropped = [np.frombuffer(data, np.float32) == 0 for data in masks]
    assert all(0 < each.sum() < each.size for each in dropped)


@pytest.mark.slow
def test_eagerly(one_rank, record_property):
    for wrap in (lambda function: function, pc.compile):
        for placement, sbp in CASES:
            for of_rank in spawn(eager, max(placement.rank_list) + 1, wrap, placement, sbp):
                assert of_rank == one_rank, f"{placement} as {sbp}"
    record_property("layouts_with_equal_bits,_eager_and_pc.compile", 2 * len(CASES))


@pytest.mark.slow
def test_as_jobs(one_rank, record_property):
    for placement, sbp in CASES:
        assert compiled(placement, sbp) == one_rank, f"{placement} as {sbp}"
    record_property("layouts_with_equal_bits,_pc.run", len(CASES))
