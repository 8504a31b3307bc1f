"""Every pair of layouts is boxed, gives the right values, and takes the classical collectives."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plancompiler.boxing.exchange import plan_boxing
from plancompiler.boxing.planner import boxing_path
from plancompiler.boxing.primitives import TABLE, primitive_between
from plancompiler.ir import BROADCAST, DType, NdSbp, Partial, Placement, Reduction, Split
from tests.boxing.simulation import apply_exchange, apply_step, assemble, scatter

F64 = DType.FLOAT64
ENTRIES = (BROADCAST, Split(0), Split(1), *map(Partial, Reduction))


def box(
    array: np.ndarray,
    src: Placement,
    src_sbp: NdSbp,
    dst: Placement,
    dst_sbp: NdSbp,
    rng: np.random.Generator,
) -> np.ndarray:
    """The value after boxing, computed shard by shard."""
    shards = scatter(array, src, src_sbp, rng)
    plan = plan_boxing(src, src_sbp, dst, dst_sbp, array.shape, F64)
    for step in plan.before:
        shards = apply_step(step, shards, array.shape, src)
    if plan.exchange is not None:
        shards = apply_exchange(plan.exchange, shards)
    return assemble(shards, array.shape, dst, dst_sbp)


def check(array: np.ndarray, *where, seed: int = 0) -> None:
    got = box(array, *where, np.random.default_rng(seed))
    np.testing.assert_allclose(got, array, rtol=1e-12, atol=1e-12, err_msg=str(where))


@pytest.mark.parametrize("extent", [1, 2, 3])
@pytest.mark.parametrize("shape", [(4, 6), (5, 2), (1, 7), (0, 3)])
def test_every_pair_on_one_axis(extent: int, shape: tuple[int, int]) -> None:
    mesh = Placement("cpu", range(extent))
    array = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    for before, after in product(ENTRIES, repeat=2):
        check(array, mesh, NdSbp((before,)), mesh, NdSbp((after,)))


@pytest.mark.parametrize(("mesh", "shape"), [((2, 2), (4, 8)), ((2, 3), (7, 5)), ((3, 2), (2, 9))])
def test_every_pair_on_two_axes(mesh: tuple[int, int], shape: tuple[int, int]) -> None:
    placement = Placement("cpu", np.arange(mesh[0] * mesh[1]).reshape(mesh))
    array = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    entries = (BROADCAST, Split(0), Split(1), Partial(), Partial(Reduction.PROD))
    for before, after in product(product(entries, repeat=2), repeat=2):
        check(array, placement, NdSbp(before), placement, NdSbp(after))


layouts = st.sampled_from(ENTRIES)


@st.composite
def placements(draw) -> Placement:
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 3), (2, 2, 2)]))
    ranks = draw(st.permutations(range(8)))
    return Placement("cpu", np.array(ranks[: int(np.prod(shape))]).reshape(shape))


@given(st.data(), placements(), placements(), st.integers(0, 2**32 - 1))
def test_any_placement_to_any_placement(data, src: Placement, dst: Placement, seed: int) -> None:
    shape = data.draw(st.sampled_from([(4, 4), (5, 3), (1, 6), (7, 1)]))
    src_sbp = NdSbp(tuple(data.draw(layouts) for _ in src.hierarchy))
    dst_sbp = NdSbp(tuple(data.draw(layouts) for _ in dst.hierarchy))
    array = np.random.default_rng(seed).integers(1, 9, size=shape).astype(np.float64)
    check(array, src, src_sbp, dst, dst_sbp, seed=seed)


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


def test_the_table_has_a_row_for_every_pair_of_kinds_that_one_step_can_join() -> None:
    kinds = (BROADCAST, Split(0), Partial())
    missing = {
        (type(before).__name__, type(after).__name__)
        for before, after in product(kinds, repeat=2)
        if primitive_between(before, after) is None
    }
    # B → B needs nothing; S → P and P → P go through B.
    assert missing == {("Broadcast", "Broadcast"), ("Split", "Partial"), ("Partial", "Partial")}
    assert len(TABLE) == 6


def test_replicas_are_read_where_they_are() -> None:
    """A rank that holds the value reads its own copy; stages read their opposite number."""
    whole = NdSbp.of("[B]")
    near = plan_boxing(Placement("cpu", [0, 1]), whole, Placement("cpu", [1, 2]), whole, (4,), F64)
    assert near.exchange is not None
    assert [p.rank for p in _sources(near.exchange, 1)] == [1]
    far = plan_boxing(Placement("cpu", [0, 1]), whole, Placement("cpu", [2, 3]), whole, (4,), F64)
    assert far.exchange is not None
    assert [p.rank for p in _sources(far.exchange, 3)] == [1]


def _sources(exchange, rank: int):
    from plancompiler.boxing.exchange import exchange_sources

    return exchange_sources(exchange, rank)
