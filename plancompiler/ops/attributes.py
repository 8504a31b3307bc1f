"""Attributes of ops: their names, the values that each accepts, and what it is when not given.

An `OpDef` lists its attributes with these types. From that one list follow the checks when an op is
recorded or read from a file, the values that shape rules, sharding rules and kernels are given
(complete, numbers as floats, dtypes as `DType`), and what `plancompiler ops` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import AttrValue, TensorType

REQUIRED: Any = object()
"""The default of an attribute that must be given."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute; any plain value is accepted."""

    name: str
    default: Any = REQUIRED
    wanted: ClassVar[str] = "a value"
    types: ClassVar[tuple[type, ...]] = (object,)

    def expected(self, inputs: Sequence[TensorType]) -> str:
        """The accepted values, as an error names them."""
        return self.wanted

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        """Whether this is a legal value for an op with inputs of these types."""
        return isinstance(value, self.types)

    def read(self, value: Any) -> Any:
        """A legal value as rules and kernels are given it."""
        return value

    def check(self, attrs: Mapping[str, AttrValue], inputs: Sequence[TensorType]) -> None:
        """Raise AttributeValueError where the attribute is missing or has an illegal value."""
        if self.name not in attrs:
            if self.default is REQUIRED:
                raise AttributeValueError(
                    f"attribute {self.name!r} is missing", expected=self.expected(inputs)
                )
        elif not self.accepts(attrs[self.name], inputs):
            raise AttributeValueError(
                f"attribute {self.name!r} has a wrong value",
                got=repr(attrs[self.name]),
                expected=self.expected(inputs),
            )

    def __str__(self) -> str:
        given = "" if self.default is REQUIRED else f" = {self.default!r}"
        return f"{self.name}: {type(self).__name__}{given}"


@dataclass(frozen=True, slots=True)
class Bool(Attribute):
    """A truth value."""

    wanted = "True or False"
    types = (bool,)


@dataclass(frozen=True, slots=True)
class Number(Attribute):
    """A truth value, a whole number or a float, kept as it is."""

    wanted = "a plain number"
    types = (bool, int, float)


@dataclass(frozen=True, slots=True)
class Int(Attribute):
    """A whole number, not below `least`."""

    least: int | None = None

    def expected(self, inputs: Sequence[TensorType]) -> str:
        return "a whole number" + ("" if self.least is None else f" of at least {self.least}")

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return type(value) is int and (self.least is None or value >= self.least)


@dataclass(frozen=True, slots=True)
class Float(Attribute):
    """A number with `least <= number < below`."""

    least: float | None = None
    below: float | None = None
    exact: bool = False
    """Whether whole numbers are read as such."""

    def expected(self, inputs: Sequence[TensorType]) -> str:
        least = "" if self.least is None else f" of at least {self.least:g}"
        return f"a number{least}" + ("" if self.below is None else f" below {self.below:g}")

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        # Comparisons are written so that NaN fails them.
        return (
            type(value) in (int, float)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
        )

    def read(self, value: Any) -> Any:
        return value if value is None or self.exact else float(value)


@dataclass(frozen=True, slots=True)
class Text(Attribute):
    """A text, one of `among`."""

    among: Sequence[str] | None = None

    def expected(self, inputs: Sequence[TensorType]) -> str:
        return "a text" if self.among is None else "one of " + ", ".join(self.among)

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return isinstance(value, str) and (self.among is None or value in self.among)


@dataclass(frozen=True, slots=True)
class Dtype(Text):
    """A dtype by its name."""

    def read(self, value: Any) -> Any:
        return DType.parse(value)


@dataclass(frozen=True, slots=True)
class _Several(Attribute):
    """A tuple of values of these types."""

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return isinstance(value, tuple) and all(type(item) in self.types for item in value)


@dataclass(frozen=True, slots=True)
class Texts(_Several):
    """A tuple of at least `least` texts."""

    least: int = 0
    types = (str,)

    def expected(self, inputs: Sequence[TensorType]) -> str:
        return f"a tuple of at least {self.least} texts" if self.least else "a tuple of texts"

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return _Several.accepts(self, value, inputs) and len(value) >= self.least


@dataclass(frozen=True, slots=True)
class Floats(_Several):
    """A tuple of numbers."""

    wanted = "a tuple of numbers"
    types = (int, float)

    def read(self, value: Any) -> Any:
        return None if value is None else tuple(map(float, value))


@dataclass(frozen=True, slots=True)
class Ints(_Several):
    """A tuple of whole numbers."""

    wanted = "a tuple of whole numbers"
    types = (int,)


@dataclass(frozen=True, slots=True)
class Shape(Ints):
    """A tensor's shape."""

    name: str = "shape"
    wanted = "extents of at least 0"

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return Ints.accepts(self, value, inputs) and min(value, default=0) >= 0


@dataclass(frozen=True, slots=True)
class Axis(Attribute):
    """An axis of input `of`, counted from the front."""

    name: str = "axis"
    of: int = 0

    def expected(self, inputs: Sequence[TensorType]) -> str:
        ndim = len(inputs[self.of].shape)
        return f"an axis from 0 to {ndim - 1}" if ndim else "a tensor with axes"

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return type(value) is int and 0 <= value < len(inputs[self.of].shape)


@dataclass(frozen=True, slots=True)
class Axes(Ints):
    """Distinct axes of the first input, in any order."""

    name: str = "axes"

    def expected(self, inputs: Sequence[TensorType]) -> str:
        return f"distinct axes from 0 to {len(inputs[0].shape) - 1}"

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        return (
            Ints.accepts(self, value, inputs)
            and len(set(value)) == len(value)
            and all(0 <= axis < len(inputs[0].shape) for axis in value)
        )


@dataclass(frozen=True, slots=True)
class Like(Attribute):
    """A value of its default's type."""

    def expected(self, inputs: Sequence[TensorType]) -> str:
        return f"a {type(self.default).__name__}, like its default {self.default!r}"

    def accepts(self, value: Any, inputs: Sequence[TensorType]) -> bool:
        types = type(self.default), type(value)
        return types[0] is types[1] or types == (float, int)


class Recorded(dict[str, Any]):
    """Attributes as an op records them; what it does not record reads as its default.

    Gradients are given these, so that `apply(kind, x, dy, **attrs)` records no default.
    """

    __slots__ = ("schema",)

    def __init__(self, attrs: Mapping[str, AttrValue], schema: Sequence[Attribute]) -> None:
        super().__init__(attrs)
        self.schema = schema

    def __missing__(self, name: str) -> Any:
        for attribute in self.schema:
            if attribute.name == name and attribute.default is not REQUIRED:
                return attribute.default
        raise KeyError(name)


def check_attributes(
    kind: str,
    schema: Sequence[Attribute],
    attrs: Mapping[str, AttrValue],
    inputs: Sequence[TensorType],
) -> None:
    """Raise AttributeValueError unless an op may have these attributes on these inputs."""
    if not schema and not attrs:
        return
    names = [attribute.name for attribute in schema]
    for name in attrs:
        if name not in names:
            raise AttributeValueError(
                f"{kind} has no attribute {name!r}",
                got=f"{name}={attrs[name]!r}",
                expected="only " + ", ".join(names) if names else "no attributes",
            )
    for attribute in schema:
        attribute.check(attrs, inputs)


def complete(schema: Sequence[Attribute], attrs: Mapping[str, AttrValue]) -> dict[str, Any]:
    """Checked attributes as rules and kernels are given them: with defaults, as read."""
    completed = {}
    for attribute in schema:
        value = attrs.get(attribute.name, attribute.default)
        if value is not REQUIRED:
            completed[attribute.name] = attribute.read(value)
    return completed
