"""Convolutions and pooling of x [n, c, *spatial], and what stands between them and other layers.

Sizes may be one number for all spatial axes or one per axis; padding is as in `pc.conv1d`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions import convolution
from plancompiler.frontend.functions.convolution import Padding, Sizes, per_axis
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.ir import DType, Value


def _parameters(
    shape: Sequence[int], channels: int, fan: int, bias: bool, dtype: DType | str
) -> tuple[Parameter, Parameter | None]:
    """A weight and a bias [channels], uniform within 1 / sqrt(fan)."""
    bound = 1.0 / math.sqrt(max(1, fan))
    weight = Parameter(shape, dtype, "uniform", (-bound, bound))
    return weight, Parameter((channels,), dtype, "uniform", (-bound, bound)) if bias else None


def _check_groups(in_channels: int, out_channels: int, groups: int) -> None:
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise AttributeValueError(
            "the groups must divide both numbers of channels evenly",
            got=f"{in_channels} to {out_channels} channels in {groups} groups",
        )


class _Convolution(Module):
    """x [n, in, *spatial] convolved with `weight` [out, in / groups, *kernel], plus `bias` [out].

    Both start uniform within 1 / sqrt(in / groups * kernel elements).
    """

    _ndim: ClassVar[int]
    _function: ClassVar[Callable[..., Value]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        _check_groups(in_channels, out_channels, groups)
        shape = (out_channels, in_channels // groups, *per_axis("kernel", kernel, self._ndim))
        fan = math.prod(shape[1:])
        self.weight, self.bias = _parameters(shape, out_channels, fan, bias, dtype)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: Value) -> Value:
        return self._function(
            x,
            self.weight.value,
            None if self.bias is None else self.bias.value,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


class Conv1d(_Convolution):
    """x [n, in, length] convolved with `weight` [out, in / groups, k], plus `bias` [out]; see
    `pc.conv1d`. Both start uniform within 1 / sqrt(in / groups * k).
    """

    _ndim = 1
    _function = staticmethod(convolution.conv1d)


class Conv2d(_Convolution):
    """x [n, in, h, w] convolved with `weight` [out, in / groups, kh, kw]; see `Conv1d`."""

    _ndim = 2
    _function = staticmethod(convolution.conv2d)


class Conv3d(_Convolution):
    """x [n, in, d, h, w] convolved with `weight` [out, in / groups, kd, kh, kw]; see `Conv1d`."""

    _ndim = 3
    _function = staticmethod(convolution.conv3d)


class ConvTranspose2d(Module):
    """The transposed convolution of x [n, in, h, w] with `weight` [in, out / groups, kh, kw], plus
    `bias` [out]; see `pc.conv_transpose1d`.

    Both start uniform within 1 / sqrt(in / groups * kernel elements).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        _check_groups(in_channels, out_channels, groups)
        extents = per_axis("kernel", kernel, 2)
        fan = in_channels // groups * math.prod(extents)
        shape = (in_channels, out_channels // groups, *extents)
        self.weight, self.bias = _parameters(shape, out_channels, fan, bias, dtype)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def forward(self, x: Value) -> Value:
        return convolution.conv_transpose2d(
            x,
            self.weight.value,
            None if self.bias is None else self.bias.value,
            self.stride,
            self.padding,
            self.output_padding,
            self.dilation,
            self.groups,
        )


class MaxPool2d(Module):
    """The greatest element of each window of x [n, c, h, w]; `stride` is the kernel by default."""

    def __init__(
        self,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Padding = 0,
        dilation: Sizes = 1,
    ) -> None:
        self.kernel, self.stride, self.padding, self.dilation = kernel, stride, padding, dilation

    def forward(self, x: Value) -> Value:
        return convolution.max_pool2d(x, self.kernel, self.stride, self.padding, self.dilation)


class AvgPool2d(Module):
    """The average of each window of x [n, c, h, w]; see `pc.avg_pool1d`."""

    def __init__(
        self,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Padding = 0,
        count_padding: bool = True,
    ) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.count_padding = count_padding

    def forward(self, x: Value) -> Value:
        return convolution.avg_pool2d(x, self.kernel, self.stride, self.padding, self.count_padding)


class AdaptiveAvgPool2d(Module):
    """Averages of x [n, c, h, w] to the extents `size`: [n, c, *size]."""

    def __init__(self, size: Sizes) -> None:
        self.size = size

    def forward(self, x: Value) -> Value:
        return convolution.adaptive_avg_pool2d(x, self.size)


class Flatten(Module):
    """Axes from `start` on become one; by default all but the first."""

    def __init__(self, start: int = 1) -> None:
        if start < 0:
            raise AttributeValueError("axes are counted from the front here", got=start)
        self.start = start

    def forward(self, x: Value) -> Value:
        if x.ndim <= self.start:
            raise ShapeError(
                "there is no axis to flatten", got=x.shape, expected=f"over {self.start} axes"
            )
        kept = x.shape[: self.start]
        return x.reshape(*kept, math.prod(x.shape[self.start :]))
