"""Diagonals and triangles of matrices (the last two axes), whatever axes are split.

Diagonal k has its first element at row max(0, -k) and column max(0, k).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.operators import filled
from plancompiler.ops.attributes import Dtype, Int
from plancompiler.ops.gradient import by_op, of_one
from plancompiler.ops.kernel import copy_unless_shared, of_box
from plancompiler.ops.registry import (
    Alias,
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    View,
    apply,
    define_op,
)
from plancompiler.ops.shape import keeps_extremes


def _length(rows: int, columns: int, offset: int) -> int:
    """The number of elements of a diagonal."""
    return max(0, min(rows - max(0, -offset), columns - max(0, offset)))


def _on_matrix(
    rows: tuple[int, int], columns: tuple[int, int], places: tuple[int, int], offset: int
) -> tuple[slice, slice, slice]:
    """The part of a diagonal that lies in all three ranges: its local rows, columns and places."""
    row, column = max(0, -offset), max(0, offset)
    low = max(rows[0] - row, columns[0] - column, places[0])
    high = max(low, min(rows[1] - row, columns[1] - column, places[1]))
    return (
        slice(low + row - rows[0], high + row - rows[0]),
        slice(low + column - columns[0], high + column - columns[0]),
        slice(low - places[0], high - places[0]),
    )


def _diagonal_of(matrices: Array, rows: slice, columns: slice) -> Array:
    """A writable view of the main diagonal of a square box."""
    diagonals: Array = np.einsum("...ii->...i", matrices[..., rows, columns])
    return diagonals


# --- diagonal and diag_embed ----------------------------------------------------------------------


def _diagonal_infer(inputs: Types, attrs: AttrMap) -> Types:
    *batch, rows, columns = inputs[0].shape
    length = _length(rows, columns, attrs["offset"])
    return (TensorType((*batch, length), inputs[0].dtype),)


def _diagonal_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *_, rows, columns = context.input_regions[0]
    here = context.output_regions[0][-1]
    local = _on_matrix(rows, columns, here, context.attrs["offset"])
    if local[2] != slice(0, here[1] - here[0]):
        outputs[0].fill(0)
    np.copyto(outputs[0][..., local[2]], _diagonal_of(inputs[0], *local[:2]))


def _alias(attrs: AttrMap, made: tuple[int, ...]) -> Alias:
    row, column, length = max(0, -attrs["offset"]), max(0, attrs["offset"]), made[-1]
    rows, columns = slice(row, row + length), slice(column, column + length)
    return lambda array: _diagonal_of(array, rows, columns)


def _put(source: Any, value: Any, attrs: AttrMap) -> Any:
    """Matrices with `value` on their diagonals."""
    rows, columns = source.shape[-2:]
    places = {"rows": rows, "columns": columns, "offset": attrs["offset"]}
    here = filled(value, True, dtype=DType.BOOL)
    here, embedded = (apply("diag_embed", each, **places) for each in (here, value))
    return apply("where", here, embedded, source)


define_op(
    "diagonal",
    infer=_diagonal_infer,
    operands="x X ... rows columns -> y X",
    rule="... m n -> ... d",
    attrs=(Int("offset"),),
    kernel=_diagonal_kernel,
    gradient=by_op("diagonal", "diag_embed"),
    linear=((0,),),
    extra=keeps_extremes,
    flops=0,
    strided=View(_alias, _put, cuts=True),
    doc="A diagonal of each matrix [..., m, n]: [..., d]. With rows or columns split, each "
    "device has its elements, so the result is partial.",
)


def _diag_embed_infer(inputs: Types, attrs: AttrMap) -> Types:
    rows, columns = attrs["rows"], attrs["columns"]
    *batch, length = inputs[0].shape
    fits = _length(rows, columns, attrs["offset"])
    if length != fits:
        raise ShapeError(
            "diag_embed needs as many elements as the diagonal has",
            got=f"{length} for diagonal {attrs['offset']} of {rows} x {columns}",
            expected=fits,
        )
    return (TensorType((*batch, rows, columns), inputs[0].dtype),)


def _diag_embed_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *_, rows, columns = context.output_regions[0]
    here = context.input_regions[0][-1]
    local = _on_matrix(rows, columns, here, context.attrs["offset"])
    outputs[0].fill(0)
    np.copyto(_diagonal_of(outputs[0], *local[:2]), inputs[0][..., local[2]])


define_op(
    "diag_embed",
    infer=_diag_embed_infer,
    operands="dy X ... length -> dx X",
    rule="... d -> ... m n",
    attrs=(
        Int("rows", least=0),
        Int("columns", least=0),
        Int("offset"),
    ),
    kernel=_diag_embed_kernel,
    gradient=by_op("diag_embed", "diagonal"),
    linear=((0,),),
    extra=keeps_extremes,
    flops=0,
    doc="Matrices [..., rows, columns] of zeros with [..., d] on a diagonal.",
)


# --- tril and triu --------------------------------------------------------------------------------


def _register_triangle(kind: str, outside: Callable[..., Any], doc: str) -> None:
    """`outside(column - row, k)` says which elements become zero."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        box = context.output_regions[0][-2:]

        def masked() -> Array:
            rows, columns = (np.arange(start, stop) for start, stop in box)
            away: Array = outside(columns - rows[:, None], context.attrs["diagonal"])
            return away

        mask = of_box(context, "mask", box, masked)
        copy_unless_shared(inputs[0], outputs[0])
        np.copyto(outputs[0], outputs[0].dtype.type(0), where=mask)

    define_op(
        kind,
        infer="x X ... m n -> y X ... m n",
        rule="... -> ...",
        attrs=(Int("diagonal"),),
        kernel=kernel,
        gradient=of_one(lambda attrs, x, y, dy: apply(kind, dy, diagonal=attrs["diagonal"])),
        linear=((0,),),
        extra=keeps_extremes,
        flops=0,
        inplace=((0, 0),),
        doc=doc,
    )


_register_triangle("tril", np.greater, "Matrices with zeros above diagonal `diagonal`.")
_register_triangle("triu", np.less, "Matrices with zeros below diagonal `diagonal`.")


# --- eye ------------------------------------------------------------------------------------------


def _eye_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    rows, columns = context.output_regions[0]
    offset = context.attrs["offset"]
    everything = (0, max(context.output_shapes[0]))
    local = _on_matrix(rows, columns, everything, offset)
    outputs[0].fill(0)
    _diagonal_of(outputs[0], *local[:2])[...] = 1


define_op(
    "eye",
    infer="-> y dtype",
    rule="-> rows columns",
    attrs=(
        Int("rows", least=0),
        Int("columns", least=0),
        Int("offset"),
        Dtype("dtype"),
    ),
    kernel=_eye_kernel,
    flops=0,
    doc="A matrix of zeros with ones on a diagonal.",
)
