"""Convolutions and pooling. Layouts are `[n, c, *spatial]`.

Sizes may be one number for all spatial axes or one per axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.out import takes_out
from plancompiler.ir.operators import whole_numbers
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "global_avg_pool",
    "global_max_pool",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]


Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[Sequence[int]]


def per_axis(name: str, value: Sizes, ndim: int) -> tuple[int, ...]:
    """One number for each of `ndim` spatial axes; `name` is what an error calls them."""
    given = whole_numbers(name, value)
    sizes = given * ndim if len(given) == 1 else given
    if len(sizes) != ndim:
        raise AttributeValueError(
            f"{name} needs a number, or one per spatial axis", got=value, expected=f"{ndim} numbers"
        )
    return sizes


def padding_amounts(
    value: Padding, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Elements before and after each axis, one after the other."""
    ndim = len(kernel)
    if isinstance(value, str):
        if value not in ("same", "valid"):
            raise AttributeValueError(
                "unknown padding", got=repr(value), expected="'same', 'valid' or numbers"
            )
        if value == "valid":
            return (0,) * (2 * ndim)
        reach = [step * (extent - 1) for extent, step in zip(kernel, dilation, strict=True)]
        return tuple(part for each in reach for part in (each // 2, each - each // 2))
    entries: tuple[int | Sequence[int], ...]
    entries = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(entries) != ndim:
        raise AttributeValueError(
            "padding needs a number, or one or a pair per spatial axis",
            got=value,
            expected=f"{ndim} entries",
        )
    amounts: list[int] = []
    for entry in entries:
        pair = (entry, entry) if isinstance(entry, int) else tuple(entry)
        if len(pair) != 2:
            raise AttributeValueError(
                "padding of an axis is a number or a pair", got=entry, expected="(before, after)"
            )
        amounts.extend(pair)
    return tuple(amounts)


def _window(
    kernel: tuple[int, ...], stride: Sizes, padding: Padding, dilation: Sizes
) -> dict[str, Any]:
    ndim = len(kernel)
    steps = per_axis("dilation", dilation, ndim)
    return {
        "stride": per_axis("stride", stride, ndim),
        "padding": padding_amounts(padding, kernel, steps),
        "dilation": steps,
    }


def _kernel_of(weight: Any, ndim: int) -> tuple[int, ...]:
    if weight.ndim != ndim + 2:
        raise ShapeError(
            "a convolution needs another number of axes on its weight",
            got=weight.shape,
            expected=f"{ndim + 2} axes",
        )
    extents: tuple[int, ...] = weight.shape[2:]
    return extents


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.reshape((-1, *(1,) * (y.ndim - 2)))


def _convolve(
    ndim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    window = _window(_kernel_of(weight, ndim), stride, padding, dilation)
    convolved: Tensor = apply(f"conv{ndim}d", x, weight, **window, groups=groups)
    return _biased(convolved, bias)


@takes_out
def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x [n, c, length] convolved with weight [o, c / groups, k]: [n, o, windows].

    `padding` is a number, one per axis, a pair (before, after) per axis, "same" (as many windows
    as elements at stride 1) or "valid" (none). With `groups`, each of as many groups of channels is
    convolved with its own part of the weight; `groups=c` is depthwise.
    """
    return _convolve(1, x, weight, bias, stride, padding, dilation, groups)


@takes_out
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x [n, c, h, w] convolved with weight [o, c / groups, kh, kw]; see `conv1d`."""
    return _convolve(2, x, weight, bias, stride, padding, dilation, groups)


@takes_out
def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """x [n, c, d, h, w] convolved with weight [o, c / groups, kd, kh, kw]; see `conv1d`."""
    return _convolve(3, x, weight, bias, stride, padding, dilation, groups)


def _convolve_transposed(
    ndim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Padding,
    output_padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    window = _window(_kernel_of(weight, ndim), stride, padding, dilation)
    more = per_axis("output_padding", output_padding, ndim)
    convolved: Tensor = apply(
        f"conv{ndim}d_transpose", x, weight, **window, groups=groups, output_padding=more
    )
    return _biased(convolved, bias)


@takes_out
def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The transposed convolution of x [n, c, length] with weight [c, o / groups, k]: what the
    convolution with this weight, stride, padding and dilation passes back.

    `output_padding` (below the stride) chooses among the extents that convolve to that of x.
    """
    return _convolve_transposed(
        1, x, weight, bias, stride, padding, output_padding, dilation, groups
    )


@takes_out
def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The transposed convolution of x [n, c, h, w]; see `conv_transpose1d`."""
    return _convolve_transposed(
        2, x, weight, bias, stride, padding, output_padding, dilation, groups
    )


@takes_out
def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The transposed convolution of x [n, c, d, h, w]; see `conv_transpose1d`."""
    return _convolve_transposed(
        3, x, weight, bias, stride, padding, output_padding, dilation, groups
    )


# --- pooling --------------------------------------------------------------------------------------


def _pool(
    kind: str,
    ndim: int,
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None,
    padding: Padding,
    dilation: Sizes = 1,
    **more: Any,
) -> Tensor:
    extents = per_axis("kernel", kernel, ndim)
    window = _window(extents, extents if stride is None else stride, padding, dilation)
    return apply_one(f"{kind}{ndim}d", x, kernel=extents, **window, **more)


@takes_out
def max_pool1d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The greatest element of each window of `kernel` elements over the last axis.

    `stride` is the kernel by default. Padding never wins; of equal elements the first gets the
    gradient.
    """
    return _pool("max_pool", 1, x, kernel, stride, padding, dilation)


@takes_out
def max_pool2d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The greatest element of each window over the last two axes; see `max_pool1d`."""
    return _pool("max_pool", 2, x, kernel, stride, padding, dilation)


@takes_out
def max_pool3d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The greatest element of each window over the last three axes; see `max_pool1d`."""
    return _pool("max_pool", 3, x, kernel, stride, padding, dilation)


@takes_out
def avg_pool1d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    count_padding: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The average of each window of `kernel` elements over the last axis.

    `stride` is the kernel by default. Padding counts as zeros, or not at all without
    `count_padding`.
    """
    return _pool("avg_pool", 1, x, kernel, stride, padding, count_padding=count_padding)


@takes_out
def avg_pool2d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    count_padding: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The average of each window over the last two axes; see `avg_pool1d`."""
    return _pool("avg_pool", 2, x, kernel, stride, padding, count_padding=count_padding)


@takes_out
def avg_pool3d(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    count_padding: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The average of each window over the last three axes; see `avg_pool1d`."""
    return _pool("avg_pool", 3, x, kernel, stride, padding, count_padding=count_padding)


@takes_out
def adaptive_avg_pool1d(x: Tensor, size: Sizes, *, out: Tensor | None = None) -> Tensor:
    """Averages over the last axis to `size` elements, over windows as equal as they can be."""
    return apply_one("adaptive_avg_pool1d", x, size=per_axis("size", size, 1))


@takes_out
def adaptive_avg_pool2d(x: Tensor, size: Sizes, *, out: Tensor | None = None) -> Tensor:
    """Averages over the last two axes to the extents `size`; see `adaptive_avg_pool1d`."""
    return apply_one("adaptive_avg_pool2d", x, size=per_axis("size", size, 2))


@takes_out
def adaptive_avg_pool3d(x: Tensor, size: Sizes, *, out: Tensor | None = None) -> Tensor:
    """Averages over the last three axes to the extents `size`; see `adaptive_avg_pool1d`."""
    return apply_one("adaptive_avg_pool3d", x, size=per_axis("size", size, 3))


@takes_out
def global_avg_pool(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The mean over space of x [n, c, *spatial]: [n, c]. Space may be split."""
    return x.mean(_space(x))


@takes_out
def global_max_pool(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The greatest element over space of x [n, c, *spatial]: [n, c]. Space may be split."""
    return x.max(_space(x))


def _space(x: Tensor) -> tuple[int, ...]:
    if x.ndim < 3:
        raise ShapeError(
            "pooling over all of space needs a spatial axis",
            got=x.shape,
            expected="[n, c, *spatial]",
        )
    return tuple(range(2, x.ndim))
