"""What kernels take: the roofline model of S. Williams et al. (2009), or curves where measured.

A kernel takes as long as its arithmetic or its memory traffic, whichever is more, at the rates that
the machine's kernels reach, and the time to start it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache

from plancompiler.costs.machine import Curve, Machine
from plancompiler.ir.dtype import DType

FREE_OPS = frozenset({"input", "variable", "output"})
"""Kinds that no kernel runs for."""


def op_seconds(
    machine: Machine, flops: float, nbytes: float, dtype: DType, kind: str | None = None
) -> float:
    """Seconds of one kernel on one device.

    `nbytes` are read and written. `kind` is the op's, where a measured curve may tell; without it
    the machine's rates do.
    """
    if kind is not None:
        curve = _curves(machine).get((kind, str(dtype)))
        if curve is not None:
            return _on_curve(curve, flops if curve.work == "flops" else nbytes)
    device = machine.device
    arithmetic = flops / (device.peak_flops(dtype) * device.matrix_efficiency)
    traffic = nbytes / (device.memory_bytes_per_second * device.memory_efficiency)
    return device.launch_seconds + max(arithmetic, traffic)


@lru_cache(maxsize=64)
def _curves(machine: Machine) -> dict[tuple[str, str], Curve]:
    return {(curve.kind, curve.dtype): curve for curve in machine.device.kernels}


def _on_curve(curve: Curve, work: float) -> float:
    """Between two points along the straight line in logarithms; beyond the ends in proportion for
    large work, and as long as the least for small.
    """
    points = curve.points
    if work <= points[0][0]:
        return points[0][1]
    if work >= points[-1][0]:
        return points[-1][1] * work / points[-1][0]
    place = bisect_right(points, (work, math.inf))
    (low, fast), (high, slow) = points[place - 1], points[place]
    part = math.log(work / low) / math.log(high / low)
    return float(fast * (slow / fast) ** part)
