"""The shared half of the wire format: frames, and the tables that every message interns into.

A frame is `PCWF`, a format version, a kind, the body's CRC-32 and length (20 bytes, big endian),
then the body: a protobuf message of columns (`proto/plancompiler/proto/*.proto`). Nothing here
imports generated code: messages are handed in, and their repeated fields are filled and read as
whole columns. Readers bound every count by the data before they allocate, and turn all faults into
WireFormatError.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, TypeVar

from plancompiler.errors import PlanCompilerError, WireFormatError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import Attrs, AttrValue, Origin, Phase, SourceLine
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp, Reduction
from plancompiler.ir.shard import Region
from plancompiler.ir.task import Primitive, TaskKind

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)
Shape = tuple[int, ...]

FORMAT_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 30
"""No job, graph, slice or plan is larger; a reader refuses before it parses."""
_MAGIC = b"PCWF"
_HEADER = struct.Struct(">4sHHIQ")
_FREE_RANKS = 1 << 20
_RANKS_PER_BYTE = 16
"""Rank lists are stored as runs, so their length is bounded apart: 2**20, more for more data."""


class MessageKind(enum.IntEnum):
    """What a frame holds."""

    JOB = 1
    BOXING_TASK_GRAPH = 2
    RANK_SLICE = 3
    PLAN = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


def seal(kind: MessageKind, message: Any) -> bytes:
    """A protobuf message as a frame."""
    body: bytes = message.SerializeToString()
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireFormatError(
            f"the {kind} is too large for the wire",
            got=f"{len(body)} bytes",
            expected=f"at most {MAX_MESSAGE_BYTES} bytes",
        )
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, kind, zlib.crc32(body), len(body)) + body


def unseal(kind: MessageKind, data: bytes, message: Any) -> None:
    """Parse a frame of this kind into an empty message, else raise WireFormatError."""
    if len(data) < _HEADER.size:
        raise WireFormatError(
            f"these bytes are too short for a {kind}",
            got=f"{len(data)} bytes",
            expected=f"at least {_HEADER.size} bytes",
        )
    magic, version, actual, checksum, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise WireFormatError(
            f"these bytes are not a {kind}", got=f"they start with {magic!r}", expected=str(_MAGIC)
        )
    if version != FORMAT_VERSION:
        raise WireFormatError(
            f"the {kind} is in another version of the wire format",
            got=f"version {version}",
            expected=f"version {FORMAT_VERSION}",
            hint="use the same plancompiler version on both sides",
        )
    if actual != kind:
        names = {int(each): str(each) for each in MessageKind}
        raise WireFormatError(
            "these bytes are another kind of message",
            got=names.get(actual, f"kind {actual}"),
            expected=str(kind),
        )
    body = memoryview(data)[_HEADER.size :]
    if length != len(body) or length > MAX_MESSAGE_BYTES:
        raise WireFormatError(
            f"the {kind} is truncated or followed by other bytes",
            got=f"{len(body)} bytes",
            expected=f"{length} bytes",
        )
    if zlib.crc32(body) != checksum:
        raise WireFormatError(f"the {kind} is damaged: its checksum does not match its bytes")
    with reading(kind):
        message.ParseFromString(body)


@contextmanager
def reading(kind: MessageKind) -> Iterator[None]:
    """Turn whatever malformed columns provoke into a WireFormatError."""
    try:
        yield
    except WireFormatError:
        raise
    except PlanCompilerError as error:
        raise WireFormatError(f"the {kind} holds a malformed part: {error.report.what}") from error
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise WireFormatError(f"the {kind} holds columns that do not fit together") from error
    except Exception as error:
        if type(error).__module__.startswith("google.protobuf"):
            raise WireFormatError(f"these bytes do not parse as a {kind}") from error
        raise


@contextmanager
def writing(kind: MessageKind) -> Iterator[None]:
    """Turn values that have no wire form into a WireFormatError."""
    try:
        yield
    except PlanCompilerError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise WireFormatError(f"the {kind} holds a value that has no wire form: {error}") from error


# --- columns --------------------------------------------------------------------------------------


class Codes(Generic[E]):
    """The wire numbers of an enum: its position, counted from one (0 is none)."""

    def __init__(self, members: Iterable[E]) -> None:
        self.members: tuple[E | None, ...] = (None, *members)
        # Members hash by name in Python code, so identity is the faster key.
        self._code = {id(member): code for code, member in enumerate(self.members)}

    def encode(self, values: Iterable[E | None]) -> list[int]:
        """Numbers of a column of members."""
        code = self._code
        return [code[id(value)] for value in values]

    def decode(self, column: Sequence[int]) -> list[E]:
        """Members of a column of numbers; 0 or an unknown number is an error."""
        members = self.decode_optional(column)
        if None in members:
            raise WireFormatError("an enum column holds no member")
        return members  # type: ignore[return-value]  # no None is in it

    def decode_optional(self, column: Sequence[int]) -> list[E | None]:
        """Members of a column of numbers; 0 is None."""
        return pick(self.members, column)


DTYPES = Codes(DType)
REDUCTIONS = Codes(Reduction)
PRIMITIVES = Codes(Primitive)
TASK_KINDS = Codes(TaskKind)
PHASES = Codes(Phase)


def pick(table: Sequence[T], column: Sequence[int]) -> list[T]:
    """Items of a table by a column of indices; negative indices are refused."""
    if column and min(column) < 0:
        raise WireFormatError("an index is negative")
    return [table[index] for index in column]


def pick_optional(table: Sequence[T], column: Sequence[int]) -> list[T | None]:
    """Items of a table by a column of optional indices: 0 is None."""
    return pick([None, *table], column)


def split(flat: Sequence[T], counts: Sequence[int]) -> list[tuple[T, ...]]:
    """A flattened column cut into tuples of these lengths, which must use it up."""
    if sum(counts) != len(flat):
        raise WireFormatError("the counts of a column do not add up to its length")
    items = iter(flat)
    return [tuple(islice(items, count)) for count in counts]


def build(cls: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """One object per row of equally long columns."""
    if len({len(column) for column in columns}) > 1:
        raise WireFormatError("columns of one table differ in length")
    return list(map(cls, *columns))


def flatten(rows: Iterable[Sequence[T]]) -> list[T]:
    """All rows after one another."""
    return [item for row in rows for item in row]


# --- tables: writing ------------------------------------------------------------------------------


class _Interned(dict[Any, int]):
    """Key → index in order of first use."""

    def __missing__(self, key: Any) -> int:
        index = self[key] = len(self)
        return index


@lru_cache(maxsize=4096)
def _runs(ranks: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """A rank list as (start, length, stride) runs, greedily from the left."""
    runs = []
    position = 0
    while position < len(ranks):
        start = ranks[position]
        length, stride = 1, 1
        if position + 1 < len(ranks):
            stride = ranks[position + 1] - start
            length = 2
            while (
                position + length < len(ranks)
                and ranks[position + length] - ranks[position + length - 1] == stride
            ):
                length += 1
        runs.append((start, length, stride))
        position += length
    return tuple(runs)


class TableWriter:
    """Interns what a message's columns refer to; `write` puts the tables into the message."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        """What ids are less by in the message."""
        self.strings = _Interned()
        self.placements = _Interned()
        self.shapes = _Interned()
        self.regions = _Interned()
        self.origins = _Interned()
        self._sbps = _Interned()
        self._sources = _Interned()
        self._attr_sets: dict[str, tuple[int, Attrs]] = {}

    def sbp(self, sbp: NdSbp) -> int:
        """Index of a layout."""
        return self._sbps[sbp]

    def optional_sbp(self, sbp: NdSbp | None) -> int:
        """Optional index of a layout."""
        return 0 if sbp is None else 1 + self._sbps[sbp]

    def optional_placement(self, placement: Placement | None) -> int:
        """Optional index of a placement."""
        return 0 if placement is None else 1 + self.placements[placement]

    def source(self, source: SourceLine) -> int:
        """Index of a source line."""
        return self._sources[(source.file, source.line)]

    def attrs(self, attrs: Attrs) -> int:
        """Index of an attribute set. The key is its repr: 1, 1.0, True and 0.0, -0.0 are equal."""
        key = repr(attrs)
        entry = self._attr_sets.get(key)
        if entry is None:
            entry = self._attr_sets[key] = (len(self._attr_sets), attrs)
        return entry[0]

    def write(self, message: Any) -> None:
        """Fill a `Tables` message. Interns strings, so it comes after all columns."""
        strings = self.strings
        placements: list[Placement] = list(self.placements)
        runs = [_runs(placement.rank_list) for placement in placements]
        named = [placement for placement in placements if placement.axes is not None]
        message.placement_device.extend([strings[each.device_type] for each in placements])
        message.placement_ndim.extend([each.ndim for each in placements])
        message.placement_extent.extend(flatten(each.hierarchy for each in placements))
        message.placement_named.extend([int(each.axes is not None) for each in placements])
        message.placement_axis_name.extend(
            [strings[name] for each in named for name in each.axes or ()]
        )
        message.placement_runs.extend([len(each) for each in runs])
        message.run_start.extend([start for each in runs for start, _, _ in each])
        message.run_length.extend([length for each in runs for _, length, _ in each])
        message.run_stride.extend([stride for each in runs for _, _, stride in each])
        message.shape_ndim.extend([len(shape) for shape in self.shapes])
        message.shape_extent.extend(flatten(self.shapes))
        message.region_ndim.extend([len(region) for region in self.regions])
        message.region_start.extend([start for region in self.regions for start, _ in region])
        message.region_stop.extend([stop for region in self.regions for _, stop in region])
        message.sbp.extend([strings[str(sbp)] for sbp in self._sbps])
        message.source_file.extend([strings[file] for file, _ in self._sources])
        message.source_line.extend([line for _, line in self._sources])
        origins: list[Origin] = list(self.origins)
        message.origin_phase.extend(PHASES.encode(each.phase for each in origins))
        message.origin_region.extend([strings[each.region] for each in origins])
        message.origin_checkpoint.extend([int(each.checkpoint) for each in origins])
        message.origin_stage.extend([each.stage for each in origins])
        self._write_attrs(message)
        message.strings.extend(self.strings)

    def _write_attrs(self, message: Any) -> None:
        sets = [attrs for _, attrs in self._attr_sets.values()]
        columns = _AttrColumns(self.strings)
        names = [self.strings[name] for attrs in sets for name, _ in attrs]
        types = [columns.add(name, value) for attrs in sets for name, value in attrs]
        message.attr_count.extend([len(attrs) for attrs in sets])
        message.attr_name.extend(names)
        message.attr_type.extend(types)
        message.tuple_length.extend(columns.lengths)
        message.item_type.extend(columns.items)
        message.int_value.extend(columns.ints)
        message.float_value.extend(columns.floats)
        message.string_value.extend(columns.texts)


_BOOL, _INT, _FLOAT, _STRING, _TUPLE = 1, 2, 3, 4, 5
_ATTR_CODES = {bool: _BOOL, int: _INT, float: _FLOAT, str: _STRING, tuple: _TUPLE}


class _AttrColumns:
    """Attribute values laid out by type."""

    def __init__(self, strings: _Interned) -> None:
        self.strings = strings
        self.lengths: list[int] = []
        self.items: list[int] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.texts: list[int] = []

    def add(self, name: str, value: AttrValue) -> int:
        """Store a value; its type's code."""
        if type(value) is tuple:
            self.lengths.append(len(value))
            self.items.extend([self._scalar(name, item) for item in value])
            return _TUPLE
        return self._scalar(name, value)

    def _scalar(self, name: str, value: object) -> int:
        code = _ATTR_CODES.get(type(value), _TUPLE)
        if code == _STRING:
            self.texts.append(self.strings[value])
        elif code == _FLOAT:
            self.floats.append(value)  # type: ignore[arg-type]  # the code says it is a float
        elif code in (_BOOL, _INT) and -(1 << 63) <= value < 1 << 63:  # type: ignore[operator]
            self.ints.append(int(value))  # type: ignore[call-overload]  # the wire takes no bools
        else:
            raise WireFormatError(
                f"the value of attribute {name!r} has no wire form",
                got=f"{value!r} ({type(value).__name__})",
                expected="a bool, a 64-bit int, a float, a str, or a tuple of these",
            )
        return code


# --- tables: reading ------------------------------------------------------------------------------


class TableReader:
    """The tables of a message, as lists of the things that its columns name."""

    def __init__(self, message: Any, data_bytes: int, base: int = 0) -> None:
        self.base = base
        self.strings: list[str] = list(message.strings)
        self.placements = self._placements(message, data_bytes)
        self.shapes: list[Shape] = split(message.shape_extent[:], message.shape_ndim[:])
        bounds = build(_range, message.region_start[:], message.region_stop[:])
        self.regions: list[Region] = split(bounds, message.region_ndim[:])
        self.sbps = [NdSbp.parse(text) for text in pick(self.strings, message.sbp[:])]
        files = pick(self.strings, message.source_file[:])
        self.sources = build(SourceLine, files, message.source_line[:])
        regions = pick(self.strings, message.origin_region[:])
        marked = [bool(flag) for flag in message.origin_checkpoint[:]]
        phases = PHASES.decode(message.origin_phase[:])
        self.origins = build(Origin, phases, regions, marked, message.origin_stage[:])
        self.attr_sets = self._attr_sets(message)

    def _placements(self, message: Any, data_bytes: int) -> list[Placement]:
        lengths = message.run_length[:]
        if sum(lengths) > _FREE_RANKS + _RANKS_PER_BYTE * data_bytes:
            raise WireFormatError("the placements of a message list too many ranks")
        runs = split(
            build(_run, message.run_start[:], lengths, message.run_stride[:]),
            message.placement_runs[:],
        )
        devices = pick(self.strings, message.placement_device[:])
        meshes = split(message.placement_extent[:], message.placement_ndim[:])
        named = message.placement_named[:]
        names = pick(self.strings, message.placement_axis_name[:])
        counts = [len(mesh) if flag else 0 for mesh, flag in zip(meshes, named, strict=True)]
        axes = split(names, counts)
        return [
            _placement(device, mesh, rank_runs, labels if flag else None)
            for device, mesh, rank_runs, labels, flag in zip(
                devices, meshes, runs, axes, named, strict=True
            )
        ]

    def _attr_sets(self, message: Any) -> list[Attrs]:
        ints = iter(message.int_value[:])
        floats = iter(message.float_value[:])
        texts = iter(pick(self.strings, message.string_value[:]))
        read: dict[int, Callable[[], Any]] = {
            _BOOL: lambda: bool(next(ints)),
            _INT: ints.__next__,
            _FLOAT: floats.__next__,
            _STRING: texts.__next__,
        }
        rows = iter(split(message.item_type[:], message.tuple_length[:]))
        read_tuple = {_TUPLE: lambda: tuple([read[code]() for code in next(rows)])}
        readers = read | read_tuple
        values = [readers[code]() for code in message.attr_type[:]]
        if any(next(column, None) is not None for column in (ints, floats, texts, rows)):
            raise WireFormatError("attribute columns hold values that no attribute uses")
        names = pick(self.strings, message.attr_name[:])
        return split(list(zip(names, values, strict=True)), message.attr_count[:])


def _range(start: int, stop: int) -> tuple[int, int]:
    return start, stop


def _run(start: int, length: int, stride: int) -> range:
    return range(start, start + length * stride, stride) if stride else range(start, start + length)


def _placement(
    device: str, mesh: Shape, runs: tuple[range, ...], axes: tuple[str, ...] | None
) -> Placement:
    ranks: list[Any] = flatten(runs)
    size = 1
    for extent in mesh:
        size *= extent
    if size != len(ranks):
        raise WireFormatError("a placement's mesh does not fit its ranks")
    if len(set(ranks)) != size:  # Placement's own check names the culprits, in quadratic time
        raise WireFormatError("a placement lists a rank twice")
    for extent in reversed(mesh[1:]):
        ranks = [ranks[start : start + extent] for start in range(0, len(ranks), extent)]
    return Placement(device, ranks, axes)
