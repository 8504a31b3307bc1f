"""What training does with gradients and variables beside the optimizers.

The updates take variables of the job (their initial values, as parameters give them) and record the
ops that make their next values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.frontend.draws import key_of, takes_generator
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import div, maximum, minimum, sqrt
from plancompiler.frontend.out import takes_out
from plancompiler.ir import DType
from plancompiler.ir.arguments import real_number
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "adafactor_update",
    "clip_by_global_norm",
    "dropout",
    "found_inf",
    "global_norm",
    "is_finite_all",
    "lamb_update",
    "lion_update",
    "moving_average_update",
    "stop_gradient",
]


@takes_out
def stop_gradient(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x, as a constant to `gradients`."""
    return apply_one("stop_gradient", x)


# --- gradients ------------------------------------------------------------------------------------


@takes_out
def global_norm(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """The 2-norm of all elements of floating tensors together, a scalar of at least float32.

    Tensors may be split in any way and lie on several placements: each gives the sum of its
    squares, partial where it is split. They are added per placement, and one scalar of each moves
    to the placement of the first tensor.
    """
    return sqrt(square_sum_of_all(tensors))


def square_sum_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of floating tensors: the square of `global_norm`."""
    return _together("square_sum", tensors, _add)


@takes_out
def clip_by_global_norm(
    tensors: Sequence[Tensor],
    max_norm: float,
    eps: float = 1e-6,
    *,
    out: tuple[Sequence[Tensor | None] | None, Tensor | None] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Tensors scaled together so that their norm is at most `max_norm`, and the norm before.

    The factor is min(1, max_norm / (norm + eps)), so small gradients stay as they are.
    """
    # An infinite limit clips nothing, for those who only want to know the norm.
    floating = isinstance(max_norm, float)
    limit = float(max_norm) if floating else real_number("the norm to clip to", max_norm)
    if not limit > 0:
        raise UsageError("a norm is clipped to a positive number", got=max_norm)
    norm = global_norm(tensors)
    factor = minimum(div(limit, norm + float(eps)), 1.0)
    local: dict[object, Tensor] = {}
    clipped = []
    for tensor in tensors:
        place = getattr(tensor, "placement", None)
        if place not in local:
            local[place] = beside(factor, tensor)
        clipped.append(tensor * local[place].cast(tensor.dtype))
    return clipped, norm


@takes_out
def found_inf(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """1 if any element of any floating tensor is infinite or no number, else 0: a float32 scalar.

    Devices that hold parts find partial maxima, which are reduced as scalars.
    """
    return _together("found_inf", tensors, maximum)


@takes_out
def is_finite_all(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Whether all elements of floating tensors are finite: a bool scalar."""
    return found_inf(tensors).equal(0.0)


def _together(
    kind: str, tensors: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """A scalar of each tensor, in one dtype; those of one placement combined there, and then those
    of all placements on that of the first.
    """
    if not tensors:
        raise UsageError("at least one tensor is needed")
    widest = DType.FLOAT32
    if any(tensor.dtype is DType.FLOAT64 for tensor in tensors):
        widest = DType.FLOAT64
    totals: dict[object, Tensor] = {}
    for tensor in tensors:
        if kind == "square_sum":
            # In the wide dtype: squares of float16 overflow at 256.
            wide = tensor if tensor.dtype is widest else tensor.cast(widest)
            scalar = apply(kind, wide, axes=tuple(range(tensor.ndim)))
        else:
            scalar = apply(kind, tensor)
        place = getattr(tensor, "placement", None)
        totals[place] = combine(totals[place], scalar) if place in totals else scalar
    return reduce(combine, (beside(scalar, tensors[0]) for scalar in totals.values()))


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left + right


def beside(scalar: Tensor, tensor: Tensor) -> Tensor:
    """The scalar on the placement of a tensor."""
    placement = getattr(tensor, "placement", None)
    if getattr(scalar, "placement", None) == placement:
        return scalar
    return scalar.redistribute(placement)


# --- updates of variables -------------------------------------------------------------------------


def moving_average_update(state: Tensor, value: Tensor, decay: float = 0.99) -> Tensor:
    """The next value of variable `state`: decay * state + (1 - decay) * value."""
    return apply_one("moving_average_update", state, value, decay=float(decay))


def lion_update(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    rate: Tensor,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The next values of variables `weight` and `momentum` by Lion (X. Chen et al., 2023)."""
    updated: tuple[Tensor, Tensor] = apply(
        "lion_update",
        weight,
        gradient,
        momentum,
        rate,
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        weight_decay=float(weight_decay),
    )
    return updated


def lamb_update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    rate: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next values of variables `weight`, `first` and `second` moments by LAMB (Y. You et al.,
    2020).

    The norms of the trust ratio are of the whole parameter, however it is split: they are sums of
    squares, reduced as scalars.
    """
    direction, next_first, next_second = apply(
        "lamb_direction",
        weight,
        gradient,
        first,
        second,
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        eps=float(eps),
        weight_decay=float(weight_decay),
    )
    updated: Tensor = apply("lamb_update", weight, direction, *square_sums(weight, direction), rate)
    return updated, next_first, next_second


def adafactor_update(
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    rate: Tensor,
    decay_power: float = 0.8,
    clip: float = 1.0,
    relative: bool = True,
    eps: tuple[float, float] = (1e-30, 1e-3),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, ...]:
    """The next values of variable `weight` and of its second `moments` by Adafactor (N. Shazeer and
    M. Stern, 2018).

    A weight [..., r, c] has two moments, of rows [..., r] and of columns [..., c]; one with fewer
    axes has one, of its own shape. They start at zero and decay by 1 - (step + 1) ** -decay_power.
    Sums over a parameter that is split are partial, and reduced as vectors and scalars. `maximize`
    goes up the gradient.
    """
    turned = {"grad_scale": -1.0} if maximize else {}
    if weight.ndim >= 2:
        if len(moments) != 2:
            raise UsageError("a matrix has two moments, of rows and of columns", got=len(moments))
        fresh = apply("adafactor_moments", gradient, eps=float(eps[0]))
        kept = [
            apply("moving_average_update", old, new, power=float(decay_power))
            for old, new in zip(moments, fresh, strict=True)
        ]
        direction = apply("adafactor_direction", gradient, *kept, kept[0].sum(-1), **turned)
    else:
        if len(moments) != 1:
            raise UsageError("a vector has one moment", got=len(moments))
        direction, *kept = apply(
            "adafactor_vector_direction",
            gradient,
            moments[0],
            eps=float(eps[0]),
            power=float(decay_power),
            **turned,
        )
    updated: Tensor = apply(
        "adafactor_update",
        weight,
        direction,
        *square_sums(weight, direction),
        rate,
        clip=float(clip),
        relative=relative,
        eps=float(eps[1]),
        weight_decay=float(weight_decay),
    )
    return updated, *kept


def square_sums(*tensors: Tensor) -> list[Tensor]:
    """The sum of squares of each tensor, in at least float32."""
    sums = []
    for tensor in tensors:
        wide = tensor.cast(DType.FLOAT32) if tensor.dtype.is_half else tensor
        sums.append(apply("square_sum", wide, axes=tuple(range(tensor.ndim))))
    return sums


@takes_out
@takes_generator
def dropout(
    x: Tensor,
    rate: float,
    key: int | None = None,
    *,
    generator: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """Elements are zeroed with probability `rate`, the others scaled by 1 / (1 - rate).

    Which ones depends on the job's seed, the step, the element's global index and `key`; by
    default each dropout of a job has its own key. Outside of jobs the generator has seed and step.
    """
    return apply_one("dropout", x, rate=float(rate), key=key_of(key))
