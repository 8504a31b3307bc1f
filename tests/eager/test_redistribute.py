"""Every change of layout on one and two mesh axes and between meshes: values, put together from the
ranks' own parts, and the collectives that run."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.ir import NdSbp
from plancompiler.ir.shard import rank_region, region_shape
from tests.ops.sharding import assemble, split

PAIR = pc.Placement("cpu", [0, 1])
LINE = pc.Placement("cpu", [0, 1, 2])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])
SHAPES = {"even": (6, 12), "uneven": (5, 7), "with empty parts": (1, 3)}
"""On two to four ranks."""
REDUCTIONS = ("P", "P(max)", "P(min)", "P(prod)", "P(avg)")
ENTRIES = ("S(0)", "S(1)", "B", *REDUCTIONS)
EXPECTED = {
    ("S", "B"): [{"all_gather": 1}],
    ("S", "S"): [{"all_to_all": 1}],
    ("P", "B"): [{"all_reduce": 1}],
    ("P", "S"): [{"reduce_scatter": 1}],
    ("B", "S"): [{}],
    ("B", "P"): [{}],
    ("B", "B"): [{}],
    # Whichever is cheaper; all but one rank may need nothing of the value.
    ("S", "P"): [{"all_gather": 1}, {"exchange": 1}],
    ("P", "P"): [{"exchange": 1}],
}
"""What a change from one kind of layout to another one needs, along one mesh axis."""


def change_all(pairs, value, shards):
    """Per pair of specs what this rank gets, how it lies, and which collectives ran."""
    world = pc.eager.current_world()
    results = []
    for (where, before), (target, after) in pairs:
        local = np.empty((0, 0), value.dtype)
        if world.rank in where:
            local = shards[where, before][where.coordinates(where.parallel_id(world.rank))]
        x = pc.eager.from_local(local, where, before, shape=value.shape)
        with pc.comm_trace() as trace:
            y = x.redistribute(target, after)
        results.append((y.spec.space.get(y.local), y.sbp, trace.counts()))
    return results


def check_all(pairs, value, spread=spawn):
    """Change the layout of a value in random parts for all pairs, by ranks that `spread` makes;
    returns their counts.
    """
    rng = np.random.default_rng(3)
    pairs = [tuple((where, NdSbp.of(sbp)) for where, sbp in pair) for pair in pairs]
    shards = {
        (where, sbp): split(value, sbp, where.hierarchy, rng)
        for where, sbp in dict.fromkeys(source for source, _ in pairs)
    }
    ranks = max(max(where.rank_list) for pair in pairs for where, _ in pair) + 1
    actual = spread(change_all, ranks, pairs, value, shards)
    counts = []
    for number, pair in enumerate(pairs):
        (source, _), (target, after) = pair
        label = " to ".join(f"{sbp} on {where}" for where, sbp in pair)
        parts = {}
        for rank in target.rank_list:
            local, sbp, _ = actual[rank][number]
            assert sbp == after, label
            region = rank_region(value.shape, target, after, rank)
            assert local.shape == region_shape(region), label
            assert local.dtype == value.dtype, label
            parts[target.coordinates(target.parallel_id(rank))] = local
        got = assemble(parts, after, target.hierarchy)
        np.testing.assert_allclose(got, value, 1e-12, 1e-12, err_msg=label)
        taking_part = {*source.rank_list, *target.rank_list}
        for rank in range(ranks):
            if rank not in taking_part:
                local, _, count = actual[rank][number]
                assert local.size == 0, label
                assert count == {}, label
        counts.append([actual[rank][number][2] for rank in range(ranks)])
    return counts


def layouts(placement, entries=("S(0)", "S(1)", "B", "P")):
    return list(product(entries, repeat=placement.ndim))


def value_of(shape):
    return np.random.default_rng(0).normal(size=shape)


def allowed(before, after):
    """The collectives that one change along an axis may need, by the table."""
    if before == after:
        return [{}]
    if before == "P(avg)" and after[0] == "P":
        return [{"all_reduce": 1, "exchange": 1}]
    return EXPECTED[before[0], after[0]]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_axis_with_counts(shape, record_property):
    total = 0
    for placement in (PAIR, LINE):
        pairs = list(product(ENTRIES, repeat=2))
        counts = check_all(
            [[(placement, before), (placement, after)] for before, after in pairs],
            value_of(SHAPES[shape]),
        )
        for (before, after), each in zip(pairs, counts, strict=True):
            for count in each:
                assert count in allowed(before, after), f"{before} to {after}"
        total += len(pairs)
    record_property(f"changes_of_layout_proved,_one_axis,_{shape}", total)


def test_whole_numbers_and_truth_values():
    for dtype, reductions in (("int64", REDUCTIONS[:4]), ("bool", ("P(max)", "P(min)"))):
        entries = ("S(0)", "S(1)", "B", *reductions)
        value = np.random.default_rng(4).integers(0, 2, (5, 7)).astype(dtype)
        check_all([[(LINE, a), (LINE, b)] for a, b in product(entries, repeat=2)], value)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_two_axes_with_counts(shape, record_property):
    pairs = list(product(layouts(GRID, ("S(0)", "S(1)", "B", "P", "P(max)")), repeat=2))
    pairs = [pair for pair in pairs if not any({"P", "P(max)"} <= {*each} for each in pair)]
    counts = check_all(
        [[(GRID, before), (GRID, after)] for before, after in pairs], value_of(SHAPES[shape])
    )
    one_axis = 0
    for (before, after), each in zip(pairs, counts, strict=True):
        label = f"{before} to {after}"
        assert all(count == each[0] for count in each), label
        if before == after:
            assert each[0] == {}, label
        changed = [axis for axis in range(2) if before[axis] != after[axis]]
        if len(changed) != 1:
            continue
        (axis,) = changed
        other = before[1 - axis]
        if other[0] != "S" or other not in (before[axis], after[axis]):
            # Nothing else lies along the tensor axes of this change.
            assert each[0] in allowed(before[axis], after[axis]), label
            one_axis += 1
    assert one_axis > 100
    for (before, after), each in zip(pairs, counts, strict=True):
        if before == ("P", "P") and after == ("B", "B"):
            assert each[0] == {"all_reduce": 1}  # over both axes at once
    record_property(f"changes_of_layout_proved,_two_axes,_{shape}", len(pairs))


BETWEEN = {
    "apart": (PAIR, pc.Placement("cpu", [2, 3])),
    "more ranks": (pc.Placement("cpu", [1]), LINE),
    "overlapping": (LINE, pc.Placement("cpu", [3, 1])),
    "another order": (LINE, pc.Placement("cpu", [2, 0, 1])),
    "one axis to two": (PAIR, GRID),
    "two axes to one": (GRID, pc.Placement("cpu", [3, 1, 0])),
    "two axes exchanged": (GRID, pc.Placement("cpu", [[0, 2], [1, 3]])),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_other_meshes_with_counts(shape, record_property):
    total = 0
    for name, (source, target) in BETWEEN.items():
        pairs = list(product(layouts(source), layouts(target)))
        counts = check_all(
            [[(source, before), (target, after)] for before, after in pairs],
            value_of(SHAPES[shape]),
        )
        for (before, after), each in zip(pairs, counts, strict=True):
            label = f"{before} to {after}, {name}"
            for rank, count in enumerate(each):
                inside = rank in source or rank in target
                assert count.pop("exchange", 0) == inside, label
                # Nothing but a reduction runs before it, and none where nothing is partial.
                assert {*count} <= {"all_reduce", "reduce_scatter"}, label
                assert "P" in before or not count, label
        total += len(pairs)
    record_property(f"changes_of_layout_proved,_other_meshes,_{shape}", total)


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
        results = {}
        for before, after in (("P", "B"), ("P", "S(0)"), ("S(0)", "B"), ("B", "S(0)")):
            x = pc.tensor(np.arange(4.0), LINE, before, requires_grad=True)
            y = x.redistribute(sbp=after)
            with pc.comm_trace() as trace:
                y.backward(pc.tensor(np.ones(4), LINE, after))
            results[before, after] = (str(x.grad.sbp), trace.counts(), x.grad.numpy().tolist())
        return results

    for of_rank in spawn(rank, 3):
        assert of_rank["P", "B"] == ("[B]", {}, [1.0] * 4)
        assert of_rank["P", "S(0)"] == ("[B]", {"all_gather": 1}, [1.0] * 4)
        assert of_rank["S(0)", "B"] == ("[S(0)]", {}, [1.0] * 4)
        assert of_rank["B", "S(0)"][2] == [1.0] * 4
