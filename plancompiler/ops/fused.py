"""Fused elementwise ops: a small program over tensors of one shape, run block by block in cache.

The program is a tuple of instructions, one text each: `"mul_scalar 0 {\"scalar\":0.5}"` is an op
kind, the numbers of its operands and its attributes. Numbers count the inputs first, then the
results; the last result is the output. A chain of ops reads and writes whole tensors between its
members; the program keeps what lies between in buffers of one block.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import product

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import AttrValue, freeze_attrs
from plancompiler.ir.sbp import BROADCAST, Partial, Reduction, Sbp
from plancompiler.ops.attributes import Attribute
from plancompiler.ops.elementwise_program import (
    BoundProgram,
    Instruction,
    expanded,
)
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    axis_signatures,
    define_op,
    flops_of,
    infer_types,
    is_custom,
    op_def,
)
from plancompiler.ops.rule import Signature

KIND = "fused_elementwise"
MAX_INPUTS = 6
"""Inputs of a program: which of them may be partial is found by trying all sets of them."""
MAX_INSTRUCTIONS = 64


@lru_cache(maxsize=1024)
def parse_program(program: tuple[str, ...]) -> tuple[Instruction, ...]:
    """The instructions of a program's text; AttributeValueError where it is none."""
    instructions = []
    for text in program:
        kind, _, rest = text.partition(" ")
        numbers, _, attrs = rest.partition(" ")
        try:
            operands = tuple(int(number) for number in numbers.split(","))
            named: dict[str, AttrValue] = json.loads(attrs) if attrs else {}
            instructions.append(Instruction(kind, operands, freeze_attrs(named)))
        except (ValueError, AttributeError):
            raise AttributeValueError(
                f"an instruction of {KIND} does not parse",
                got=repr(text),
                expected='"KIND NUMBER,… {ATTRIBUTES}"',
            ) from None
        if is_custom(kind) or not op_def(kind).elementwise:
            raise AttributeValueError(f"{KIND} cannot run this kind of op", got=repr(kind))
    return tuple(instructions)


def _program(attrs: AttrMap) -> tuple[Instruction, ...]:
    program = attrs["program"]
    if not isinstance(program, tuple) or not program:
        raise AttributeValueError(f"{KIND} needs a program of instructions", got=repr(program))
    return parse_program(tuple(map(str, program)))


def _types(inputs: Types, attrs: AttrMap) -> Types:
    """Types of all numbers of the program: inputs, then results."""
    types = list(inputs)
    for instruction in _program(attrs):
        if not all(0 <= operand < len(types) for operand in instruction.operands):
            raise AttributeValueError(
                f"an instruction of {KIND} reads what is not there yet",
                got=str(instruction),
                expected=f"numbers below {len(types)}",
            )
        operands = tuple(types[operand] for operand in instruction.operands)
        types.extend(infer_types(instruction.kind, operands, dict(instruction.attrs)))
    return tuple(types)


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    if not 1 <= len(inputs) <= MAX_INPUTS or len(_program(attrs)) > MAX_INSTRUCTIONS:
        raise AttributeValueError(
            f"{KIND} has too many inputs or instructions, or none",
            got=f"{len(inputs)} inputs, {len(_program(attrs))} instructions",
            expected=f"1 to {MAX_INPUTS} inputs, up to {MAX_INSTRUCTIONS} instructions",
        )
    for tensor in inputs:
        if tensor.shape != inputs[0].shape:
            raise ShapeError(
                f"{KIND} needs inputs of one shape", got=tensor.shape, expected=inputs[0].shape
            )
    types = _types(inputs, attrs)
    read = {operand for each in _program(attrs) for operand in each.operands}
    unread = sorted(set(range(len(types) - 1)) - read)
    if unread:
        # A partial that reaches only these would be lost.
        raise AttributeValueError(
            f"a program of {KIND} makes or takes what it does not read", got=f"numbers {unread}"
        )
    return types[-1:]


# --- sharding -------------------------------------------------------------------------------------


def _extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    """Partials that pass through every instruction that they reach."""
    types, program = _types(inputs, attrs), _program(attrs)
    signatures = []
    for reduction in (Reduction.SUM, Reduction.MAX, Reduction.MIN, Reduction.PROD):
        entries: tuple[Sbp, ...] = (BROADCAST, Partial(reduction))
        for choice in product(entries, repeat=len(inputs)):
            if all(entry is BROADCAST for entry in choice):
                continue
            result = _through(program, types, choice, parts)
            if result is not None:
                signatures.append(Signature(choice, (result,)))
    return tuple(signatures)


def _through(
    program: tuple[Instruction, ...], types: Types, inputs: tuple[Sbp, ...], parts: int
) -> Sbp | None:
    """The output's layout for inputs that are broadcast or partial; None where it is not legal."""
    layouts = list(inputs)
    for instruction in program:
        operands = tuple(layouts[operand] for operand in instruction.operands)
        if all(entry is BROADCAST for entry in operands):
            layouts.append(BROADCAST)
            continue
        known = axis_signatures(
            instruction.kind,
            tuple(types[operand] for operand in instruction.operands),
            (types[len(layouts)],),
            instruction.attrs,
            parts,
        )
        fitting = [each.outputs[0] for each in known if each.inputs == operands]
        if not fitting:
            return None
        layouts.append(fitting[0])
    return layouts[-1] if isinstance(layouts[-1], Partial) else None


# --- kernel ---------------------------------------------------------------------------------------


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    bound = context.state.get("bound")
    if bound is None:
        dtypes = tuple(DType.parse(array.dtype) for array in inputs)
        program = expanded(_program(context.attrs), dtypes)
        bound = context.state["bound"] = BoundProgram(program, dtypes, context)
    bound(inputs, outputs[0])


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    types = _types(inputs, attrs)
    return sum(
        flops_of(
            instruction.kind,
            tuple(types[operand] for operand in instruction.operands),
            (types[len(inputs) + place],),
            dict(instruction.attrs),
        )
        for place, instruction in enumerate(_program(attrs))
    )


define_op(
    KIND,
    infer=_infer,
    rule=lambda inputs, outputs, attrs: f"{', '.join('...' for _ in inputs)} -> ...",
    attrs=(Attribute("program"),),
    kernel=_kernel,
    extra=_extra,
    flops=_flops,
    inplace=((0, 0),),
    takes_bfloat16=True,
    doc="A program of elementwise ops on tensors of one shape, block by block in cache; made "
    "by the pass fuse_elementwise.",
)
