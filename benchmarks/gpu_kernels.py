"""How long single kernels take on one GPU, at the sizes of the block of `gpu_block.py`.

    python -m benchmarks.gpu_kernels

Prints one JSON line for each call: microseconds, the least of five times 20 calls one after another
between two events; the bytes of its inputs and outputs over that time; and for products and
attention what it computes (of causal attention the half that is seen).

Needs a GPU and CuPy; without them it says what is missing and ends with code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu_block import device_name
from benchmarks.step import say
from plancompiler.errors import DeviceError
from plancompiler.executor.cuda.device import CudaDevice, local_device
from plancompiler.ir import DType
from plancompiler.ir.op import AttrValue, TensorType
from plancompiler.ops import infer_types, op_def
from plancompiler.ops.registry import KernelContext

ROUNDS, CALLS = 5, 20
BATCH, LENGTH, DIM = 8, 1024, 768
Array = Any
Call = tuple[str, Sequence[Array], Mapping[str, AttrValue], float]
"""Kind, inputs, attributes, and floating-point operations; 0 where they do not matter."""


class Timer:
    """Runs ops on a device."""

    def __init__(self) -> None:
        self.device = CudaDevice(local_device(0))
        self.arrays = self.device.arrays
        self._random = np.random.default_rng(0)
        self._stream = self.device.stream("calls")

    def put(self, *shape: int, dtype: str = "float16") -> Array:
        """Random numbers on the device."""
        return self.arrays.asarray(self._random.standard_normal(shape).astype(dtype))

    def outputs(
        self, kind: str, inputs: Sequence[Array], attrs: Mapping[str, AttrValue]
    ) -> tuple[Array, ...]:
        """Memory for the results of a call."""
        types = tuple(TensorType(each.shape, DType.parse(each.dtype)) for each in inputs)
        made = infer_types(kind, types, attrs)
        return tuple(self.arrays.empty(each.shape, each.dtype.numpy) for each in made)

    def time(
        self, kind: str, inputs: Sequence[Array], attrs: Mapping[str, AttrValue]
    ) -> tuple[float, tuple[Array, ...]]:
        """Microseconds of a call, and what it gives."""
        given, outputs = tuple(inputs), self.outputs(kind, inputs, attrs)
        shapes = [tuple(each.shape for each in some) for some in (given, outputs)]
        boxes = [tuple(tuple((0, n) for n in each) for each in some) for some in shapes]
        definition = op_def(kind)
        context = KernelContext(
            definition.complete(attrs),
            *(shapes[0], shapes[1], boxes[0], boxes[1]),
            arrays=self.arrays,
            fixed=True,
        )
        kernel = self.device.kernel(
            definition, [DType.parse(each.dtype) for each in (*given, *outputs)]
        )
        times = []
        with self._stream:
            for _ in range(ROUNDS + 1):  # the first one compiles
                begin, end = self.device.timer(), self.device.timer()
                self.device.settle()
                self.device.record(begin, self._stream)
                for _ in range(CALLS):
                    kernel(context, given, outputs)
                self.device.record(end, self._stream)
                self.device.synchronize(end)
                times.append(self.device.elapsed(begin, end) / CALLS / 1e3)
        return min(times[1:]), outputs


def calls(timer: Timer) -> Iterator[Call]:
    """What the block is made of."""
    put = timer.put
    for heads, width in ((12, 64), (8, 128)):
        query, key, value, passed = (put(BATCH, heads, LENGTH, width) for _ in range(4))
        attrs: dict[str, AttrValue] = {"causal": True, "scale": width**-0.5}
        flops = 2.0 * BATCH * heads * LENGTH**2 * width
        yield "attention", [query, key, value], attrs, flops
        _, (result, normaliser) = timer.time("attention", [query, key, value], attrs)
        inputs = [query, key, value, result, normaliser, passed]
        yield "attention_grad", inputs, attrs, 2.5 * flops
    x, hidden = put(BATCH, LENGTH, DIM), put(BATCH, LENGTH, 4 * DIM)
    vector, bias = put(DIM), put(4 * DIM)
    weight, wide = put(DIM, DIM), put(4 * DIM, DIM)
    yield "layer_norm", [x, vector, vector], {"eps": 1e-5}, 0
    _, (_, mean, rstd) = timer.time("layer_norm", [x, vector, vector], {"eps": 1e-5})
    yield "layer_norm_grad", [x, vector, mean, rstd, x], {}, 0
    yield "add", [x, vector], {}, 0
    yield "add", [x, x], {}, 0
    yield "add", [hidden, bias], {}, 0
    yield "gelu", [hidden], {}, 0
    yield "gelu_grad", [hidden, hidden], {}, 0
    for each in (x, hidden):
        yield "sum", [each], {"axes": (0, 1), "keepdims": False}, 0
    yield "transpose", [put(BATCH, LENGTH, 12, 64)], {"axes": (0, 2, 1, 3)}, 0
    rows = 2.0 * BATCH * LENGTH * DIM**2
    yield "matmul", [x, weight], {"transpose_b": True}, rows
    yield "matmul", [x, wide], {"transpose_b": True}, 4 * rows
    yield "matmul", [hidden, wide], {}, 4 * rows
    yield "contract_leading", [x, x], {}, rows
    yield "contract_leading", [hidden, x], {}, 4 * rows
    rate = timer.arrays.asarray(np.float32(1e-3))
    yield "sgd_update", [weight, weight, rate], {}, 0


def main() -> None:
    """Time every call, or say what is missing."""
    try:
        name = device_name("cuda")
        timer = Timer()
    except DeviceError as error:
        sys.exit(f"{error}\nnothing was measured")
    for kind, inputs, attrs, flops in calls(timer):
        microseconds, outputs = timer.time(kind, inputs, attrs)
        moved = sum(each.nbytes for each in (*inputs, *outputs))
        say(
            {
                "benchmark": "gpu_kernels",
                "device": name,
                "kind": kind,
                "inputs": [list(each.shape) for each in inputs],
                "us": round(microseconds, 1),
                "gb_s": round(moved / microseconds / 1e3, 1),
                "tflop_s": round(flops / microseconds / 1e6, 1),
            }
        )


if __name__ == "__main__":
    main()
