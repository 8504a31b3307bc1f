"""Placements: which devices hold a tensor, arranged as a mesh with named axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.errors import PlacementError, UsageError
from plancompiler.ir.source import user_line
from plancompiler.ir.task import require_rank_fits

DEVICE_TYPES = ("cpu", "cuda")


class Placement:
    """An immutable n-dimensional array of distinct ranks on one device type.

    `ranks` is nested as the mesh is (its shape is the hierarchy); `axes` may name the mesh axes.
    The parallel id of a rank is its row-major index.
    """

    __slots__ = ("_hash", "_index", "axes", "device_type", "hierarchy", "rank_list")

    device_type: str
    hierarchy: tuple[int, ...]
    rank_list: tuple[int, ...]
    """All ranks in parallel-id order."""
    axes: tuple[str, ...] | None
    _index: dict[int, int]
    _hash: int

    def __init__(
        self,
        device_type: str,
        ranks: Sequence[Any] | np.ndarray[Any, Any] | int,
        axes: Sequence[str] | None = None,
    ) -> None:
        if device_type not in DEVICE_TYPES:
            raise PlacementError(
                "unknown device type", got=repr(device_type), expected=" or ".join(DEVICE_TYPES)
            )
        try:
            array = np.atleast_1d(np.asarray(ranks))
        except ValueError:
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "iu" or array.size == 0:
            raise PlacementError(
                "ranks must be a non-empty rectangular array of whole numbers",
                got=repr(ranks),
                expected="such as [0, 1] or [[0, 1], [2, 3]]",
            )
        rank_list = tuple(array.ravel().tolist())
        if min(rank_list) < 0:
            raise PlacementError(
                "a rank is negative", got=str(min(rank_list)), expected="0 or more"
            )
        require_rank_fits(max(rank_list))
        index = dict(zip(rank_list, range(len(rank_list)), strict=True))
        if len(index) != len(rank_list):
            twice = sorted({rank for rank in rank_list if rank_list.count(rank) > 1})
            raise PlacementError(
                "a placement lists a rank twice",
                got=f"rank {', '.join(map(str, twice))} in {array.tolist()}",
                expected="distinct ranks",
            )
        if axes is not None:
            axes = tuple(axes)
            if (
                len(axes) != array.ndim
                or len(set(axes)) != len(axes)
                or not all(isinstance(name, str) for name in axes)
            ):
                raise PlacementError(
                    "axis names must be distinct texts, one per mesh axis",
                    got=repr(axes),
                    expected=f"{array.ndim} names",
                )
        hierarchy = tuple(array.shape)
        set_field = object.__setattr__
        set_field(self, "device_type", device_type)
        set_field(self, "hierarchy", hierarchy)
        set_field(self, "rank_list", rank_list)
        set_field(self, "axes", axes)
        set_field(self, "_index", index)
        set_field(self, "_hash", hash((device_type, hierarchy, rank_list, axes)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Placement is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        """For `pickle` and `copy`: what it is made of."""
        return Placement, (self.device_type, self.ranks.tolist(), self.axes)

    @property
    def ranks(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The ranks as an array of the mesh's shape."""
        return np.array(self.rank_list, dtype=np.int64).reshape(self.hierarchy)

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.rank_list)

    @property
    def ndim(self) -> int:
        """Number of mesh axes."""
        return len(self.hierarchy)

    def __contains__(self, rank: int) -> bool:
        return rank in self._index

    def parallel_id(self, rank: int) -> int:
        """Row-major index of a rank that is in the placement."""
        try:
            return self._index[rank]
        except KeyError:
            raise PlacementError(
                "a rank is not in the placement", got=rank, expected=self
            ) from None

    def coordinates(self, parallel_id: int) -> tuple[int, ...]:
        """Mesh coordinates of a parallel id."""
        reversed_coordinates = []
        for extent in reversed(self.hierarchy):
            parallel_id, coordinate = divmod(parallel_id, extent)
            reversed_coordinates.append(coordinate)
        return tuple(reversed(reversed_coordinates))

    def parallel_id_at(self, coordinates: Sequence[int]) -> int:
        """Parallel id at mesh coordinates."""
        parallel_id = 0
        for extent, coordinate in zip(self.hierarchy, coordinates, strict=True):
            parallel_id = parallel_id * extent + coordinate
        return parallel_id

    def group(self, rank: int, mesh_axes: Sequence[int]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `mesh_axes`, in row-major order of these."""
        coordinates = self.coordinates(self.parallel_id(rank))
        index = tuple(
            slice(None) if axis in mesh_axes else coordinate
            for axis, coordinate in enumerate(coordinates)
        )
        return tuple(self.ranks[index].ravel().tolist())

    def axis(self, name: str) -> int:
        """Index of the mesh axis with this name."""
        if self.axes is None or name not in self.axes:
            raise PlacementError(
                "no mesh axis has this name", got=repr(name), expected=str(self.axes)
            )
        return self.axes.index(name)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Placement)
            and self._hash == other._hash
            and self.device_type == other.device_type
            and self.hierarchy == other.hierarchy
            and self.rank_list == other.rank_list
            and self.axes == other.axes
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        axes = "" if self.axes is None else f", axes={self.axes!r}"
        return f"Placement({self.device_type!r}, {self.ranks.tolist()!r}{axes})"

    def __str__(self) -> str:
        first, count = self.rank_list[0], self.size
        if self.rank_list == tuple(range(first, first + count)):
            ranks = f"{first}..{first + count - 1}" if count > 1 else f"{first}"
        else:
            ranks = ",".join(map(str, self.rank_list))
        extents = [str(extent) for extent in self.hierarchy]
        if self.axes is not None:
            extents = [
                f"{name if name.isidentifier() else json.dumps(name)}={extent}"
                for name, extent in zip(self.axes, extents, strict=True)
            ]
        return f"{self.device_type}:{ranks}({', '.join(extents)})"


def require_placement(
    value: object, op: str | None = None, expected: str = 'pc.Placement("cpu", [0, 1])'
) -> Placement:
    """The value; UsageError, with the user's line, where it is no placement."""
    if not isinstance(value, Placement):
        raise UsageError(
            "a placement is needed here",
            op=op,
            source=user_line(),
            got=f"{type(value).__name__} {value}"[:80],
            expected=expected,
        )
    return value
