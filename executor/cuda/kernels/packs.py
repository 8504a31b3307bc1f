"""Elementwise programs on packs of eight elements, which are read and written 16 bytes at a time.

`cupy.ElementwiseKernel` reads element by element, and finds the place of each in its array where
shapes differ. For halves that takes several times as long as their memory does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.executor.cuda.kernels.fused import FusedSource
from plancompiler.executor.cuda.kernels.launch import (
    C_TYPES,
    LARGEST_COUNT,
    Arrays,
    all_contiguous,
    function_of,
    launch_of,
)

PACK = 8
THREADS = 256
BLOCKS = 132 * 16
"""At most: a block goes on with later packs."""

_C_NAMES = {str(dtype): name for dtype, name in C_TYPES.items()}
"""By their names in a FusedSource."""

Place = tuple[str, int]
"""How an input lies under the output, and of how many packs it is: `all` elements in their places;
`one` element for all; `end`: those of the last axes, again and again; `row`: one for each row of so
many packs."""


def place_of(shape: tuple[int, ...], out: tuple[int, ...]) -> Place | None:
    """How an input of a shape lies under an output; None where it is none of the ways above."""
    stripped = list(shape)
    while stripped and stripped[0] == 1:
        stripped.pop(0)
    size = _product(stripped)
    if size == 1:
        return "one", 0
    if size == _product(out):
        return "all", 0
    if tuple(stripped) == out[len(out) - len(stripped) :]:
        return ("end", size // PACK) if size % PACK == 0 else None
    if len(shape) == len(out) and shape[-1] == 1 and shape[:-1] == out[:-1]:
        return ("row", out[-1] // PACK) if out[-1] % PACK == 0 else None
    return None


def _product(numbers: Sequence[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def pack_text(source: FusedSource, places: Sequence[Place]) -> str:
    """The text of a kernel `packs(out, count, inputs...)`."""
    declared = [_declared(each) for each in source.inputs.split(", ")]
    made, out = _declared(source.outputs)
    parameters = "".join(f", const {kind}* a_{name}" for kind, name in declared)
    before, loads, elements = [], [], []
    for (kind, name), (place, packs) in zip(declared, places, strict=True):
        if place == "one":
            before.append(f"const {kind} {name} = a_{name}[0];")
        elif place == "row":
            loads.append(f"const {kind} {name} = a_{name}[i / {packs}u];")
        else:
            at = "i" if place == "all" else f"i % {packs}u"
            pack = f"Pack<{kind}, {PACK}>"
            loads.append(f"const {pack} p_{name} = ((const {pack}*)a_{name})[{at}];")
            elements.append(f"const {kind} {name} = p_{name}.v[j];")
    lines = "\n".join
    return f"""
extern "C" __global__ void packs({made}* a_{out}, unsigned int count{parameters}) {{
{lines(before)}
for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
     i += gridDim.x * blockDim.x) {{
{lines(loads)}
Pack<{made}, {PACK}> p_{out};
#pragma unroll
for (int j = 0; j < {PACK}; ++j) {{
{lines(elements)}
{made} {out};
{source.body}
p_{out}.v[j] = {out};
}}
((Pack<{made}, {PACK}>*)a_{out})[i] = p_{out};
}}
}}
"""


def _declared(text: str) -> tuple[str, str]:
    kind, name = text.split()
    return _C_NAMES[kind], name


def pack_launch(
    arrays: Any, source: FusedSource, inputs: Arrays, out: Any
) -> Callable[[], None] | None:
    """The launch of an elementwise program; None where arrays do not come in packs."""
    if not 0 < out.size <= LARGEST_COUNT or out.size % PACK:
        return None
    places = [place_of(each.shape, out.shape) for each in inputs]
    known = [each for each in places if each is not None]
    packed = [each for each, place in zip(inputs, places, strict=True) if place != ("one", 0)]
    if len(known) < len(places) or not all_contiguous([out, *packed]):
        return None
    function = function_of(arrays, pack_text(source, known), "packs")
    count = out.size // PACK
    blocks = min(-(-count // THREADS), BLOCKS)
    return launch_of(arrays, function, (blocks,), THREADS, [out, ctypes.c_uint32(count), *inputs])
