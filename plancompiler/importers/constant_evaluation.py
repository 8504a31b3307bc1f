"""Rules on arrays: what an operation of an imported model makes of operands that are known.

The ops that a rule applies run at once, with their own kernels, on whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.frontend.trace import JobBuilder
from plancompiler.importers.graph import Array
from plancompiler.importers.rules import Rule
from plancompiler.ir import (
    UNKNOWN_SOURCE,
    AttrValue,
    DType,
    NdSbp,
    Placement,
    TensorType,
    Value,
    plain_value,
)
from plancompiler.ir.value import ACTIVE_TRACER
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import KernelContext, infer_types, op_def

_HERE = Placement("cpu", [0])


class _ArrayBuilder(JobBuilder):
    """A tracer that computes what it is asked to record."""

    def __init__(self) -> None:
        super().__init__("constants")
        self.arrays: dict[str, Array] = {}

    def value_of(self, array: Array) -> Value:
        """A symbolic value that stands for an array."""
        name = f"value{len(self.arrays)}"
        self.arrays[name] = array
        return Value(name, array.shape, DType.parse(array.dtype), _HERE, UNKNOWN_SOURCE)

    def add(
        self,
        kind: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, AttrValue],
        placement: Placement | None,
        sbp: NdSbp | None = None,
    ) -> tuple[Value, ...]:
        """Compute an op's outputs."""
        arrays = [
            np.ascontiguousarray(self.arrays[value.name]).reshape(value.shape) for value in inputs
        ]
        if kind == "redistribute":
            return tuple(inputs)
        plain = {key: plain_value(key, value) for key, value in attrs.items()}
        types = infer_types(kind, tuple(value.type for value in inputs), plain)
        definition = op_def(kind)
        outputs = [np.empty(each.shape, each.dtype.numpy) for each in types]
        context = KernelContext(
            definition.complete(plain),
            tuple(array.shape for array in arrays),
            tuple(array.shape for array in outputs),
            tuple(tuple((0, extent) for extent in array.shape) for array in arrays),
            tuple(tuple((0, extent) for extent in array.shape) for array in outputs),
        )
        kernel = kernel_for(definition, [array.dtype for array in (*arrays, *outputs)])
        with np.errstate(all="ignore"):
            kernel(context, arrays, outputs)
        return tuple(map(self.value_of, outputs))


def evaluated(
    rule: Rule,
    operands: Sequence[Any],
    attrs: Mapping[str, Any],
    types: Sequence[TensorType | None],
) -> tuple[Array, ...]:
    """The results of a rule on arrays and numbers."""
    builder = _ArrayBuilder()
    token = ACTIVE_TRACER.set(builder)
    try:
        given = [
            builder.value_of(each)
            if isinstance(each, np.ndarray) and not (rule.arrays and at)
            else each
            for at, each in enumerate(operands)
        ]
        named = dict(attrs)
        if rule.typed:
            named["result"] = types[0]
        made = rule.function(*given, **named)
    finally:
        ACTIVE_TRACER.reset(token)
    results = made if isinstance(made, tuple) else (made,)
    return tuple(builder.arrays[each.name] for each in results)
