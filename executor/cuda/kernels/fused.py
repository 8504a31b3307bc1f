"""Fused elementwise programs as one kernel: the program's text becomes a line of C++ per op.

`source_of` is pure: the tests compile what it writes with a C++ compiler and compare with the
host's kernels. Halves are computed in float and rounded once, at the end. A program with an op or a
dtype that is not known here runs op by op, as it would without fusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plancompiler.ir import DType
from plancompiler.ir.op import TensorType, freeze_attrs
from plancompiler.ops.elementwise_program import Instruction, Instructions, expanded
from plancompiler.ops.fused import parse_program
from plancompiler.ops.registry import Kernel, KernelContext, OpDef, infer_types, op_def

KernelOn = Callable[[Any, OpDef, Iterable[DType]], Kernel]
"""Gives the kernel of an op on arrays of a namespace, for these dtypes."""

_TYPES = {
    DType.BOOL: ("bool", "bool"),
    DType.FLOAT16: ("float16", "float"),
    DType.BFLOAT16: ("bfloat16", "float"),
    DType.FLOAT32: ("float32", "float"),
    DType.FLOAT64: ("float64", "double"),
}
"""Per dtype its name as a parameter and the C++ type in which it is computed."""

PREAMBLE = """
#ifndef INFINITY
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#endif
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
"""
"""Constants that expressions use."""


@dataclass(frozen=True, slots=True)
class FusedSource:
    """One elementwise kernel, in the form that `cupy.ElementwiseKernel` takes."""

    inputs: str
    outputs: str
    body: str


def source_of(program: Instructions, dtypes: Sequence[DType]) -> FusedSource | None:
    """The kernel of a program on inputs of these dtypes; None where it has no such form."""
    types = [TensorType((), dtype) for dtype in dtypes]
    instructions = expanded(program, tuple(dtypes), everything=True)
    for instruction in instructions:
        operands = tuple(types[operand] for operand in instruction.operands)
        types += infer_types(instruction.kind, operands, dict(instruction.attrs))
    if not all(tensor.dtype in _TYPES for tensor in types):
        return None
    lines = []
    for number, dtype in enumerate(dtypes):
        lines.append(f"const {_TYPES[dtype][1]} v{number} = x{number};")
    for number, instruction in enumerate(instructions, len(dtypes)):
        result = _TYPES[types[number].dtype][1]
        operand = _TYPES[types[instruction.operands[0]].dtype][1]
        expression = expression_of(instruction, operand if result == "bool" else result)
        if expression is None:
            return None
        lines.append(f"const {result} v{number} = {expression};")
    lines.append(f"y = v{len(types) - 1};")
    return FusedSource(
        ", ".join(f"{_TYPES[dtype][0]} x{number}" for number, dtype in enumerate(dtypes)),
        f"{_TYPES[types[-1].dtype][0]} y",
        "\n".join(lines),
    )


def expression_of(instruction: Instruction, computed: str) -> str | None:
    """An instruction as an expression of its operands `v0`, `v1`, ...; None where there is none."""
    attrs = dict(instruction.attrs)
    swapped = bool(attrs.pop("swapped", False))
    scalar = attrs.pop("scalar", None)
    attrs.pop("dtype", None)
    template = op_def(instruction.kind).code
    if instruction.kind == "clip":
        attrs.pop("edges", None)
        template = "{0}"
        for name, beyond in (("high", ">"), ("low", "<")):
            if name in attrs:
                bound = literal_of(attrs.pop(name), computed)
                template = f"({{0}} {beyond} {bound} ? {bound} : {template})"
    if template is None or attrs:
        return None
    operands = [f"v{number}" for number in instruction.operands]
    if scalar is not None:
        operands.append(literal_of(scalar, computed))
        if swapped:
            operands.reverse()
    for place, operand in enumerate(operands):
        template = template.replace(f"{{{place}}}", operand)
    return template.replace("T(", f"{computed}(")


def literal_of(scalar: object, computed: str) -> str:
    """A number as the text of one of this type."""
    value = float(scalar) if isinstance(scalar, (bool, int, float)) else math.nan
    if math.isnan(value):
        return f"{computed}(NAN)"
    if math.isinf(value):
        return f"{computed}({'-' if value < 0 else ''}INFINITY)"
    return f"{computed}({value!r})"


def kernel_of_source(arrays: Any, name: str, source: FusedSource | None) -> Any:
    """The compiled kernel; None where there is no source or such arrays have no such kernels."""
    make = getattr(arrays, "ElementwiseKernel", None)
    if source is None or make is None:
        return None
    return make(
        source.inputs, source.outputs, source.body, f"plancompiler_{name}", preamble=PREAMBLE
    )


def formula_kernel(arrays: Any, definition: OpDef, dtypes: Sequence[DType]) -> Kernel | None:
    """One kernel for an op that a formula describes, or a line of C++; None where there is none.

    `dtypes` are those of inputs and output.
    """
    given = tuple(dtypes[:-1])

    def run(context: KernelContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        bound = context.state.get("device_kernel")
        if bound is None:
            attrs = freeze_attrs(context.attrs)
            program: Instructions = (Instruction(definition.kind, tuple(range(len(given))), attrs),)
            source = source_of(program, given)
            bound = kernel_of_source(arrays, definition.kind, source)
            context.state["device_kernel"] = bound
        bound(*inputs, outputs[0])

    makes = hasattr(arrays, "ElementwiseKernel") and all(dtype in _TYPES for dtype in dtypes)
    # For an op that devices cannot run as NumPy does its line of C++ is a program of one op.
    alone = definition.code is not None and not definition.portable
    written = definition.formula is not None or alone
    return run if makes and written else None


def fused_kernel(arrays: Any, dtypes: Sequence[DType], kernel_on: KernelOn) -> Kernel:
    """The kernel of fused programs; `dtypes` are those of inputs and output. `kernel_on` gives the
    kernels of their ops, for those that run op by op.
    """

    def run(context: KernelContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        bound = context.state.get("device_kernel")
        if bound is None:
            bound = context.state["device_kernel"] = _bind(arrays, context, dtypes[:-1], kernel_on)
        bound(inputs, outputs[0])

    return run


def _bind(arrays: Any, context: KernelContext, dtypes: Sequence[DType], kernel_on: KernelOn) -> Any:
    texts = context.attrs["program"]
    program = parse_program(tuple(map(str, texts)) if isinstance(texts, tuple) else ())
    kernel = kernel_of_source(arrays, "fused", source_of(program, dtypes))
    if kernel is None:
        return _OneByOne(arrays, context, program, dtypes, kernel_on)
    return lambda inputs, out: kernel(*inputs, out)


class _OneByOne:
    """A program's ops one after another, on whole arrays."""

    def __init__(
        self,
        arrays: Any,
        context: KernelContext,
        program: Instructions,
        dtypes: Sequence[DType],
        kernel_on: KernelOn,
    ) -> None:
        self._arrays = arrays
        types = [TensorType((), dtype) for dtype in dtypes]
        self._steps = []
        for instruction in program:
            definition = op_def(instruction.kind)
            operands = tuple(types[operand] for operand in instruction.operands)
            attrs = dict(instruction.attrs)
            types += definition.types(operands, attrs)
            kernel = kernel_on(
                arrays, definition, (*(each.dtype for each in operands), types[-1].dtype)
            )
            shapes = context.output_shapes * len(operands)
            given = definition.complete(attrs)
            step = KernelContext(given, shapes, context.output_shapes, (), (), arrays=arrays)
            self._steps.append((kernel, step, instruction.operands, types[-1].dtype.numpy))

    def __call__(self, inputs: Sequence[Any], out: Any) -> None:
        numbers = list(inputs)
        for kernel, context, operands, dtype in self._steps:
            made = self._arrays.empty(out.shape, dtype)
            kernel(context, [numbers[number] for number in operands], [made])
            numbers.append(made)
        out[...] = numbers[-1]
