"""Normalisation by all batches that were seen so far."""

from __future__ import annotations

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.data_norm import data_norm, data_norm_update
from plancompiler.frontend.nn.module import Buffer, Module
from plancompiler.frontend.nn.normalization import refuse_second_update
from plancompiler.frontend.trace import current_recorder
from plancompiler.ir import DType, Phase, Value


class DataNorm(Module):
    """Normalises each channel of x [n, channels, ...] by the batches of all earlier steps.

    `batch_count`, `batch_sum` and `batch_square_sum` decay by `decay` in each step of training and
    take the batch's means in; see `pc.data_norm_update`. They start as if `initial_count` batches
    of mean 0 and variance 1 had been seen. The batch is the whole one on any layout; with `groups`
    it is cut into balanced groups of rows, each with statistics of its own, and where these are
    split over as many devices nothing is exchanged. A job may call it once in training mode.
    """

    def __init__(
        self,
        channels: int,
        groups: int | None = None,
        decay: float = 0.9999999,
        eps: float = 1e-4,
        initial_count: float = 1e4,
        dtype: DType | str = "float32",
    ) -> None:
        if groups is not None and groups < 1:
            raise AttributeValueError(
                "DataNorm needs at least one group", got=groups, expected="None or at least 1"
            )
        if not initial_count > 0:
            raise AttributeValueError(
                "DataNorm starts from some batches", got=initial_count, expected="more than 0"
            )
        self.decay, self.eps = decay, eps
        shape = (channels,) if groups is None else (groups, channels)
        self.batch_count = Buffer(shape, dtype, "constant", (initial_count,))
        self.batch_sum = Buffer(shape, dtype, "zeros")
        self.batch_square_sum = Buffer(shape, dtype, "constant", (initial_count,))

    def forward(self, x: Value) -> Value:
        states = (self.batch_count.value, self.batch_sum.value, self.batch_square_sum.value)
        normalized = data_norm(x, *states)
        if self.training:
            refuse_second_update(states[0], "decayed_sum_update")
            with current_recorder().phase(Phase.UPDATE):
                data_norm_update(x, *states, decay=self.decay, eps=self.eps)
        return normalized
