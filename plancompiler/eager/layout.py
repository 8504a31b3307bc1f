"""Changes of layout, carried out at once: the compiler's boxing plans on this rank's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import EllipsisType

from plancompiler.boxing.exchange import (
    Exchange,
    exchange_readers,
    exchange_sources,
    plan_boxing,
)
from plancompiler.boxing.planner import BoxingStep
from plancompiler.eager.spec import Change, TensorSpec
from plancompiler.errors import ShapeError
from plancompiler.executor.comm.context import CommContext
from plancompiler.executor.comm.reduce import UFUNCS, accumulator, identity_of
from plancompiler.ir import Placement, Reduction
from plancompiler.ir.shard import region_index, region_shape, relative, shard_region
from plancompiler.ir.source import user_line
from plancompiler.ir.task import Primitive
from plancompiler.ops.registry import Array


def plan_move(source: TensorSpec, target: TensorSpec) -> Change:
    """What makes this rank's part of a tensor in the target's layout from that in the source's.

    All ranks of both placements call it together; others do nothing.
    """
    plan = plan_boxing(
        source.placement, source.sbp, target.placement, target.sbp, source.shape, source.dtype
    )
    changes: list[Change] = []
    if source.inside:
        changes += [_step(source, step) for step in plan.before]
    if plan.exchange is not None and (source.inside or target.inside):
        changes.append(_exchange(source, target, plan.exchange))
    if not target.inside:
        changes.append(lambda array: target.empty())
    return partial(_in_turn, tuple(changes) or (_copy,), target)


def _in_turn(changes: tuple[Change, ...], target: TensorSpec, array: Array) -> Array:
    for change in changes:
        array = change(array)
    if array.shape != target.local_shape:
        raise ShapeError(
            "the parts of a tensor on other ranks do not match its global shape on this rank",
            source=user_line(),
            rank=target.world.rank,
            got=array.shape,
            expected=f"{target.local_shape}, this rank's part of {target}",
            hint="give from_local the global shape, or check=True",
        )
    return array


# --- steps on one placement -----------------------------------------------------------------------


def _step(spec: TensorSpec, step: BoxingStep) -> Change:
    placement, world = spec.placement, spec.world
    coordinates = placement.coordinates(placement.parallel_id(world.rank))
    if step.primitive is Primitive.SLICE:
        before, after = (
            shard_region(spec.shape, placement.hierarchy, sbp, coordinates)
            for sbp in (step.before, step.after)
        )
        return partial(_cut, region_index(relative(after, before)))
    if step.primitive is Primitive.PARTIALISE:
        reduction = step.reduction or Reduction.SUM
        if reduction is Reduction.AVG or not any(coordinates[axis] for axis in step.mesh_axes):
            return _copy
        return partial(_filled, spec, identity_of(reduction, spec.dtype))
    group = world.comm.context(
        placement.group(world.rank, step.mesh_axes), device_type=placement.device_type
    )
    return _collective(group, step)


def _collective(group: CommContext, step: BoxingStep) -> Change:
    reduction = step.reduction or Reduction.SUM
    if step.primitive is Primitive.ALL_REDUCE:
        return partial(group.all_reduce, reduction=reduction)
    if step.primitive is Primitive.REDUCE_SCATTER:
        return partial(group.reduce_scatter, axis=step.dst_axis, reduction=reduction)
    if step.primitive is Primitive.ALL_GATHER:
        return partial(group.all_gather, axis=step.src_axis)
    return partial(group.all_to_all, split_axis=step.dst_axis, join_axis=step.src_axis)


def _cut(index: tuple[slice | EllipsisType, ...], array: Array) -> Array:
    return array[index].copy()


def _copy(array: Array) -> Array:
    return array.copy()


def _filled(spec: TensorSpec, value: float, array: Array) -> Array:
    return spec.space.full(array.shape, value, spec.numpy_dtype)


# --- exchange between placements ------------------------------------------------------------------


def _exchange(source: TensorSpec, target: TensorSpec, exchange: Exchange) -> Change:
    world = source.world
    ranks = _all_ranks(source.placement, target.placement)
    types = {source.placement.device_type, target.placement.device_type}
    # Between hosts and devices values go through the hosts' memory.
    device_type = types.pop() if len(types) == 1 else "cpu"
    space = world.space(device_type)
    group = world.comm.context(ranks, device_type=device_type) if len(ranks) > 1 else None
    upload = target.inside and target.space is not space
    readers = {rank for rank, _ in exchange_readers(exchange, world.rank)}
    sent = [
        next(
            (
                region_index(piece.source)
                for piece in (exchange_sources(exchange, rank) if rank in readers else ())
                if piece.rank == world.rank
            ),
            None,
        )
        for rank in ranks
    ]
    received = [
        (
            ranks.index(piece.rank),
            region_index(piece.source) if piece.rank == world.rank else None,
            region_index(piece.target),
            region_shape(piece.target),
        )
        for piece in (exchange_sources(exchange, world.rank) if target.inside else ())
    ]
    fill = exchange.fill(world.rank) if target.inside else None
    reduction = exchange.reduction

    def run(array: Array) -> Array:
        if source.space is not space:
            array = source.space.get(array)
        nothing = space.empty((0,), target.numpy_dtype)
        pieces = [nothing if box is None else array[box] for box in sent]
        by_member = pieces if group is None else group.exchange(pieces)
        if not target.inside:
            return target.empty()
        made = assembled(array, by_member)
        return target.space.put(made) if upload else made

    def assembled(array: Array, by_member: Sequence[Array]) -> Array:
        shape_of_part = target.local_shape
        if fill is not None:
            return space.full(shape_of_part, identity_of(fill, target.dtype), target.numpy_dtype)
        if reduction is None:
            out = space.empty(shape_of_part, target.numpy_dtype)
            for member, own, box, shape in received:
                out[box] = array[own] if own is not None else by_member[member].reshape(shape)
            return out
        wide = accumulator(reduction, target.numpy_dtype)
        total = space.full(shape_of_part, identity_of(reduction, target.dtype), wide)
        for member, own, box, shape in received:
            place = total[box]
            part = array[own] if own is not None else by_member[member].reshape(shape)
            UFUNCS[reduction](place, part, out=place)
        return total.astype(target.numpy_dtype, copy=False)

    return run


def _all_ranks(left: Placement, right: Placement) -> tuple[int, ...]:
    return tuple(sorted({*left.rank_list, *right.rank_list}))
