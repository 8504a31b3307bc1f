"""Ops with windows over split axes: as if whole, and no more bytes moved than the halos have."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.ir.shard import balanced_range
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import MODES, compile_plans

RANKS = 4
LINE = pc.Placement("cpu", list(range(RANKS)))
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])

# Function, shape of x, of the weight (if any), arguments.
Case = tuple[str, tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]
CASES: tuple[Case, ...] = (
    ("conv2d", (1, 3, 16, 5), (4, 3, 3, 3), {"padding": 1}),
    ("conv2d", (1, 3, 17, 5), (4, 3, 3, 2), {}),
    ("conv2d", (1, 2, 13, 4), (2, 2, 4, 3), {"stride": (3, 1), "padding": [(2, 1), (0, 0)]}),
    ("conv2d", (2, 4, 18, 4), (6, 2, 3, 2), {"dilation": (3, 1), "padding": (3, 0), "groups": 2}),
    ("conv2d", (1, 5, 11, 4), (5, 1, 3, 3), {"padding": 1, "groups": 5}),
    ("conv2d", (1, 3, 7, 4), (4, 3, 7, 3), {"padding": (3, 1)}),  # wider than any shard
    ("conv2d", (1, 3, 16, 4), (4, 3, 4, 1), {"stride": (4, 1)}),  # windows do not overlap
    ("conv2d", (1, 3, 15, 4), (4, 3, 2, 1), {"stride": (5, 1)}),  # nor see every element
    ("conv2d", (1, 3, 3, 9), (4, 3, 2, 3), {"padding": 1}),  # fewer rows than ranks
    ("conv1d", (1, 3, 19), (4, 3, 5), {"padding": 2, "stride": 2}),
    ("conv3d", (1, 2, 9, 3, 4), (3, 2, 3, 2, 1), {"padding": (1, 0, 0), "stride": (2, 1, 1)}),
    ("conv_transpose2d", (1, 3, 9, 4), (3, 2, 3, 2), {"stride": 2, "padding": 1}),
    ("conv_transpose1d", (1, 4, 7), (4, 2, 5), {"stride": 3, "output_padding": 1, "groups": 2}),
    ("max_pool2d", (1, 2, 17, 4), None, {"kernel": 3, "stride": 2, "padding": 1}),
    ("max_pool1d", (2, 2, 11), None, {"kernel": 2}),
    ("avg_pool2d", (1, 2, 14, 5), None, {"kernel": 3, "stride": 2, "padding": 1}),
    ("avg_pool1d", (1, 2, 9), None, {"kernel": 4, "stride": 1, "padding": 3, "count_padding": 0}),
    ("adaptive_avg_pool2d", (1, 2, 13, 4), None, {"size": (6, 2)}),
)


def arrays_of(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(len(case[1]) + sum(case[1]))
    return [rng.normal(size=shape) for shape in case[1:3] if shape is not None]


def call(case: Case, tensors) -> Any:
    """The output, and a loss of it with a gradient that differs from element to element."""
    kind, _, _, arguments = case
    if "count_padding" in arguments:
        arguments = {**arguments, "count_padding": bool(arguments["count_padding"])}
    y = getattr(pc, kind)(*tensors, **arguments)
    return y, (y * y * y).sum()


def run_eagerly(placement: pc.Placement, layout: list[str], compiled: bool) -> list[Any]:
    """Of each case: output, gradients, the layout of the output, and bytes sent forward."""
    results = []
    for case in CASES:
        arrays = arrays_of(case)
        wanted = [each.replace("-1", str(len(case[1]) - 1)) for each in layout]
        whole = ["B"] * placement.ndim
        tensors = [
            pc.tensor(array, placement, wanted if number == 0 else whole)
            for number, array in enumerate(arrays)
        ]
        for tensor in tensors:
            tensor.requires_grad = True
        if compiled:
            y, loss = pc.compile(lambda *given, case=case: call(case, given))(*tensors)
            nbytes = 0
        else:
            with pc.comm_trace() as trace:
                y, loss = call(case, tensors)
            nbytes = sum(each.nbytes for each in trace.collectives if each.op == "exchange")
        loss.backward()
        values = [each.numpy() for each in (y, *(tensor.grad for tensor in tensors))]
        results.append((values, str(y.sbp), nbytes))
    return results


@pytest.fixture(scope="module")
def whole() -> list[list[np.ndarray]]:
    """Output and gradients of each case on one rank."""
    alone = pc.Placement("cpu", [0])
    return [values for values, _, _ in spawn(run_eagerly, 1, alone, ["S(2)"], False)[0]]


def assert_same(got, wanted) -> None:
    for case, values, each in zip(CASES, got, wanted, strict=True):
        for one, other in zip(values, each, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=str(case))


def test_the_whole_is_what_numpy_gives(whole):
    """The convolutions of the table, by sums over slices of a padded copy."""
    proved = 0
    for case, (y, *_) in zip(CASES, whole, strict=True):
        kind, shape, _, arguments = case
        if not kind.startswith("conv") or "transpose" in kind:
            continue
        x, weight = arrays_of(case)
        ndim = len(shape) - 2
        per_axis = {
            name: np.broadcast_to(arguments.get(name, default), ndim)
            for name, default in (("stride", 1), ("dilation", 1))
        }
        padding = arguments.get("padding", 0)
        if not isinstance(padding, list):
            padding = [(each, each) for each in np.broadcast_to(padding, ndim)]
        padded = np.pad(x, [(0, 0), (0, 0), *padding])
        groups = arguments.get("groups", 1)
        expected = np.zeros_like(y)
        for at in np.ndindex(*weight.shape[2:]):
            places = tuple(
                slice(start * dilation, start * dilation + (extent - 1) * stride + 1, stride)
                for start, dilation, stride, extent in zip(
                    at, per_axis["dilation"], per_axis["stride"], y.shape[2:], strict=True
                )
            )
            part = padded[(slice(None), slice(None), *places)]
            for each in range(groups):
                mine = [
                    slice(each * n // groups, (each + 1) * n // groups)
                    for n in (part.shape[1], y.shape[1])
                ]
                factor = weight[(mine[1], slice(None), *at)]
                expected[:, mine[1]] += np.einsum("nc...,oc->no...", part[:, mine[0]], factor)
        np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9, err_msg=str(case))
        proved += 1
    assert proved == 11


def halo_bytes(case: Case, windows: int) -> int:
    """Bytes of the rows of x that ranks need and do not have, found window by window."""
    _, shape, weight, arguments = case
    extent = shape[2]
    kernel = weight[2] if weight is not None else _first(arguments["kernel"])
    stride = _first(arguments.get("stride", 1 if weight is not None else kernel))
    before, span = _first(arguments.get("padding", 0)), kernel - 1
    span *= _first(arguments.get("dilation", 1))
    rows = 0
    for rank in range(RANKS):
        own = set(range(*balanced_range(extent, RANKS, rank)))
        needed: set[int] = set()
        for window in range(*balanced_range(windows, RANKS, rank)):
            start = window * stride - before
            needed |= set(range(start, start + span + 1)) & set(range(extent))
        rows += len(needed - own)
    return rows * 8 * int(np.prod(shape)) // extent


def _first(value: Any) -> int:
    """What an argument says of the first spatial axis."""
    return int(np.ravel(value)[0])


COUNTED = [case for case in CASES if "transpose" not in case[0] and "adaptive" not in case[0]]


def test_split_tensors_give_the_same_and_move_their_halos(whole, caplog):
    with caplog.at_level(logging.INFO, "plancompiler"):
        by_rank = spawn(run_eagerly, RANKS, LINE, ["S(2)"], False)
    assert re.search(r"conv2d \(.*\) uses .* as \[S\(2\)\] as \[H\(2 16 ", caplog.text)
    assert_same([values for values, _, _ in by_rank[0]], whole)
    for number, case in enumerate(CASES):
        assert by_rank[0][number][1] == "[S(2)]", case
        if case in COUNTED:
            sent = sum(results[number][2] for results in by_rank)
            assert sent == halo_bytes(case, whole[number][0].shape[2]), case
    assert len(COUNTED) == 15


@pytest.mark.slow
def test_two_mesh_axes_split_one_spatial_axis_or_two(whole):
    for layout in (["S(2)", "S(2)"], ["S(2)", "S(-1)"]):
        results = spawn(run_eagerly, RANKS, GRID, layout, False)[0]
        assert_same([values for values, _, _ in results], whole)


@pytest.mark.slow
def test_compiled_functions_give_the_same(whole):
    results = spawn(run_eagerly, 2, pc.Placement("cpu", [0, 1]), ["S(2)"], True)[0]
    assert_same([values for values, _, _ in results], whole)


def job_of_all() -> pc.Job:
    with pc.job("halos") as job:
        for number, case in enumerate(CASES):
            tensors = [
                pc.input(f"{name}{number}", array.shape, "float64", LINE, [sbp])
                for name, array, sbp in zip("xw", arrays_of(case), ("S(2)", "B"), strict=False)
            ]
            y, loss = call(case, tensors)
            for name, value in zip("ygd", (y, *pc.gradients(loss, tensors)), strict=False):
                pc.output(f"{name}{number}", value)
    return job


@pytest.mark.processes
def test_a_job_gives_the_same_in_all_modes_and_moves_the_halos(whole):
    job = job_of_all()
    compiled = {mode: compile_plans(job, RANKS, mode) for mode in MODES}
    assert len({each.digest for each in compiled.values()}) == 1
    feeds = {
        f"{name}{number}": array
        for number, case in enumerate(CASES)
        for name, array in zip("xw", arrays_of(case), strict=False)
    }
    with pc.run(job, ranks=RANKS) as session:
        outputs = session.step(**feeds)
    got = [
        [outputs[f"{name}{number}"] for name in ("ygd" if case[2] is not None else "yg")]
        for number, case in enumerate(CASES)
    ]
    assert_same(got, whole)
    copied: dict[str, int] = {}
    for plan in compiled["naive"].plans.values():
        for task in plan.tasks:
            if task.kind is TaskKind.COPY_COMM_NET:
                value = task.name.partition(":")[0]
                shape = plan.register_by_id[task.outputs[0]].shape
                copied[value] = copied.get(value, 0) + int(np.prod(shape)) * 8
    value_of = {op.attr("name"): op.outputs[0].name for op in job.ops if op.kind == "input"}
    for number, case in enumerate(CASES):
        if case in COUNTED and "max" not in case[0]:
            # Backward of a convolution reads the halos that forward has brought; that of a maximum
            # reads wider ones.
            wanted = halo_bytes(case, whole[number][0].shape[2])
            assert copied.get(value_of[f"x{number}"], 0) == wanted, case
