"""Optimizers that scale a step by norms of the whole parameter, however it is split: sums of
squares are partial on each device, and reduced as scalars or vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plancompiler.frontend.functions.training import adafactor_update, square_sums
from plancompiler.frontend.optim.elementwise import Given
from plancompiler.frontend.optim.optimizer import (
    FormulaOptimizer,
    Optimizer,
    State,
    attributes_of,
    check_numbers,
)
from plancompiler.frontend.optim.parameter_group import Parameters
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.frontend.trace import JobBuilder
from plancompiler.ir import BROADCAST, NdSbp, Sbp, Split, Value
from plancompiler.ops.registry import apply


class LARS(FormulaOptimizer):
    """LARS (Y. You, I. Gitman, B. Ginsburg, 2017): SGD with momentum, whose rate is multiplied per
    parameter with trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), or 1 where a norm is
    zero.
    """

    prefix = "lars"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            maximize=maximize,
        )

    def kind(self, numbers: Mapping[str, Any]) -> str:
        return "lars_update"

    def append_update(
        self,
        builder: JobBuilder,
        value: Value,
        grad: Value,
        states: Sequence[Value],
        rate: Value,
        numbers: Mapping[str, Any],
    ) -> None:
        attrs = attributes_of("lars_update", numbers)
        apply("lars_update", value, grad, *states, *square_sums(value, grad), rate, **attrs)

    # Each has norms of its own: their updates cannot be made together.
    update_all = Optimizer.update_all


class LAMB(Optimizer):
    """LAMB (Y. You et al., 2020): Adam's step with decoupled weight decay, scaled per parameter by
    the norm of the parameter over that of the step.
    """

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )

    def states_of(
        self, value: Value, sbp: NdSbp | None, numbers: Mapping[str, Any]
    ) -> Iterable[State]:
        return [(suffix, value.shape, sbp) for suffix in ("lamb_m", "lamb_v")]

    def check(self, numbers: Mapping[str, Any]) -> None:
        check_numbers("lamb_direction", numbers)

    def append_update(
        self,
        builder: JobBuilder,
        value: Value,
        grad: Value,
        states: Sequence[Value],
        rate: Value,
        numbers: Mapping[str, Any],
    ) -> None:
        attrs = attributes_of("lamb_direction", numbers)
        direction = apply("lamb_direction", value, grad, *states, **attrs)[0]
        apply("lamb_update", value, direction, *square_sums(value, direction), rate)


class Adafactor(Optimizer):
    """Adafactor (N. Shazeer and M. Stern, 2018), without momentum.

    The second moment of a matrix [..., r, c] is kept as that of its rows and of its columns. Steps
    are clipped so that their root mean square is at most `clip`. With `relative` the learning rate
    is a share of the parameter's root mean square, or of eps[1] where that is greater; eps[0] is
    added to squares. Moments decay by 1 - (step + 1) ** -decay_power.
    """

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-2,
        decay_power: float = 0.8,
        clip: float = 1.0,
        relative: bool = True,
        eps: tuple[float, float] = (1e-30, 1e-3),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            decay_power=decay_power,
            clip=clip,
            relative=relative,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )

    def states_of(
        self, value: Value, sbp: NdSbp | None, numbers: Mapping[str, Any]
    ) -> Iterable[State]:
        shape, last = value.shape, value.ndim - 1
        if last < 1:
            return [("adafactor_v", shape, sbp)]
        return [
            ("adafactor_rows", shape[:-1], _without(sbp, last)),
            ("adafactor_columns", (*shape[:-2], shape[-1]), _without(sbp, last - 1)),
        ]

    def append_update(
        self,
        builder: JobBuilder,
        value: Value,
        grad: Value,
        states: Sequence[Value],
        rate: Value,
        numbers: Mapping[str, Any],
    ) -> None:
        adafactor_update(value, grad, states, rate, **numbers)


def _without(sbp: NdSbp | None, axis: int) -> NdSbp | None:
    """The layout of a tensor that lacks an axis of one with this layout."""

    def entry(given: Sbp) -> Sbp:
        if not isinstance(given, Split) or given.axis < axis:
            return given
        return BROADCAST if given.axis == axis else Split(given.axis - 1)

    return None if sbp is None else NdSbp(tuple(map(entry, sbp.entries)))
