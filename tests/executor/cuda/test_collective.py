"""Collectives as NCCL calls: values, and which calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from plancompiler.executor.comm.program import program_of
from plancompiler.executor.comm.reduce import UFUNCS
from plancompiler.executor.cuda.collective import DeviceProgram, bind_collective
from plancompiler.executor.cuda.interface import CallKind
from plancompiler.ir import DType, Reduction
from plancompiler.ir.shard import balanced_range
from plancompiler.ir.task import Primitive
from plancompiler.plan.plan import CollectiveSpec
from tests.executor.cuda.devices import ThreadedDevice, World
from tests.executor.cuda.strict import StrictArray, StrictNamespace

SHAPES = [(6, 4), (5, 3), (2, 7, 3), (1, 4), (0, 3)]
REDUCTIONS = list(Reduction)


def part(array, axis, members, member):
    return array[
        (slice(None),) * axis + (slice(*balanced_range(array.shape[axis], members, member)),)
    ]


def reduced(arrays, how):
    total = arrays[0].astype(np.float64)
    for each in arrays[1:]:
        total = UFUNCS[how](total, each)
    return total / len(arrays) if how is Reduction.AVG else total


def run(spec, sources, targets, dtype):
    """All members' part of a collective, each on a device of its own."""
    world = World()
    members = len(sources)
    unique_id = world.unique_id()
    failures = []

    def member(own):
        try:
            device = ThreadedDevice(world)
            communicator = device.communicator(unique_id, members, own)
            values = [((StrictArray(sources[own]),), (StrictArray(targets[own]),))]
            work = bind_collective(device, communicator, None, spec, own, members, values, dtype)
            if work is not None:
                work(0)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=member, args=(own,)) for own in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", REDUCTIONS, ids=str)
def test_reductions(shape, members, how):
    rng = np.random.default_rng(3)
    sources = [rng.uniform(0.5, 2, shape).astype(np.float32) for _ in range(members)]
    expected = reduced(sources, how)
    targets = [np.zeros(shape, np.float32) for _ in sources]
    run(CollectiveSpec(Primitive.ALL_REDUCE, 0, how), sources, targets, DType.FLOAT32)
    for target in targets:
        np.testing.assert_allclose(target, expected, rtol=1e-6)
    for axis in range(len(shape)):
        targets = [np.zeros_like(part(sources[0], axis, members, own)) for own in range(members)]
        spec = CollectiveSpec(Primitive.REDUCE_SCATTER, 0, how, dst_axis=axis)
        run(spec, sources, targets, DType.FLOAT32)
        for own, target in enumerate(targets):
            np.testing.assert_allclose(target, part(expected, axis, members, own), rtol=1e-6)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moves(shape, members):
    whole = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    for axis in range(len(shape)):
        sources = [part(whole, axis, members, own).copy() for own in range(members)]
        targets = [np.zeros_like(whole) for _ in range(members)]
        spec = CollectiveSpec(Primitive.ALL_GATHER, 0, src_axis=axis)
        run(spec, sources, targets, DType.INT16)
        for target in targets:
            np.testing.assert_array_equal(target, whole)
        for other in set(range(len(shape))) - {axis}:
            targets = [np.zeros_like(part(whole, other, members, own)) for own in range(members)]
            spec = CollectiveSpec(Primitive.ALL_TO_ALL, 0, src_axis=axis, dst_axis=other)
            run(spec, sources, targets, DType.INT16)
            for own, target in enumerate(targets):
                np.testing.assert_array_equal(target, part(whole, other, members, own))


@pytest.mark.parametrize(
    ("dtype", "how", "expected"),
    [
        (np.bool_, Reduction.SUM, [True, True, False]),
        (np.bool_, Reduction.PROD, [True, False, False]),
        (np.int16, Reduction.SUM, [2, 1, 0]),
        (np.int32, Reduction.AVG, [1, 0, 0]),
    ],
)
def test_dtypes_that_are_reduced_as_others(dtype, how, expected):
    sources = [np.array([1, 0, 0], dtype), np.array([1, 1, 0], dtype)]
    targets = [np.zeros(3, dtype) for _ in sources]
    run(CollectiveSpec(Primitive.ALL_REDUCE, 0, how), sources, targets, DType.parse(dtype))
    for target in targets:
        np.testing.assert_array_equal(target, np.array(expected, dtype))


def kinds(spec, source, target, members, own=0):
    """Calls, and whether input and output are packed."""
    arrays = StrictNamespace()
    values = [[arrays.empty(shape, np.float32)] for shape in (source, target)]
    bound = DeviceProgram(arrays, program_of(spec), own, members, *values, DType.FLOAT32)
    packs, unpacks = (bool(side.moves) for side in (bound._send, bound._receive))
    return [call.kind for call in bound.calls], packs, unpacks


def test_equal_parts_along_the_first_axis_are_one_call_without_packing():
    gather = CollectiveSpec(Primitive.ALL_GATHER, 0, src_axis=0)
    assert kinds(gather, (3, 5), (6, 5), 2) == ([CallKind.ALL_GATHER], False, False)
    scatter = CollectiveSpec(Primitive.REDUCE_SCATTER, 0, Reduction.SUM, dst_axis=0)
    assert kinds(scatter, (6, 5), (3, 5), 2) == ([CallKind.REDUCE_SCATTER], False, False)


def test_unequal_parts_are_a_call_for_each_member():
    gather = CollectiveSpec(Primitive.ALL_GATHER, 0, src_axis=0)
    assert kinds(gather, (3, 5), (5, 5), 2) == ([CallKind.BROADCAST] * 2, False, False)
    scatter = CollectiveSpec(Primitive.REDUCE_SCATTER, 0, Reduction.SUM, dst_axis=0)
    assert kinds(scatter, (5, 5), (3, 5), 2) == ([CallKind.REDUCE] * 2, False, False)


def test_inner_axes_are_packed():
    gather = CollectiveSpec(Primitive.ALL_GATHER, 0, src_axis=1)
    assert kinds(gather, (3, 2), (3, 4), 2) == ([CallKind.ALL_GATHER], False, True)
    # An axis of extent 1 before it keeps pieces in one run of bytes.
    assert kinds(gather, (1, 2), (1, 4), 2) == ([CallKind.ALL_GATHER], False, False)
