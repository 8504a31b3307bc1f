"""What gradient functions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.errors import GradientError
from plancompiler.ops.registry import AttrMap, Gradient, Tensors, apply, op_def


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
    """The gradient where the mask is true, zero elsewhere, where it may be infinite or NaN; linear,
    so a partial stays partial.
    """
    return apply("masked", grad, mask)


def widened(tensor: Any) -> Any:
    """The tensor in the dtype in which its numbers are added up: float32 for those of 16 bits."""
    wide = tensor.dtype.accumulator
    return tensor if wide is tensor.dtype else tensor.cast(wide)


def accumulated(gradient: Gradient) -> Gradient:
    """The gradient, found in float32 where tensors have 16 bits and rounded once: what it adds up
    or counts may leave their range.
    """

    def widely(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        if not any(each.dtype.is_half for each in (*inputs, *outputs)):
            return gradient(attrs, inputs, outputs, grads)
        wide = [
            [None if each is None else widened(each) for each in some]
            for some in (inputs, outputs, grads)
        ]
        passed = gradient(attrs, *wide)
        return [
            None if grad is None else grad.cast(tensor.dtype)
            for grad, tensor in zip(passed, inputs, strict=True)
        ]

    return widely


def of_one(gradient: Callable[[AttrMap, Any, Any, Any], Any]) -> Gradient:
    """The gradient of an op of one input and one output: `(attrs, x, y, dy)` to dx."""

    def gradients(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        return (gradient(attrs, inputs[0], outputs[0], grads[0]),)

    return gradients


def by_op(kind: str, back: str) -> Gradient:
    """The gradient of an op as another op, which takes and gives by name what the first one has.

    The gradient of `x` is `dx`, and that of `dx` is `ddx` or `x`. An attribute that the op lacks is
    the extent of that name among its operands.
    """

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        definition = op_def(back)
        ours, theirs = op_def(kind).line, definition.line
        assert ours is not None
        assert theirs is not None
        known = {
            **{f"d{each.name}": grad for each, grad in zip(ours.outputs, grads, strict=True)},
            # Only of linear ops the gradient of `dx` is `x`; others have an input of this name.
            **{each.name[1:]: grad for each, grad in zip(ours.outputs, grads, strict=True)},
            **{each.name: tensor for each, tensor in zip(ours.outputs, outputs, strict=True)},
            **{each.name: tensor for each, tensor in zip(ours.inputs, inputs, strict=False)},
        }
        given = [known[each.name] for each in theirs.inputs if each.name in known]
        _, extents = ours.check(kind, tuple(inputs), attrs)
        names = [each.name for each in definition.attrs if each.name in extents]
        made = apply(back, *given, **{name: extents[name][0] for name in names})
        results = made if isinstance(made, tuple) else (made,)
        # `dx` is what is passed back to `ddx`, where there is one, rather than to `x`.
        of = {
            **{f"d{each.name}": each.name for each in ours.inputs},
            **{each.name[1:]: each.name for each in ours.inputs if each.name.startswith("d")},
        }
        passed = {of[each.name]: grad for each, grad in zip(theirs.outputs, results, strict=True)}
        return [passed.get(each.name) for each, _ in zip(ours.inputs, inputs, strict=False)]

    return gradient


def nothing(like: Any) -> Any:
    """The gradient of what is piecewise constant: zeros like a tensor, in its layout."""
    return apply("zeros_like", like)


def over_positive(grad: Any, divisor: Any) -> Any:
    """grad / divisor for a divisor that is never negative; zero where it is zero."""
    zero = divisor.equal(0)
    return masked(grad / (divisor + zero.cast(divisor.dtype)), apply("logical_not", zero))


def only_first(kind: str, grads: Any) -> Any:
    """The gradient of the first output, where the others are side results without gradients."""
    if grads[0] is None or any(grad is not None for grad in grads[1:]):
        raise GradientError(
            f"only the first output of {kind} has a gradient",
            got="a gradient for a side result",
            hint="do not differentiate through the side results",
        )
    return grads[0]
