"""Halos: what is reached by arithmetic is what windows, counted one by one, see."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import plancompiler as pc
from plancompiler.boxing.exchange import Exchange, exchange_readers, exchange_sources
from plancompiler.errors import SbpSyntaxError
from plancompiler.ir import NdSbp, Placement, Split
from plancompiler.ir.halo import Halo, Reach, parse_halo
from plancompiler.ir.shard import rank_region
from plancompiler.ops.window import Window

windows = st.builds(
    lambda kernel, stride, before, after, dilation: Window(
        (kernel,), (stride,), ((before, after),), (dilation,)
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(1, 3),
)


def seen(window: Window, extent: int, index: int) -> set[int]:
    """The elements between the first and the last that a window is over, as far as they exist."""
    start = index * window.stride[0] - window.padding[0][0]
    return set(range(start, start + window.reach(0))) & set(range(extent))


def count(window: Window, extent: int) -> int:
    spare = extent + sum(window.padding[0]) - window.reach(0)
    assume(spare >= 0)
    return spare // window.stride[0] + 1


@settings(max_examples=150, deadline=None)
@given(windows, st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_range_of_windows_reaches_what_they_see(window, extent, low, high):
    total = count(window, extent)
    low, high = sorted((min(low, total), min(high, total)))
    reach = window.needs(0, extent)
    needed = set().union(*(seen(window, extent, index) for index in range(low, high)))
    start, stop = Halo(0, total, (reach,)).range_of(low, high)
    assert set(range(start, stop)) >= needed
    if low < high and seen(window, extent, low) and seen(window, extent, high - 1):
        assert (start, stop) == (min(needed), max(needed) + 1)  # else some more at an end
    if low == high:
        assert start == stop

    # The other way round: the windows that see an element of a range.
    low, high = sorted((min(low, extent), min(high, extent)))
    lookers = {i for i in range(total) if seen(window, extent, i) & set(range(low, high))}
    back = Halo(0, extent, (reach.inverse(total),))
    start, stop = back.range_of(low, high)
    assert set(range(start, stop)) >= lookers
    if low < high and all(
        any(edge in seen(window, extent, i) for i in range(total)) for edge in (low, high - 1)
    ):
        assert (start, stop) == (min(lookers), max(lookers) + 1)
    # And all that these windows see.
    both = Halo(0, extent, (reach.inverse(total), reach))
    start, stop = both.range_of(low, high)
    assert set(range(start, stop)) >= set().union(*(seen(window, extent, i) for i in lookers))
    assert parse_halo(str(both)) == both
    layout = NdSbp((both, Split(1)))
    assert NdSbp.parse(str(layout)) == layout


@settings(max_examples=60, deadline=None)
@given(windows, st.integers(1, 17), st.sampled_from([(2,), (5,), (2, 2), (3, 2)]), st.data())
def test_an_exchange_brings_each_rank_its_halo_once(window, extent, mesh, data):
    """Whatever lies where before: in pieces along the axis, along another, or whole."""
    total = count(window, extent)
    placement = Placement("cpu", np.arange(np.prod(mesh)).reshape(mesh))
    halo = Halo(1, total, (window.needs(0, extent),))
    entries = st.sampled_from([Split(1), Split(0), NdSbp.of("B")[0]])
    before = NdSbp(tuple(data.draw(entries) for _ in mesh))
    after = NdSbp((halo,) * len(mesh))
    shape = (3, extent)
    exchange = Exchange(shape, placement, before, placement, after)
    read: set[tuple[int, int]] = set()
    for rank in placement.rank_list:
        region = rank_region(shape, placement, after, rank)
        filled = np.zeros([stop - start for start, stop in region], int)
        for piece in exchange_sources(exchange, rank):
            held = rank_region(shape, placement, before, piece.rank)
            for (target, _), (source, _), (corner, _), (origin, _) in zip(
                piece.target, piece.source, region, held, strict=True
            ):
                assert target + corner == source + origin
            filled[tuple(slice(*each) for each in piece.target)] += 1
            if piece.rank != rank:
                read.add((rank, piece.rank))
        assert (filled == 1).all()
    told = {
        (reader, rank)
        for rank in placement.rank_list
        for reader, _ in exchange_readers(exchange, rank)
    }
    assert told == read


def test_users_do_not_write_halos():
    text = str(Halo(0, 4, (Reach(1, -1, 1, 1, 4),)))
    with pytest.raises(SbpSyntaxError):
        pc.tensor(np.zeros(4), pc.Placement("cpu", [0]), [text])
    wrong = ["H(0 4 -1:0:0:1:4)", "H(0 4 1:0:0:0:4)", "H(0 4)", "H(0 4 1:0:0:1)"]
    assert [parse_halo(each) for each in wrong] == [None] * 4
    for each, spaces in product(wrong, ("", " ")):
        with pytest.raises(SbpSyntaxError):
            NdSbp.parse(f"[{spaces}{each}]")
