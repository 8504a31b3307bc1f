"""Ops and values as columns, shared by jobs, boxing task graphs and slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.ir.columns import (
    ATTRS,
    DTYPE,
    GIVEN,
    OPTIONAL_SBP,
    ORIGIN,
    PLACEMENT,
    SHAPE,
    SOURCE,
    STRING,
    Columns,
)
from plancompiler.ir.op import Micro
from plancompiler.ir.value import Op, Value
from plancompiler.ir.wire import TableReader, TableWriter, pick, split


class _ValueTable:
    """Distinct values of a message. Values compare without their placement, so the key has it."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._by_identity: dict[int, int] = {}
        self._by_content: dict[tuple[object, ...], int] = {}

    def index(self, value: Value) -> int:
        index = self._by_identity.get(id(value))
        if index is None:
            key = (value.name, value.shape, value.dtype.value, value.placement)
            index = self._by_content.setdefault(key, len(self.values))
            if index == len(self.values):
                self.values.append(value)
            self._by_identity[id(value)] = index
        return index


_VALUES = Columns(
    Value, "value_", name=STRING, shape=SHAPE, dtype=DTYPE, placement=PLACEMENT, source=GIVEN
)
_OPS = Columns(
    Op,
    "op_",
    name=STRING,
    kind=STRING,
    inputs=GIVEN,
    outputs=GIVEN,
    attrs=ATTRS,
    placement=PLACEMENT,
    sbp=OPTIONAL_SBP,
    source=SOURCE,
    origin=ORIGIN,
    micro=GIVEN,
)


def write_ops(message: Any, tables: TableWriter, ops: Sequence[Op]) -> None:
    """Fill an `Ops` message."""
    values = _ValueTable()
    message.output_value.extend([values.index(value) for op in ops for value in op.outputs])
    message.input_value.extend([values.index(value) for op in ops for value in op.inputs])
    message.op_inputs.extend([len(op.inputs) for op in ops])
    message.op_outputs.extend([len(op.outputs) for op in ops])
    _VALUES.write(message, values.values, tables)
    _OPS.write(message, ops, tables)


def read_ops(
    message: Any, tables: TableReader, micros: Sequence[Micro | None] | None = None
) -> list[Op]:
    """The ops of an `Ops` message; `micros` are their places in a step of several micro-batches."""
    values = _VALUES.read(message, tables)
    return _OPS.read(
        message,
        tables,
        inputs=split(pick(values, message.input_value[:]), message.op_inputs[:]),
        outputs=split(pick(values, message.output_value[:]), message.op_outputs[:]),
        micro=[None] * len(message.op_name) if micros is None else micros,
    )
