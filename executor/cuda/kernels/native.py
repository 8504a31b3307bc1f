"""Which ops run as kernels of CUDA C++, and where: where arrays do not suit those, the kernels that
are made of CuPy's functions run.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.executor.cuda.kernels import flash, rows
from plancompiler.executor.cuda.kernels.fused import (
    FusedSource,
    expression_of,
    literal_of,
    source_of,
)
from plancompiler.executor.cuda.kernels.launch import (
    C_TYPES,
    LARGEST_COUNT,
    Arrays,
    Make,
    all_contiguous,
    function_of,
    launch_of,
    prepared,
    writes_kernels,
)
from plancompiler.executor.cuda.kernels.packs import BLOCKS, PACK, THREADS, pack_launch
from plancompiler.executor.cuda.kernels.products import contraction, matrix_product
from plancompiler.ir import DType
from plancompiler.ir.op import TensorType, freeze_attrs
from plancompiler.ops.elementwise_program import Instruction, Instructions
from plancompiler.ops.fused import KIND as FUSED
from plancompiler.ops.fused import parse_program
from plancompiler.ops.registry import Kernel, KernelContext, OpDef, infer_types
from plancompiler.ops.update import UPDATES, UpdateProgram

_MAKES: dict[str, Make] = {
    "attention": flash.attention,
    "attention_grad": flash.attention_grad,
    "contract_leading": contraction,
    "layer_norm": rows.layer_norm,
    "layer_norm_grad": rows.layer_norm_grad,
    "matmul": matrix_product,
    "sum": rows.leading_sum,
    "transpose": rows.transpose,
}

_NARROW = {"float16", "bfloat16", "float32"}
"""Dtypes whose arithmetic is in float32."""


def native_kernel(
    arrays: Any, definition: OpDef, dtypes: Sequence[DType], otherwise: Kernel
) -> Kernel:
    """The kernel in CUDA C++ of an op, with `otherwise` for arrays that do not suit it; or that one
    alone, where there is none.
    """
    if not writes_kernels(arrays):
        return otherwise
    kind = definition.kind
    make = _MAKES.get(kind)
    if make is None and kind in UPDATES:
        make = _update(kind)
    if make is None and (kind == FUSED or definition.elementwise) and len(dtypes) > 1:
        make = _elementwise(definition, dtypes)
    return otherwise if make is None else prepared("launches", make, otherwise)


def _elementwise(definition: OpDef, dtypes: Sequence[DType]) -> Make | None:
    kind, given = definition.kind, tuple(dtypes[:-1])
    if kind != FUSED and definition.code is None and definition.formula is None:
        return None

    def make(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Any:
        if len(outputs) != 1:
            return None
        source: FusedSource | None = context.state.get("source")
        if source is None:
            if kind == FUSED:
                texts = context.attrs["program"]
                program: Instructions = parse_program(tuple(map(str, texts)))
            else:
                # As they are written in a program: a dtype by its name.
                attrs = freeze_attrs(
                    {
                        name: str(each) if isinstance(each, DType) else each
                        for name, each in context.attrs.items()
                    }
                )
                program = (Instruction(kind, tuple(range(len(given))), attrs),)
            source = context.state["source"] = source_of(program, given)
        return None if source is None else pack_launch(context.arrays, source, inputs, outputs[0])

    return make


# --- updates --------------------------------------------------------------------------------------


def update_text(
    update: UpdateProgram, kinds: Sequence[str], outs: Sequence[str], on_device: Sequence[bool]
) -> str | None:
    """The text of `update(count, outputs..., tensors..., numbers...)`. Elements are computed in
    float; numbers that vary are given as such, or `on_device` as where they lie.
    """
    types = [TensorType((), DType.FLOAT32)] * update.leaves
    lines = [f"const float v{at} = (float)p{at}.v[j];" for at in range(update.tensors)]
    for place, instruction in enumerate(update.program, update.leaves):
        operands = tuple(types[operand] for operand in instruction.operands)
        types += infer_types(instruction.kind, operands, dict(instruction.attrs))
        computed = "bool" if types[-1].dtype is DType.BOOL else "float"
        expression = expression_of(instruction, "float")
        if expression is None or types[-1].dtype not in (DType.BOOL, DType.FLOAT32):
            return None
        lines.append(f"const {computed} v{place} = {expression};")
    numbers, told = [], iter(on_device)
    parameters = [f", {kind}* y{at}" for at, kind in enumerate(outs)]
    parameters += [f", const {kind}* x{at}" for at, kind in enumerate(kinds)]
    for place, known in enumerate(update.constants, update.tensors):
        if known is not None:
            numbers.append(f"const float v{place} = {literal_of(known, 'float')};")
        elif next(told):
            parameters.append(f", const float* n{place}")
            numbers.append(f"const float v{place} = n{place}[0];")
        else:
            parameters.append(f", const float v{place}")
    packs = [
        f"const Pack<{kind}, {PACK}> p{at} = ((const Pack<{kind}, {PACK}>*)x{at})[i];"
        for at, kind in enumerate(kinds)
    ]
    packs += [f"Pack<{kind}, {PACK}> q{at};" for at, kind in enumerate(outs)]
    lines += [f"q{at}.v[j] = v{place};" for at, place in enumerate(update.results)]
    stores = [f"((Pack<{kind}, {PACK}>*)y{at})[i] = q{at};" for at, kind in enumerate(outs)]
    join = "\n".join
    return f"""
extern "C" __global__ void update(unsigned int count{"".join(parameters)}) {{
{join(numbers)}
for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
     i += gridDim.x * blockDim.x) {{
{join(packs)}
#pragma unroll
for (int j = 0; j < {PACK}; ++j) {{
{join(lines)}
}}
{join(stores)}
}}
}}
"""


def _update(kind: str) -> Make:
    known = UPDATES[kind]
    places = [at for at, each in enumerate(known.operands) if each.shape != ()]
    scalars = [
        (at, each.dtype.startswith("int"))
        for at, each in enumerate(known.operands)
        if each.shape == ()
    ]
    counted = any(known.operands[at].name == "count" for at, _ in scalars)

    def make(context: KernelContext, inputs: Arrays, outputs: Arrays) -> Callable[[], None] | None:
        tensors, arrays, out = [inputs[at] for at in places], context.arrays, outputs[0]
        every = [*tensors, *outputs]
        if any(each.shape != out.shape for each in every) or not all_contiguous(every):
            return None
        if not 0 < out.size <= LARGEST_COUNT or out.size % PACK:
            return None
        if not {each.dtype.name for each in every} <= _NARROW:
            return None
        update = known.program(context.attrs, DType.FLOAT32)
        elements = max(1, math.prod(context.input_shapes[0]))

        def told() -> tuple[Any, ...]:
            given: list[Any] = [elements]
            if not counted:
                given.append(context.step + 1)
            for at, whole in scalars:
                given.append(inputs[at].astype(np.float64) if whole else inputs[at])
            return update.numbers(*given)

        numbers_now = told()
        on_device = [isinstance(each, arrays.ndarray) for each in numbers_now]
        kinds, outs = (
            [C_TYPES[DType.parse(each.dtype)] for each in some] for some in (tensors, outputs)
        )
        text = update_text(update, kinds, outs, on_device)
        if text is None:
            return None
        numbers = [ctypes.c_void_p() if each else ctypes.c_float() for each in on_device]
        count = out.size // PACK
        launch = launch_of(
            arrays,
            function_of(arrays, text, "update"),
            (min(-(-count // THREADS), BLOCKS),),
            THREADS,
            [ctypes.c_uint32(count), *outputs, *tensors, *numbers],
        )

        if all(
            any(each is given and each.dtype.name == "float32" for given in inputs)
            for each in numbers_now
        ):
            # They lie where they lay.
            for number, each in zip(numbers, numbers_now, strict=True):
                number.value = each.data.ptr
            return launch

        def run() -> None:
            # Memory that is let go of after a launch is given to later launches only.
            kept = []
            for number, each in zip(numbers, told(), strict=True):
                if isinstance(number, ctypes.c_float):
                    number.value = float(each)
                else:
                    kept.append(each.astype(np.float32, copy=False))
                    number.value = kept[-1].data.ptr
            launch()

        return run

    return make
