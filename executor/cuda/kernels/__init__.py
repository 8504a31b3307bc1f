"""Kernels on device arrays.

Most host kernels are NumPy calls with `out=`, and NumPy hands those to the arrays they are given
(NEP 13 and 18): on CuPy's they run as they are, where their `OpDef` says `portable`; tests prove
it on arrays that refuse what CuPy refuses. `DEVICE_KERNELS` holds kernels written for devices.
Every other op still runs: on the host, with copies there and back, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from plancompiler.executor.cuda.kernels.fused import formula_kernel, fused_kernel
from plancompiler.executor.cuda.kernels.native import native_kernel
from plancompiler.executor.cuda.kernels.written import DEVICE_KERNELS
from plancompiler.ir import DType
from plancompiler.ops.fused import KIND as FUSED
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import Kernel, KernelContext, OpDef

_LOG = logging.getLogger(__name__)
_TOLD: set[str] = set()
_IN_BFLOAT16 = {"contract_leading", "matmul"}
"""Kinds whose kernels multiply bfloat16 as it is, where others compute it in float32."""


def kernel_on(arrays: Any, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
    """An op's kernel on arrays of the namespace `arrays`, for these dtypes."""
    known = tuple(dtypes)
    return native_kernel(arrays, definition, known, _of_functions(arrays, definition, known))


def _of_functions(arrays: Any, definition: OpDef, known: tuple[DType, ...]) -> Kernel:
    """The kernel that is made of functions of arrays."""
    kind = definition.kind
    if kind == FUSED:
        return fused_kernel(arrays, known, kernel_on)
    derived = formula_kernel(arrays, definition, known)
    if derived is not None:
        return derived
    written = DEVICE_KERNELS.get(kind)
    if written is not None:
        native = definition.takes_bfloat16 or kind in _IN_BFLOAT16
        return kernel_for(
            replace(definition, kernel=written, takes_bfloat16=native),
            (each.numpy for each in known),
        )
    if definition.portable:
        return kernel_for(definition, (each.numpy for each in known))
    if kind not in _TOLD and not definition.source:
        _TOLD.add(kind)
        _LOG.warning(
            "op %s has no kernel for devices: it runs on the host, with copies both ways", kind
        )
    kernel = kernel_for(definition, (each.numpy for each in known))
    return on_host(arrays, kernel, definition.collects)


def on_host(arrays: Any, kernel: Kernel, collects: bool) -> Kernel:
    """A host kernel on device arrays: the host waits for inputs, and copies outputs back.

    With `collects` it adds to what its outputs hold, so that they come along.
    """

    def run(context: KernelContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        host: KernelContext | None = context.state.get("on_host")
        if host is None:
            host = context.state["on_host"] = replace(context, arrays=np, state={}, work={})
        host.attrs, host.seed = context.attrs, context.seed
        host.step, host.microbatch = context.step, context.microbatch
        host.input_regions, host.output_regions = context.input_regions, context.output_regions
        taken = [arrays.asnumpy(array) for array in inputs]
        made = [
            arrays.asnumpy(array) if collects else np.empty(array.shape, array.dtype)
            for array in outputs
        ]
        kernel(host, taken, made)
        for source, target in zip(made, outputs, strict=True):
            if target.size:
                target.set(np.asarray(source, order="C"))

    return run
