"""Optimizers: they differentiate a loss and append the update of every parameter to the job.

A schedule gives the learning rate as a function of the step; it is computed inside the job, once
per placement. State (momentum, moments) lives in variables named after their parameter, on the
same devices and with the same SBP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plancompiler.errors import AttributeValueError, GradientError, UsageError
from plancompiler.frontend.autodiff import gradients
from plancompiler.frontend.nn.module import Parameter
from plancompiler.frontend.trace import JobBuilder, current_builder
from plancompiler.ir import AttrValue, DType, Op, Phase, Value


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate over steps; made by `constant`, `linear` and `cosine`."""

    kind: str
    base: float
    warmup: int = 0
    total: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0 or (self.kind != "constant" and self.total <= self.warmup):
            raise AttributeValueError(
                "a schedule warms up for some steps and then decays until `total`",
                got=f"warmup={self.warmup}, total={self.total}",
                expected="0 <= warmup < total",
            )


def constant(base: float, warmup: int = 0) -> Schedule:
    """From 0 to `base` in a straight line over `warmup` steps, then `base`."""
    return Schedule("constant", float(base), warmup)


def linear(base: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm-up to `base`, then a straight line to `final` at step `total`, and `final` from there
    on.
    """
    return Schedule("linear", float(base), warmup, total, float(final))


def cosine(base: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm-up to `base`, then half a cosine down to `final` at step `total`, and `final` from
    there.
    """
    return Schedule("cosine", float(base), warmup, total, float(final))


class Optimizer(ABC):
    """Base of the optimizers. `lr` is a number or a schedule."""

    states: Sequence[str] = ()
    """Suffixes of the state variables of a parameter."""

    def __init__(self, lr: float | Schedule, weight_decay: float = 0.0) -> None:
        self.schedule = lr if isinstance(lr, Schedule) else constant(lr)
        self.weight_decay = float(weight_decay)

    def minimize(
        self, loss: Value, parameters: Iterable[Parameter | Value] | None = None
    ) -> list[Value]:
        """Append the gradients of `loss` and the update of each parameter; returns the gradients.

        `parameters` defaults to all trainable parameters that the job has read so far. Raises
        GradientError for a loss that is no floating scalar and for a parameter that does not
        influence it (freeze it if that is meant).
        """
        builder = current_builder()
        variables = _variables(builder, parameters)
        found: list[Value] = []
        for value, grad in zip(variables, gradients(loss, variables), strict=True):
            op = builder.producer(value)
            if grad is None:
                raise GradientError(
                    f"parameter {op.attr('name')!r} does not influence the loss",
                    op=op.name,
                    source=builder.source_line(),
                    hint="freeze it, or leave it out of `parameters`",
                )
            found.append(grad)
        self.apply(variables, found)
        return found

    def apply(self, parameters: Iterable[Parameter | Value], gradients: Sequence[Value]) -> None:
        """Append the update of each parameter by a gradient that the caller made, in the same
        order: one of `pc.gradients`, scaled, clipped or summed.

        Raises UsageError where their numbers or types differ.
        """
        builder = current_builder()
        variables = _variables(builder, parameters)
        if [value.type for value in variables] != [grad.type for grad in gradients]:
            raise UsageError(
                "every parameter needs a gradient of its shape and dtype",
                source=builder.source_line(),
                got=", ".join(str(grad.type) for grad in gradients) or "no gradient",
                expected=", ".join(str(value.type) for value in variables),
            )
        with builder.phase(Phase.UPDATE):
            for value, grad in zip(variables, gradients, strict=True):
                self._append_update(builder, builder.producer(value), value, grad)

    def _append_update(self, builder: JobBuilder, op: Op, value: Value, grad: Value) -> None:
        rate = builder.source(value.placement, "learning_rate", self._rate_attrs())[0]
        states = [
            builder.add(
                "variable",
                (),
                {
                    "name": f"{op.attr('name')}.{suffix}",
                    "shape": value.shape,
                    "dtype": str(value.dtype),
                    "init": "zeros",
                    "init_args": (),
                    "trainable": False,
                },
                value.placement,
                op.sbp,
            )[0]
            for suffix in self.states
        ]
        kind, attrs = self._update()
        builder.add(kind, (value, grad, *states, rate), attrs, value.placement, op.sbp)

    def _rate_attrs(self) -> dict[str, AttrValue]:
        schedule = self.schedule
        return {
            "schedule": schedule.kind,
            "base": schedule.base,
            "warmup": schedule.warmup,
            "total": schedule.total,
            "final": schedule.final,
        }

    @abstractmethod
    def _update(self) -> tuple[str, dict[str, AttrValue]]:
        """Kind and attributes of the update, whose inputs are parameter, gradient, states, rate."""


class SGD(Optimizer):
    """Stochastic gradient descent: w -= lr * (g + weight_decay * w).

    With momentum, m = momentum * m + g replaces g; Nesterov's form looks ahead by g + momentum * m.
    """

    def __init__(
        self,
        lr: float | Schedule,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay)
        if nesterov and momentum == 0.0:
            raise UsageError("Nesterov's method needs a momentum", got="momentum=0")
        self.momentum = float(momentum)
        self.nesterov = nesterov
        self.states = ("momentum",) if self.momentum else ()

    def _update(self) -> tuple[str, dict[str, AttrValue]]:
        if not self.momentum:
            return "sgd_update", {"weight_decay": self.weight_decay}
        return "momentum_update", {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient."""

    states = ("adam_m", "adam_v")
    decoupled = False

    def __init__(
        self,
        lr: float | Schedule,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = float(eps)

    def _update(self) -> tuple[str, dict[str, AttrValue]]:
        return "adam_update", {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
        }


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): w shrinks by lr *
    weight_decay.
    """

    decoupled = True

    def __init__(
        self,
        lr: float | Schedule,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)


def _variables(builder: JobBuilder, parameters: Iterable[Parameter | Value] | None) -> list[Value]:
    """The values of the parameters to update, each once."""
    if parameters is None:
        found = [
            op.outputs[0]
            for op in builder.ops
            if op.kind == "variable" and op.attr("trainable") is True
        ]
    else:
        found = []
        for each in parameters:
            if isinstance(each, Parameter) and not each.trainable:
                continue
            value = each.value if isinstance(each, Parameter) else each
            op = builder.producer(value)
            if op.kind != "variable":
                raise UsageError(
                    "only parameters can be updated",
                    op=op.name,
                    source=builder.source_line(),
                    got=str(value),
                )
            if all(value is not other for other in found):
                found.append(value)
    not_floating = [value for value in found if not value.dtype.is_floating]
    if not_floating:
        raise GradientError(
            "a trainable parameter must be floating",
            got=str(not_floating[0]),
            expected=DType.FLOAT32,
        )
    if not found:
        raise UsageError("there is no trainable parameter to update", source=builder.source_line())
    return found
