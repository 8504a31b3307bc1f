"""Placements, SBPs, shards and ids: what they say, what they refuse, and that texts come back."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plancompiler as pc
from plancompiler.errors import IdOverflowError, PlacementError, SbpSyntaxError
from plancompiler.ir import (
    BROADCAST,
    Broadcast,
    NdSbp,
    Partial,
    Placement,
    Reduction,
    Split,
    parse_sbp,
)
from plancompiler.ir.shard import balanced_range, element_count, region_shape, shard_region
from plancompiler.ir.task import (
    FAMILY_BITS,
    LANE_BITS,
    RANK_BITS,
    SLOT_BITS,
    RegisterId,
    pack_register_id,
    unpack_id,
)

entries = st.one_of(
    st.just(BROADCAST),
    st.builds(Split, st.integers(0, 9)),
    st.sampled_from(Reduction).map(Partial),
)
layouts = st.lists(entries, max_size=4).map(tuple).map(NdSbp)


@pytest.mark.parametrize(
    ("ranks", "axes", "said"),
    [
        ([0, 1, 0], None, "lists a rank twice.*rank 0"),
        ([[0, 1], [2]], None, "rectangular"),
        ([], None, "rectangular"),
        ([0.5], None, "whole numbers"),
        ([-1, 0], None, "negative"),
        ([0, 1], ("dp", "tp"), "axis names"),
        ([[0, 1]], ("dp", "dp"), "axis names"),
    ],
)
def test_malformed_placements(ranks: object, axes: tuple[str, ...] | None, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        Placement("cpu", ranks, axes)  # type: ignore[arg-type]


def test_an_unknown_device_and_axis() -> None:
    with pytest.raises(PlacementError, match="unknown device type"):
        Placement("tpu", [0])
    with pytest.raises(PlacementError, match="no mesh axis"):
        Placement("cpu", [0], ("dp",)).axis("tp")
    with pytest.raises(PlacementError, match="not in the placement"):
        Placement("cpu", [3]).parallel_id(0)


def test_a_placement_is_a_mesh() -> None:
    mesh = Placement("cpu", [[4, 2], [7, 0]], ("dp", "tp"))
    assert eval(repr(mesh)) == mesh  # noqa: S307  # our own text
    assert (mesh.size, mesh.ndim, mesh.axis("tp")) == (4, 2, 1)
    assert mesh.group(2, [0]) == (2, 0)
    assert mesh.group(7, [0, 1]) == (4, 2, 7, 0)
    for parallel_id, rank in enumerate(mesh.rank_list):
        assert mesh.parallel_id(rank) == parallel_id
        assert mesh.parallel_id_at(mesh.coordinates(parallel_id)) == parallel_id
    with pytest.raises(AttributeError):
        mesh.device_type = "cuda"


@given(layouts)
def test_texts_of_layouts_come_back(sbp: NdSbp) -> None:
    names = {
        "NdSbp": NdSbp,
        "Split": Split,
        "Broadcast": Broadcast,
        "Partial": Partial,
        "Reduction": Reduction,
    }
    assert NdSbp.of(str(sbp)) == sbp
    assert NdSbp.of([str(entry) for entry in sbp]) == sbp
    assert eval(repr(sbp), names) == sbp  # noqa: S307  # our own text


@pytest.mark.parametrize(
    "text", ["", "S", "S()", "S(-1)", "S(x)", "B(0)", "P(median)", "[S(0)", "s(0)"]
)
def test_what_is_no_sbp(text: str) -> None:
    with pytest.raises(SbpSyntaxError, match="Expected: S"):
        parse_sbp(text)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_balanced_pieces_cover_and_differ_by_one(extent: int, parts: int) -> None:
    ranges = [balanced_range(extent, parts, index) for index in range(parts)]
    assert [element for start, stop in ranges for element in range(start, stop)] == list(
        range(extent)
    )
    lengths = [stop - start for start, stop in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_nested_splits_cut_the_outer_piece_again(extent: int, outer: int, inner: int) -> None:
    sbp = NdSbp((Split(0), Split(0)))
    covered = []
    for coordinates in np.ndindex(outer, inner):
        ((start, stop),) = shard_region((extent,), (outer, inner), sbp, coordinates)
        low, high = balanced_range(extent, outer, coordinates[0])
        assert low <= start <= stop <= high
        assert element_count(region_shape(((start, stop),))) == stop - start
        covered += range(start, stop)
    assert covered == list(range(extent))


@given(
    st.tuples(
        *(
            st.integers(0, (1 << bits) - 1)
            for bits in (RANK_BITS, FAMILY_BITS, LANE_BITS, SLOT_BITS)
        )
    )
)
def test_ids_are_packed_in_63_bits_and_come_back(fields: tuple[int, int, int, int]) -> None:
    packed = pack_register_id(*fields)
    assert 0 <= packed < 1 << 63
    assert unpack_id(packed) == RegisterId(*fields)


@pytest.mark.parametrize(("position", "name"), list(enumerate(("rank", "family", "lane", "slot"))))
def test_an_id_field_that_overflows_is_named(position: int, name: str) -> None:
    bits = (RANK_BITS, FAMILY_BITS, LANE_BITS, SLOT_BITS)[position]
    fields = [0, 0, 0, 0]
    fields[position] = 1 << bits
    with pytest.raises(IdOverflowError, match=f"the {name} does not fit.*{bits} bits"):
        pack_register_id(*fields)


def test_placements_and_jobs_are_copied_and_pickled() -> None:
    mesh = Placement("cpu", [[4, 2], [7, 0]], ("dp", "tp"))
    with pc.job("sum") as job:
        pc.output("y", pc.input("x", (4,), "float32", mesh, ["S(0)", "B"]).sum())
    for value in (mesh, job, NdSbp.of(["S(0)", "P(max)"]), pc.Config(zero=1)):
        pickled = pickle.loads(pickle.dumps(value))  # noqa: S301  # of our own making
        for result in (pickled, copy.copy(value), copy.deepcopy(value)):
            assert result == value
            assert str(result) == str(value)
