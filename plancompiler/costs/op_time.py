"""What kernels take: the roofline model of S. Williams et al. (2009).

A kernel takes as long as its arithmetic or its memory traffic, whichever is more, at the rates that
the machine's kernels reach, and the time to start it.
"""

from __future__ import annotations

from plancompiler.costs.machine import Machine
from plancompiler.ir.dtype import DType

FREE_OPS = frozenset({"input", "variable", "output"})
"""Kinds that no kernel runs for."""


def op_seconds(
    machine: Machine, flops: float, nbytes: float, dtype: DType, pointwise: float = 0.0
) -> float:
    """Seconds of one kernel on one device; `nbytes` are read and written, and `pointwise` are
    operations in float32 between the products of a kernel that has both.
    """
    device = machine.device
    arithmetic = flops / (device.peak_flops(dtype) * device.matrix_efficiency)
    arithmetic += pointwise / device.peak_flops(DType.FLOAT32)
    traffic = nbytes / (device.memory_bytes_per_second * device.memory_efficiency)
    return device.launch_seconds + max(arithmetic, traffic)
