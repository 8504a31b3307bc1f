"""Which ops of a job somebody needs."""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.ir.value import Op
from plancompiler.ops.registry import op_def

KEPT_KINDS = frozenset({"input", "output", "variable"})
"""Kinds that stay in a job though nobody reads them: they are what the job promises its user."""


def live_ops(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops that influence an output or a variable's next value, and inputs and variables."""
    needed: set[str] = set()
    kept = []
    for op in reversed(ops):
        if (
            op.kind in KEPT_KINDS
            or op_def(op.kind).mutates
            or any(value.name in needed for value in op.outputs)
        ):
            kept.append(op)
            needed.update(value.name for value in op.inputs)
    return tuple(reversed(kept))
