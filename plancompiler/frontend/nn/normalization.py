"""Normalisation beside `LayerNorm`. Each scales by `weight` and shifts by `bias`."""

from __future__ import annotations

import math
from typing import ClassVar

from plancompiler.errors import AttributeValueError, JobError, ShapeError
from plancompiler.frontend.functions import normalization
from plancompiler.frontend.functions.training import moving_average_update
from plancompiler.frontend.nn.module import Buffer, Module, Parameter
from plancompiler.frontend.trace import JobBuilder, current_recorder
from plancompiler.ir import DType, Phase, Value


class RMSNorm(Module):
    """Divides the last axis (of extent `dim`) by the root of its mean square, then scales by
    `weight`.
    """

    def __init__(self, dim: int, eps: float = 1e-5, dtype: DType | str = "float32") -> None:
        self.eps = eps
        self.weight = Parameter((dim,), dtype, "ones")

    def forward(self, x: Value) -> Value:
        return normalization.rms_norm(x, self.weight.value, self.eps)


class GroupNorm(Module):
    """Normalises x [n, channels, *spatial] over each of `groups` groups of channels and space."""

    def __init__(
        self, groups: int, channels: int, eps: float = 1e-5, dtype: DType | str = "float32"
    ) -> None:
        if groups < 1 or channels % groups:
            raise AttributeValueError(
                "the groups must divide the channels evenly",
                got=f"{channels} channels in {groups} groups",
            )
        self.groups, self.eps = groups, eps
        self.weight = Parameter((channels,), dtype, "ones")
        self.bias = Parameter((channels,), dtype, "zeros")

    def forward(self, x: Value) -> Value:
        return normalization.group_norm(
            x, self.groups, self.weight.value, self.bias.value, self.eps
        )


class _BatchNorm(Module):
    _ndims: ClassVar[tuple[int, ...]]
    """Numbers of axes that an input may have."""

    def __init__(
        self,
        channels: int,
        momentum: float = 0.1,
        eps: float = 1e-5,
        dtype: DType | str = "float32",
    ) -> None:
        if not 0.0 < momentum <= 1.0:
            raise AttributeValueError(
                "the momentum of running statistics is the share of the newest batch",
                got=momentum,
                expected="0 < momentum <= 1",
            )
        self.momentum, self.eps = momentum, eps
        self.weight = Parameter((channels,), dtype, "ones")
        self.bias = Parameter((channels,), dtype, "zeros")
        self.running_mean = Buffer((channels,), dtype, "zeros")
        self.running_variance = Buffer((channels,), dtype, "ones")

    def forward(self, x: Value) -> Value:
        if x.ndim not in self._ndims:
            raise ShapeError(
                f"{type(self).__name__} takes another number of axes",
                got=x.shape,
                expected=" or ".join(map(str, self._ndims)) + " axes",
            )
        if self.training:
            mean, variance = normalization.batch_statistics(x)
            self._keep(x, mean, variance)
        else:
            mean, variance = self.running_mean.value, self.running_variance.value
        return normalization.batch_norm(
            x, self.weight.value, self.bias.value, mean, variance, self.eps
        )

    def _keep(self, x: Value, mean: Value, variance: Value) -> None:
        """Append the updates of the running statistics."""
        recorder = current_recorder()
        refuse_second_update(self.running_mean.value, "moving_average_update")
        count = math.prod(x.shape) // x.shape[1]
        with recorder.phase(Phase.UPDATE):
            # The variance of a batch is around its own mean, and so too small by this factor.
            unbiased = variance * (count / max(1, count - 1))
            for kept, new in ((self.running_mean, mean), (self.running_variance, unbiased)):
                state = kept.value
                seen = new if new.dtype is state.dtype else new.cast(state.dtype)
                moving_average_update(state, seen, decay=1.0 - self.momentum)


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
    into `running_mean` and `running_variance` with the weight `momentum`; in `eval` mode with those
    two. A job may call it once in training mode, as each call would be an update.
    """

    _ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Normalises each channel of x [n, channels, h, w] over the rest; see `BatchNorm1d`."""

    _ndims = (4,)
