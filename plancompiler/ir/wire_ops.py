"""Ops and values as columns, shared by jobs, boxing task graphs and slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.ir.op import Micro
from plancompiler.ir.placement import Placement
from plancompiler.ir.value import Op, Value
from plancompiler.ir.wire import (
    DTYPES,
    TableReader,
    TableWriter,
    build,
    pick,
    pick_optional,
    split,
)


class _ValueTable:
    """Distinct values of a message. Values compare without their placement, so the key has it."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._by_identity: dict[int, int] = {}
        self._by_content: dict[tuple[object, ...], int] = {}

    def index(self, value: Value) -> int:
        found = self._by_identity.get(id(value))
        if found is None:
            key = (value.name, value.shape, value.dtype.value, value.placement)
            found = self._by_content.setdefault(key, len(self.values))
            if found == len(self.values):
                self.values.append(value)
            self._by_identity[id(value)] = found
        return found


def write_ops(message: Any, tables: TableWriter, ops: Sequence[Op]) -> None:
    """Fill an `Ops` message."""
    values = _ValueTable()
    strings, placements = tables.strings, tables.placements
    message.output_value.extend([values.index(value) for op in ops for value in op.outputs])
    message.input_value.extend([values.index(value) for op in ops for value in op.inputs])
    message.value_name.extend([strings[value.name] for value in values.values])
    message.value_shape.extend([tables.shapes[value.shape] for value in values.values])
    message.value_dtype.extend(DTYPES.encode(value.dtype for value in values.values))
    message.value_placement.extend([placements[value.placement] for value in values.values])
    message.op_name.extend([strings[op.name] for op in ops])
    message.op_kind.extend([strings[op.kind] for op in ops])
    message.op_inputs.extend([len(op.inputs) for op in ops])
    message.op_outputs.extend([len(op.outputs) for op in ops])
    message.op_attrs.extend([tables.attrs(op.attrs) for op in ops])
    message.op_placement.extend([placements[op.placement] for op in ops])
    message.op_sbp.extend([tables.optional_sbp(op.sbp) for op in ops])
    message.op_source.extend([tables.source(op.source) for op in ops])
    message.op_origin.extend([tables.origins[op.origin] for op in ops])


def read_ops(
    message: Any, tables: TableReader, micros: Sequence[Micro | None] | None = None
) -> list[Op]:
    """The ops of an `Ops` message; `micros` are their places in a step of several micro-batches."""
    placements: Sequence[Placement] = tables.placements
    values = build(
        Value,
        pick(tables.strings, message.value_name[:]),
        pick(tables.shapes, message.value_shape[:]),
        DTYPES.decode(message.value_dtype[:]),
        pick(placements, message.value_placement[:]),
    )
    return build(
        Op,
        pick(tables.strings, message.op_name[:]),
        pick(tables.strings, message.op_kind[:]),
        split(pick(values, message.input_value[:]), message.op_inputs[:]),
        split(pick(values, message.output_value[:]), message.op_outputs[:]),
        pick(tables.attr_sets, message.op_attrs[:]),
        pick(placements, message.op_placement[:]),
        pick_optional(tables.sbps, message.op_sbp[:]),
        pick(tables.sources, message.op_source[:]),
        pick(tables.origins, message.op_origin[:]),
        [None] * len(message.op_name) if micros is None else micros,
    )
