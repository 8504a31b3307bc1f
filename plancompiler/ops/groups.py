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


def group_split(count: GroupCount, sources: Axes, targets: Axes) -> tuple[Extra, Legal]:
    """What splits an op between its groups: the axes of its inputs and outputs; the first input
    carries them.

    The rule line must keep these axes whole wherever `count` is not None.
    """
    shared = Signature(tuple(map(_entry, sources)), tuple(map(_entry, targets)))
    first = shared.inputs[0]

    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
        groups = count(inputs, attrs)
        return () if groups is None or groups % parts else (shared,)

    def legal(
        inputs: Types,
        outputs: Types,
        attrs: AttrMap,
        signature: NdSignature,
        hierarchy: tuple[int, ...],
    ) -> bool:
        groups = count(inputs, attrs)
        if groups is None:
            return True
        parts = 1
        for entry, extent in zip(signature.inputs[0], hierarchy, strict=True):
            parts *= extent if entry == first else 1
        return groups % parts == 0

    return extra, legal


def _entry(axis: int | None) -> Sbp:
    return BROADCAST if axis is None else Split(axis)
