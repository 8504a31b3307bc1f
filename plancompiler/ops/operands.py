"""Operands of ops in one line: their names, dtypes and shapes.

    "x F, gamma F, mean A, dy F -> dx F, dgamma F"
    "x F n c ..., gamma F c -> y F n c ..., rstd A n groups"

An operand has a name, a dtype, and perhaps a shape, in the words of a rule line (`ops.rule`). A
word stands for one extent everywhere, which is that of the attribute of this name, if there is one
(`shape` for several);
`...` are the same axes everywhere, and `()` is a scalar. Operands without a shape have that of the
sharding rule, if it is a line. Dtypes:

    F I N X    a floating dtype, a whole one, any of numbers, any: one for all with this letter
    f i n p    likewise, but each its own; p is that of a position
    A          that of F, or the one in which F is added up, which outputs have
    int32      this one
    dtype      of outputs: the attribute of this name

An input with `?` may be left out; the last axis of one with `!` has elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plancompiler.errors import ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.check import (
    ANY,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Types,
    expect_dtype,
    expect_same_dtype,
    expect_shape,
)
from plancompiler.ops.rule import parse_rule_line

_KINDS = {
    "F": FLOATS,
    "I": INTEGERS,
    "N": NUMBERS,
    "X": ANY,
    "P": frozenset({DType.INT32, DType.INT64}),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One input or output."""

    name: str
    dtype: str
    shape: tuple[str, ...] | None
    """Words; None where nothing is said of it."""
    optional: bool
    filled: bool

    def accepted(self, inputs: Types) -> frozenset[DType]:
        """The dtypes that it may have beside the first input."""
        if self.dtype == "A":
            return frozenset({inputs[0].dtype, inputs[0].dtype.accumulator})
        return _KINDS.get(self.dtype.upper()) or frozenset({DType.parse(self.dtype)})


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of an op."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @property
    def counts(self) -> Sequence[int]:
        """How many inputs there may be."""
        optional = sum(operand.optional for operand in self.inputs)
        return tuple(range(len(self.inputs) - optional, len(self.inputs) + 1))

    def check(
        self, kind: str, inputs: Types, attrs: Mapping[str, Any]
    ) -> tuple[dict[str, DType], dict[str, tuple[Any, ...]]]:
        """The dtype of each letter and the extents of each word; DTypeError or ShapeError for
        inputs that the op does not take.
        """
        pairs = list(zip(self.inputs, inputs, strict=False))
        dtypes: dict[str, DType] = {}
        for operand, tensor in pairs:
            expect_dtype(kind, tensor, operand.accepted(inputs), operand.name)
            if operand.dtype in _KINDS:
                same = tuple(each for one, each in pairs if one.dtype == operand.dtype)
                dtypes[operand.dtype] = expect_same_dtype(kind, same)
        extents: dict[str, tuple[Any, ...]]
        extents = {"1": (1,), **{name: (value,) for name, value in attrs.items()}}
        extents["shape"] = attrs.get("shape", ())
        for operand, tensor in pairs:
            if operand.shape is not None:
                _fit(kind, operand, tensor, extents)
        return dtypes, extents

    def results(self, kind: str, inputs: Types, attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """The outputs that follow; errors as of `check`."""
        dtypes, extents = self.check(kind, inputs, attrs)
        dtypes["A"] = inputs[0].dtype.accumulator if inputs else DType.FLOAT32

        def made() -> Iterator[TensorType]:
            for operand in self.outputs:
                dtype = attrs["dtype"] if operand.dtype == "dtype" else dtypes.get(operand.dtype)
                shape = sum((extents[word] for word in operand.shape or ()), ())
                yield TensorType(shape, dtype or DType.parse(operand.dtype))

        return tuple(made())


def _fit(
    kind: str, operand: Operand, tensor: TensorType, extents: dict[str, tuple[Any, ...]]
) -> None:
    """Learn extents of words from a shape, which must have those that are known."""
    words, shape = operand.shape or (), tensor.shape
    least = len(words) - words.count("...")
    spread = len(shape) - least
    if "..." in extents and "..." in words:
        least += len(extents["..."])
        fits = len(shape) == least
    else:
        fits = spread == 0 or (spread > 0 and "..." in words)
    if not fits:
        more = "at least " if "..." in words and "..." not in extents else ""
        raise ShapeError(
            f"{kind} needs another number of axes on its {operand.name}",
            got=shape,
            expected=f"{more}{least} axes [{', '.join(words)}]",
        )
    wanted: tuple[int, ...] = ()
    for word in words:
        seen = shape[len(wanted) : len(wanted) + (spread if word == "..." else 1)]
        wanted += extents.setdefault(word, seen)
    expect_shape(kind, tensor, wanted, operand.name)
    if operand.filled and shape[-1] == 0:
        raise ShapeError(f"{kind} over an empty axis has no value", got=shape)


@lru_cache(maxsize=1024)
def parse_operands(line: str, rule: str | None) -> Operands:
    """The operands that a line describes, beside the op's sharding rule if that is a line."""

    def side(text: str, shapes: Sequence[tuple[str, ...] | None]) -> Iterator[Operand]:
        for part, known in zip(text.split(","), shapes, strict=False):
            name, dtype, *words = part.replace("?", "").replace("!", "").split()
            shape = known if not words else () if words == ["()"] else tuple(words)
            plain = None if shape is None else tuple(word.strip("[]") for word in shape)
            yield Operand(name, dtype, plain, "?" in part, "!" in part)

    left, _, right = line.partition("->")
    none = (None,) * len(line)
    known = (none, none) if rule is None else parse_rule_line(rule)
    return Operands(
        tuple(side(left, known[0])) if left.strip() else (),
        tuple(side(right, known[1])) if right.strip() else (),
    )
