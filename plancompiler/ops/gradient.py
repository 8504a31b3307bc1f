"""What gradient functions share."""

from __future__ import annotations

from typing import Any

from plancompiler.errors import GradientError
from plancompiler.ops.registry import apply


def reduce_to(grad: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over the axes along which its tensor of `shape` was broadcast."""
    if grad.shape == shape:
        return grad
    leading = len(grad.shape) - len(shape)
    stretched = [
        leading + axis
        for axis, extent in enumerate(shape)
        if extent == 1 and grad.shape[leading + axis] != 1
    ]
    total = grad.sum((*range(leading), *stretched))
    return total if total.shape == shape else total.reshape(shape)


def expand_to(tensor: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast a tensor to `shape`."""
    return tensor if tensor.shape == shape else apply("expand_to", tensor, shape=shape)


def masked(grad: Any, mask: Any) -> Any:
    """The gradient where the mask is true, zero elsewhere; linear, so a partial stays partial."""
    return grad * mask.cast(grad.dtype)


def over_positive(grad: Any, divisor: Any) -> Any:
    """grad / divisor for a divisor that is never negative; grad where it is zero."""
    return grad / (divisor + divisor.equal(0).cast(divisor.dtype))


def only_first(kind: str, grads: Any) -> Any:
    """The gradient of the first output, where the others are side results without gradients."""
    if grads[0] is None or any(grad is not None for grad in grads[1:]):
        raise GradientError(
            f"only the first output of {kind} has a gradient",
            got="a gradient for a side result",
            hint="do not differentiate through the side results",
        )
    return grads[0]
