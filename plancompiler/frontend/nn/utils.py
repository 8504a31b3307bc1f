"""`pc.nn.utils`: gradients clipped in place, and parameters as one vector, as PyTorch has them.

They act on eager tensors. A job has no gradients to change: `optimizer.minimize(loss,
clip_norm=...)` clips there. `pc.nn.utils.rnn` has the functions of packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from plancompiler.errors import NonFiniteError, ShapeError, UsageError
from plancompiler.frontend.functions.elementwise import minimum
from plancompiler.frontend.functions.reduction import norm
from plancompiler.frontend.functions.shape import concat, stack
from plancompiler.frontend.functions.training import global_norm
from plancompiler.frontend.nn import packed_sequence as rnn
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.hooks.eager_world import eager_world
from plancompiler.hooks.other_names import no_such_name
from plancompiler.ir import Value
from plancompiler.ir.source import user_line

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "parameters_to_vector",
    "rnn",
    "vector_to_parameters",
]


def _tensors(parameters: Any) -> list[Any]:
    """Parameters, tensors or a model as eager tensors."""
    if isinstance(parameters, Module):
        parameters = parameters.parameters()
    several: Iterable[Any] = parameters if isinstance(parameters, Iterable) else [parameters]
    if hasattr(parameters, "placement"):  # a tensor or a parameter, which has rows, too
        several = [parameters]
    tensors = [each.value if isinstance(each, Parameter) else each for each in several]
    if any(isinstance(each, Value) for each in tensors):
        raise UsageError(
            "a job has no tensors that are changed in place",
            source=user_line(),
            hint="optimizer.minimize(loss, clip_norm=...) clips gradients in a job",
        )
    return tensors


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """Scale the gradients of parameters, in place, so that their norm together is at most
    `max_norm`; the norm before. `optimizer.step(clip_norm=...)` does so in one call.

    NonFiniteError for a norm that is not finite, where `error_if_nonfinite` asks for it.
    """
    grads = [each.grad for each in _tensors(parameters) if each.grad is not None]
    if not grads:
        return 0.0
    with eager_world().no_grad():
        if float(norm_type) == 2.0:
            total = global_norm(grads)
        else:
            norms = [norm(each.reshape((-1,)), float(norm_type)) for each in grads]
            total = norm(stack(norms), float(norm_type))
        if error_if_nonfinite and not math.isfinite(float(total)):
            raise NonFiniteError(
                "the norm of the gradients is not finite", source=user_line(), got=float(total)
            )
        factor = minimum(float(max_norm) / (total + 1e-6), 1.0)
        for each in grads:
            local = factor if each.placement == factor.placement else float(factor)
            each.copy_(each * (local if isinstance(local, float) else local.cast(each.dtype)))
    return total


def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    """Bound the gradients of parameters, in place, by -clip_value and clip_value."""
    bound = float(clip_value)
    for each in _tensors(parameters):
        if each.grad is not None:
            each.grad.clamp_(-bound, bound)


def parameters_to_vector(parameters: Any) -> Any:
    """All elements of parameters along one axis."""
    return concat([each.reshape((-1,)) for each in _tensors(parameters)])


def vector_to_parameters(vec: Any, parameters: Any) -> None:
    """Give parameters the elements of a vector, in order. ShapeError where it has another number
    of elements.
    """
    tensors = _tensors(parameters)
    sizes = [math.prod(each.shape) for each in tensors]
    if vec.shape != (sum(sizes),):
        raise ShapeError(
            "the vector does not have the elements of the parameters",
            source=user_line(),
            got=vec.shape,
            expected=(sum(sizes),),
        )
    start = 0
    with eager_world().no_grad():
        for each, size in zip(tensors, sizes, strict=True):
            each.copy_(vec[start : start + size].reshape(each.shape))
            start += size


def __getattr__(name: str) -> Any:
    raise no_such_name("pc.nn.utils", name)
