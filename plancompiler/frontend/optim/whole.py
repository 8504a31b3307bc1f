"""Optimizers that scale a step by norms of the whole parameter, however it is split: sums of
squares are partial on each device, and reduced as scalars or vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plancompiler.frontend.functions.training import adafactor_update, lamb_update
from plancompiler.frontend.optim.eager import Parameters
from plancompiler.frontend.optim.optimizer import Optimizer, State
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.frontend.trace import JobBuilder
from plancompiler.ir import BROADCAST, NdSbp, Sbp, Split, Value
from plancompiler.ir.arguments import number_pair, real_number


class LAMB(Optimizer):
    """LAMB (Y. You et al., 2020): Adam's step with decoupled weight decay, scaled per parameter by
    the norm of the parameter over that of the step.
    """

    def __init__(
        self,
        lr: Rate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, parameters)
        self.betas = number_pair("betas", betas)
        self.eps = real_number("eps", eps)

    def states_of(self, value: Value, sbp: NdSbp | None) -> Iterable[State]:
        return [(suffix, value.shape, sbp) for suffix in ("lamb_m", "lamb_v")]

    def append_update(
        self, builder: JobBuilder, value: Value, grad: Value, states: Sequence[Value], rate: Value
    ) -> None:
        first, second = states
        lamb_update(value, grad, first, second, rate, self.betas, self.eps, self.weight_decay)


class Adafactor(Optimizer):
    """Adafactor (N. Shazeer and M. Stern, 2018), without momentum.

    The second moment of a matrix [..., r, c] is kept as that of its rows and of its columns. Steps
    are clipped so that their root mean square is at most `clip`. With `relative` the learning rate
    is a share of the parameter's root mean square, or of eps[1] where that is greater; eps[0] is
    added to squares. Moments decay by 1 - (step + 1) ** -decay_power.
    """

    def __init__(
        self,
        lr: Rate,
        decay_power: float = 0.8,
        clip: float = 1.0,
        relative: bool = True,
        eps: tuple[float, float] = (1e-30, 1e-3),
        weight_decay: float = 0.0,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, parameters)
        self.decay_power = real_number("decay_power", decay_power)
        self.clip = real_number("clip", clip)
        self.relative = relative
        self.eps = number_pair("eps", eps)

    def states_of(self, value: Value, sbp: NdSbp | None) -> Iterable[State]:
        shape, last = value.shape, value.ndim - 1
        if last < 1:
            return [("adafactor_v", shape, sbp)]
        return [
            ("adafactor_rows", shape[:-1], _without(sbp, last)),
            ("adafactor_columns", (*shape[:-2], shape[-1]), _without(sbp, last - 1)),
        ]

    def append_update(
        self, builder: JobBuilder, value: Value, grad: Value, states: Sequence[Value], rate: Value
    ) -> None:
        adafactor_update(
            value,
            grad,
            states,
            rate,
            self.decay_power,
            self.clip,
            self.relative,
            self.eps,
            self.weight_decay,
        )


def _without(sbp: NdSbp | None, axis: int) -> NdSbp | None:
    """The layout of a tensor that lacks an axis of one with this layout."""

    def entry(given: Sbp) -> Sbp:
        if not isinstance(given, Split) or given.axis < axis:
            return given
        return BROADCAST if given.axis == axis else Split(given.axis - 1)

    return None if sbp is None else NdSbp(tuple(map(entry, sbp.entries)))
