"""The memory planner: offsets for the storage of one rank's step, sharing bytes by lifetime.

Two requests may lie on the same bytes if, whatever the streams' interleaving, all users of the one
have finished before the other is produced, within the step and across its end. That is made a
question of intervals: a request gets a *window* on the compute stream's order, where point 2i is
the start of compute task i and 2i + 1 its end.

- Its window starts at 2i if compute task i produces it. A producer on another stream knows compute
  tasks up to some c to be done when it starts: 2c + 1.
- It ends at 2i + 1 for a user that is compute task i; for a user on another stream at 2c, where c
  is the first compute task that knows the user to be done when it starts. The last user counts.

If A ends no later than B starts, then all users of A are done before B's producer starts: the four
cases come down to compute task i being done before compute task j starts for i < j. The next step's
producer of A finds B's users done as well: it is a compute task or knows of one, so it knows that
the compute stream finished the step before, and a compute task of that step knew of B's users.
Where there is no such c the request is *dedicated*: its bytes are used for nothing else.

Placing windows is dynamic storage allocation, which is NP-hard. Heuristics run: sweeps along time,
forward and backward, with best fit and first fit; then greedy best fit in several orders: by size
and by area, after the arena planners of inference runtimes, and what is alive at the peak first;
then a few rounds of squeaky wheel optimisation (Joslin and Clements 1999), which move forward what
stuck out. The smallest arena wins, the earlier heuristic on a tie, and all stops as soon as the
arena is within two thousandths of the lower bound.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plancompiler.errors import VerifyError
from plancompiler.plan.order import StepOrder

ALIGNMENT = 64
"""Bytes; a cache line and the widest vector register."""

_MANY = 4096
"""Above this number of requests only the cheap heuristics and one greedy order run."""
_TOO_MANY = 16_384
"""Above this number only what takes n log n time: best fit along time."""
_SQUEAKY_WORK = 12_000
"""Requests × rounds of squeaky wheel optimisation."""
_CLOSE_ENOUGH = 500
"""The search ends at this fraction of the lower bound above it."""
_MOST_BYTES = 1 << 60
"""Of all requests together: offsets are numbers of 64 bits."""

Int = npt.NDArray[np.int64]
Columns = Sequence[int] | Int


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """Bytes that tasks write and read: a register with all registers that take its memory over."""

    key: int
    """The caller's name for it, such as a register id; unique."""
    nbytes: int
    """All slots together."""
    users: tuple[int, ...]
    """Positions in plan order of all tasks that write or read it."""
    producers: tuple[int, ...]
    """Those of `users` that must not start before the bytes are free."""
    dedicated: bool = False
    """Never share: several slots, or read by tasks whose end this rank does not learn."""
    area: int = 0
    """Requests of different areas are never alive at once: areas lie on the same bytes."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where every request lies in the arena."""

    offsets: dict[int, int]
    """Bytes from the start, by request key; aligned to 64."""
    nbytes: int
    """Size of the arena."""
    peak_live_bytes: int
    """The most that is alive at once: no placement can be smaller."""


def align(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_memory(
    order: StepOrder, compute_stream: int, requests: Sequence[StorageRequest]
) -> MemoryPlan:
    """Offsets for all requests of one step.

    `order` is over the tasks in plan order; `compute_stream` is the number of the stream on whose
    order windows are measured. The result depends on the arguments alone.
    """
    total = sum(align(request.nbytes) for request in requests)
    if total > _MOST_BYTES:
        raise VerifyError(
            "the registers of a rank are larger than any memory",
            got=f"{total} bytes",
            expected=f"at most {_MOST_BYTES} bytes",
        )
    offsets: dict[int, int] = {}
    areas: dict[int, list[tuple[int, int, int, int]]] = {}
    dedicated = []
    windows = storage_windows(order, compute_stream, requests)
    for request, window in zip(requests, windows, strict=True):
        if request.nbytes == 0:
            offsets[request.key] = 0
        elif window is None:
            dedicated.append(request)
        else:
            areas.setdefault(request.area, []).append((request.key, *window, align(request.nbytes)))
    top = peak = 0
    for area in areas.values():
        columns = (tuple(each[column] for each in area) for column in (1, 2, 3))
        placed, size, alive = known_placements(*columns)
        offsets.update((each[0], offset) for each, offset in zip(area, placed, strict=True))
        top, peak = max(top, size), max(peak, alive)
    own = 0
    for request in dedicated:
        offsets[request.key] = top + own
        own += align(request.nbytes)
    return MemoryPlan(offsets, top + own, peak + own)


def storage_windows(
    order: StepOrder, compute_stream: int, requests: Sequence[StorageRequest]
) -> list[tuple[int, int] | None]:
    """The half-open window of each request on the compute stream's order; None where dedicated."""
    streams, positions, clocks = order.streams, order.positions, order.clocks
    # Knowledge only grows along a stream, so the first compute task to know is a binary search.
    known = [
        [clocks[task][stream] for task, on in enumerate(streams) if on == compute_stream]
        for stream in range(len(order.counts))
    ]
    count = order.counts[compute_stream] if compute_stream < len(order.counts) else 0

    def window(request: StorageRequest) -> tuple[int, int] | None:
        start = end = -1
        for task in request.producers:
            if streams[task] == compute_stream:
                first = 2 * positions[task]
            elif count and (done := clocks[task][compute_stream]):
                first = 2 * done - 1
            else:
                return None
            start = first if start < 0 else min(start, first)
        for task in (*request.producers, *request.users):
            if streams[task] == compute_stream:
                last = 2 * positions[task] + 1
            else:
                learner = bisect_right(known[streams[task]], positions[task])
                if learner == count:
                    return None
                last = 2 * learner
            end = max(end, last)
        return (start, end) if request.producers else None

    return [None if request.dedicated else window(request) for request in requests]


def place_windows(
    starts: Sequence[int], ends: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], int, int]:
    """Offsets for half-open windows `[start, end)`, the arena's size, and the lower bound of it.

    `sizes` are in bytes and aligned.
    """
    if not starts:
        return [], 0, 0
    peak = peak_live(starts, ends, sizes)
    best: list[int] = []
    best_top = -1
    columns = (np.asarray(column, dtype=np.int64) for column in (starts, ends, sizes))
    for offsets in _placements(*columns, peak=peak):
        top = max(map(int.__add__, offsets, sizes))
        if best_top < 0 or top < best_top:
            best, best_top = offsets, top
        if (best_top - peak) * _CLOSE_ENOUGH <= peak:
            break
    return best, best_top, peak


known_placements = lru_cache(maxsize=32)(place_windows)
"""Ranks that do the same work, and a job that few passes change, have the same windows."""


def peak_live(starts: Sequence[int], ends: Sequence[int], sizes: Sequence[int]) -> int:
    """The most bytes of half-open windows `[start, end)` that are alive at one point."""
    if not starts:
        return 0
    return int(live_bytes(starts, ends, sizes).max())


def live_bytes(starts: Columns, ends: Columns, sizes: Columns) -> Int:
    """Bytes alive at each point."""
    change = np.zeros(int(np.max(ends)) + 1, dtype=np.int64)
    np.add.at(change, np.asarray(starts), sizes)
    np.subtract.at(change, np.asarray(ends), sizes)
    return change.cumsum()


def _placements(starts: Int, ends: Int, sizes: Int, *, peak: int) -> Iterator[list[int]]:
    """Offsets by one heuristic after another, cheap ones first; computed as they are asked for."""
    last = int(ends.max())
    forward = (starts.tolist(), ends.tolist(), sizes.tolist())
    backward = ((last - ends).tolist(), (last - starts).tolist(), sizes.tolist())
    for columns in (forward, backward):
        yield _sweep(*columns, best_fit=True)
        if len(starts) <= _TOO_MANY:
            yield _sweep(*columns, best_fit=False)
    if len(starts) > _TOO_MANY:
        return
    lengths = ends - starts
    peak_at = int(live_bytes(starts, ends, sizes).argmax())
    away = (peak_at < starts) | (ends <= peak_at)
    # What is alive at the peak must lie without a gap there; the rest fits around it.
    orders = [
        np.lexsort((starts, -lengths, -sizes)),
        np.lexsort((-ends, starts, away)),
        np.lexsort((starts, -ends, away)),
        np.lexsort((starts, -lengths * sizes)),
    ]
    if len(starts) > _MANY:
        yield _greedy(orders[0], starts, ends, sizes)
        return
    overlaps = (starts < ends[:, None]) & (ends > starts[:, None])
    for _ in range(1 + _SQUEAKY_WORK // len(starts) // len(orders)):
        for which, order in enumerate(orders):
            offsets = _greedy(order, starts, ends, sizes, overlaps)
            yield offsets
            orders[which] = _blame(order, np.asarray(offsets) + sizes > peak)


def _blame(order: Int, above: npt.NDArray[np.bool_]) -> Int:
    """The order with what lies above the bound moved to half its place."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) * 2
    place[above] = place[above] // 2 - 1
    return np.argsort(place, kind="stable")


def _greedy(
    order: Int,
    starts: Int,
    ends: Int,
    sizes: Int,
    overlaps: npt.NDArray[np.bool_] | None = None,
) -> list[int]:
    """Place one after another, each into the tightest gap between placed ones it is alive with.

    `overlaps` says of all pairs whether they are alive at once, where that is known.
    """
    offsets, tops = np.zeros_like(sizes), np.zeros_like(sizes)
    placed = np.empty_like(order)  # indices, by offset
    offsets_sorted: list[int] = []
    size = sizes.tolist()
    for filled, index in enumerate(order.tolist()):
        if overlaps is None:
            together = (starts < ends[index]) & (ends > starts[index])
        else:
            together = overlaps[index]
        alive = placed[:filled]
        alive = alive[together[alive]]
        need, offset = size[index], 0
        if len(alive):
            covered = np.maximum.accumulate(tops[alive])
            gaps = offsets[alive]
            gaps[1:] -= covered[:-1]
            fits = (gaps >= need).nonzero()[0]
            if not len(fits):
                offset = int(covered[-1])
            elif choice := int(fits[gaps[fits].argmin()]):
                offset = int(covered[choice - 1])
        at = bisect_right(offsets_sorted, offset)
        offsets_sorted.insert(at, offset)
        if at < filled:
            placed[at + 1 : filled + 1] = placed[at:filled]
        placed[at] = index
        offsets[index], tops[index] = offset, offset + need
    placed_at: list[int] = offsets.tolist()
    return placed_at


def _sweep(starts: list[int], ends: list[int], sizes: list[int], *, best_fit: bool) -> list[int]:
    """Walk along time; give each window a free gap when it starts and take it back when it ends."""
    events = sorted(
        [(end, 0, size, index) for index, (end, size) in enumerate(zip(ends, sizes, strict=True))]
        + [
            (start, 1, -size, index)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
    )
    result = [0] * len(starts)
    gap_starts: list[int] = []
    gap_ends: list[int] = []
    by_size: list[tuple[int, int]] = []
    top = 0
    for _, opens, _, index in events:
        size = sizes[index]
        if opens:
            at = -1
            if best_fit:
                fitting = bisect_left(by_size, (size, -1))
                if fitting < len(by_size):
                    at = bisect_left(gap_starts, by_size[fitting][1])
            else:
                at = next(
                    (
                        gap
                        for gap, (low, high) in enumerate(zip(gap_starts, gap_ends, strict=True))
                        if high - low >= size
                    ),
                    -1,
                )
            if at < 0:
                # Grow the arena; a gap at its end is used first.
                if gap_ends and gap_ends[-1] == top:
                    low = gap_starts.pop()
                    gap_ends.pop()
                    _remove(by_size, (top - low, low))
                else:
                    low = top
                result[index] = low
                top = low + size
                continue
            low, high = gap_starts[at], gap_ends[at]
            result[index] = low
            _remove(by_size, (high - low, low))
            if high - low == size:
                del gap_starts[at], gap_ends[at]
            else:
                gap_starts[at] = low + size
                insort(by_size, (high - low - size, low + size))
        else:
            low, high = result[index], result[index] + size
            at = bisect_left(gap_starts, low)
            if at < len(gap_starts) and gap_starts[at] == high:
                _remove(by_size, (gap_ends[at] - high, high))
                high = gap_ends[at]
                del gap_starts[at], gap_ends[at]
            if at and gap_ends[at - 1] == low:
                at -= 1
                low = gap_starts[at]
                _remove(by_size, (gap_ends[at] - low, low))
                del gap_starts[at], gap_ends[at]
            gap_starts.insert(at, low)
            gap_ends.insert(at, high)
            insort(by_size, (high - low, low))
    return result


def _remove(ordered: list[tuple[int, int]], item: tuple[int, int]) -> None:
    del ordered[bisect_left(ordered, item)]
