"""Embedding: rows of a table by number, and its gradient."""

from __future__ import annotations

import numpy as np

from plancompiler.errors import ExecutionError
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Int
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import contiguous, in_float32
from plancompiler.ops.registry import Array, Arrays, KernelContext, define_op


def _local_ids(ids: Array, vocabulary: int, low: int, high: int) -> tuple[Array, Array | None]:
    """Flat ids as rows of this device's shard, and which of them are in it (None: all)."""
    flat = ids.reshape(-1)
    if flat.size and not 0 <= flat.min() <= flat.max() < vocabulary:
        wrong = (flat < 0) | (flat >= vocabulary)
        raise ExecutionError(
            "an id is outside the embedding table",
            got=f"id {int(flat[np.argmax(wrong)])}",
            expected=f"0 to {vocabulary - 1}",
        )
    if (low, high) == (0, vocabulary):
        return flat, None
    return flat - low, (flat >= low) & (flat < high)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    table, ids = inputs
    low, high = context.input_regions[0][0]
    rows, inside = _local_ids(ids, context.input_shapes[0][0], low, high)
    out = outputs[0].reshape(rows.size, table.shape[1])
    if inside is None:
        # The ids are checked, so `clip` only spares the buffer that `raise` needs.
        np.take(table, rows, axis=0, out=out, mode="clip")
    else:
        out.fill(0)
        out[inside] = table[rows[inside]]


define_op(
    "embedding",
    infer="table F vocabulary d, ids i ... -> y F ... d",
    rule="v d, ... -> ... d",
    kernel=contiguous(_kernel),
    gradient=by_op("embedding", "embedding_grad"),
    linear=((0,),),
    flops=0,
    doc="(table [v, d], ids [...]) -> [..., d]. With the vocabulary split each device adds the "
    "rows that it holds, so the result is partial.",
)


def add_rows(out: Array, rows: Array, values: Array, inside: Array | None = None) -> None:
    """Add `values[i]` to `out[rows[i]]` for each i, or for those that are `inside`."""
    chosen = np.argsort(rows, kind="stable")
    if inside is not None:
        chosen = chosen[inside[chosen]]
    if not chosen.size:
        return
    ordered = rows[chosen]
    changes = np.diff(ordered, prepend=ordered[0] - 1)
    # Measured on 1,024 to 8,192 rows of 256 floats: `np.add.at` takes 2.2 us a row; a sum per run
    # of equal rows 0.2 us a row and 1 us a run; adding row by row 0.6 us a row.
    if 2 * np.count_nonzero(changes) <= len(ordered):
        starts = np.flatnonzero(changes)
        sorted_values = values[chosen]
        stops = np.append(starts[1:], len(ordered))
        for start, stop, row in zip(
            starts.tolist(), stops.tolist(), ordered[starts].tolist(), strict=True
        ):
            target = out[row]
            np.add(target, np.add.reduce(sorted_values[start:stop], axis=0), out=target)
    else:
        for position, row in zip(chosen.tolist(), ordered.tolist(), strict=True):
            target = out[row]
            np.add(target, values[position], out=target)


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (ids, dy), (out,) = inputs, outputs
    low, high = context.output_regions[0][0]
    rows, inside = _local_ids(ids, context.output_shapes[0][0], low, high)
    gradient = dy.reshape(rows.size, out.shape[1])
    out.fill(0)
    add_rows(out, rows, gradient, inside)


define_op(
    "embedding_grad",
    infer="ids i, dy F -> dtable F",
    rule="..., ... d -> vocabulary d",
    attrs=(Int("vocabulary", least=0),),
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_op("embedding_grad", "embedding"),
    linear=((1,),),
    flops=lambda inputs, outputs, attrs: element_count(inputs[1].shape),
    doc="(ids [...], dy [..., d]) -> the gradient of the table [vocabulary, d].",
)
