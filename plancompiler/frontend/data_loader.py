"""`pc.data.DataLoader`: batches of any sequence or iterable of arrays, for feeds and eager tensors.

The order of an epoch depends on the seed and the epoch alone, so all ranks and all restarts see the
same batches. A loader with a placement reads only the rows that its rank holds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pickle import PicklingError
from typing import Any
from weakref import finalize

import numpy as np

from plancompiler.errors import DataError, UsageError
from plancompiler.frontend.trace import current_recorder
from plancompiler.ir import BROADCAST, DType, NdSbp, Placement, Split
from plancompiler.ir.arguments import whole_number
from plancompiler.ir.closing import Closing
from plancompiler.ir.operators import SbpLike
from plancompiler.ir.placement import require_placement
from plancompiler.ir.shard import rank_region
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER
from plancompiler.ops import random

Array = np.ndarray[Any, np.dtype[Any]]
Rows = Sequence[int]


class DataLoader(Closing):
    """Batches of a dataset, epoch by epoch: `for batch in loader:` goes through one.

    `dataset` is a sequence (what has `len` and gives an item for a whole number), a dict or tuple
    of arrays whose first axis counts rows, or any iterable. An item is an array or a number, or a
    tuple or dict of them; `map` makes another item of each. `collate_fn` makes a batch of a list of
    items; by default each part of the items is stacked. The last batch may be smaller unless
    `drop_last` is set.

    `shuffle` gives each epoch another random order, by `seed`; `sampler` gives the rows of an epoch
    instead, as a sequence or as a function of the epoch. With `num_workers` that many processes
    read, `prefetch_factor` batches each ahead of the reader; dataset and functions must be
    importable there. An iterable is read here, in its own order.

    Without `placement` batches hold NumPy arrays, for `session.step(**batch)` or `pc.tensor`. With
    one they hold eager tensors of layout `sbp` (default: broadcast), of which each rank reads its
    own rows: all ranks of the world make the same loader and the same loops.

    A loop that is left early ends its epoch. `state_dict()` is the place after the last batch that
    was given, and `load_state_dict` and `seek` go to one: the next loop continues there.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        map: Callable[[Any], Any] | None = None,  # noqa: A002  # the usual name
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Rows | Callable[[int], Rows] | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        drop_last: bool = False,
        seed: int = 0,
        placement: Placement | None = None,
        sbp: SbpLike | None = None,
    ) -> None:
        self._batch_size = _positive("batch_size", batch_size)
        self._workers = whole_number("num_workers", num_workers)
        self._ahead = self._workers * _positive("prefetch_factor", prefetch_factor)
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._sampler = sampler
        columns = isinstance(dataset, (dict, tuple))
        self._reader = _Reader(_Columns(dataset) if columns else dataset, map, collate_fn)
        self._rows = _row_count(self._reader.dataset)
        if self._rows is None and (shuffle or sampler is not None or self._workers):
            raise UsageError(
                "an iterable without length is read here, in its own order",
                source=user_line(),
                got="shuffle, sampler or num_workers",
                hint="give a sequence, which has len() and items by number",
            )
        if placement is not None:
            require_placement(placement, "DataLoader", "placement=pc.Placement(...)")
        self._placement = placement
        self._layout: NdSbp | None = None
        if placement is not None:
            layout = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)
            self._layout = layout.check(placement.ndim, 32)  # parts have axes of their own
            if layout.has_partial:
                raise UsageError("data are split or broadcast", source=user_line(), got=str(layout))
        self._epoch = self._batch = 0
        self._is_placed = True
        """Whether the next loop continues at the place that is set, rather than in a new epoch."""
        self._pool: ProcessPoolExecutor | None = None
        self._drop_pool: Callable[[], object] = lambda: None

    # --- epochs ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch. UsageError for an iterable, which does not tell."""
        if self._rows is None:
            raise UsageError("an iterable has no length", source=user_line())
        rows = self._rows
        if isinstance(self._sampler, Sequence):
            rows = len(self._sampler)
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_placed:
            self._epoch, self._batch = self._epoch + 1, 0
        self._is_placed = False
        return self._batches(self._epoch, self._batch)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        if ACTIVE_TRACER.get() is not None:
            raise UsageError(
                "a DataLoader gives numbers, which a job does not have while it is traced",
                source=user_line(),
                hint="feed its batches to pc.input, or use pc.data.Arrays inside of the job",
            )
        if self._rows is None:
            made = self._streamed(first)
        elif self._workers:
            made = self._read_ahead(self._numbers(epoch, first))
        else:
            made = map(self._reader.read, self._numbers(epoch, first))
        for batch in made:
            self._batch += 1
            yield self._given(batch)
        self._epoch, self._batch, self._is_placed = epoch + 1, 0, True

    def _numbers(self, epoch: int, first: int) -> Iterator[_Numbers]:
        """Of each batch the rows that are read here, where they begin in it, and its extent."""
        assert self._rows is not None
        order: Any
        if self._sampler is not None:
            order = self._sampler(epoch) if callable(self._sampler) else self._sampler
        elif self._shuffle:
            order = random.permutation(self._seed, f"epoch {epoch}", self._rows)
        else:
            order = np.arange(self._rows)
        for begin in range(first * self._batch_size, len(order), self._batch_size):
            rows = order[begin : begin + self._batch_size]
            if self._drop_last and len(rows) < self._batch_size:
                return
            low, high = self._own(len(rows))
            # A rank without rows reads one all the same, to know the shapes.
            yield rows[low : max(high, low + 1)] if low < len(rows) else rows[:1], low, len(rows)

    def _streamed(self, first: int) -> Iterator[_Read]:
        items = iter(self._reader.dataset)
        skipped = first * self._batch_size
        if sum(1 for _ in islice(items, skipped)) < skipped:
            return
        while rows := list(islice(items, self._batch_size)):
            if self._drop_last and len(rows) < self._batch_size:
                return
            low, high = self._own(len(rows))
            own = rows[low : max(high, low + 1)] if low < len(rows) else rows[:1]
            yield self._reader.batch(own), low, len(rows)

    def _own(self, extent: int) -> tuple[int, int]:
        """The rows of a batch that this rank holds."""
        if self._layout is None or self._placement is None:
            return 0, extent
        rank = current_recorder().rank
        if rank not in self._placement:
            return 0, 0
        entries = [entry if entry == Split(0) else BROADCAST for entry in self._layout]
        ((low, high),) = rank_region((extent,), self._placement, NdSbp(tuple(entries)), rank)
        return low, high

    def _read_ahead(self, numbers: Iterator[_Numbers]) -> Iterator[_Read]:
        """Batches of worker processes, in order."""
        pool = self._open_pool()
        waiting: deque[Future[_Read]] = deque()
        try:
            for each in numbers:
                waiting.append(self._asked(pool, each))
                if len(waiting) > self._ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise self._ended(error) from error
        finally:
            for future in waiting:
                future.cancel()

    def _asked(self, pool: ProcessPoolExecutor, numbers: _Numbers) -> Future[_Read]:
        try:
            return pool.submit(_read, numbers)
        # What cannot be pickled; errors of the user's functions come with the results.
        except (BrokenProcessPool, PicklingError, AttributeError) as error:
            raise self._ended(error) from error

    def _ended(self, error: Exception) -> DataError:
        self.close()
        return DataError(
            "a process that reads data has ended, or what it is to read cannot be sent to it",
            source=user_line(),
            got=str(error) or type(error).__name__,
            hint="dataset and functions must be importable (not defined in __main__'s "
            "functions), and a program that starts processes begins with "
            "`if __name__ == '__main__':`",
        )

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            pool = self._pool = ProcessPoolExecutor(
                self._workers,
                multiprocessing.get_context("spawn"),
                _begin_to_read,
                (self._reader,),
            )
            # A loader that is forgotten takes its processes with it.
            self._drop_pool = finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        return self._pool

    def close(self) -> None:
        """End the processes that read. Safe to call again; a later loop starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._drop_pool()
            pool.shutdown(wait=True, cancel_futures=True)

    # --- places ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """The place after the last batch that was given, for `load_state_dict`."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next loop continue at a place. UsageError for what is none."""
        if not isinstance(state, Mapping) or set(state) != {"epoch", "batch"}:
            raise UsageError(
                "this is not the place of a DataLoader",
                source=user_line(),
                got=", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state),
                expected="epoch, batch",
            )
        self._epoch = whole_number("epoch", state["epoch"])
        self._batch = whole_number("batch", state["batch"])
        self._is_placed = True

    def seek(self, step: int) -> None:
        """Let the next loop continue where so many batches have been given, epoch by epoch: after a
        restore, `loader.seek(session.next_step)`. UsageError for an iterable without length.
        """
        epoch, batch = divmod(whole_number("step", step), len(self))
        self.load_state_dict({"epoch": epoch, "batch": batch})

    # --- tensors --------------------------------------------------------------------------------

    def _given(self, read: _Read) -> Any:
        """What the loop is given of what was read."""
        batch, low, extent = read
        if self._placement is None:
            return batch
        if isinstance(batch, Mapping):
            return {name: self._tensor(part, low, extent) for name, part in batch.items()}
        if isinstance(batch, (tuple, list)):
            return tuple(self._tensor(part, low, extent) for part in batch)
        return self._tensor(batch, low, extent)

    def _tensor(self, part: Any, low: int, extent: int) -> Any:
        array = np.asarray(part)
        world = current_recorder()
        shape = (extent, *array.shape[1:])
        spec = world.spec(shape, DType.parse(array.dtype), self._placement, self._layout)
        if not spec.inside:
            return world.part(spec, array)
        (start, stop), *others = spec.region
        index = (slice(start - low, stop - low), *(slice(*bounds) for bounds in others))
        return world.part(spec, array[index])


_Numbers = tuple[Any, int, int]
"""Of a batch the rows that are read here, where they begin in it, and its extent."""
_Read = tuple[Any, int, int]
"""The same with what was read."""


class _Reader:
    """Reads rows of a dataset and makes a batch of them; it travels to worker processes."""

    def __init__(
        self,
        dataset: Any,
        change: Callable[[Any], Any] | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset = dataset
        self._change, self._collate = change, collate

    def read(self, numbers: _Numbers) -> _Read:
        """The batch of these rows."""
        rows, low, extent = numbers
        dataset = self.dataset
        if isinstance(dataset, _Columns) and self._change is None and self._collate is None:
            return dataset.rows(rows), low, extent
        return self.batch([dataset[int(row)] for row in rows]), low, extent

    def batch(self, items: list[Any]) -> Any:
        """A batch of items."""
        if self._change is not None:
            items = [self._change(item) for item in items]
        return stacked(items) if self._collate is None else self._collate(items)


class _Columns:
    """Arrays with one row for each item."""

    def __init__(self, columns: Any) -> None:
        self._named = columns if isinstance(columns, dict) else None
        self._arrays = [np.asarray(each) for each in (columns.values() if self._named else columns)]
        counts = {array.shape[:1] for array in self._arrays}
        if len(counts) != 1 or () in counts:
            raise DataError(
                "the arrays of a dataset have different numbers of rows",
                source=user_line(),
                got=", ".join(str(array.shape) for array in self._arrays) or "no array",
                expected="one first extent",
            )

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, row: int) -> Any:
        return self.rows(row)

    def rows(self, chosen: Any) -> Any:
        """The arrays' rows of these numbers."""
        parts = [array[chosen] for array in self._arrays]
        return tuple(parts) if self._named is None else dict(zip(self._named, parts, strict=True))


def stacked(items: list[Any]) -> Any:
    """A batch of items of one form: each part of them stacked along a new first axis.

    Python's numbers become float32 and int64, as with `pc.tensor`. DataError for items that differ.
    """
    first = items[0]
    if isinstance(first, Mapping):
        return {name: stacked([item[name] for item in items]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(stacked(list(parts)) for parts in zip(*items, strict=True))
    try:
        array = np.stack([np.asarray(item) for item in items])
    except ValueError:
        shapes = sorted({np.shape(item) for item in items})
        raise DataError(
            "items of a batch have different shapes",
            source=user_line(),
            got=", ".join(map(str, shapes[:4])),
            expected="one shape",
            hint="give a collate_fn that pads them",
        ) from None
    return array.astype(np.float32) if type(first) is float else array


def _positive(name: str, value: int) -> int:
    number = whole_number(name, value)
    if number < 1:
        raise UsageError(f"{name} must be positive", source=user_line(), got=number)
    return number


def _row_count(dataset: Any) -> int | None:
    """Items of a sequence; None for another iterable."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return len(dataset)
    if isinstance(dataset, Iterable):
        return None
    raise UsageError(
        "a dataset is a sequence or an iterable of arrays",
        source=user_line(),
        got=type(dataset).__name__,
        expected="something with len() and items by number, or something to loop over",
    )


# --- in worker processes --------------------------------------------------------------------------

_reader: _Reader | None = None


def _begin_to_read(reader: _Reader) -> None:
    global _reader
    _reader = reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program that reads ends this process
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _read(numbers: _Numbers) -> _Read:
    assert _reader is not None
    return _reader.read(numbers)
