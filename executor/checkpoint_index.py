"""The index of a checkpoint: which boxes of which variables lie in which files.

A variable's boxes are the cells of a grid, as all layouts make them: along each axis ranges that
follow one another without gap or overlap, and a box for each combination. That is checked without
looking at elements, for reading and for writing, so that every element is stored exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plancompiler.errors import CheckpointError, PlanCompilerError
from plancompiler.executor.shard_file import digests_length
from plancompiler.ir import DType
from plancompiler.ir.shard import Region, element_count, region_shape
from plancompiler.ir.strict_json import JsonObject, parse_json

INDEX = "index.json"
FORMAT_VERSION = 2
FORMATS = (1, FORMAT_VERSION)
"""What can be read: files of format 1 have no digests."""
_MAX_BYTES = 1 << 30
_MAX_PARTS = 64 << 20
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a variable in a file."""

    file: str
    region: Region
    digests: str | None
    """As `shard_file.digests` makes them of its bytes; None in format 1."""

    def __str__(self) -> str:
        bounds = ", ".join(f"{start}:{stop}" for start, stop in self.region)
        return f"[{bounds}] in {self.file}"


@dataclass(frozen=True, slots=True)
class StoredVariable:
    """A variable of a checkpoint."""

    shape: Shape
    dtype: str
    sbp: str
    """As it was split when it was saved."""
    placement: Any
    """As it was placed then: plain data for people to read."""
    boxes: tuple[StoredBox, ...]


class CheckpointIndex:
    """A parsed index. Variables are parsed when they are asked for."""

    def __init__(self, value: Any, where: str) -> None:
        fields = JsonObject(value, where, CheckpointError)
        self.where = where
        self.format = require_format(fields)
        self.job = fields.text("job")
        self.step = fields.number("step")
        self.world_size = fields.number("world_size", 1)
        self._variables = fields.inner("variables")

    @property
    def names(self) -> frozenset[str]:
        """Of all variables."""
        return self._variables.names

    @property
    def plain_variables(self) -> dict[str, Any]:
        """Of all variables what the file says, unchecked."""
        return {name: self._variables.get(name) for name in sorted(self._variables.names)}

    @property
    def files(self) -> list[str]:
        """The names of all files that hold its variables."""
        boxes = (box for name in self._variables.names for box in self.variable(name).boxes)
        return sorted({box.file for box in boxes})

    def variable(self, name: str) -> StoredVariable:
        """A variable as it is listed; `verify_cover` says whether its boxes hold all of it."""
        entry = self._variables.inner(name)
        boxes = tuple(
            StoredBox(_file_name(box), region_of(box), digests_of(box, self.format))
            for box in entry.objects("boxes")
        )
        return StoredVariable(
            entry.numbers("shape"),
            entry.text("dtype"),
            entry.text("sbp"),
            entry.get("placement"),
            boxes,
        )


def require_format(fields: JsonObject) -> int:
    """The format of an index or of a shard's header; CheckpointError for an unknown one."""
    version = fields.get("format")
    if type(version) is not int or version not in FORMATS:
        raise CheckpointError(
            "this is no checkpoint of this version",
            got=f"{fields.where} of format {version!r}"[:200],
            expected=f"format {' or '.join(map(str, FORMATS))}",
        )
    return version


def region_of(box: JsonObject) -> Region:
    """The field `region`."""
    region = []
    for bounds in box.items("region"):
        if (
            type(bounds) is not list
            or len(bounds) != 2
            or any(type(each) is not int for each in bounds)
            or not 0 <= bounds[0] <= bounds[1] < 1 << 62
        ):
            raise box.refused("region", bounds, "pairs of start and stop")
        region.append((bounds[0], bounds[1]))
    return tuple(region)


def digests_of(box: JsonObject, version: int) -> str | None:
    """The field `xxh3`, which format 1 has not."""
    return None if version == 1 else box.text("xxh3")


def _file_name(box: JsonObject) -> str:
    name = box.text("file")
    if Path(name).name != name or name == "..":
        raise CheckpointError("the index of a checkpoint names what is not a file name", got=name)
    return name


def verify_cover(name: str, variable: StoredVariable, where: str) -> None:
    """Raise CheckpointError unless each element of a variable is in exactly one of its boxes, and
    each box has as many digests as it needs. Takes time for boxes, not for elements.
    """

    def wrong(what: str, boxes: Iterable[object]) -> CheckpointError:
        return CheckpointError(
            f"the boxes of variable {name!r} in a checkpoint {what}",
            got=f"{where}: {'; '.join(map(str, boxes))}",
            expected=f"each element of {variable.dtype}{list(variable.shape)} in one box",
            hint="restore another checkpoint: this one's index was damaged or put together by hand",
        )

    try:
        itemsize = DType.parse(variable.dtype).itemsize
    except PlanCompilerError as error:
        raise wrong("are of an unknown dtype", [variable.dtype]) from error
    seen: dict[Region, StoredBox] = {}
    for box in variable.boxes:
        shape = region_shape(box.region)
        if len(shape) != len(variable.shape) or any(
            stop > extent for (_, stop), extent in zip(box.region, variable.shape, strict=True)
        ):
            raise wrong("reach outside of it", [box])
        nbytes = element_count(shape) * itemsize
        if box.digests is not None and len(box.digests) != digests_length(nbytes):
            raise wrong("have digests of other bytes", [box])
        if not nbytes:
            continue
        if box.region in seen:
            raise wrong("overlap", [seen[box.region], box])
        seen[box.region] = box
    if not element_count(variable.shape):
        return
    cells = 1
    for axis, extent in enumerate(variable.shape):
        ranges = {box.region[axis]: box for box in seen.values()}
        ordered = sorted(ranges)
        cells *= len(ordered)
        for before, after in pairwise(ordered):
            if before[1] > after[0]:
                raise wrong("overlap", [ranges[before], ranges[after]])
            if before[1] < after[0]:
                raise wrong("leave a gap", [ranges[before], ranges[after]])
        if not ordered or ordered[0][0] != 0 or ordered[-1][1] != extent:
            ends = [ranges[each] for each in (*ordered[:1], *ordered[-1:])]
            raise wrong("leave a gap", ends or ["no boxes"])
    if len(seen) != cells:
        raise wrong("leave a gap", [f"{len(seen)} boxes of a grid of {cells}"])


def parse_index(text: bytes, where: str) -> CheckpointIndex:
    """The index in a file's bytes; CheckpointError for anything else."""
    value = parse_json(
        text, where, error=CheckpointError, max_bytes=_MAX_BYTES, max_parts=_MAX_PARTS
    )
    return CheckpointIndex(value, where)


def format_index(
    job: str, step: int, world_size: int, variables: Mapping[str, StoredVariable]
) -> bytes:
    """The text of an index."""
    index = {
        "format": FORMAT_VERSION,
        "job": job,
        "step": step,
        "world_size": world_size,
        "variables": {name: _plain(each) for name, each in sorted(variables.items())},
    }
    return (json.dumps(index, indent=1) + "\n").encode()


def _plain(variable: StoredVariable) -> dict[str, Any]:
    return {
        "shape": list(variable.shape),
        "dtype": variable.dtype,
        "sbp": variable.sbp,
        "placement": variable.placement,
        "boxes": list(_plain_boxes(variable.boxes)),
    }


def _plain_boxes(boxes: Iterable[StoredBox]) -> Iterator[dict[str, Any]]:
    for box in boxes:
        yield {
            "file": box.file,
            "region": [list(bounds) for bounds in box.region],
            "xxh3": box.digests,
        }
