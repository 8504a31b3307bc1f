"""Learning rates over steps. They are computed inside the job, once per placement."""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.errors import AttributeValueError
from plancompiler.ir import AttrValue
from plancompiler.ir.arguments import real_number, whole_number


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
