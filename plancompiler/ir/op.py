"""Values, ops and the tensor types between them: the leaf types of the IR."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ir.sbp import NdSbp, Sbp

AttrValue = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""What an op's attribute may be: plain data that has one text form and one wire form."""
Attrs = tuple[tuple[str, AttrValue], ...]
"""Attributes sorted by name."""


def freeze_attrs(attrs: Mapping[str, AttrValue]) -> Attrs:
    """A mapping as sorted pairs."""
    return tuple(sorted(attrs.items()))


class TensorType(NamedTuple):
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The user's line that made an op."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN_SOURCE = SourceLine("", 0)


class Phase(enum.Enum):
    """The part of a training step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Traced by differentiation: the gradient's seed and all that follows from it."""
    UPDATE = "update"
    """Traced by an optimizer besides the gradients: what changes variables."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Origin:
    """What of the user's program made an op; passes decide by it."""

    phase: Phase = Phase.FORWARD
    region: str = ""
    """The call of a module or function that may be computed again for backward; empty outside."""
    checkpoint: bool = False
    """Whether the user asked for that (`pc.checkpoint`)."""
    stage: int = -1
    """The pipeline stage that the user named (`pc.stage`); -1 where placements decide."""

    def __str__(self) -> str:
        """`forward region="block 0" checkpoint stage=1`, with what is not the default."""
        region = f" region={json.dumps(self.region)}" if self.region else ""
        stage = f" stage={self.stage}" if self.stage >= 0 else ""
        return f"{self.phase}{region}{' checkpoint' * self.checkpoint}{stage}"


NO_ORIGIN = Origin()
"""Of ops outside all that Origin tells apart."""


@dataclass(frozen=True, slots=True)
class Micro:
    """An op's place in a step of several micro-batches.

    Micro-batches are a mesh axis in time: along it a value is split (a piece per micro-batch),
    partial (each adds its part) or broadcast (the same for all).
    """

    segment: int
    """Index into the segments of the job's pipeline."""
    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    def __str__(self) -> str:
        """`segment 1: [S(0), B] -> [S(0)]`."""
        return f"segment {self.segment}: {NdSbp(self.inputs)} -> {NdSbp(self.outputs)}"


_PLAIN_TYPES = frozenset({bool, int, float, str})


def plain_value(name: str, value: object) -> AttrValue:
    """An attribute as plain data: tuples for lists, built-in types for NumPy numbers and enums."""
    if type(value) in _PLAIN_TYPES:
        return cast("AttrValue", value)
    if type(value) is tuple and _PLAIN_TYPES.issuperset(map(type, value)):
        return value
    if isinstance(value, (tuple, list)):
        return cast("AttrValue", tuple(plain_value(name, item) for item in value))
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain_value(name, value.item())
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    raise AttributeValueError(
        f"attribute {name!r} is not plain data",
        got=type(value).__name__,
        expected="a number, a string, or a tuple of one of them",
    )
