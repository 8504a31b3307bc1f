"""The rule that registers on the same bytes are never alive at once.

Bytes are shared within a segment by happens-before, as in a step that is one whole. Segments share
bytes because all streams come through the slots one after another: a register that is local to a
segment, that is first written by a task which knows its compute stream to have come to the segment,
and whose users are all known to the compute stream at the segment's end, is alive within one slot.
Everything else has bytes of its own: what segments carry to others, several slots, variables, what
other ranks read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from plancompiler.errors import MemoryOverlapError, VerifyError
from plancompiler.plan.index import COMPUTE, PlanIndex
from plancompiler.plan.order import Clock, StepOrder, covers
from plancompiler.plan.plan import Plan, RegisterDesc
from plancompiler.plan.rules_memory import extent_text


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of a group of registers."""

    root: RegisterDesc
    start: int
    end: int
    segment: int
    """The segment that they never leave; -1 where there is none."""
    producer: int
    """Place in the segment of the task that first writes them."""
    users: list[int]
    """Places in the segment."""
    needed: Clock | None
    """What must be known for all users to be done; None where that is never known."""
    within_slot: bool = False
    """Whether they are alive within one slot of their segment only."""


def check_overlap(index: PlanIndex) -> None:
    """Registers on the same bytes are never alive at once, whatever the streams' interleaving.

    Per segment, producers are walked in plan order while a map from bytes to their last owner is
    kept. Order is transitive, so comparing each storage with the owners it displaces is enough, and
    across the end of the segment's run the last owner of a byte with its first.
    """
    storages: dict[tuple[int, int], list[_Storage]] = {}
    for root, members in index.groups.items():
        register = index.plan.register_by_id[root]
        if register.nbytes > 0:
            storage = _storage(index, register, members)
            storages.setdefault((register.block, storage.segment), []).append(storage)
    by_block: dict[int, list[_Storage]] = {}
    for (block, segment), lifetimes in sorted(storages.items()):
        if segment >= 0:
            _check_segment(index, index.segment_orders[segment], lifetimes)
        by_block.setdefault(block, []).extend(lifetimes)
    if len(index.plan.segments) > 1 or index.plan.microbatches > 1:
        for lifetimes in by_block.values():
            _check_across_segments(index, lifetimes)


def _storage(index: PlanIndex, root: RegisterDesc, members: list[RegisterDesc]) -> _Storage:
    home = index.home_segment(members)
    start, end = root.offset, root.offset + root.nbytes * root.register_count
    if home is None:
        return _Storage(root, start, end, -1, -1, [], None)
    first = index.segment_starts[home]
    order = index.segment_orders[home]
    producer = index.position[root.producer] - first
    users = index.users(members)
    if first:
        users = [place - first for place in users]
    never = (
        index.plan.blocks[root.block].purpose == "variables"
        or root.register_count > 1
        or any(len(index.local_consumers[one.id]) < len(one.consumers) for one in members)
    )
    needed = None if never else order.clock_of(users)
    entered = order.streams[producer] == COMPUTE or order.clocks[producer][COMPUTE] > 0
    left = needed is not None and covers(order.end_clocks[COMPUTE], needed)
    return _Storage(root, start, end, home, producer, users, needed, entered and left)


def _check_segment(index: PlanIndex, order: StepOrder, storages: list[_Storage]) -> None:
    last = _ByteMap()
    first = _ByteMap()
    for storage in storages:
        pieces = last.replace(storage)
        for start, end, owner in pieces:
            if owner is None:
                first.add(start, end, storage)
            elif (
                owner.needed is None
                or storage.needed is None
                or not covers(order.clocks[storage.producer], owner.needed)
            ):
                raise _overlap(index, owner, storage, across=False)
    for start, end, owner in first.pieces():
        for final in last.owners(start, end):
            if final is not owner and not (
                final.needed is not None
                and covers(order.previous_clock(owner.producer), final.needed)
            ):
                raise _overlap(index, final, owner, across=True)


def _check_across_segments(index: PlanIndex, storages: list[_Storage]) -> None:
    """A sweep over bytes: storages of different segments meet only if each stays in its slots."""
    events = []
    for number, storage in enumerate(storages):
        events += [(storage.start, 1, number), (storage.end, 0, number)]
    alive: dict[int, None] = {}
    within: dict[int, int] = {}
    """Segment → how many storages that stay within their slots hold the byte."""
    apart: dict[int, int] = {}
    """The same for all other storages."""
    for _, begins, number in sorted(events):
        storage = storages[number]
        counts = within if storage.within_slot else apart
        if not begins:
            del alive[number]
            counts[storage.segment] -= 1
            if not counts[storage.segment]:
                del counts[storage.segment]
            continue
        others = [apart] if storage.within_slot else [apart, within]
        # Within one segment the storages have been compared already.
        if any(segment != storage.segment or segment < 0 for each in others for segment in each):
            other = next(storages[one] for one in alive if not _may_share(storages[one], storage))
            raise _overlap(index, other, storage, across=False)
        alive[number] = None
        counts[storage.segment] = counts.get(storage.segment, 0) + 1


def _may_share(one: _Storage, two: _Storage) -> bool:
    """Whether bytes of both may be the same, as far as this is a question between segments."""
    return (one.within_slot and two.within_slot) or one.segment == two.segment >= 0


class _ByteMap:
    """Disjoint ranges of bytes with their owners."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        """Sorted."""
        self._range: dict[int, tuple[int, _Storage]] = {}
        """Start → end and owner."""

    def add(self, start: int, end: int, owner: _Storage) -> None:
        """A range that overlaps none."""
        insort(self._starts, start)
        self._range[start] = end, owner

    def _between(self, start: int, end: int) -> tuple[int, int]:
        """Which of the ranges, in order, have a byte in common with this one."""
        low = bisect_right(self._starts, start)
        if low and self._range[self._starts[low - 1]][0] > start:
            low -= 1
        return low, bisect_left(self._starts, end)

    def replace(self, owner: _Storage) -> list[tuple[int, int, _Storage | None]]:
        """Give the owner its bytes; the ranges it displaces, None where nobody owned them."""
        start, end = owner.start, owner.end
        low, high = self._between(start, end)
        displaced: list[tuple[int, int, _Storage | None]] = []
        kept = [start]
        free = start
        old_starts = self._starts[low:high]
        for old_start in old_starts:
            old_end, old = self._range.pop(old_start)
            if free < old_start:
                displaced.append((free, old_start, None))
            displaced.append((max(start, old_start), min(end, old_end), old))
            free = old_end
            if old_start < start:
                kept.insert(0, old_start)
                self._range[old_start] = start, old
            if old_end > end:
                kept.append(end)
                self._range[end] = old_end, old
        if free < end:
            displaced.append((free, end, None))
        self._range[start] = end, owner
        if kept != old_starts:
            self._starts[low:high] = kept
        return displaced

    def pieces(self) -> list[tuple[int, int, _Storage]]:
        return [(start, *self._range[start]) for start in self._starts]

    def owners(self, start: int, end: int) -> list[_Storage]:
        """Owners of any byte of a range."""
        low, high = self._between(start, end)
        return [self._range[each][1] for each in self._starts[low:high]]


def _overlap(index: PlanIndex, old: _Storage, new: _Storage, *, across: bool) -> VerifyError:
    reason = _never_done(index.plan, old) or _never_done(index.plan, new)
    if reason is None and old.segment != new.segment:
        stays = new if old.within_slot else old
        reason = (
            f"{stays.root.name!r} may be in use outside the slots of segment "
            f"{str(index.plan.segments[stays.segment])!r}"
        )
    if reason is None:
        order = index.segment_orders[new.segment]
        start = index.segment_starts[new.segment]
        done = order.previous_step_done if across else order.happens_before
        late = next(user for user in old.users if not done(user, new.producer))
        run = "step" if not index.plan.schedule else "run of the segment"
        when = f" of the next {run}" if across else ""
        reason = (
            f"{index.place_name(start + late)} may still use {old.root.name!r} when "
            f"{index.place_name(start + new.producer)}{when} writes {new.root.name!r}"
        )
    return index.broken(
        f"registers {old.root.name!r} and {new.root.name!r} are alive at once and share memory: "
        f"{reason}",
        new.root,
        got=f"{old.root.name!r} at {extent_text(old.root)}, "
        f"{new.root.name!r} at {extent_text(new.root)}",
        expected="bytes that do not overlap",
        error=MemoryOverlapError,
    )


def _never_done(plan: Plan, storage: _Storage) -> str | None:
    """Why the end of a storage's use is never known on its rank; None where it is."""
    if storage.needed is not None:
        return None
    if plan.blocks[storage.root.block].purpose == "variables":
        return f"{storage.root.name!r} is kept from step to step"
    if storage.root.register_count > 1:
        return f"{storage.root.name!r} has several slots"
    if storage.segment < 0:
        return f"{storage.root.name!r} is carried from segment to segment"
    return f"{storage.root.name!r} is read by other ranks"
