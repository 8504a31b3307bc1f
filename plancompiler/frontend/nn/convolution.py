"""Convolutions of x [n, c, *spatial].

Sizes may be one number for all spatial axes or one per axis; padding is as in `pc.conv1d`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.convolution import (
    Padding,
    Sizes,
    padding_amounts,
    per_axis,
)
from plancompiler.frontend.nn import functional
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

    Both start uniform within 1 / sqrt(in / groups * kernel elements). `padding_mode` is "zeros",
    "reflect", "replicate" or "circular".
    """

    _ndim: ClassVar[int]
    _function: ClassVar[Callable[..., Value]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: DType | str = "float32",
    ) -> None:
        _check_groups(in_channels, out_channels, groups)
        extents = per_axis("kernel_size", kernel_size, self._ndim)
        shape = (out_channels, in_channels // groups, *extents)
        fan = math.prod(shape[1:])
        self.weight, self.bias = _parameters(shape, out_channels, fan, bias, dtype)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.padding_mode = padding_mode
        self._beside: list[int] | None = None
        if padding_mode != "zeros":
            steps = per_axis("dilation", dilation, self._ndim)
            ends = padding_amounts(padding, extents, steps)
            pairs = [ends[2 * axis : 2 * axis + 2] for axis in range(self._ndim)]
            self._beside = [end for pair in reversed(pairs) for end in pair]
            self.padding = 0

    def forward(self, x: Value) -> Value:
        if self._beside is not None:
            x = functional.pad(x, self._beside, self.padding_mode)
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
    _function = staticmethod(functional.conv1d)


class Conv2d(_Convolution):
    """x [n, in, h, w] convolved with `weight` [out, in / groups, kh, kw]; see `Conv1d`."""

    _ndim = 2
    _function = staticmethod(functional.conv2d)


class Conv3d(_Convolution):
    """x [n, in, d, h, w] convolved with `weight` [out, in / groups, kd, kh, kw]; see `Conv1d`."""

    _ndim = 3
    _function = staticmethod(functional.conv3d)


class _Transposed(Module):
    """The transposed convolution of x [n, in, *spatial] with `weight` [in, out / groups, *kernel],
    plus `bias` [out]; see `pc.conv_transpose1d`.

    Both start uniform within 1 / sqrt(out / groups * kernel elements).
    """

    _ndim: ClassVar[int]
    _function: ClassVar[Callable[..., Value]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        dtype: DType | str = "float32",
    ) -> None:
        _check_groups(in_channels, out_channels, groups)
        extents = per_axis("kernel_size", kernel_size, self._ndim)
        shape = (in_channels, out_channels // groups, *extents)
        fan = math.prod(shape[1:])
        self.weight, self.bias = _parameters(shape, out_channels, fan, bias, dtype)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def forward(self, x: Value) -> Value:
        return self._function(
            x,
            self.weight.value,
            None if self.bias is None else self.bias.value,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )


class ConvTranspose1d(_Transposed):
    """The transposed convolution of x [n, in, length] with `weight` [in, out / groups, k], plus
    `bias` [out]; see `pc.conv_transpose1d`. Both start uniform within 1 / sqrt(out / groups * k).
    """

    _ndim = 1
    _function = staticmethod(functional.conv_transpose1d)


class ConvTranspose2d(_Transposed):
    """The transposed convolution of x [n, in, h, w]; see `ConvTranspose1d`."""

    _ndim = 2
    _function = staticmethod(functional.conv_transpose2d)


class ConvTranspose3d(_Transposed):
    """The transposed convolution of x [n, in, d, h, w]; see `ConvTranspose1d`."""

    _ndim = 3
    _function = staticmethod(functional.conv_transpose3d)
