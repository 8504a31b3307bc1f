"""Normalisation beside `LayerNorm`. Each scales by `weight` and shifts by `bias`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from plancompiler.errors import AttributeValueError, JobError, ShapeError, UsageError
from plancompiler.frontend.functions import normalization
from plancompiler.frontend.nn import functional
from plancompiler.frontend.nn.functional.normalization import keep_statistics
from plancompiler.frontend.nn.module import Buffer, Module, Parameter
from plancompiler.frontend.trace import JobBuilder, current_recorder
from plancompiler.ir import DType, Value
from plancompiler.ir.operators import whole_numbers
from plancompiler.ir.source import user_line


class RMSNorm(Module):
    """Divides the last axis, or the last axes of the extents `normalized_shape`, by the root of
    their mean square, then scales by `weight`, unless without `elementwise_affine`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        self.eps = eps
        self.shape = whole_numbers("normalized_shape", normalized_shape)
        self.weight = Parameter(self.shape, dtype, "ones") if elementwise_affine else None

    def forward(self, x: Value) -> Value:
        weight = None if self.weight is None else self.weight.value
        if weight is not None and len(self.shape) == 1:
            return normalization.rms_norm(x, weight, self.eps)
        return functional.rms_norm(x, self.shape, weight, self.eps)


def _affine(
    channels: int, affine: bool, dtype: DType | str
) -> tuple[Parameter | None, Parameter | None]:
    """Weight and bias of channels, or none."""
    if not affine:
        return None, None
    return Parameter((channels,), dtype, "ones"), Parameter((channels,), dtype, "zeros")


def _value(parameter: Parameter | None) -> Value | None:
    return None if parameter is None else parameter.value


class GroupNorm(Module):
    """Normalises x [n, channels, *spatial] over each of `num_groups` groups of channels and space,
    then scales by `weight` and shifts by `bias`, unless without `affine`.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise AttributeValueError(
                "the groups must divide the channels evenly",
                got=f"{num_channels} channels in {num_groups} groups",
            )
        self.num_groups, self.eps = num_groups, eps
        self.weight, self.bias = _affine(num_channels, affine, dtype)

    def forward(self, x: Value) -> Value:
        return normalization.group_norm(
            x, self.num_groups, _value(self.weight), _value(self.bias), self.eps
        )


class _InstanceNorm(Module):
    _ndim: ClassVar[int]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        dtype: DType | str = "float32",
    ) -> None:
        if track_running_stats:
            raise UsageError(
                "an instance is normalised by its own statistics",
                source=user_line(),
                got="track_running_stats=True",
                expected="False",
                hint="pc.nn.BatchNorm2d keeps running statistics",
            )
        self.num_features, self.eps = num_features, eps
        self.weight, self.bias = _affine(num_features, affine, dtype)

    def forward(self, x: Value) -> Value:
        single = x.ndim == self._ndim + 1
        if x.ndim not in (self._ndim + 1, self._ndim + 2):
            raise ShapeError(
                f"{type(self).__name__} takes another number of axes",
                got=x.shape,
                expected=f"{self._ndim + 1} or {self._ndim + 2} axes",
            )
        images = x.reshape((1, *x.shape)) if single else x
        made = normalization.instance_norm(images, _value(self.weight), _value(self.bias), self.eps)
        return made.reshape(x.shape) if single else made


class InstanceNorm1d(_InstanceNorm):
    """Normalises each channel of each x [n, channels, length] over the length; with `affine` scales
    by `weight` and shifts by `bias`.
    """

    _ndim = 1


class InstanceNorm2d(_InstanceNorm):
    """Normalises each channel of each x [n, channels, h, w] over space; see `InstanceNorm1d`."""

    _ndim = 2


class InstanceNorm3d(_InstanceNorm):
    """Normalises each channel of each x [n, channels, d, h, w] over space; see `InstanceNorm1d`."""

    _ndim = 3


class _BatchNorm(Module):
    _ndims: ClassVar[tuple[int, ...]]
    """Numbers of axes that an input may have."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        if not 0.0 < momentum <= 1.0:
            raise AttributeValueError(
                "the momentum of running statistics is the share of the newest batch",
                got=momentum,
                expected="0 < momentum <= 1",
            )
        self.momentum, self.eps = momentum, eps
        self.weight, self.bias = _affine(num_features, affine, dtype)
        self.tracks = track_running_stats
        if track_running_stats:
            self.running_mean = Buffer((num_features,), dtype, "zeros")
            self.running_var = Buffer((num_features,), dtype, "ones")

    def forward(self, x: Value) -> Value:
        if x.ndim not in self._ndims:
            raise ShapeError(
                f"{type(self).__name__} takes another number of axes",
                got=x.shape,
                expected=" or ".join(map(str, self._ndims)) + " axes",
            )
        if self.training or not self.tracks:
            mean, variance = normalization.batch_statistics(x)
            if self.tracks:
                running = self.running_mean.value, self.running_var.value
                refuse_second_update(running[0], "moving_average_update")
                count = math.prod(x.shape) // x.shape[1]
                keep_statistics(running, (mean, variance), count, self.momentum)
        else:
            mean, variance = self.running_mean.value, self.running_var.value
        return normalization.batch_norm(
            x, _value(self.weight), _value(self.bias), mean, variance, self.eps
        )


def refuse_second_update(state: Value, kind: str) -> None:
    """JobError if the job that is traced updates this variable by an op of this kind already."""
    recorder = current_recorder()
    for op in recorder.ops if isinstance(recorder, JobBuilder) else ():
        if op.kind == kind and op.inputs[0] is state:
            name = recorder.producer(state).attr("name")
            raise JobError(
                f"running statistics {name!r} would be updated twice in a step",
                op=op.name,
                source=recorder.source_line(),
                hint="call the module once in training mode, or join its inputs",
            )


class BatchNorm1d(_BatchNorm):
    """Normalises each channel of x [n, channels] or [n, channels, length] over the rest.

    In training with mean and variance of the batch (the whole one, on any layout), which also go
    into `running_mean` and `running_var` with the weight `momentum`; in `eval` mode with those
    two. A job may call it once in training mode, as each call would be an update.
    """

    _ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Normalises each channel of x [n, channels, h, w] over the rest; see `BatchNorm1d`."""

    _ndims = (4,)


class BatchNorm3d(_BatchNorm):
    """Normalises each channel of x [n, channels, d, h, w] over the rest; see `BatchNorm1d`."""

    _ndims = (5,)


class SyncBatchNorm(_BatchNorm):
    """Normalises each channel of x [n, channels, ...] over the rest. Every batch norm here is over
    the whole batch, on any layout; this is PyTorch's name for it.
    """

    _ndims = (2, 3, 4, 5)
