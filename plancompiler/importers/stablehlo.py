"""StableHLO programs as plain data: what a parser of MLIR makes, and what `stablehlo_reader` reads.

Attributes whose form is a text of their own (`#stablehlo.dot<...>`) are parsed here, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plancompiler.ir import DType, NdSbp, SourceLine, Split, TensorType
from plancompiler.ir.sbp import BROADCAST

DTYPES = {
    "i1": DType.BOOL,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "ui8": DType.UINT8,
    "ui16": DType.UINT16,
    "ui32": DType.UINT32,
    "ui64": DType.UINT64,
    "f16": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "f32": DType.FLOAT32,
    "f64": DType.FLOAT64,
}
"""Element types by their names in MLIR."""


@dataclass(frozen=True, slots=True)
class HloOp:
    """One operation."""

    name: str
    """With its dialect, such as `stablehlo.add`."""
    operands: tuple[int, ...]
    """Numbers of the values that it reads."""
    results: tuple[int, ...]
    types: tuple[TensorType | str, ...]
    """Of the results; the text of a type that has no counterpart here."""
    attrs: Mapping[str, Any]
    regions: tuple[HloBlock, ...]
    source: SourceLine


@dataclass(frozen=True, slots=True)
class HloBlock:
    """Operations in order. The last one returns."""

    arguments: tuple[int, ...]
    ops: tuple[HloOp, ...]


@dataclass(frozen=True, slots=True)
class HloFunction:
    """A function of a program."""

    name: str
    body: HloBlock
    types: tuple[TensorType | str, ...]
    """Of the arguments."""
    labels: tuple[str, ...]
    """What the program calls each argument, such as `params['w']`; empty where it says nothing."""
    shardings: tuple[Sharding | None, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over which mesh axes each axis of a tensor is split."""

    axes: tuple[tuple[str, ...], ...]
    open: bool = False
    """Whether some axis may be split further."""

    def on(self, mesh_axes: Sequence[str]) -> NdSbp:
        """The same as one entry for each axis of a mesh; axes of other meshes do not count."""
        split = {name: Split(axis) for axis, names in enumerate(self.axes) for name in names}
        return NdSbp.of([split.get(name, BROADCAST) for name in mesh_axes])


@dataclass(frozen=True, slots=True)
class HloProgram:
    """A module of MLIR."""

    functions: Mapping[str, HloFunction]
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Names and sizes of mesh axes, by the name of the mesh."""

    @property
    def main(self) -> HloFunction:
        """The function that the program is."""
        return self.functions["main"]


_ENUM = re.compile(r"#(?:stablehlo|chlo)<\w+ (\w+)>\Z")
_CONV = re.compile(r"#stablehlo\.conv(?:<raw)?<?.*\[(.*)\]x\[(.*)\]->\[(.*)\]")
_NUMBERS = re.compile(r"(\w+) = (\[[\d, -]*\]|-?\d+)")
_AXES = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
_MESH_AXIS = re.compile(r'"([^"]+)"=(\d+)')


def parsed_attribute(text: str) -> Any:
    """An attribute of StableHLO that MLIR knows only as a text: the word of an enumeration, a dict
    of numbers and lists of numbers, or the layouts of a convolution's operands.
    """
    enum = _ENUM.match(text)
    if enum:
        return enum[1]
    layouts = _CONV.match(text)
    if layouts:
        return tuple(tuple(part.split(", ")) for part in layouts.groups())
    if text.startswith("#stablehlo."):
        return {name: _numbers(value) for name, value in _NUMBERS.findall(text)}
    return text


def _numbers(text: str) -> Any:
    if text.startswith("["):
        return [int(each) for each in text[1:-1].split(",") if each.strip()]
    return int(text)


def parsed_sharding(text: str) -> Sharding | None:
    """`#sdy.sharding<@mesh, [{"dp"}, {}]>`; None for one that names no axes of a mesh."""
    _, bracket, rest = text.partition("[")
    dims, end, _ = rest.partition("]")
    if not bracket or not end:
        return None
    axes, is_open = [], False
    for part in _AXES.findall(dims):
        is_open = is_open or "?" in part
        names = []
        for name, sub_axis in _NAME.findall(part):
            if sub_axis:  # a piece of a mesh axis, which an SBP cannot say
                return None
            names.append(name)
        axes.append(tuple(names))
    return Sharding(tuple(axes), is_open)


def parsed_mesh(text: str) -> dict[str, int]:
    """Names and sizes of the axes of `#sdy.mesh<["dp"=2, "tp"=2]>`."""
    return {name: int(size) for name, size in _MESH_AXIS.findall(text)}
