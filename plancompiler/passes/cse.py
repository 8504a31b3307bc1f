"""Common-subexpression elimination: of ops that compute the same, the first serves all readers.

Two ops are the same where kind, attributes, inputs, placement and demanded layout are. That holds
for random ops and data sources too: what they make follows from their attributes, the job's seed
and the step alone. What has an identity of its own is never merged: inputs, variables, outputs,
updates.
"""

from __future__ import annotations

from plancompiler.ir import Job, Op, Value
from plancompiler.ir.shard import element_count
from plancompiler.ops.liveness import KEPT_KINDS
from plancompiler.ops.registry import op_def
from plancompiler.passes.base import PassResult, counted, rewired, with_ops

REMADE_BYTES = 1 << 16
"""A fill of more bytes is cheaper to make again than to keep from its first reader to its last."""


def eliminate_common_subexpressions(job: Job) -> PassResult:
    """The job with each distinct computation done once."""
    first: dict[object, Op] = {}
    instead: dict[str, Value] = {}
    kept: list[Op] = []
    remade = 0
    for op in job.ops:
        op = rewired(op, instead)
        if op.kind in KEPT_KINDS or op_def(op.kind).mutates:
            kept.append(op)
            continue
        # Equal numbers of other types (1, 1.0, True; 0.0, -0.0) are other attributes: hence repr.
        key = (op.kind, repr(op.attrs), tuple(v.name for v in op.inputs), op.placement, op.sbp)
        known = first.setdefault(key, op)
        if known is op:
            kept.append(op)
        elif op.kind == "fill" and _nbytes(op.outputs[0]) > REMADE_BYTES:
            kept.append(op)
            remade += 1
        else:
            for value, same in zip(op.outputs, known.outputs, strict=True):
                instead[value.name] = same
    notes: tuple[str, ...] = ()
    if remade:
        notes = (f"{counted(remade, 'large fill')} made again: cheaper than to keep the first",)
    merged = len(job.ops) - len(kept)
    return PassResult(
        with_ops(job, kept), f"merged {counted(merged, 'op')} into equal earlier ones", notes
    )


def _nbytes(value: Value) -> int:
    return element_count(value.shape) * value.dtype.itemsize
