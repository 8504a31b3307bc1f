"""Products with weights, convolutions, and look-ups in tables, with PyTorch's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend.functions import convolution
from plancompiler.frontend.functions.convolution import Padding, Sizes
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import maximum, where
from plancompiler.frontend.functions.indexing import embedding as rows_of
from plancompiler.frontend.functions.indexing import one_hot as one_hot_of
from plancompiler.frontend.functions.linear import einsum
from plancompiler.frontend.functions.linear import linear as linear_of
from plancompiler.frontend.functions.reduction import any as any_of
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir.operators import filled
from plancompiler.ops.registry import apply_one


@public
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias of x [..., in], weight [out, in] (or [in], for [...]), and bias [out]."""
    if input.ndim > 1 and weight.ndim > 1:
        return linear_of(input, weight, bias)
    rows = input.reshape((1, *input.shape)) if input.ndim == 1 else input
    made = linear_of(rows, weight.reshape((-1, weight.shape[-1])))
    shape = (*input.shape[:-1], *weight.shape[:-1])
    made = made.reshape(shape)
    return made if bias is None else made + bias


@public
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x₁ᵀ W x₂ + b for input1 [..., m], input2 [..., n], weight [o, m, n], bias [o]: [..., o]."""
    product: Tensor = einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


def _convolution(ndim: int, transposed: bool) -> Callable[..., Any]:
    name = f"conv_transpose{ndim}d" if transposed else f"conv{ndim}d"
    ours = getattr(convolution, name)

    def batched(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        if x.ndim != ndim + 1:
            return of(x)
        made = of(x.reshape((1, *x.shape)))
        return made.reshape(made.shape[1:])

    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        return batched(input, lambda x: ours(x, weight, bias, stride, padding, dilation, groups))

    def transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Tensor:
        return batched(
            input,
            lambda x: ours(x, weight, bias, stride, padding, output_padding, dilation, groups),
        )

    function: Callable[..., Any] = transpose if transposed else convolve
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`pc.{name}`, also of one image without a batch, with PyTorch's arguments."
    return public(function)


conv1d, conv2d, conv3d = (_convolution(ndim, False) for ndim in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    _convolution(ndim, True) for ndim in (1, 2, 3)
)


# --- tables ---------------------------------------------------------------------------------------


def _place_of_padding(padding_idx: int | None, count: int) -> int | None:
    if padding_idx is None:
        return None
    if not -count <= padding_idx < count:
        raise AttributeValueError(
            "the row of the padding is none of the table",
            got=padding_idx,
            expected=f"{-count} to {count - 1}",
        )
    return padding_idx % count


def _refuse_options(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None or scale_grad_by_freq:
        raise UsageError(
            "a table is neither renormalised when it is read, nor its gradient scaled by counts",
            got=f"max_norm={max_norm}, scale_grad_by_freq={scale_grad_by_freq}",
            expected="None and False",
        )


@public
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of weight [count, dim] by ids [...]: [..., dim]. The row `padding_idx` gets no gradient.
    Gradients are dense; UsageError for `max_norm` and `scale_grad_by_freq`.
    """
    _refuse_options(max_norm, scale_grad_by_freq)
    rows = rows_of(weight, input)
    padding = _place_of_padding(padding_idx, weight.shape[0])
    if padding is None:
        return rows
    away = input.equal(padding).reshape((*input.shape, 1))
    return where(away, apply_one("stop_gradient", rows), rows)


@public
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The "sum", "mean" or "max" of each bag's rows of weight [count, dim]: [bags, dim].

    A row of ids [bags, n] is a bag; ids [n] are bags from `offsets` [bags] on, with
    `include_last_offset` up to its last. `per_sample_weights`, like the ids, multiply the rows of a
    sum. Ids `padding_idx` do not count. Of an empty bag comes zero. UsageError for "max" with
    `offsets`.
    """
    _refuse_options(max_norm, scale_grad_by_freq)
    if mode not in ("sum", "mean", "max"):
        raise AttributeValueError("unknown mode", got=repr(mode), expected="sum, mean or max")
    if per_sample_weights is not None and mode != "sum":
        raise UsageError("only sums have weights of samples", got=f"mode={mode!r}")
    if (offsets is None) != (input.ndim == 2):
        raise ShapeError(
            "bags are rows of ids, or ids with offsets", got=f"{input.shape}, offsets {offsets}"
        )
    padding = _place_of_padding(padding_idx, weight.shape[0])
    rows = rows_of(weight, input)
    counted: Tensor = (input >= 0) if padding is None else input.not_equal(padding)
    beside = counted.reshape((*input.shape, 1))
    if mode == "max":
        if offsets is not None:
            raise UsageError(
                "the greatest of a bag needs bags of one length",
                got="offsets",
                hint="give ids [bags, n], padded with padding_idx",
            )
        greatest = where(beside, rows, float("-inf")).max(1)
        return where(any_of(beside, 1), greatest, 0.0)
    rows = apply_one("masked", rows, beside)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape((*input.shape, 1))
    numbers = counted.cast(rows.dtype)
    if offsets is None:
        total, count = rows.sum(1), numbers.sum(1)
    else:
        bags = offsets.shape[0] - include_last_offset
        starts = offsets[:bags] if include_last_offset else offsets
        ones = filled(input, 1, dtype=starts.dtype)
        places = apply_one("cumsum", ones, axis=0) - 1
        owner = (
            apply_one("searchsorted", starts.cast("int64"), places.cast("int64"), side="right") - 1
        )
        total = apply_one("index_select_grad", owner, rows, axis=0, extent=bags)
        count = apply_one("index_select_grad", owner, numbers, axis=0, extent=bags)
    if mode == "sum":
        return total
    divisor: Tensor = maximum(count, 1.0).reshape((count.shape[0], 1))
    return total / divisor


@public
def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """1 at each id and zeros elsewhere: ids [...] as int64 [..., num_classes]; by default as many
    classes as the greatest id needs, which is read: a collective, and a TracingError in jobs.
    """
    return one_hot_of(tensor, num_classes, "int64")
