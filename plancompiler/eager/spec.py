"""`TensorSpec`: all that is known of an eager tensor besides its numbers, one object per world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plancompiler.executor.space import HOST, Space
from plancompiler.ir import AttrValue, DType, NdSbp, Placement, TensorType
from plancompiler.ir.shard import Region, rank_region, region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plancompiler.eager.tensor import DistTensor
    from plancompiler.eager.world import World


class TensorSpec:
    """Global shape, dtype, placement and SBP, and what follows for this rank.

    A world makes one object per combination, so that specs are compared and hashed by identity.
    """

    __slots__ = (
        "dtype",
        "inside",
        "local_shape",
        "numpy_dtype",
        "placement",
        "region",
        "runs",
        "sbp",
        "shape",
        "space",
        "whole",
        "world",
    )

    def __init__(
        self, world: World, shape: tuple[int, ...], dtype: DType, placement: Placement, sbp: NdSbp
    ) -> None:
        self.world = world
        self.shape = shape
        self.dtype = dtype
        self.placement = placement
        self.sbp = sbp
        self.numpy_dtype = dtype.numpy
        self.inside = world.rank in placement
        """Whether this rank holds a part."""
        self.space: Space = world.space(placement.device_type) if self.inside else HOST
        """Where its part lies."""
        self.region: Region = ()
        """The box of the global tensor that this rank holds."""
        self.local_shape: tuple[int, ...] = (0,) * max(1, len(shape))
        if self.inside:
            self.region = rank_region(shape, placement, sbp, world.rank)
            self.local_shape = region_shape(self.region)
        self.whole: TensorSpec | None = None
        """The same tensor broadcast, once somebody has asked the world for it."""
        self.runs: dict[Any, Callable[..., DistTensor]] = {}
        """Prepared ops on a tensor of this spec, by kind and what else they take."""

    @property
    def type(self) -> TensorType:
        """Global shape and dtype."""
        return TensorType(self.shape, self.dtype)

    def empty(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A local array of unset elements."""
        return self.space.empty(self.local_shape, self.numpy_dtype)

    def __str__(self) -> str:
        return f"{self.type} on {self.placement} as {self.sbp}"


def attrs_key(attrs: Mapping[str, AttrValue]) -> tuple[object, ...]:
    """Attributes as part of a key. 1, 1.0 and True are equal but not the same, nor are 0.0 and
    -0.0; the key of a random op is no part of its plan.
    """
    return tuple(
        [
            (name, value, value.__class__) if value else (name, repr(value))
            for name, value in attrs.items()
            if name != "key" or value.__class__ is not int
        ]
    )
