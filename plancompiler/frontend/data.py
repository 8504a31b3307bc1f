"""Data inside a job: each rank reads its own part of every batch from files.

Inputs fed by the caller (`pc.input`) are for small data; these are for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from glob import glob, has_magic
from os import PathLike, fspath
from pathlib import Path

from plancompiler.errors import DataError, DTypeError, UsageError
from plancompiler.frontend.data_loader import DataLoader
from plancompiler.frontend.stored import Stored
from plancompiler.frontend.trace import source_tensor
from plancompiler.ir import AttrValue, DType, Placement, Value
from plancompiler.ir.arguments import path_text
from plancompiler.ir.operators import SbpLike
from plancompiler.ops.data import STORED_TOKENS
from plancompiler.ops.stored import StoredArray, mapped_tokens, stored_array

__all__ = ["Arrays", "DataLoader", "Stored", "TokenFile"]

PathText = str | PathLike[str]


class Arrays:
    """Batches of rows of the arrays in npz files: `images, labels = pc.data.Arrays(...)`.

    `path` is a file, a list of files, or a pattern such as `"train-*.npz"`, which stands for the
    files that match it, sorted by name. Several files are *shards* of one dataset: each has the
    same arrays, and their rows follow one another. Arrays that are stored as they are
    (`np.savez`) are memory-mapped, compressed ones unpacked whole when their first row is wanted.

    Each step gives the next `batch` rows of each array of `keys`, as values [batch, ...] of the
    stored dtype; `data["images"]` is one of them. Rows `split` = (start, stop) are used, all by
    default; when they are used up the next epoch begins, in a new random order if `shuffle` is
    set. The order depends on the job's seed, `seed` and the step alone, so it is the same on
    every layout. `sbp` is how the devices of `placement` hold the batches (default: broadcast).

    The files are looked at while the job is traced: DataError if one is missing or damaged, lacks
    an array, has fewer rows, or holds others than the first. Where they are only on the workers,
    `types` gives what cannot be seen: for each key the shape of a row and the dtype,
    `{"images": ((64,), "uint8")}`; `split` and the files' full names must then be given. A file
    that changes while the job reads it fails the job.
    """

    def __init__(
        self,
        path: PathText | Sequence[PathText],
        keys: Sequence[str] = ("x", "y"),
        batch: int = 64,
        *,
        placement: Placement,
        sbp: SbpLike | None = None,
        shuffle: bool = True,
        seed: int = 0,
        split: tuple[int, int] | None = None,
        types: Mapping[str, tuple[Sequence[int], DType | str]] | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise UsageError("keys must be several names", got=repr(keys), expected=repr([keys]))
        files = _shard_files(path)
        if types is not None and not all(Path(file).exists() for file in files):
            rows = _promised(files, keys, types, split)
        else:
            rows = _seen(files, keys)
        self.start, self.stop = _checked_split(files, split, rows)
        self.batch = batch
        self.values: dict[str, Value] = {}
        for key, (shape, dtype, _) in rows.items():
            attrs: dict[str, AttrValue] = {
                "paths": files,
                "key": key,
                "batch": batch,
                "shape": shape,
                "dtype": str(dtype),
                "start": self.start,
                "stop": self.stop,
                "shuffle": shuffle,
                "seed": seed,
            }
            self.values[key] = source_tensor("arrays_batch", attrs, placement, sbp)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.values.values())

    def __getitem__(self, key: str) -> Value:
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)


Rows = dict[str, tuple[tuple[int, ...], DType, int | None]]
"""Per key the shape of a row, the dtype, and the number of rows where it is known."""


def _shard_files(path: PathText | Sequence[PathText]) -> tuple[str, ...]:
    """The files that are meant, patterns replaced by what matches them."""
    if isinstance(path, (str, PathLike)):
        path = [path]
    files: list[str] = []
    for each in path if isinstance(path, Sequence) and not isinstance(path, bytes) else (path,):
        if not isinstance(each, (str, PathLike)) or not isinstance(fspath(each), str):
            raise UsageError("a data file must be a path", got=repr(each))
        file = path_text("a data file", each)
        if has_magic(file) and not Path(file).exists():
            matching = sorted(glob(file))  # noqa: PTH207  (a pattern may begin anywhere)
            if not matching:
                raise DataError(
                    "no data file matches a pattern",
                    got=file,
                    expected="at least one file",
                    hint="files that are only on the workers must be listed by their names",
                )
            files += matching
        else:
            files.append(file)
    if not files:
        raise UsageError("there must be at least one data file", got="an empty list")
    return tuple(files)


def _seen(files: Sequence[str], keys: Sequence[str]) -> Rows:
    """What the files hold. All have the same arrays, and within a file these have equal lengths."""
    rows: dict[str, tuple[tuple[int, ...], DType, int]] = {}
    for file in files:
        counts = {}
        for key in keys:
            stored = stored_array(file, key)
            shape, dtype = stored.shape, _dtype_of(stored)
            if not shape or not shape[0]:
                raise DataError(
                    f"array {key!r} of a data file has no rows",
                    got=f"{dtype}{list(shape)} in {file}",
                    expected="at least one row",
                )
            known = rows.setdefault(key, (shape[1:], dtype, 0))
            if (shape[1:], dtype) != known[:2]:
                raise DataError(
                    f"rows of {key!r} in a data file are not like those in the first",
                    got=f"{dtype}{list(shape[1:])} in {file}",
                    expected=f"{known[1]}{list(known[0])} as in {files[0]}",
                )
            counts[key] = shape[0]
            rows[key] = (*known[:2], known[2] + shape[0])
        if len(set(counts.values())) > 1:
            raise DataError(
                "arrays of a data file have different numbers of rows",
                got=f"{', '.join(f'{key}: {count}' for key, count in counts.items())} in {file}",
                expected="one number for all keys",
            )
    return dict(rows)


def _dtype_of(stored: StoredArray) -> DType:
    try:
        return DType.parse(stored.dtype)
    except DTypeError as error:
        raise DataError(
            f"array {stored.key!r} of a data file has a dtype that no tensor has",
            got=f"{stored.dtype} in {stored.file.path}",
            expected=error.report.expected,
        ) from None


def _promised(
    files: Sequence[str],
    keys: Sequence[str],
    types: Mapping[str, tuple[Sequence[int], DType | str]],
    split: tuple[int, int] | None,
) -> Rows:
    missing = [key for key in keys if key not in types]
    if missing or split is None:
        raise DataError(
            "a data file is not here, and what the job needs to know about it is not given",
            got=_named(files),
            expected="types for every key, and split",
        )
    return {key: (tuple(types[key][0]), DType.parse(types[key][1]), None) for key in keys}


def _checked_split(
    files: Sequence[str], split: tuple[int, int] | None, rows: Rows
) -> tuple[int, int]:
    if not rows:
        raise UsageError("keys must name at least one array", got=_named(files))
    counts = {count for _, _, count in rows.values() if count is not None}
    start, stop = split if split is not None else (0, next(iter(counts)))
    if not 0 <= start < stop or any(stop > count for count in counts):
        raise DataError(
            "split must be a range of rows of the data",
            got=f"({start}, {stop}) of {', '.join(map(str, counts)) or 'unknown'} rows in "
            f"{_named(files)}",
            expected="0 <= start < stop <= rows",
        )
    return start, stop


def _named(files: Sequence[str]) -> str:
    """Files, for people."""
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


class TokenFile:
    """Random sequences from a file of tokens: `tokens, targets = pc.data.TokenFile(...)`.

    Both are int64 [batch, length]; `targets` are the tokens one position further on. The file is
    raw numbers of `dtype`, one after another, and is memory-mapped. Where the sequences begin
    depends on the job's seed, `seed` and the step alone, so it is the same on every layout. `sbp`
    is how the devices of `placement` hold the batches (default: broadcast). DataError if the file
    is there but too short.
    """

    def __init__(
        self,
        path: PathText,
        batch: int,
        length: int,
        dtype: str = "uint8",
        *,
        placement: Placement,
        sbp: SbpLike | None = None,
        seed: int = 0,
    ) -> None:
        file = path_text("a token file", path)
        if dtype not in STORED_TOKENS:
            raise DTypeError(
                "a token file holds whole numbers",
                got=repr(dtype),
                expected="one of " + ", ".join(STORED_TOKENS),
            )
        if Path(file).exists():
            mapped_tokens(file, dtype, length + 1)

        def sequences(shift: int) -> Value:
            attrs: dict[str, AttrValue] = {
                "path": file,
                "dtype": dtype,
                "batch": batch,
                "length": length,
                "shift": shift,
                "seed": seed,
            }
            return source_tensor("token_batch", attrs, placement, sbp)

        self.tokens = sequences(0)
        self.targets = sequences(1)

    def __iter__(self) -> Iterator[Value]:
        return iter((self.tokens, self.targets))
