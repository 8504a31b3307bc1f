"""Candidates that need not be looked at, because others do the same and never cost more.

No op gains by taking as a partial value what nothing before it makes partial: with broadcast in
place of this partial entry, here and in all that follows from it, the ops do as much work, and
neither the identity nor the reduction is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.ir import Partial, Sbp
from plancompiler.ops.rule import NdSignature
from plancompiler.search.candidates import Candidates
from plancompiler.search.tied_ops import TiedGraph

Entry = tuple[int, Sbp]
"""A mesh axis, and what a layout is along it."""


def without_dominated(tied: TiedGraph, candidates: Sequence[Candidates]) -> tuple[Candidates, ...]:
    """The candidates of all classes, without those that take partial what nobody makes so."""
    sources: list[list[list[tuple[int, int]]]] = [
        [[] for _ in members[0].inputs] for members in tied.classes
    ]
    for group in tied.groups:
        for reader in group.readers:
            sources[reader.ops][reader.operand].append((group.maker, group.slot))
    partials: dict[tuple[int, int], set[Entry]] = {}
    """What each output of a class may be partial in."""
    changed = True
    while changed:
        changed = False
        for number, each in enumerate(candidates):
            given = _given(sources[number], partials)
            for signature in each.signatures:
                for slot, output in enumerate(signature.outputs):
                    if not output.has_partial:
                        continue
                    known = partials.setdefault((number, slot), set())
                    for entry in enumerate(output):
                        if entry not in known and isinstance(entry[1], Partial):
                            taken = _taking(signature, entry)
                            demanded = len(each.signatures) == 1
                            made = not taken or any(entry in given[place] for place in taken)
                            if demanded or made:
                                known.add(entry)
                                changed = True
    return tuple(
        _kept(each, _given(sources[number], partials)) for number, each in enumerate(candidates)
    )


def _given(
    sources: Sequence[Sequence[tuple[int, int]]], partials: dict[tuple[int, int], set[Entry]]
) -> list[set[Entry]]:
    """What each input may be partial in."""
    return [{entry for maker in makers for entry in partials.get(maker, ())} for makers in sources]


def _taking(signature: NdSignature, entry: Entry) -> list[int]:
    """The inputs that are partial in this."""
    axis, partial = entry
    return [operand for operand, layout in enumerate(signature.inputs) if layout[axis] == partial]


def _kept(candidates: Candidates, given: Sequence[set[Entry]]) -> Candidates:
    if len(candidates.signatures) == 1:
        return candidates  # the user demands it
    keep = [
        all(
            any(entry in given[operand] for operand in _taking(signature, entry))
            for layout in signature.inputs
            if layout.has_partial
            for entry in enumerate(layout)
            if isinstance(entry[1], Partial)
        )
        for signature in candidates.signatures
    ]
    return candidates if all(keep) else candidates.where(keep)
