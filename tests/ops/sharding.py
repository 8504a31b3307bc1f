"""Splitting whole arrays into shards, running an op's kernel on every device, and putting together.

This is the reference meaning of SBP, written on whole arrays and independent of boxing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from math import prod

import numpy as np

from plancompiler.ir import (
    AttrValue,
    Broadcast,
    DType,
    NdSbp,
    Partial,
    Reduction,
    Split,
    TensorType,
)
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import (
    Region,
    balanced_range,
    region_index,
    region_shape,
    shard_region,
)
from plancompiler.ops import KernelContext, infer_types, op_def
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import Kernel
from plancompiler.ops.rule import NdSignature

Coordinates = tuple[int, ...]
Shards = dict[Coordinates, np.ndarray]


def type_of(array: np.ndarray) -> TensorType:
    return TensorType(array.shape, DType.parse(array.dtype))


def _kernel_of(kind: str, arrays: Sequence[np.ndarray]) -> Kernel:
    return kernel_for(op_def(kind), (array.dtype for array in arrays))


def run_dense(
    kind: str,
    inputs: Sequence[np.ndarray],
    attrs: Mapping[str, AttrValue],
    *,
    seed: int = 0,
    step: int = 0,
    state: Mapping[str, object] | None = None,
) -> list[np.ndarray]:
    """Outputs of an op's kernel on whole arrays."""
    types = infer_types(kind, tuple(map(type_of, inputs)), attrs)
    context = KernelContext(
        attrs=op_def(kind).complete(attrs),
        input_shapes=tuple(array.shape for array in inputs),
        output_shapes=tuple(tensor.shape for tensor in types),
        input_regions=tuple(tuple((0, n) for n in array.shape) for array in inputs),
        output_regions=tuple(tuple((0, n) for n in tensor.shape) for tensor in types),
        seed=seed,
        step=step,
        state=dict(state or {}),
    )
    outputs = [np.empty(tensor.shape, tensor.dtype.numpy) for tensor in types]
    _kernel_of(kind, (*inputs, *outputs))(context, inputs, outputs)
    return outputs


def split(
    array: np.ndarray, sbp: NdSbp, hierarchy: tuple[int, ...], rng: np.random.Generator
) -> Shards:
    """The array as its shards on a mesh; partial values as random parts.

    Parts are made before splits and copies, so that devices which differ only along a broadcast
    axis hold the same.
    """
    if sbp.has_halo:
        return _with_halos(array, sbp, hierarchy, rng)
    order = sorted(
        range(len(hierarchy)),
        key=lambda axis: (isinstance(sbp[axis], Broadcast), isinstance(sbp[axis], Split), axis),
    )
    shards: Shards = {(): array}
    for axis in order:
        shards = {
            (*coordinates, index): piece
            for coordinates, shard in shards.items()
            for index, piece in enumerate(_split_once(shard, sbp[axis], hierarchy[axis], rng))
        }
    position = [order.index(axis) for axis in range(len(hierarchy))]
    return {
        tuple(coordinates[at] for at in position): np.ascontiguousarray(shard).reshape(shard.shape)
        for coordinates, shard in shards.items()
    }


def _with_halos(
    array: np.ndarray, sbp: NdSbp, hierarchy: tuple[int, ...], rng: np.random.Generator
) -> Shards:
    """The shards without halos, cut out of those of an array that is whole along their axes."""
    whole = NdSbp(
        tuple(Broadcast() if isinstance(entry, (Halo, Split)) else entry for entry in sbp)
    )
    return {
        coordinates: np.ascontiguousarray(
            shard[region_index(shard_region(array.shape, hierarchy, sbp, coordinates))]
        )
        for coordinates, shard in split(array, whole, hierarchy, rng).items()
    }


def _split_once(array, entry, parts, rng):
    if isinstance(entry, Broadcast):
        return [array] * parts
    if isinstance(entry, Split):
        ranges = [balanced_range(array.shape[entry.axis], parts, index) for index in range(parts)]
        return [
            array[(slice(None),) * entry.axis + (slice(start, stop),)] for start, stop in ranges
        ]
    if entry.reduction is Reduction.SUM:
        if array.dtype.kind == "f":
            pieces = [rng.normal(size=array.shape).astype(array.dtype) for _ in range(parts - 1)]
        else:
            pieces = [rng.integers(0, 9, array.shape).astype(array.dtype) for _ in range(parts - 1)]
        return [*pieces, array - sum(pieces)]
    if entry.reduction is Reduction.AVG:
        pieces = [rng.normal(size=array.shape).astype(array.dtype) for _ in range(parts - 1)]
        return [*pieces, parts * array - sum(pieces)]
    # One device has the element, the others something that does not change or loses against it.
    owner = rng.integers(0, parts, array.shape)
    if entry.reduction is Reduction.PROD:
        one = np.ones((), array.dtype)
        return [np.where(owner == index, array, one) for index in range(parts)]
    if array.dtype.kind == "b":
        beaten = entry.reduction is Reduction.MIN
        return [np.where(owner == index, array, beaten) for index in range(parts)]
    away = rng.integers(1, 9, array.shape).astype(array.dtype)
    beaten = array - away if entry.reduction is Reduction.MAX else array + away
    return [np.where(owner == index, array, beaten) for index in range(parts)]


def assemble(
    shards: Mapping[Coordinates, np.ndarray], sbp: NdSbp, hierarchy: tuple[int, ...]
) -> np.ndarray:
    """The whole array from its shards; checks that broadcast copies agree."""
    joined = dict(shards)
    for axis in reversed(range(len(hierarchy))):
        joined = {
            coordinates: _join(
                [joined[(*coordinates, i)] for i in range(hierarchy[axis])], sbp[axis]
            )
            for coordinates in product(*map(range, hierarchy[:axis]))
        }
    return joined[()]


def _join(pieces, entry):
    if isinstance(entry, Split):
        return np.concatenate(pieces, axis=entry.axis)
    if isinstance(entry, Broadcast):
        for piece in pieces[1:]:
            if piece.shape == pieces[0].shape and (piece == pieces[0]).all():
                continue
            np.testing.assert_array_equal(piece, pieces[0], "copies of a broadcast value differ")
        return pieces[0]
    if entry.reduction is Reduction.AVG:
        return sum(pieces) / len(pieces)
    combine = {
        Reduction.SUM: np.add,
        Reduction.MAX: np.maximum,
        Reduction.MIN: np.minimum,
        Reduction.PROD: np.multiply,
    }
    total = pieces[0]
    for piece in pieces[1:]:
        total = combine[entry.reduction](total, piece)
    return total


@lru_cache(maxsize=4096)
def regions(
    shape: tuple[int, ...], hierarchy: tuple[int, ...], sbp: NdSbp
) -> dict[Coordinates, Region]:
    """What each device has of an array."""
    return {
        coordinates: shard_region(shape, hierarchy, sbp, coordinates)
        for coordinates in product(*map(range, hierarchy))
    }


class ShardedCall:
    """A call of an op, to be run on shards in layout after layout."""

    def __init__(
        self,
        kind: str,
        inputs: Sequence[np.ndarray],
        attrs: Mapping[str, AttrValue],
        *,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        self.kind, self.inputs, self.attrs = kind, inputs, attrs
        self.seed, self.step = seed, step
        self.types = infer_types(kind, tuple(map(type_of, inputs)), attrs)
        self.complete_attrs = op_def(kind).complete(attrs)
        dtypes = (array.dtype for array in inputs), (tensor.dtype.numpy for tensor in self.types)
        self.kernel = kernel_for(op_def(kind), chain(*dtypes))

    def run(
        self, signature: NdSignature, hierarchy: tuple[int, ...], rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Outputs of one kernel call per device, put together again."""
        sharded = [
            split(array, sbp, hierarchy, rng)
            for array, sbp in zip(self.inputs, signature.inputs, strict=True)
        ]
        input_shapes = tuple(array.shape for array in self.inputs)
        output_shapes = tuple(tensor.shape for tensor in self.types)
        input_regions, output_regions = (
            [regions(shape, hierarchy, sbp) for shape, sbp in zip(shapes, layouts, strict=True)]
            for shapes, layouts in (
                (input_shapes, signature.inputs),
                (output_shapes, signature.outputs),
            )
        )
        results: list[Shards] = [{} for _ in self.types]
        for coordinates in product(*map(range, hierarchy)):
            context = KernelContext(
                attrs=self.complete_attrs,
                input_shapes=input_shapes,
                output_shapes=output_shapes,
                input_regions=tuple(each[coordinates] for each in input_regions),
                output_regions=tuple(each[coordinates] for each in output_regions),
                seed=self.seed,
                step=self.step,
            )
            local = [shards[coordinates] for shards in sharded]
            outputs = [
                _poisoned(region_shape(region), tensor.dtype)
                for tensor, region in zip(self.types, context.output_regions, strict=True)
            ]
            if self.kind == "input":
                whole = signature.outputs[0]
                if any(isinstance(entry, Partial) for entry in whole):
                    raise NotImplementedError(str(whole))
                mine = region_index(context.output_regions[0])
                context.state["value"] = local_feed(self.attrs)[mine]
            self.kernel(context, local, outputs)
            for shards, output in zip(results, outputs, strict=True):
                shards[coordinates] = output
        return [
            assemble(shards, sbp, hierarchy)
            for shards, sbp in zip(results, signature.outputs, strict=True)
        ]


def assert_close(
    got: np.ndarray,
    wanted: np.ndarray,
    bound: float,
    least: float | None = None,
    label: object = "",
) -> None:
    """`np.testing.assert_allclose` with `bound` as its relative tolerance and `least`, by default
    `bound` too, as the absolute one. It takes as long as several kernels, so it is asked only about
    what is not plainly close. `label` says what was compared.
    """
    least = bound if least is None else least
    if got.shape == wanted.shape:
        with np.errstate(all="ignore"):
            near = got == wanted if bound == 0 else abs(got - wanted) <= least + bound * abs(wanted)
        if near.all():
            return
    np.testing.assert_allclose(got, wanted, bound, least, err_msg=str(label))


def local_feed(attrs: Mapping[str, AttrValue]) -> np.ndarray:
    """What the tests feed to an `input` op."""
    shape, dtype = attrs["shape"], attrs["dtype"]
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def _poisoned(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Output memory as a kernel may find it: full of garbage."""
    byte = b"\x01" if dtype is DType.BOOL else b"\xff"
    return np.ndarray(shape, dtype.numpy, bytearray(byte * (prod(shape) * dtype.itemsize)))
