"""Weights of models in safetensors files: one file, or several with an index, as Hugging Face's
libraries write them.

Reading takes names, shapes and dtypes from the files' headers. Numbers are read when a job starts
or an eager tensor is made, by each rank those that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import DataError
from plancompiler.frontend.nn.module import Buffer, Module, Parameter
from plancompiler.frontend.stored import Stored
from plancompiler.ir import TensorType
from plancompiler.ir.arguments import path_text
from plancompiler.ir.source import user_line
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.ir.whole_file import naming_output, read_file, write_whole
from plancompiler.ops.initializer import initialize
from plancompiler.ops.stored import stored_tensor, tensors_of_file
from plancompiler.plan.arrays import StoredTensor, array_pieces

Array = np.ndarray[Any, np.dtype[Any]]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIGURATIONS = ("config.json", "generation_config.json")
_MAX_INDEX = 256 << 20
"""Bytes."""
_SHOWN = 8


Place = tuple[Path, str, StoredTensor]
"""Where a tensor lies: its file, its name there, and its place in the file."""


def load_weights(
    module: Module,
    path: str | PathLike[str],
    strict: bool = True,
    names: Callable[[str], str | None] | None = None,
) -> None:
    """Let the parameters and buffers of a module start with the values in safetensors files.

    `path` is a file, or a folder with `model.safetensors`, with several files and the index
    `model.safetensors.index.json`, or with one other such file. Names are those of
    `named_parameters`, or what `names` makes of the files' (None leaves an entry out); a parameter
    that is tied needs one of its names. Floating values of another dtype are cast to the
    parameter's. With `strict` False, what the files hold besides is left
    alone, and parameters that they lack stay as they are.

    Numbers are read when a job starts, by every rank those of its own shards. Parameters that were
    read as eager tensors take the new values at once.

    Raises DataError for files that are missing or damaged, an index that names files outside of
    its folder, and entries that are missing, superfluous, or of another shape or kind of dtype: all
    of them in one error, before anything changes. UsageError in a job that has read a parameter.
    """
    source = Path(path_text("weights", path))
    places = _renamed(weight_entries(source), names)
    chosen: dict[Parameter, Stored] = {}
    several: dict[Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        several.setdefault(parameter, []).append(name)
    missing, wrong = [], []
    for parameter, own in several.items():
        given = {name: places[name] for name in own if name in places}
        if not given and isinstance(parameter, Buffer) and not parameter.saved:
            continue
        if not given:
            missing.append(f"{own[0]} {_type_of(parameter)}")
            continue
        wrong += [
            f"{name} is {TensorType(stored.shape, stored.dtype)} and must be {_type_of(parameter)}"
            for name, (_, _, stored) in given.items()
            if not _fits(stored, parameter)
        ]
        if not wrong:
            wrong += _unequal(given)
        file, key, _ = next(iter(given.values()))
        chosen[parameter] = Stored(file, key)
    known = {name for own in several.values() for name in own}
    extra = sorted(places.keys() - known) if strict else []
    problems = [
        f"{what}: {_some(entries)}"
        for what, entries in (
            ("missing", missing if strict else []),
            ("not in the model", extra),
            ("wrong", wrong),
        )
        if entries
    ]
    if problems:
        raise DataError(
            f"the weights do not fit module {type(module).__name__}",
            source=user_line(),
            got=f"{source}: " + "; ".join(problems),
            expected=f"the {len(several)} parameters and buffers of the module, each once",
            hint="" if wrong else "strict=False takes those that both have",
        )
    for parameter, stored_at in chosen.items():
        parameter.start_from(stored_at)


def _type_of(parameter: Parameter) -> TensorType:
    return TensorType(parameter.file_shape or parameter.shape, parameter.dtype)


def _fits(stored: StoredTensor, parameter: Parameter) -> bool:
    floating = stored.dtype.is_floating and parameter.dtype.is_floating
    same = stored.dtype is parameter.dtype
    return stored.shape == _type_of(parameter).shape and (same or floating)


def _renamed(
    places: Mapping[str, Place], names: Callable[[str], str | None] | None
) -> dict[str, Place]:
    if names is None:
        return dict(places)
    renamed: dict[str, Place] = {}
    for entry, place in places.items():
        name = names(entry)
        if name in renamed:
            raise DataError(
                "two entries of the weights have one name in the module",
                source=user_line(),
                got=f"{renamed[name][1]} and {entry}, both {name}",
            )
        if name is not None:
            renamed[name] = place
    return renamed


def _unequal(given: Mapping[str, Place]) -> list[str]:
    """Whether entries of one parameter that is tied have different values, which it cannot take."""
    first, *others = (stored_tensor(str(file), key) for file, key, _ in given.values())
    name, *more = given
    return [
        f"{another} differs from {name}, and both are one parameter"
        for another, other in zip(more, others, strict=True)
        if not np.array_equal(_bytes_of(first), _bytes_of(other))
    ]


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)  # numbers that are not numbers are equal, too


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- files ----------------------------------------------------------------------------------------


def weight_entries(source: Path) -> dict[str, Place]:
    """Where each tensor of a file or folder lies, by its name there; see `load_weights`."""
    if not source.is_dir():
        return _of_files([source])
    index = source / INDEX_FILE
    if index.is_file():
        return _of_index(index)
    single = source / SINGLE_FILE
    files = [single] if single.is_file() else sorted(source.glob("*.safetensors"))
    if not files:
        raise DataError(
            "a folder has no weights",
            source=user_line(),
            got=str(source),
            expected=f"{SINGLE_FILE}, or several files and {INDEX_FILE}",
        )
    if len(files) > 1:
        raise DataError(
            "a folder has several files of weights and no index",
            source=user_line(),
            got=", ".join(file.name for file in files[:_SHOWN]),
            expected=f"{INDEX_FILE}, or one file",
            hint="name the file",
        )
    return _of_files(files)


def _of_files(files: list[Path]) -> dict[str, Place]:
    return {
        name: (file, name, tensor)
        for file in files
        for name, tensor in tensors_of_file(str(file)).items()
    }


def _of_index(index: Path) -> dict[str, Place]:
    what = f"the index {index}"
    text = read_file("an index of weights", index, DataError)
    value = parse_json(text, what, error=DataError, max_bytes=_MAX_INDEX)
    listed = JsonObject(value, what, DataError).inner("weight_map")
    files: dict[str, Mapping[str, StoredTensor]] = {}
    places = {}
    for name in sorted(listed.names):
        file = listed.text(name)
        # A file of the folder may be a link, as in Hugging Face's cache; a path may not leave it.
        if Path(file).name != file or "\\" in file or file in ("", ".", ".."):
            raise listed.refused(name, file, f"the name of a file in {index.parent}")
        if file not in files:
            files[file] = tensors_of_file(str(index.parent / file))
        tensor = files[file].get(name)
        if tensor is None:
            raise DataError(
                f"a file of weights does not hold {name!r}, as the index says",
                got=f"{index.parent / file} with {len(files[file])} others",
            )
        places[name] = (index.parent / file, name, tensor)
    return places


def initial_value(name: str, parameter: Parameter, seed: int) -> Array:
    """The value that a parameter of this name starts with in a job of this seed, in the shape that
    it has in files; DataError for one that has none.
    """
    given = parameter.initial
    if isinstance(given, Stored):
        return stored_tensor(given.file, given.key).astype(parameter.dtype.numpy)
    if given is not None:
        return given.reshape(_type_of(parameter).shape)
    whole = tuple((0, extent) for extent in parameter.shape)
    value = initialize(
        parameter.init, parameter.init_args, name, seed, parameter.shape, whole, parameter.dtype
    )
    return value.reshape(_type_of(parameter).shape)


def write_weights(
    folder: Path,
    arrays: Mapping[str, Array],
    max_file_bytes: int,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write arrays as safetensors files of at most so many bytes (or one array), with an index
    where there are several, and other files `beside` them. OutputError where they cannot be
    written.
    """
    parts: list[dict[str, Array]] = [{}]
    size = 0
    for name, array in arrays.items():
        if parts[-1] and size + array.nbytes > max_file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = np.ascontiguousarray(array).reshape(array.shape)
        size += array.nbytes
    stem, suffix = SINGLE_FILE.split(".")
    files = [
        f"{stem}-{number + 1:05d}-of-{len(parts):05d}.{suffix}" if len(parts) > 1 else SINGLE_FILE
        for number in range(len(parts))
    ]
    with naming_output("a file of weights", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, part in zip(files, parts, strict=True):
            # Which libraries of Hugging Face ask for.
            write_whole(folder / file, array_pieces(part, {"format": "pt"}), lasting=True)
        if len(parts) > 1:
            write_whole(folder / INDEX_FILE, [_index_text(dict(zip(files, parts, strict=True)))])
        for name, content in (beside or {}).items():
            write_whole(folder / name, [content])
        for old in _old_files(folder, {*files, *([INDEX_FILE] if len(parts) > 1 else [])}):
            old.unlink()


def beside_weights(files: Iterable[str]) -> dict[str, bytes]:
    """The configurations that lie beside files of weights, in a folder of Hugging Face's form."""
    texts = {}
    for folder in {Path(file).parent for file in files}:
        for name in CONFIGURATIONS:
            file = folder / name
            if file.is_file():
                texts[name] = file.read_bytes()
    return texts


def _index_text(parts: Mapping[str, Mapping[str, Array]]) -> bytes:
    total = sum(array.nbytes for part in parts.values() for array in part.values())
    places = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2).encode()


def _old_files(folder: Path, kept: set[str]) -> Iterator[Path]:
    """Files of an older export of another number of files, which readers would mix with ours."""
    for pattern in (SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors"):
        for file in folder.glob(pattern):
            if file.name not in kept:
                yield file
