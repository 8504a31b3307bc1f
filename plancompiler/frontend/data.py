"""Data inside a job: each rank reads its own part of every batch from files.

Inputs fed by the caller (`pc.input`) are for small data; these are for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path

from plancompiler.errors import DataError, DTypeError, UsageError
from plancompiler.frontend.trace import source_tensor
from plancompiler.ir import AttrValue, DType, Placement, Value
from plancompiler.ir.operators import SbpLike
from plancompiler.ops.data import STORED_TOKENS, map_tokens, read_array

PathText = str | PathLike[str]


class Arrays:
    """Batches of rows of the arrays in an npz file: `images, labels = pc.data.Arrays(...)`.

    Each step gives the next `batch` rows of each array of `keys`, as values [batch, ...] of the
    stored dtype; `data["images"]` is one of them. Rows `split` = (start, stop) are used, all by
    default; when they are used up the next epoch begins, in a new random order if `shuffle` is
    set. The order depends on the job's seed, `seed` and the step alone, so it is the same on
    every layout. `sbp` is how the devices of `placement` hold the batches (default: broadcast).

    The file is looked at while the job is traced: DataError if it is missing, lacks a key or has
    fewer rows. Where it is only on the workers, `types` gives what cannot be seen: for each key
    the shape of a row and the dtype, `{"images": ((64,), "uint8")}`; `split` must then be given.
    """

    def __init__(
        self,
        path: PathText,
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
        file = fspath(path)
        if types is not None and not Path(file).exists():
            rows = _promised(file, keys, types, split)
        else:
            rows = _seen(file, keys)
        self.start, self.stop = _checked_split(file, split, rows)
        self.batch = batch
        self.values: dict[str, Value] = {}
        for key, (shape, dtype, _) in rows.items():
            attrs: dict[str, AttrValue] = {
                "path": file,
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


def _seen(file: str, keys: Sequence[str]) -> Rows:
    found: Rows = {}
    for key in keys:
        array = read_array(file, key)
        if array.ndim == 0 or len(array) == 0:
            raise DataError(f"array {key!r} of a data file has no rows", got=file)
        found[key] = (array.shape[1:], DType.parse(array.dtype), len(array))
    return found


def _promised(
    file: str,
    keys: Sequence[str],
    types: Mapping[str, tuple[Sequence[int], DType | str]],
    split: tuple[int, int] | None,
) -> Rows:
    missing = [key for key in keys if key not in types]
    if missing or split is None:
        raise DataError(
            "a data file is not here, and what the job needs to know about it is not given",
            got=file,
            expected="types for every key, and split",
        )
    return {key: (tuple(types[key][0]), DType.parse(types[key][1]), None) for key in keys}


def _checked_split(file: str, split: tuple[int, int] | None, rows: Rows) -> tuple[int, int]:
    if not rows:
        raise UsageError("keys must name at least one array", got=file)
    counts = {count for _, _, count in rows.values() if count is not None}
    if len(counts) > 1:
        raise DataError(
            "arrays of a data file have different numbers of rows",
            got=", ".join(f"{key}: {count}" for key, (_, _, count) in rows.items()),
        )
    start, stop = split if split is not None else (0, next(iter(counts)))
    if not 0 <= start < stop or any(stop > count for count in counts):
        raise DataError(
            "split must be a range of rows of the data file",
            got=f"({start}, {stop}) of {', '.join(map(str, counts)) or 'unknown'} rows in {file}",
            expected="0 <= start < stop <= rows",
        )
    return start, stop


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
        file = fspath(path)
        if dtype not in STORED_TOKENS:
            raise DTypeError(
                "a token file holds whole numbers",
                got=repr(dtype),
                expected="one of " + ", ".join(STORED_TOKENS),
            )
        if Path(file).exists():
            map_tokens(file, dtype, length + 1)

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
