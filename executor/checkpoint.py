"""Checkpoints: safetensors shards and an index of global shapes, dtypes, SBP and placements.

Every rank writes the boxes of variables that it is the first to hold into one file; the file's
metadata says which boxes those are. `index.json` is written last, to a temporary name that is then
renamed, and lists for each variable its boxes and their files. A reader assembles the box that its
own rank needs, so that any other placement and number of ranks can load a checkpoint. Files of an
older checkpoint in the same folder stay valid until the new index replaces theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from plancompiler.errors import CheckpointError, PlanCompilerError
from plancompiler.ir import Broadcast, DType
from plancompiler.ir.shard import (
    Region,
    element_count,
    intersect,
    region_index,
    region_shape,
    relative,
)
from plancompiler.plan.arrays import array_pieces, arrays_from_bytes
from plancompiler.plan.plan import Plan, VariableDesc

Array = np.ndarray[Any, np.dtype[Any]]
KeepGoing = Callable[[], None]
"""Called between pieces of a file; raises where the rest is not wanted any more."""

INDEX = "index.json"
FORMAT_VERSION = 1
_KEY = "plancompiler"
_MAX_HEADER = 64 << 20
"""Bytes of the header of shards in memory."""


def shard_name(step: int, tag: str, rank: int) -> str:
    """File of one rank's shards."""
    return f"step{step}{tag and '-'}{tag}-rank{rank:05d}.safetensors"


def saved_names(plan: Plan) -> tuple[str, ...]:
    """The variables of which this rank writes a box: those that it is the first to hold."""
    return tuple(each.name for each in plan.variables if _is_first_holder(each, plan.rank))


def shards_to_bytes(plan: Plan, arrays: Mapping[str, Array], step: int) -> bytes:
    """The boxes that this rank is the first to hold, as safetensors bytes with their places.

    `arrays` has at least the variables of `saved_names`: this rank's part of each. Raises
    CheckpointError where one is missing or does not fit, or a variable is partial on its placement.
    """
    return b"".join(array_pieces(*_shards(plan, arrays, step)))


def _shards(
    plan: Plan, arrays: Mapping[str, Array], step: int
) -> tuple[dict[str, Array], dict[str, str]]:
    """What a rank's file holds: arrays by name, and the texts beside them."""
    tensors: dict[str, Array] = {}
    described: dict[str, dict[str, Any]] = {}
    for variable in plan.variables:
        if variable.sbp.has_partial:
            raise CheckpointError(
                f"variable {variable.name!r} is partial, so no rank holds its value",
                rank=plan.rank,
                got=str(variable.sbp),
            )
        if not _is_first_holder(variable, plan.rank):
            continue
        array = arrays.get(variable.name)
        if array is None:
            raise CheckpointError(
                f"variable {variable.name!r} was not given to save", rank=plan.rank
            )
        expected = region_shape(variable.region)
        if array.shape != expected or array.dtype != variable.dtype.numpy:
            raise CheckpointError(
                f"variable {variable.name!r} does not fit its shard",
                rank=plan.rank,
                got=f"{array.dtype}{list(array.shape)}",
                expected=f"{variable.dtype}{list(expected)}",
            )
        tensors[variable.name] = array if array.flags.c_contiguous else array.copy(order="C")
        described[variable.name] = _describe(variable)
    header = {"format": FORMAT_VERSION, "step": step, "job": plan.job, "variables": described}
    return tensors, {_KEY: json.dumps(header, sort_keys=True)}


def make_folder(directory: str | os.PathLike[str]) -> None:
    """Make sure before a long run that a checkpoint can be written into a folder when it ends.

    Raises CheckpointError, with what is in the way.
    """
    folder = Path(directory)
    with _file_errors("written", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def save_shards(
    directory: str | os.PathLike[str],
    plan: Plan,
    arrays: Mapping[str, Array],
    step: int,
    tag: str = "",
    keep_going: KeepGoing | None = None,
) -> Path:
    """Write this rank's shards; `write_index` makes them a checkpoint when all ranks have.

    `step` is the number of the next step to run. `tag` tells apart saves of one step into one
    folder; all ranks give the same. What `keep_going` raises ends the writing without a trace.
    """
    folder = Path(directory)
    path = folder / shard_name(step, tag, plan.rank)
    tensors, metadata = _shards(plan, arrays, step)
    with _file_errors("written", path):
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, array_pieces(tensors, metadata), keep_going)
    return path


def write_index(
    directory: str | os.PathLike[str], world_size: int, step: int, tag: str = ""
) -> None:
    """Make the shards of all ranks a checkpoint, and remove those of an older one in the folder."""
    folder = Path(directory)
    variables: dict[str, dict[str, Any]] = {}
    job = ""
    names = [shard_name(step, tag, rank) for rank in range(world_size)]
    for name in names:
        header = _file_header(folder / name)
        job = header["job"]
        for variable, described in header["variables"].items():
            entry = variables.setdefault(variable, {**described, "region": None, "boxes": []})
            entry.pop("region", None)
            entry["boxes"].append({"file": name, "region": described["region"]})
    index = {
        "format": FORMAT_VERSION,
        "job": job,
        "step": step,
        "world_size": world_size,
        "variables": dict(sorted(variables.items())),
    }
    path = folder / INDEX
    with _file_errors("written", path):
        _write(path, [(json.dumps(index, indent=1) + "\n").encode()])
        for old in folder.glob("step*-rank*.safetensors*"):
            if old.name not in names:
                old.unlink(missing_ok=True)


def read_index(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The index of a checkpoint: `step`, `job`, `world_size`, `variables`."""
    path = Path(directory) / INDEX
    with _file_errors("read", path):
        text = path.read_bytes()
    try:
        index = json.loads(text)
    except ValueError as error:
        raise CheckpointError("the index of a checkpoint is damaged", got=f"{path}: {error}") from (
            error
        )
    if not isinstance(index, dict) or index.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            "this is no checkpoint of this version",
            got=str(path),
            expected=f"format {FORMAT_VERSION}",
        )
    return index


def load_shards(directory: str | os.PathLike[str], plan: Plan) -> tuple[dict[str, Array], int]:
    """This rank's variables, assembled from whatever boxes the checkpoint has; and its step.

    Raises CheckpointError for a missing or damaged file, and for a variable that is missing or has
    another shape or dtype.
    """
    folder = Path(directory)
    index = read_index(folder)
    with contextlib.ExitStack() as stack, _damage(folder):
        files = _Files(folder, stack)
        arrays = {
            variable.name: _load_variable(index["variables"], files, variable, plan.rank)
            for variable in plan.variables
        }
        return arrays, int(index["step"])


def assemble(shards: Iterable[bytes]) -> dict[str, Array]:
    """Whole variables by name from the `shards_to_bytes` of all ranks."""
    found: dict[str, Array] = {}
    filled: dict[str, int] = {}
    for data in shards:
        with _damage("shards in memory"):
            described = _bytes_header(data)["variables"]
            for name, array in sorted(arrays_from_bytes(data).items()):
                entry = described[name]
                shape = tuple(entry["shape"])
                if name not in found:
                    found[name] = np.empty(shape, DType.parse(entry["dtype"]).numpy)
                    filled[name] = 0
                found[name][region_index(_region(entry["region"]))] = array
                filled[name] += array.size
    for name, array in found.items():
        if filled[name] != array.size:
            raise CheckpointError(f"variable {name!r} is not complete")
    return found


# --- pieces ---------------------------------------------------------------------------------------


def _is_first_holder(variable: VariableDesc, rank: int) -> bool:
    """Whether no rank with a lower parallel id holds the same box: it is at 0 on broadcast axes."""
    placement = variable.placement
    coordinates = placement.coordinates(placement.parallel_id(rank))
    return all(
        coordinate == 0 or not isinstance(entry, Broadcast)
        for coordinate, entry in zip(coordinates, variable.sbp, strict=True)
    )


def _describe(variable: VariableDesc) -> dict[str, Any]:
    placement = variable.placement
    return {
        "shape": list(variable.shape),
        "dtype": str(variable.dtype),
        "sbp": str(variable.sbp),
        "placement": {
            "device_type": placement.device_type,
            "ranks": placement.ranks.tolist(),
            "axes": None if placement.axes is None else list(placement.axes),
        },
        "region": [list(bounds) for bounds in variable.region],
    }


def _region(bounds: Any) -> Region:
    return tuple((int(start), int(stop)) for start, stop in bounds)


class _Files:
    """Open shard files of a folder, each opened once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._open: dict[str, Any] = {}

    def read(self, file: str, name: str, box: Region, wanted: Region) -> Array:
        """The part `wanted` of the box `box` of a variable, both in global coordinates."""
        if file not in self._open:
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a file name")
            path = self._folder / file
            with _file_errors("read", path):
                opened = safe_open(path, framework="np")
            self._open[file] = self._stack.enter_context(opened)
        part = self._open[file].get_slice(name)
        if tuple(part.get_shape()) != region_shape(box):
            raise ValueError(f"{name!r} in {file} does not have the shape that the index says")
        index = region_index(relative(wanted, box))
        found: Array = part[index] if index else self._open[file].get_tensor(name)
        return found


def _load_variable(
    variables: Mapping[str, Any], files: _Files, variable: VariableDesc, rank: int
) -> Array:
    entry = variables.get(variable.name)
    if entry is None:
        raise CheckpointError(
            f"the checkpoint has no variable {variable.name!r}",
            rank=rank,
            expected=f"{variable.dtype}{list(variable.shape)}",
        )
    if tuple(entry["shape"]) != variable.shape or entry["dtype"] != str(variable.dtype):
        raise CheckpointError(
            f"variable {variable.name!r} has another shape or dtype in the checkpoint",
            rank=rank,
            got=f"{entry['dtype']}{entry['shape']}",
            expected=f"{variable.dtype}{list(variable.shape)}",
        )
    if variable.sbp.has_partial:
        raise CheckpointError(
            f"variable {variable.name!r} is partial and cannot be loaded",
            rank=rank,
            got=str(variable.sbp),
        )
    target = np.empty(region_shape(variable.region), variable.dtype.numpy)
    filled = 0
    for each in entry["boxes"]:
        box = _region(each["region"])
        if not box:
            target[()] = files.read(each["file"], variable.name, box, box)
            filled = 1
            continue
        common = intersect(box, variable.region)
        if common is None:
            continue
        part = files.read(each["file"], variable.name, box, common)
        if part.dtype != target.dtype:
            raise ValueError(f"{variable.name!r} has dtype {part.dtype} in {each['file']}")
        target[region_index(relative(common, variable.region))] = part
        filled += element_count(region_shape(common))
    if filled != target.size:
        raise CheckpointError(
            f"the checkpoint does not hold all of variable {variable.name!r}",
            rank=rank,
            got=f"{filled} elements of this rank's shard",
            expected=f"{target.size}",
        )
    return target


# --- files ----------------------------------------------------------------------------------------


def _write(
    path: Path, pieces: Iterable[bytes | memoryview], keep_going: KeepGoing | None = None
) -> None:
    """Write a file whole or not at all, so that it is there even if the machine stops now."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                if keep_going is not None:
                    keep_going()
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder as lasting as the files, where its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_header(path: Path) -> dict[str, Any]:
    with _file_errors("read", path), _damage(path), safe_open(path, framework="np") as file:
        return _parsed_header((file.metadata() or {})[_KEY])


def _bytes_header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data), _MAX_HEADER):
        raise ValueError("the header is longer than the data")
    return _parsed_header(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])


def _parsed_header(text: str) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(text)
    if header["format"] != FORMAT_VERSION:
        raise ValueError(f"format {header['format']} is not known")
    return header


@contextlib.contextmanager
def _file_errors(done: str, path: Path) -> Any:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            "a file of the checkpoint is missing",
            got=str(path),
            hint="check the folder; a checkpoint is complete when it has an index.json",
        ) from error
    except OSError as error:
        hint = None
        if done == "written":
            hint = "give a folder on a disk with room, in which files may be made"
        raise CheckpointError(
            f"a file of the checkpoint cannot be {done}",
            got=f"{path}: {error.strerror or error}",
            hint=hint,
        ) from error


@contextlib.contextmanager
def _damage(where: Path | str) -> Any:
    try:
        yield
    except PlanCompilerError:
        raise
    except (
        SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError("the checkpoint is damaged", got=f"{where}: {error}") from error
