"""Learning rates over steps. Jobs compute those of a `Schedule` inside, once per placement; other
functions of the step are evaluated on the host, and their values fed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plancompiler.errors import AttributeValueError, UsageError
from plancompiler.ir import AttrValue
from plancompiler.ir.arguments import real_number, whole_number
from plancompiler.ir.source import user_line
from plancompiler.ops.structural import learning_rate_at


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

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if self.kind == "constant" and step >= self.warmup:
            return self.base
        return learning_rate_at(step, self.attrs)

    @property
    def attrs(self) -> dict[str, AttrValue]:
        """The attributes of the `learning_rate` op that computes it."""
        return {
            "schedule": self.kind,
            "base": self.base,
            "warmup": self.warmup,
            "total": self.total,
            "final": self.final,
        }


Rate = float | Schedule | Callable[[int], float]
"""What users give as a learning rate: a number, a schedule, or any function of the step."""


def schedule_of(rate: Rate) -> Callable[[int], float]:
    """A learning rate as a function of the step: a `Schedule`, or the user's function."""
    if isinstance(rate, Schedule):
        return rate
    if callable(rate):
        return rate
    if isinstance(rate, (list, tuple)):
        raise UsageError(
            "a learning rate must be a finite number, a schedule or a function of the step",
            source=user_line(),
            got=type(rate).__name__,
            hint="parameters come first: pc.optim.SGD(model.parameters(), lr=0.1)",
        )
    number = real_number("a learning rate", rate)
    if number < 0:
        raise AttributeValueError(
            "a learning rate must not be negative", source=user_line(), got=number
        )
    return constant(number)


def rate_at(schedule: Callable[[int], float], step: int) -> float:
    """The rate of a step. UsageError where the user's function gives none."""
    if isinstance(schedule, Schedule):
        return schedule(step)
    value = schedule(step)
    try:
        number = real_number("a learning rate", value)
    except UsageError:
        number = math.nan
    if not number >= 0:
        raise UsageError(
            f"the learning rate's function gave no rate for step {step}",
            source=user_line(),
            got=repr(value)[:80],
            expected="a finite number that is not negative",
        )
    return number


def fed_rate(optimizer: int) -> dict[str, AttrValue]:
    """The attributes of a `learning_rate` op whose values come from outside, for the optimizer of
    this number.
    """
    return {"schedule": "fed", "base": 0.0, "optimizer": optimizer}


def constant(base: float, warmup: int = 0) -> Schedule:
    """From 0 to `base` in a straight line over `warmup` steps, then `base`."""
    return _schedule("constant", base, warmup)


def linear(base: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm-up to `base`, then a straight line to `final` at step `total`, and `final` from there
    on.
    """
    return _schedule("linear", base, warmup, total, final)


def cosine(base: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm-up to `base`, then half a cosine down to `final` at step `total`, and `final` from
    there.
    """
    return _schedule("cosine", base, warmup, total, final)


def _schedule(kind: str, base: float, warmup: int, total: int = 0, final: float = 0.0) -> Schedule:
    return Schedule(
        kind,
        real_number("a learning rate", base),
        whole_number("warmup", warmup),
        whole_number("total", total),
        real_number("final", final),
    )
