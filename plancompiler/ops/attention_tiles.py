"""How a device's attention is cut into tiles of scores, and what is done to a tile: masks, hidden
keys, dropped weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ops import kernel as blocking
from plancompiler.ops.dropout import kept_in_rows, stream_of
from plancompiler.ops.registry import Array, AttrMap, KernelContext

_TILE_BLOCKS = 2
"""Pieces' worth of bytes in a tile of scores."""
_TILE_KEYS = 512
"""Keys of a tile: more cost cache, fewer cost calls."""
_CAUSAL_ROWS = 64
"""Queries of a tile of causal attention at most: half of what a tile has to either side of the
diagonal is work for nothing, but products of few rows are slow."""
LOWER_RIGHT = "lower_right"
"""The alignment of causal attention in which the last query sees all keys."""


def causal_diagonal(attrs: AttrMap, length: int, keys: int) -> int | None:
    """Query i of `length` sees the keys up to i + this; None where it sees all.

    The attribute `causal` is False, True (query i sees key i and those before it, whatever the
    lengths) or "lower_right" (the last query sees the last key). AttributeValueError for others.
    """
    causal = attrs.get("causal", False)
    if causal is False:
        return None
    if causal is True:
        return 0
    if causal == LOWER_RIGHT:
        return keys - length
    raise AttributeValueError(
        "unknown alignment of causal attention",
        got=repr(causal),
        expected=f"False, True (query i sees keys 0 to i) or {LOWER_RIGHT!r} (the last query sees "
        "all keys)",
    )


class Window(NamedTuple):
    """The queries and keys of a call of a kernel, among those of the whole tensors."""

    row: int
    """The first query."""
    column: int
    """The first key."""
    keys: int
    """How many keys there are in all."""
    shift: int | None
    """Local query i sees the local keys up to i + this, which is at least 0; None where it sees
    all."""


def window_of(context: KernelContext) -> Window:
    """The window of a kernel that has all keys."""
    length, keys = context.input_shapes[0][2], context.input_shapes[1][2]
    row = context.input_regions[0][2][0]
    diagonal = causal_diagonal(context.attrs, length, keys)
    return Window(row, 0, keys, None if diagonal is None else diagonal + row)


class Tiles:
    """How the local work is cut up.

    Batch and heads of keys are one axis, "pairs"; the heads of queries of one pair stand below
    each other. A tile is some pairs, some positions of their queries, and some keys.
    """

    def __init__(
        self,
        context: KernelContext,
        query: Array,
        key: Array,
        window: Window,
        masks: Sequence[Array] = (),
    ) -> None:
        """`masks` is what is added to the scores, one array or none."""
        self._context = context
        self._query = query
        self._masks = masks
        self.rate = context.attrs.get("dropout", 0.0)
        self.keys: int = key.shape[2]
        self.groups: int = key.shape[1]
        self.pairs = key.shape[0] * self.groups
        self.heads = query.shape[1] // max(1, key.shape[1])
        self.length: int = query.shape[2]
        self._window = window
        self.causal = window.shift is not None
        # Local query i sees the keys up to i + shift.
        self.shift: int = window.shift or 0
        self.wide = min(_TILE_KEYS, self.keys)
        budget = _TILE_BLOCKS * blocking.BLOCK_BYTES // query.itemsize
        most = min(self.length, _CAUSAL_ROWS) if self.causal else self.length
        self.tall = max(1, min(most, budget // (self.wide * max(1, self.heads))))
        self.deep = max(1, budget // (self.wide * max(1, self.heads) * self.tall))

    def queries(self) -> Iterator[tuple[slice, slice]]:
        """Pairs and positions of the tiles of queries; of the same pairs the last ones first, as
        they see the most keys."""
        for pair in blocking.piece_starts(self._query, self.pairs, self.deep):
            for start in reversed(range(0, self.length, self.tall)):
                stop = min(start + self.tall, self.length)
                yield slice(pair, pair + self.deep), slice(start, stop)

    def keys_of(self, rows: slice) -> Iterator[slice]:
        """Tiles of keys that queries at these positions may see."""
        seen = self.seen(rows)
        for start in range(0, seen, self.wide):
            yield slice(start, min(start + self.wide, seen))

    def seen(self, rows: slice) -> int:
        """How many of the keys queries at these positions may see."""
        return min(self.keys, rows.stop + self.shift) if self.causal else self.keys

    def first_hidden(self, rows: slice, columns: slice) -> int:
        """The first key of a tile that its first query may not see; each query sees one more."""
        if not self.causal:
            return self.keys
        first: int = rows.start + self.shift + 1 - columns.start
        return first

    def hide(self, scores: Array, rows: slice, columns: slice) -> None:
        """Give -inf to the keys of a tile that queries may not see, in scores [pairs, heads * rows,
        keys]."""
        # The first key that not all of the queries see.
        first = max(columns.start, rows.start + self.shift + 1)
        if not self.causal or first >= columns.stop:
            return
        height = rows.stop - rows.start
        last = rows.start + self.shift - first
        bounds = _bounds(self._context, height, columns.stop - first, last, scores.dtype)
        part = scores.reshape(len(scores), self.heads, height, -1)[..., first - columns.start :]
        np.minimum(part, bounds, out=part)

    def mask(self, scores: Array, pairs: slice, rows: slice, columns: slice) -> None:
        """Add the mask to scores [pairs, heads * rows, keys] of a tile."""
        for mask in self._masks:
            places, part = self.in_mask(mask, rows, columns)
            for row, pair in zip(scores, range(pairs.start, self.pairs), strict=False):
                target = row.reshape(self.heads, rows.stop - rows.start, row.shape[1])
                np.add(target, part[places(pair)], out=target)

    def in_mask(
        self, mask: Array, rows: slice, columns: slice
    ) -> tuple[Callable[[int], tuple[int, int]], Array]:
        """[batch, groups, heads of a group, rows, keys] of the mask (or its gradient), each extent
        that or 1, and where in it the first two of a pair are.
        """
        batch, heads, length, keys = mask.shape
        groups = 1 if heads == 1 else heads // self.heads
        part = mask.reshape(batch, groups, heads // groups, length, keys)[
            :,
            :,
            :,
            rows if length > 1 else slice(None),
            columns if keys > 1 else slice(None),
        ]
        count = max(1, self.groups)

        def places(pair: int) -> tuple[int, int]:
            return pair // count if batch > 1 else 0, pair % count if groups > 1 else 0

        return places, part

    @property
    def masked(self) -> bool:
        """Whether a mask is added to the scores."""
        return bool(self._masks)

    def drop(self, weights: Array, pairs: slice, rows: slice, columns: slice) -> None:
        """Zero the weights of a tile that are dropped, and scale the others."""
        if self.rate:
            np.multiply(weights, self.keep(pairs, rows, columns), out=weights)
            np.multiply(weights, 1 / (1 - self.rate), out=weights)

    def keep(self, pairs: slice, rows: slice, columns: slice) -> Array:
        """Which weights [pairs, heads * rows, keys] of a tile are not dropped: the bits that
        dropout would give to all weights [batch, heads, queries, keys].
        """
        context = self._context
        start, threshold = stream_of(context, self.rate)
        (batch, _), (head, _) = context.input_regions[0][:2]
        row, column, keys, _ = self._window
        _, heads, length, _ = context.input_shapes[0]
        arange = context.arrays.arange
        pair = arange(pairs.start, min(pairs.stop, self.pairs))[:, None, None]
        count = max(1, self.groups)
        number = batch + pair // count
        number = number * heads + head + pair % count * self.heads + arange(self.heads)[:, None]
        number = number * length + row + arange(rows.start, rows.stop)
        place = (column + columns.start, column + columns.stop)
        kept = kept_in_rows(context, number.reshape(-1), keys, place, start, threshold)
        return kept.reshape(pair.size, -1, kept.shape[1])

    def fold(self, array: Array) -> Array:
        """[batch, heads, length, ...] of queries as [pairs, heads of a pair, length, ...]."""
        return array.reshape(self.pairs, self.heads, *array.shape[2:])

    def below(self, array: Array) -> Array:
        """[pairs, heads of a pair, rows, width] as [pairs, rows, width]; a copy if needed."""
        if self.heads == 1:
            return array[:, 0]
        return array.reshape(len(array), array.shape[1] * array.shape[2], array.shape[3])


def _bounds(context: KernelContext, rows: int, keys: int, last: int, dtype: np.dtype[Any]) -> Array:
    """[rows, keys]: inf where row i may see a key, those up to last + i, and -inf elsewhere."""
    key = "bounds", rows, keys, last, dtype
    bounds: Array | None = context.work.get(key)
    if bounds is None:
        arange = context.arrays.arange
        visible = arange(keys) <= arange(rows)[:, None] + last
        bounds = context.work[key] = np.where(visible, np.inf, -np.inf).astype(dtype)
    return bounds
