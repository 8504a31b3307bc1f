"""Axes made of groups of unequal meaning: channels of a grouped convolution, heads that share keys.

Such an axis splits between groups, never inside one, and several operands carry it with different
extents. Balanced pieces of all of them meet only where the number of devices divides the number of
groups, which a rule line cannot say.
"""

from __future__ import annotations

from collections.abc import Callable

from plancompiler.ir.sbp import BROADCAST, Sbp, Split
from plancompiler.ops.registry import AttrMap, Extra, Legal, Types
from plancompiler.ops.rule import NdSignature, Signature

GroupCount = Callable[[Types, AttrMap], int | None]
"""The number of groups of a call; None where its rule line says all."""
Axes = tuple[int | None, ...]
"""The axis of each operand that carries the groups; None where it carries none."""


def group_split(count: GroupCount, inputs: Axes, outputs: Axes) -> tuple[Extra, Legal]:
    """What splits an op between its groups; the first input carries them.

    The rule line must keep the axes whole wherever `count` is not None.
    """
    first = inputs[0]
    if first is None:
        raise ValueError("the first input carries the groups")
    signature = Signature(tuple(map(_entry, inputs)), tuple(map(_entry, outputs)))
    wanted = Split(first)

    def extra(types: Types, made: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
        groups = count(types, attrs)
        return () if groups is None or groups % parts else (signature,)

    def legal(
        types: Types,
        made: Types,
        attrs: AttrMap,
        chosen: NdSignature,
        hierarchy: tuple[int, ...],
    ) -> bool:
        groups = count(types, attrs)
        if groups is None:
            return True
        parts = 1
        for entry, extent in zip(chosen.inputs[0], hierarchy, strict=True):
            parts *= extent if entry == wanted else 1
        return groups % parts == 0

    return extra, legal


def _entry(axis: int | None) -> Sbp:
    return BROADCAST if axis is None else Split(axis)
