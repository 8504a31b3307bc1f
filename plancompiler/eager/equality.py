"""Whether tensors are equal: one truth value, the same on every rank of the world."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.eager.inplace_forms import check_tensor
from plancompiler.eager.settings import no_grad
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import TracingError
from plancompiler.frontend.functions import all as all_true
from plancompiler.frontend.functions import isclose, isnan
from plancompiler.ir import NdSbp, Reduction
from plancompiler.ir.operators import Scalar, is_scalar
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER


def allclose(
    x: DistTensor,
    y: DistTensor | Scalar,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Whether all elements are close as in `pc.isclose`: a collective over the world.

    Every rank of the world calls it and gets the same answer, ranks outside of the placement, too.
    Layouts and placements may differ; shapes broadcast. TracingError while a job or a compiled
    function is traced.
    """
    _check_eager("allclose", x)
    other = _beside("allclose", x, y)
    return _agreed(x, isclose(x, other, rtol, atol, equal_nan))


def array_equal(x: DistTensor, y: DistTensor | Scalar, equal_nan: bool = False) -> bool:
    """Whether two tensors have one shape and equal elements: a collective over the world.

    Every rank of the world calls it and gets the same answer, ranks outside of the placement, too.
    Layouts, placements and dtypes may differ. TracingError while a job or a compiled function is
    traced.
    """
    _check_eager("array_equal", x)
    other = _beside("array_equal", x, y)
    if (() if is_scalar(other) else other.shape) != x.shape:
        return False
    same = x == other
    if equal_nan and x.dtype.is_floating and not is_scalar(other) and other.dtype.is_floating:
        same = same | (isnan(x) & isnan(other))
    return _agreed(x, same)


def _check_eager(name: str, x: Any) -> None:
    if ACTIVE_TRACER.get() is None:
        check_tensor(name, x)
        if not x.spec.world.mode.traces:
            return
    elementwise = "isclose(x, y)" if name == "allclose" else "equal(x, y)"
    raise TracingError(
        f"{name} gives a truth value, which is not known while a function is traced",
        source=user_line(),
        hint=f"pc.all(pc.{elementwise}) is a tensor with the answer",
    )


def _beside(name: str, x: DistTensor, y: Any) -> Any:
    """The other operand where x lies."""
    if is_scalar(y):
        return y
    other = x.coerced(name, y)
    if other.placement == x.placement:
        return other
    with no_grad():
        return other.redistribute(x.placement, NdSbp.broadcast(x.placement.ndim))


def _agreed(x: DistTensor, same: DistTensor) -> bool:
    """Whether a condition holds everywhere, as every rank of the world learns it."""
    spec = x.spec
    holds = all_true(same) if same.ndim else same
    answer = bool(holds.item()) if spec.inside else True
    everybody = tuple(range(spec.world.size))
    if spec.placement.size == len(everybody):
        return answer
    group = spec.world.comm.context(everybody)
    return bool(group.all_reduce(np.array(answer, np.int8), Reduction.MIN))
