"""Checkpoints: safetensors shards and an index of global shapes, dtypes, SBP and placements.

Every rank writes the boxes of variables that it is the first to hold into one file; the file's
metadata says which boxes those are, and the digests of their bytes. `index.json` is written last,
and lists for each variable its boxes, their files and digests. A reader assembles the box that its
own rank needs, so that any other placement and number of ranks can load a checkpoint, and checks
what it reads. Files of an older checkpoint in the same folder stay valid until the new index
replaces theirs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import CheckpointError
from plancompiler.executor.checkpoint_index import (
    FORMAT_VERSION,
    INDEX,
    CheckpointIndex,
    StoredBox,
    StoredVariable,
    digests_of,
    format_index,
    parse_index,
    region_of,
    require_format,
    verify_cover,
)
from plancompiler.executor.shard_file import ShardFile, digests
from plancompiler.ir import Broadcast, DType, NdSbp, Placement
from plancompiler.ir.shard import (
    Region,
    intersect,
    region_index,
    region_shape,
    relative,
)
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.ir.whole_file import UNFINISHED, make_writable_folder, write_whole
from plancompiler.plan.arrays import array_pieces, parse_header
from plancompiler.plan.plan import Plan, VariableDesc

Array = np.ndarray[Any, np.dtype[Any]]
KeepGoing = Callable[[], None]
"""Called between pieces of a file; raises where the rest is not wanted any more."""

CHECK_VARIABLE = "PLANCOMPILER_CHECK_RESTORE"
"""0 in the environment reads checkpoints without checking digests."""
_KEY = "plancompiler"
_ADDED = "loss_scale"
"""How the names of variables begin that mixed precision adds."""
SKIPPED_STEPS = f"{_ADDED}.skipped_steps"
"""That of them which counts the steps that updated nothing."""
_SHOWN = 8

_log = logging.getLogger(__name__)


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
    tensors, variables = _shards(plan, arrays)
    return b"".join(array_pieces(tensors, _metadata(plan, step, variables)))


def _shards(
    plan: Plan, arrays: Mapping[str, Array]
) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
    """What a rank's file holds: arrays by name, and what is said of them."""
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
    return tensors, described


def _metadata(
    plan: Plan, step: int, variables: Mapping[str, Any], version: int = 1
) -> dict[str, str]:
    """The text beside the arrays. Format 1 has no digests."""
    header = {"format": version, "step": step, "job": plan.job, "variables": variables}
    return {_KEY: json.dumps(header, sort_keys=True)}


def make_folder(directory: str | os.PathLike[str]) -> None:
    """Make sure before a long run that a checkpoint can be written into a folder when it ends.

    Raises CheckpointError, with what is in the way.
    """
    folder = Path(directory)
    with _file_errors("written", folder):
        make_writable_folder(folder)


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
    tensors, variables = _shards(plan, arrays)
    for name, tensor in tensors.items():
        if keep_going is not None:
            keep_going()
        # As plain bytes: buffers of bfloat16 have no form that Python knows.
        variables[name]["xxh3"] = digests(tensor.reshape(-1).view(np.uint8).data)
    with _file_errors("written", path):
        folder.mkdir(parents=True, exist_ok=True)
        pieces = array_pieces(tensors, _metadata(plan, step, variables, FORMAT_VERSION))
        write_whole(path, pieces, lasting=True, keep_going=keep_going)
    return path


def write_index(
    directory: str | os.PathLike[str], world_size: int, step: int, tag: str = ""
) -> None:
    """Make the shards of all ranks a checkpoint, and remove those of an older one in the folder.

    Raises CheckpointError where they do not hold each element of their variables once.
    """
    folder = Path(directory)
    path = folder / INDEX
    variables: dict[str, StoredVariable] = {}
    job = ""
    names = [shard_name(step, tag, rank) for rank in range(world_size)]
    boxes: dict[str, list[StoredBox]] = {}
    for name in names:
        with _file_errors("read", folder / name), ShardFile(folder / name) as file:
            header = _shard_header(file.metadata, str(folder / name))
        version, job = require_format(header), header.text("job")
        described = header.inner("variables")
        for variable in described.names:
            entry = described.inner(variable)
            stored = _described(entry)
            if replace(variables.setdefault(variable, stored), sbp=stored.sbp) != stored:
                raise entry.refused("shape", str(stored), "the variable as other shards have it")
            box = StoredBox(name, region_of(entry), digests_of(entry, version))
            boxes.setdefault(variable, []).append(box)
    for variable, listed in boxes.items():
        variables[variable] = replace(variables[variable], boxes=tuple(listed))
        verify_cover(variable, variables[variable], str(path))
    with _file_errors("written", path):
        write_whole(path, [format_index(job, step, world_size, variables)], lasting=True)
        kept = {INDEX, *names}
        for pattern in ("step*-rank*.safetensors*", f"{INDEX}.*{UNFINISHED}"):
            for old in folder.glob(pattern):
                if old.name not in kept:
                    old.unlink(missing_ok=True)


def read_index(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The index of a checkpoint as plain data: `step`, `job`, `world_size`, `variables` by name."""
    path = Path(directory) / INDEX
    index = _read_index(path)
    return {
        "format": index.format,
        "job": index.job,
        "step": index.step,
        "world_size": index.world_size,
        "variables": index.plain_variables,
    }


def saved_types(directory: str | os.PathLike[str]) -> dict[str, str]:
    """What a checkpoint holds: by the name of each variable its dtype and shape, as in
    `float32[3, 4]`.
    """
    index = _read_index(Path(directory) / INDEX)
    types = {}
    for name in index.names:
        variable = index.variable(name)
        types[name] = f"{variable.dtype}{list(variable.shape)}"
    return types


def skipped_steps(directory: str | os.PathLike[str]) -> int:
    """How many of a checkpoint's steps have updated nothing, as loss scaling skipped them."""
    index = _read_index(Path(directory) / INDEX)
    if SKIPPED_STEPS not in index.names:
        return 0
    place = Placement("cpu", [0]), NdSbp.broadcast(1)
    variable = VariableDesc(SKIPPED_STEPS, 0, (), DType.INT32, *place, (), ())
    with contextlib.ExitStack() as stack:
        files = _Files(Path(directory), stack, check=True)
        return int(_load_variable(index, files, variable, rank=0))


def check_no_others(directory: str | os.PathLike[str], names: Collection[str]) -> None:
    """Raise CheckpointError where a checkpoint holds other variables than these.

    Those that the compiler adds to a job by itself do not count, unless they say that steps were
    skipped, and neither does the number of the step, which the state of an eager optimizer holds
    and a job has from the index.
    """
    saved = saved_types(directory)
    skipped = 0 if SKIPPED_STEPS in names else skipped_steps(directory)
    if skipped:
        raise CheckpointError(
            "loss scaling has skipped steps of the checkpoint, which this job would count",
            got=f"{SKIPPED_STEPS!r} = {skipped}",
            expected="a job that goes on in float16, or a checkpoint without skipped steps",
            hint="strict_restore=False (--no-strict-restore) counts them, which matters where "
            "updates go by their number, as Adam's bias correction does",
        )
    others = [
        name
        for name, kind in saved.items()
        if name not in names and not name.startswith(_ADDED) and (name, kind) != ("step", "int64[]")
    ]
    if others:
        raise CheckpointError(
            "the checkpoint holds variables that the job does not have",
            got=", ".join(f"{name!r} {saved[name]}" for name in others[:_SHOWN])
            + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""),
            expected="the variables of the job, and no others",
            hint="strict_restore=False (--no-strict-restore) leaves them where they are, as for a "
            "job that only predicts",
        )


def load_shards(
    directory: str | os.PathLike[str], plan: Plan, check: bool | None = None
) -> tuple[dict[str, Array], int]:
    """This rank's variables, assembled from whatever boxes the checkpoint has; and its step.

    What is read is checked against its digests unless `check` is False, by default unless the
    environment has PLANCOMPILER_CHECK_RESTORE=0. Raises CheckpointError for a missing or damaged
    file, and for a variable that is missing or has another shape or dtype.
    """
    if check is None:
        check = os.environ.get(CHECK_VARIABLE, "").strip() != "0"
    folder = Path(directory)
    index = _read_index(folder / INDEX)
    if check and index.format == 1 and plan.rank == 0:
        _log.warning(
            "the checkpoint %s has no digests, as an older version wrote it: damage to its shards "
            "is not seen",
            folder,
        )
    with contextlib.ExitStack() as stack:
        files = _Files(folder, stack, check)
        arrays = {
            variable.name: _load_variable(index, files, variable, plan.rank)
            for variable in plan.variables
        }
        return arrays, index.step


def assemble(shards: Iterable[bytes]) -> dict[str, Array]:
    """Whole variables by name from the `shards_to_bytes` of all ranks."""
    stored: dict[str, StoredVariable] = {}
    parts: dict[str, list[tuple[StoredBox, Array]]] = {}
    for number, data in enumerate(shards):
        where = f"shard {number} in memory"
        for name, variable, box, array in _parts_of(data, where):
            stored.setdefault(name, variable)
            parts.setdefault(name, []).append((box, array))
    values: dict[str, Array] = {}
    for name, held in parts.items():
        variable = replace(stored[name], boxes=tuple(box for box, _ in held))
        verify_cover(name, variable, "shards in memory")
        if not held[0][1].dtype.name == variable.dtype:
            raise CheckpointError(f"variable {name!r} has another dtype in its shard")
        target = values[name] = np.empty(variable.shape, held[0][1].dtype)
        for box, array in held:
            if array.shape != region_shape(box.region) or array.dtype != target.dtype:
                raise CheckpointError(
                    f"a shard of variable {name!r} is not what it says", got=str(box)
                )
            target[region_index(box.region)] = array
    return values


def _parts_of(data: bytes, where: str) -> Iterator[tuple[str, StoredVariable, StoredBox, Array]]:
    """Name, variable, box and array of what a rank's bytes hold."""
    begin = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or begin > len(data):
        raise CheckpointError("shards in memory are damaged", got=f"{len(data)} bytes")
    tensors, metadata = parse_header(data[8:begin], where, begin, len(data))
    header = _shard_header(metadata, where)
    version, described = require_format(header), header.inner("variables")
    for name, tensor in tensors.items():
        entry = described.inner(name)
        box = StoredBox(where, region_of(entry), digests_of(entry, version))
        array = np.frombuffer(data, np.uint8, tensor.nbytes, tensor.begin)
        yield (
            name,
            _described(entry),
            box,
            array.view(tensor.dtype.numpy).reshape(tensor.shape),
        )


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


def _described(entry: JsonObject) -> StoredVariable:
    """What a shard says of a variable, less its box."""
    return StoredVariable(
        entry.numbers("shape"),
        entry.text("dtype"),
        entry.text("sbp"),
        entry.get("placement"),
        (),
    )


class _Files:
    """Open shard files of a folder, each opened once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, check: bool) -> None:
        self._folder = folder
        self._stack = stack
        self._check = check
        self._open: dict[str, ShardFile] = {}

    def read(self, box: StoredBox, variable: VariableDesc, wanted: Region, out: Array) -> None:
        """Put the part `wanted` of a box, in global coordinates, into `out`, an array of it."""
        path = self._folder / box.file
        with _file_errors("read", path):
            file = self._open.get(box.file)
            if file is None:
                file = self._open[box.file] = self._stack.enter_context(ShardFile(path))
            tensor = file.tensors.get(variable.name)
            shape = region_shape(box.region)
            if tensor is None or tensor.shape != shape or tensor.dtype is not variable.dtype:
                raise CheckpointError(
                    "a file of the checkpoint does not hold what the index says",
                    got=f"{path}: {'nothing' if tensor is None else tensor}",
                    expected=f"{variable.dtype}{list(shape)} of {variable.name!r}",
                )
            inside = relative(wanted, box.region)
            (first, last), *rest = inside or ((0, 1),)
            inner = region_index(tuple(rest))
            checked = box.digests if self._check else None
            for at, rows in file.read_rows(variable.name, first, last, checked):
                if not inside:
                    out[()] = rows
                    return
                out[at - first : at - first + len(rows)] = rows[(slice(None), *inner)]


def _load_variable(
    index: CheckpointIndex, files: _Files, variable: VariableDesc, rank: int
) -> Array:
    if variable.name not in index.names:
        raise CheckpointError(
            f"the checkpoint has no variable {variable.name!r}",
            rank=rank,
            expected=f"{variable.dtype}{list(variable.shape)}",
        )
    stored = index.variable(variable.name)
    if stored.shape != variable.shape or stored.dtype != str(variable.dtype):
        raise CheckpointError(
            f"variable {variable.name!r} has another shape or dtype in the checkpoint",
            rank=rank,
            got=f"{stored.dtype}{list(stored.shape)}",
            expected=f"{variable.dtype}{list(variable.shape)}",
        )
    if variable.sbp.has_partial:
        raise CheckpointError(
            f"variable {variable.name!r} is partial and cannot be loaded",
            rank=rank,
            got=str(variable.sbp),
        )
    verify_cover(variable.name, stored, index.where)  # so all of the target will be written
    target = np.empty(region_shape(variable.region), variable.dtype.numpy)
    for box in stored.boxes:
        common = intersect(box.region, variable.region)
        if common is not None and target.size:
            place = target[region_index(relative(common, variable.region))]
            files.read(box, variable, common, place)
    return target


# --- files ----------------------------------------------------------------------------------------


def _read_index(path: Path) -> CheckpointIndex:
    with _file_errors("read", path):
        text = path.read_bytes()
    return parse_index(text, str(path))


def _shard_header(metadata: Mapping[str, str], where: str) -> JsonObject:
    """What a shard says of itself."""
    what = f"what {where} says of its variables"
    text = metadata.get(_KEY)
    if text is None:
        raise CheckpointError("this is no shard of a checkpoint", got=where)
    return JsonObject(parse_json(text.encode(), what, error=CheckpointError), what, CheckpointError)


@contextlib.contextmanager
def _file_errors(done: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = None
        if done == "written":
            hint = "give a folder on a disk with room, in which files may be made"
        elif isinstance(error, FileNotFoundError):
            raise CheckpointError(
                "a file of the checkpoint is missing",
                got=str(path),
                hint="check the folder; a checkpoint is complete when it has an index.json",
            ) from error
        raise CheckpointError(
            f"a file of the checkpoint cannot be {done}",
            got=f"{path}: {error.strerror or error}",
            hint=hint,
        ) from error
