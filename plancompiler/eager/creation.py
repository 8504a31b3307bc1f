"""Eager tensors out of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.eager.agreement import compare_copies, gathered
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.world import World, current_world
from plancompiler.errors import DTypeError, ShapeError, UsageError
from plancompiler.executor.space import HOST
from plancompiler.ir import DType, NdSbp, Placement, Split
from plancompiler.ir.argument_errors import names_wrong_arguments
from plancompiler.ir.operators import SbpLike, whole_numbers
from plancompiler.ir.placement import require_placement
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

_PARTS = 4096
"""Kinds of parts that `from_local` knows at sight."""


@names_wrong_arguments
def tensor(
    value: object,
    placement: Placement,
    sbp: SbpLike | None = None,
    dtype: DType | str | None = None,
    requires_grad: bool = False,
) -> DistTensor:
    """A tensor of a whole value, which must be equal on all ranks (default: broadcast).

    Each rank keeps its part. Python numbers become float32 or int64. Nothing is exchanged.
    """
    if isinstance(value, DistTensor):
        raise UsageError(
            "this is a DistTensor already", source=user_line(), hint="use .redistribute(...)"
        )
    world = current_world()
    array = world.array_for(value, placement)
    if dtype is not None:
        wanted = DType.parse(dtype)
        try:
            array = array.astype(wanted.numpy)
        except (TypeError, ValueError):
            raise DTypeError(
                "a value is not made of numbers",
                source=user_line(),
                got=f"{array.dtype} of shape {array.shape}",
                expected=f"what becomes {wanted}",
            ) from None
    elif not hasattr(value, "dtype") and array.dtype == np.float64:
        array = array.astype(np.float32)
    made = world.tensor(array, placement, sbp)
    made.requires_grad = requires_grad
    return made


def from_local(
    local: object,
    placement: Placement,
    sbp: SbpLike | None = None,
    shape: Sequence[int] | None = None,
    check: bool = False,
) -> DistTensor:
    """A tensor of this rank's own part (default: each rank holds the whole value).

    `shape` is the global shape; without it, the parts of all ranks must have the same shape. With
    `check` the parts' shapes and dtypes are compared across ranks, and their extents are summed
    along split axes; ranks that hold the same part, such as all ranks of a broadcast value, must
    pass the same numbers, else a TransportError is raised. The parts of a split are balanced: see
    `pc.Placement`. ShapeError for a part whose shape is not the one that its rank must hold.
    """
    world = current_world()
    known = None
    if local.__class__ is np.ndarray and shape is None and not check:
        # Tuples, texts and layouts can be looked up; a list cannot.
        known = (local.shape, local.dtype, placement, sbp)
        try:
            spec = world.parts.get(known)
        except TypeError:
            known = spec = None
        if spec is not None:
            return DistTensor(spec, local.copy())
    require_placement(placement, "from_local")
    array = world.array_for(local, placement)
    layout = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)
    layout.check(placement.ndim, array.ndim)
    inside = world.rank in placement
    if shape is not None:
        extents, whose = whole_numbers("extents", shape), "shapes that the ranks give"
    elif check and inside:
        extents, whose = _summed(world, array, placement, layout), "parts"
    else:
        extents, whose = _extents(array.shape, placement, layout), "parts without a global shape"
    spec = world.spec(extents, DType.parse(array.dtype), placement, layout)
    if (check or world.compares) and inside and placement.size > 1:
        _compare(world, array, extents, placement, whose)
        compare_copies(world, array, placement, layout, "from_local")
    if spec.inside and array.shape != spec.local_shape:
        raise ShapeError(
            "a part has another shape than its rank holds",
            source=user_line(),
            rank=world.rank,
            got=array.shape,
            expected=f"{spec.local_shape}, this rank's part of {spec}",
            hint="parts of a split are balanced: the first ranks hold one element more; "
            "give the global shape where they differ",
        )
    tensor = DistTensor(spec, spec.put(array))
    kept = known is not None and array.dtype == known[1] and spec.space is HOST and spec.inside
    if kept and not world.compares and len(world.parts) < _PARTS:
        world.parts[known] = spec
    return tensor


DistTensor.from_local = staticmethod(from_local)


def _extents(shape: tuple[int, ...], placement: Placement, sbp: NdSbp) -> tuple[int, ...]:
    """The global shape, if all parts are as large as this one."""
    extents = list(shape)
    for entry, parts in zip(sbp, placement.hierarchy, strict=True):
        if isinstance(entry, Split):
            extents[entry.axis] *= parts
    return tuple(extents)


def _summed(
    world: World,
    array: Array,
    placement: Placement,
    sbp: NdSbp,
) -> tuple[int, ...]:
    """The global shape by the sum of all parts' extents."""
    extents = list(array.shape)
    for mesh_axis, entry in reversed(list(enumerate(sbp))):
        if isinstance(entry, Split):
            group = world.comm.context(placement.group(world.rank, (mesh_axis,)))
            total = group.all_reduce(np.array(extents[entry.axis], np.int64))
            extents[entry.axis] = int(total)
    return tuple(extents)


def _compare(
    world: World, array: Array, extents: tuple[int, ...], placement: Placement, whose: str
) -> None:
    """All ranks must give parts of one dtype and number of axes, which make one global shape."""
    group, dtypes = world.comm.context(placement.rank_list), list(DType)
    own = [dtypes.index(DType.parse(array.dtype)), array.ndim, *array.shape, *extents]
    every = gathered(group, np.array(own, np.int64))
    said = {rank: each.tolist() for rank, each in zip(placement.rank_list, every, strict=True)}
    if any(each[:2] != own[:2] for each in said.values()):
        raise ShapeError(
            "the parts of a tensor have different dtypes or numbers of axes",
            op="from_local",
            source=user_line(),
            rank=world.rank,
            got="; ".join(
                f"rank {rank}: {dtypes[each[0]]} of {each[1]} axes" for rank, each in said.items()
            ),
            expected=f"{dtypes[own[0]]} of {own[1]} axes on all",
        )
    if any(each[2 + array.ndim :] != list(extents) for each in said.values()):
        raise ShapeError(
            f"the {whose} make different global shapes",
            op="from_local",
            source=user_line(),
            rank=world.rank,
            got="; ".join(
                f"rank {rank}: {each[2 : 2 + array.ndim]} of {each[2 + array.ndim :]}"
                for rank, each in said.items()
            ),
            expected="the same extents on all ranks; along split axes parts of one size, unless "
            "the global shape is known",
            hint="give shape=, or check=True to have the extents along split axes summed",
        )
