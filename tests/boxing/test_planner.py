"""Every pair of layouts is boxed, gives the right values, and takes the classical collectives."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from plancompiler.boxing.exchange import exchange_readers, exchange_sources, plan_boxing
from plancompiler.boxing.planner import boxing_path
from plancompiler.boxing.primitives import TABLE, primitive_between
from plancompiler.ir import BROADCAST, DType, NdSbp, Partial, Placement, Reduction, Split
from plancompiler.ir.task import Primitive
from tests.boxing.cases import Case, check, random_case

F64 = DType.FLOAT64
ENTRIES = (BROADCAST, Split(0), Split(1), *map(Partial, Reduction))


@pytest.mark.parametrize("extent", [1, 2, 3])
@pytest.mark.parametrize("shape", [(4, 6), (5, 2), (1, 7), (0, 3)])
def test_every_pair_on_one_axis(extent: int, shape: tuple[int, int]) -> None:
    mesh = Placement("cpu", range(extent))
    for before, after in product(ENTRIES, repeat=2):
        check(Case(shape, mesh, NdSbp((before,)), mesh, NdSbp((after,)), seed=0))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shape"), [((2, 2), (4, 8)), ((2, 3), (7, 5)), ((3, 2), (2, 9))])
def test_every_pair_on_two_axes(mesh: tuple[int, int], shape: tuple[int, int]) -> None:
    placement = Placement("cpu", np.arange(mesh[0] * mesh[1]).reshape(mesh))
    entries = (BROADCAST, Split(0), Split(1), Partial(), Partial(Reduction.PROD))
    for before, after in product(product(entries, repeat=2), repeat=2):
        check(Case(shape, placement, NdSbp(before), placement, NdSbp(after), seed=0))


@pytest.mark.slow
def test_random_placements_and_layouts() -> None:
    for seed in range(1000):
        check(random_case(seed))


@pytest.mark.parametrize(
    ("before", "after", "mesh", "expected"),
    [
        ("[P]", "[B]", (4,), {"all_reduce": 1}),
        ("[P]", "[S(0)]", (4,), {"reduce_scatter": 1}),
        ("[S(0)]", "[B]", (4,), {"all_gather": 1}),
        ("[S(0)]", "[S(1)]", (4,), {"all_to_all": 1}),
        ("[B]", "[S(0)]", (4,), {"slice": 1}),
        ("[B]", "[P]", (4,), {"partialise": 1}),
        ("[P, P]", "[B, B]", (2, 2), {"all_reduce": 1}),
        ("[S(0), P]", "[S(0), B]", (2, 2), {"all_reduce": 1}),
        ("[S(0), S(0)]", "[B, B]", (2, 2), {"all_gather": 1}),
        ("[P, S(1)]", "[B, B]", (2, 2), {"all_reduce": 1, "all_gather": 1}),
    ],
)
def test_classical_layout_changes_take_the_classical_collectives(
    before: str, after: str, mesh: tuple[int, ...], expected: dict[str, int]
) -> None:
    path = boxing_path(NdSbp.of(before), NdSbp.of(after), (64, 64), F64, mesh)
    assert Counter(str(step.primitive) for step in path) == expected


def test_a_split_moves_to_another_mesh_axis_in_one_exchange() -> None:
    """No device gathers the whole value: each reads the one box that it lacks."""
    mesh = Placement("cpu", np.arange(16).reshape(4, 4))
    plan = plan_boxing(mesh, NdSbp.of("[S(0), B]"), mesh, NdSbp.of("[B, S(0)]"), (64, 8), F64)
    assert plan.before == ()
    assert plan.exchange is not None
    for rank in range(16):
        (piece,) = exchange_sources(plan.exchange, rank)
        assert np.prod([stop - start for start, stop in piece.source]) == 64 * 8 / 4


@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (3, 2), (8, 16), (1, 6), (2, 3, 4)])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.MAX])
def test_no_way_is_cheaper_than_one_reduction_over_the_whole_mesh(mesh, reduction) -> None:
    used = [extent > 1 for extent in mesh]
    partial = NdSbp(tuple(Partial(reduction) if each else BROADCAST for each in used))
    whole = NdSbp((BROADCAST,) * len(mesh))
    options = [[BROADCAST, Split(0), Partial(reduction)] if each else [BROADCAST] for each in used]
    between = [NdSbp(entries) for entries in product(*options)]
    for extent in (1, 120, 120 * 10**4, 120 * 10**9):
        (step,) = boxing_path(partial, whole, (extent,), F64, mesh)
        assert step.primitive is Primitive.ALL_REDUCE
        for middle in between:
            ways = [
                boxing_path(*pair, (extent,), F64, mesh)
                for pair in ((partial, middle), (middle, whole))
            ]
            assert step.seconds <= sum(each.seconds for way in ways for each in way) * (1 + 1e-12)


def test_the_table_has_a_row_for_every_pair_of_kinds_that_one_step_can_join() -> None:
    kinds = (BROADCAST, Split(0), Partial())
    missing = {
        (type(before).__name__, type(after).__name__)
        for before, after in product(kinds, repeat=2)
        if primitive_between(before, after) is None
    }
    # B → B needs nothing; S → P and P → P go through B.
    assert missing == {("Broadcast", "Broadcast"), ("Split", "Partial"), ("Partial", "Partial")}
    # From whole to a halo nothing is needed of others; all else is an exchange.
    assert len(TABLE) == 7


def test_replicas_are_read_where_they_are() -> None:
    """A rank that holds the value reads its own copy; stages read their opposite number."""
    whole = NdSbp.of("[B]")
    near = plan_boxing(Placement("cpu", [0, 1]), whole, Placement("cpu", [1, 2]), whole, (4,), F64)
    assert near.exchange is not None
    assert [p.rank for p in exchange_sources(near.exchange, 1)] == [1]
    far = plan_boxing(Placement("cpu", [0, 1]), whole, Placement("cpu", [2, 3]), whole, (4,), F64)
    assert far.exchange is not None
    assert [p.rank for p in exchange_sources(far.exchange, 3)] == [1]


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 400), marks=pytest.mark.slow)], ids=str
)
def test_readers_are_the_inverse_of_sources(seeds: range) -> None:
    """What a source computes of its readers is what all destinations together say."""
    exchanges = 0
    for seed in seeds:
        case = random_case(seed)
        plan = plan_boxing(case.src, case.src_sbp, case.dst, case.dst_sbp, case.shape, F64)
        if plan.exchange is None:
            continue
        exchanges += 1
        said: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(8)}
        for dst_rank in case.dst.rank_list:
            for piece in exchange_sources(plan.exchange, dst_rank):
                if piece.rank != dst_rank:
                    said[piece.rank].append((dst_rank, piece.lane))
        for rank, readers in said.items():
            assert exchange_readers(plan.exchange, rank) == tuple(sorted(readers)), case
    assert exchanges > len(seeds) // 2
