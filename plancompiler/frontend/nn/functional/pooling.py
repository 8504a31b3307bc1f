"""Pooling of [n, c, *space] or [c, *space], with PyTorch's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.convolution import Sizes, per_axis
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.shape import expand, moveaxis
from plancompiler.frontend.functions.shape import pad as pad_all
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir.operators import filled
from plancompiler.ops.registry import apply_one, apply_source


def _windows(
    x: Tensor,
    ndim: int,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """The attributes of windows, and how far the last ones reach beyond the padding.

    With `ceil_mode` a last window counts that begins within the axis or the padding before it.
    """
    if x.ndim not in (ndim + 1, ndim + 2):
        raise ShapeError(
            "pooling takes channels, or a batch of them",
            got=x.shape,
            expected=f"{ndim + 1} or {ndim + 2} axes",
        )
    kernel = per_axis("kernel_size", kernel_size, ndim)
    steps = kernel if stride is None or stride == () else per_axis("stride", stride, ndim)
    pads, spread = per_axis("padding", padding, ndim), per_axis("dilation", dilation, ndim)
    if min((*kernel, *steps, *spread)) < 1 or min(pads) < 0:
        raise AttributeValueError(
            "windows need sizes, steps and dilations of at least 1",
            got=f"kernel_size {kernel}, stride {steps}, padding {pads}, dilation {spread}",
        )
    beyond, ends = [], []
    for axis in range(ndim):
        extent = x.shape[x.ndim - ndim + axis]
        reach = spread[axis] * (kernel[axis] - 1) + 1
        left = extent + 2 * pads[axis] - reach
        more = 0
        if ceil_mode and left >= 0:
            count = -(-left // steps[axis]) + 1
            if (count - 1) * steps[axis] >= extent + pads[axis]:
                count -= 1
            more = max(0, (count - 1) * steps[axis] - left)
        beyond.append(more)
        ends += [pads[axis], pads[axis] + more]
    attrs = {"kernel": kernel, "stride": steps, "padding": tuple(ends), "dilation": spread}
    return attrs, tuple(beyond)


def _max_pool(ndim: int) -> Callable[..., Any]:
    def function(
        input: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        attrs, _ = _windows(input, ndim, kernel_size, stride, padding, dilation, ceil_mode)
        if any(
            2 * each > size
            for each, size in zip(per_axis("padding", padding, ndim), attrs["kernel"], strict=True)
        ):
            raise AttributeValueError(
                "padding is at most half of a window", got=padding, expected=attrs["kernel"]
            )
        if not return_indices:
            return apply_one(f"max_pool{ndim}d", input, **attrs)
        return _with_places(input, _places(input, ndim), f"max_pool{ndim}d", attrs)

    return _named(
        function,
        f"max_pool{ndim}d",
        f"The greatest element of each window over the last {ndim} axes. The stride is the window "
        "by default; padding never wins. With `ceil_mode` a last window may reach beyond the end. "
        "With `return_indices` also where each lies in the last axes, counted through: int64.",
    )


def _places(x: Tensor, ndim: int) -> Tensor:
    """For each element its place in the last axes, counted through, as a number that is exact."""
    count = math.prod(x.shape[x.ndim - ndim :])
    dtype = "float32" if count < _EXACT else "float64"
    line: Any = apply_source(x, "arange", start=0, count=count, step=1, dtype=dtype)
    places: Tensor = expand(line.reshape(x.shape[x.ndim - ndim :]), x.shape)
    return places


_EXACT = 1 << 24
"""Whole numbers below it are exact in float32."""


def _with_places(
    x: Tensor, places: Tensor, kind: str, attrs: dict[str, tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """The greatest elements of windows, and the place of each, of equal ones the first."""
    wide: Tensor = x.cast(places.dtype) if x.dtype.itemsize < places.dtype.itemsize else x
    pooled = apply_one(kind, wide, **attrs)
    like = places if places.dtype is wide.dtype else places.cast(wide.dtype)
    chosen = apply_one(f"{kind}_pick", _fixed(wide), _fixed(pooled), like, **attrs)
    made = pooled if pooled.dtype is x.dtype else pooled.cast(x.dtype)
    return made, chosen.cast("int64")


def _fixed(x: Tensor) -> Tensor:
    return apply_one("stop_gradient", x)


def _avg_pool(ndim: int) -> Callable[..., Any]:
    def function(
        input: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        x = input
        attrs, beyond = _windows(x, ndim, kernel_size, stride, padding, 1, ceil_mode)
        if divisor_override is not None:
            if divisor_override == 0:
                raise AttributeValueError("an average divides by its divisor", got=0)
            average = apply_one(f"avg_pool{ndim}d", x, **attrs, count_padding=True)
            return average * (math.prod(attrs["kernel"]) / divisor_override)
        if count_include_pad and any(beyond):
            # What lies beyond the padding does not count: so the padding becomes elements.
            pads = [0] * (x.ndim - ndim) + list(attrs["padding"][::2])
            x = pad_all(x, pads, pads)
            ends = tuple(each for more in beyond for each in (0, more))
            attrs, count_include_pad = {**attrs, "padding": ends}, False
        return apply_one(f"avg_pool{ndim}d", x, **attrs, count_padding=count_include_pad)

    return _named(
        function,
        f"avg_pool{ndim}d",
        f"The average of each window over the last {ndim} axes. The stride is the window by "
        "default. Padding counts as zeros, or not at all without `count_include_pad`; "
        "`divisor_override` is what each sum is divided by. With `ceil_mode` a last window may "
        "reach beyond the end.",
    )


def _named(function: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return public(function)


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))


# --- to a size ------------------------------------------------------------------------------------


def _target(x: Tensor, ndim: int, output_size: Any) -> tuple[int, ...]:
    """Extents to pool to; None keeps that of the input."""
    given = tuple(output_size) if isinstance(output_size, Sequence) else (output_size,) * ndim
    if len(given) != ndim or x.ndim not in (ndim + 1, ndim + 2):
        raise ShapeError(
            "pooling to a size needs an extent for each axis of space",
            got=f"{output_size} for {x.shape}",
            expected=f"{ndim} extents, for {ndim + 1} or {ndim + 2} axes",
        )
    space = x.shape[x.ndim - ndim :]
    return tuple(have if each is None else each for each, have in zip(given, space, strict=True))


def _adaptive_avg_pool(ndim: int) -> Callable[..., Any]:
    def function(input: Tensor, output_size: Any) -> Tensor:
        size = _target(input, ndim, output_size)
        return apply_one(f"adaptive_avg_pool{ndim}d", input, size=size)

    return _named(
        function,
        f"adaptive_avg_pool{ndim}d",
        f"Averages over the last {ndim} axes to the extents `output_size`, over windows as equal "
        "as they can be; None keeps an extent.",
    )


def _adaptive_max_pool(ndim: int) -> Callable[..., Any]:
    def function(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        x = input
        places = _places(input, ndim) if return_indices else None
        # From the last axis on: of equal elements the first in memory gets the gradient.
        for place, count in enumerate(reversed(_target(input, ndim, output_size))):
            axis = x.ndim - 1 - place
            windows, attrs = _shares(x, axis, count)
            if places is None:
                x = apply_one("max_pool1d", windows, **attrs)
            else:
                shares, _ = _shares(places, axis, count)
                x, places = _with_places(windows, shares, "max_pool1d", attrs)
                places = moveaxis(places, -1, axis).cast(shares.dtype)
            x = moveaxis(x, -1, axis)
        return x if places is None else (x, places.cast("int64"))

    return _named(
        function,
        f"adaptive_max_pool{ndim}d",
        f"The greatest elements over the last {ndim} axes to the extents `output_size`, of windows "
        "as equal as they can be; None keeps an extent. `return_indices` as in "
        f"`max_pool{ndim}d`.",
    )


def _shares(x: Tensor, axis: int, count: int) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """`count` windows along an axis, which becomes the last, one after another, and the attributes
    of pooling over them: each from floor(i n / count) to ceil((i + 1) n / count), shorter ones with
    their last element twice.
    """
    extent = x.shape[axis]
    if count < 1 or extent < 1:
        raise ShapeError("pooling needs an element along every axis", got=f"{extent} to {count}")
    bounds = [(i * extent // count, -(-(i + 1) * extent // count)) for i in range(count)]
    width = max(high - low for low, high in bounds)
    if extent % count:
        places = [min(low + each, high - 1) for low, high in bounds for each in range(width)]
        x = x[(*(slice(None),) * axis, places)]
    return moveaxis(x, axis, -1), {"kernel": (width,), "stride": (width,)}


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(_adaptive_avg_pool, (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = map(_adaptive_max_pool, (1, 2, 3))


# --- norms ----------------------------------------------------------------------------------------


def _lp_pool(ndim: int) -> Callable[..., Any]:
    average: Callable[..., Any] = (avg_pool1d, avg_pool2d, avg_pool3d)[ndim - 1]

    def function(
        input: Tensor,
        norm_type: float,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        ceil_mode: bool = False,
    ) -> Tensor:
        power = float(norm_type)
        count = math.prod(per_axis("kernel_size", kernel_size, ndim))
        raised = input if power == 1 else input**power
        pooled: Any = average(raised, kernel_size, stride, 0, ceil_mode)
        total: Tensor = apply_one("sign", pooled) * abs(pooled).relu() * float(count)
        return total if power == 1 else total ** (1.0 / power)

    return _named(
        function,
        f"lp_pool{ndim}d",
        f"The p-norm of each window over the last {ndim} axes: the root of the sum of powers, of "
        "numbers that are not negative or for an even power.",
    )


lp_pool1d, lp_pool2d, lp_pool3d = map(_lp_pool, (1, 2, 3))


# --- back -----------------------------------------------------------------------------------------


def _max_unpool(ndim: int) -> Callable[..., Any]:
    def function(
        input: Tensor,
        indices: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        output_size: Sequence[int] | None = None,
    ) -> Tensor:
        if input.ndim not in (ndim + 1, ndim + 2) or indices.shape != input.shape:
            raise ShapeError(
                "unpooling takes channels, or a batch of them, and a place for each element",
                got=f"{input.shape} and {indices.shape}",
                expected=f"{ndim + 1} or {ndim + 2} axes",
            )
        kernel = per_axis("kernel_size", kernel_size, ndim)
        steps = kernel if stride is None else per_axis("stride", stride, ndim)
        pads = per_axis("padding", padding, ndim)
        lead, space = input.shape[: input.ndim - ndim], input.shape[input.ndim - ndim :]
        size = tuple(
            (extent - 1) * step - 2 * beside + width
            for extent, step, beside, width in zip(space, steps, pads, kernel, strict=True)
        )
        if output_size is not None:
            size = tuple(output_size)[-ndim:]
        flat = (*lead, math.prod(space))
        zeros = filled(input, 0.0, (*lead, math.prod(size)))
        places, axis = indices.reshape(flat), len(lead)
        # Windows that overlap have one greatest element: at equal places are equal elements.
        put = apply_one(
            "put_along_axis", zeros, places, input.reshape(flat), axis=axis, mode="same"
        )
        return put.reshape((*lead, *size))

    return _named(
        function,
        f"max_unpool{ndim}d",
        f"Zeros with the elements of the input at their places, `max_pool{ndim}d`'s indices: what "
        "it was pooled from, without what was not greatest. `output_size` chooses among the "
        "extents that are pooled to that of the input.",
    )


max_unpool1d, max_unpool2d, max_unpool3d = map(_max_unpool, (1, 2, 3))
