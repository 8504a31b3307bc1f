"""Real runs: results against NumPy on both transports, feeds, variables, slices, views."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from plancompiler.errors import (
    DeviceError,
    ExecutionError,
    FeedError,
    NonFiniteError,
    RankError,
    TransportError,
    UsageError,
)
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.runtime import Runtime
from plancompiler.ir import Reduction
from plancompiler.ir.task import TaskKind
from plancompiler.plan.plan import Stream
from tests.executor.plans import Sketch, chain, data_parallel, pipeline, whole, with_op

RNG = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_rank(count):
    with LocalWorld(chain(count)) as world:
        w = world.variables(0)["w"]
        assert w.std() > 0
        for _ in range(4):
            x = floats(3, 4)
            np.testing.assert_allclose(world.step({"x": x})["y"], np.maximum(x @ w, 0), rtol=1e-6)


def run_on(transport, host_world, build, arguments, feeds):
    plans = build(*arguments)
    ranks = range(len(plans))
    if transport == "local":
        with LocalWorld(plans) as world:
            outputs = [world.step(fed) for fed in feeds]
            return outputs, [world.variables(rank) for rank in ranks]
    hosts = [rank % 2 for rank in ranks] if transport == "hosts" else ()
    host_world.open(build, *arguments, ranks=ranks, hosts=hosts)
    outputs = [host_world.step([fed], ranks)[0] for fed in feeds]
    variables = [host_world.ask(rank, "variables") for rank in ranks]
    host_world.close_run(ranks)
    return outputs, variables


@pytest.mark.parametrize("transport", ["local", "host", "hosts"])
@pytest.mark.parametrize(("world_size", "columns"), [(1, 4), (2, 4), (3, 70_000), (4, 1)])
def test_data_parallel(transport, world_size, columns, host_world):
    feeds = [{"x": floats(12, columns)} for _ in range(3)]
    outputs, variables = run_on(
        transport, host_world, data_parallel, (world_size, 12, columns), feeds
    )
    total = np.zeros(columns)
    for fed, actual in zip(feeds, outputs, strict=True):
        total = total + fed["x"].sum(axis=0)
        for rank in range(world_size):
            np.testing.assert_allclose(actual[f"w{rank}"], total, rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(actual[f"w{rank}"], actual["w0"])
    for rank in range(world_size):
        np.testing.assert_array_equal(variables[rank]["w"], outputs[-1]["w0"])


@pytest.mark.parametrize("transport", ["local", "host", "hosts"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline(transport, stages, count, host_world):
    feeds = [{"x": floats(5, 3)} for _ in range(4)]
    outputs, _ = run_on(transport, host_world, pipeline, (stages, count), feeds)
    for fed, actual in zip(feeds, outputs, strict=True):
        np.testing.assert_array_equal(actual["y"], fed["x"] * 2**stages)


@pytest.mark.parametrize("transport", ["host", "hosts"])
def test_all_transports_give_the_same_bits(transport, host_world):
    feeds = [{"x": floats(12, 50_000)} for _ in range(2)]
    arguments = (4, 12, 50_000)
    local, local_variables = run_on("local", host_world, data_parallel, arguments, feeds)
    other, other_variables = run_on(transport, host_world, data_parallel, arguments, feeds)
    for left, right in zip(local, other, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
    for left, right in zip(local_variables, other_variables, strict=True):
        np.testing.assert_array_equal(left["w"], right["w"])


@pytest.mark.parametrize("hosts", [(), (0, 1, 0)], ids=str)
def test_many_steps_ahead_on_a_pipeline(hosts, host_world):
    """Steps overlap between ranks; versions must not mix."""
    feeds = [{"x": np.full((5, 3), step, np.float32)} for step in range(30)]
    host_world.open(pipeline, 3, 2, ranks=range(3), hosts=hosts)
    outputs = host_world.step(feeds, range(3))
    host_world.close_run(range(3))
    assert [result["y"][0, 0] for result in outputs] == [8 * step for step in range(30)]


# --- slices -------------------------------------------------------------------------------------


def slice_plan(pieces, shape, dtype="float32", reduction=None, kind=TaskKind.SLICE_BOXING):
    """Two inputs a, b of shape (4, 3), sliced into one output."""
    sketch = Sketch(1)
    a = sketch.input(0, 0, "a", (4, 3), dtype)
    b = sketch.input(0, 1, "b", (4, 3), dtype)
    y = sketch.slice(0, 2, [a, b], shape, dtype, pieces, reduction, kind)
    sketch.output(0, 3, "y", y)
    return sketch.build()


def run_slice(dtype="float32", **arguments):
    a = (RNG.normal(size=(4, 3)) * 10).astype(dtype)
    b = (RNG.normal(size=(4, 3)) * 10).astype(dtype)
    with LocalWorld(slice_plan(dtype=dtype, **arguments)) as world:
        world.step({"a": b, "b": a})
        return a, b, world.step({"a": a, "b": b})["y"]


def test_slice_copy():
    top, bottom = ((0, 2), (0, 3)), ((2, 4), (0, 3))
    a, b, y = run_slice(shape=(4, 3), pieces=[(0, bottom, top), (1, top, bottom)])
    np.testing.assert_array_equal(y, np.concatenate([a[2:], b[:2]]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "bool"])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_slice_add(dtype, reduction):
    """b everywhere, a on rows 1 and 2; with the identity elsewhere when b comes second."""
    rows = ((1, 3), (0, 3))
    a, b, y = run_slice(
        dtype=dtype,
        shape=(4, 3),
        pieces=[(0, rows, rows), (1, whole((4, 3)), whole((4, 3)))],
        reduction=reduction,
    )
    exact = np.float32 if dtype == "float16" else a.dtype
    if dtype in ("int32", "bool") and reduction is Reduction.AVG:
        exact = np.int64
    left, right = a[1:3].astype(exact), b[1:3].astype(exact)
    wanted = b.copy()
    if reduction is Reduction.SUM:
        both = np.add(left, right)
    elif reduction is Reduction.AVG:
        both = (left + right) / 2 if dtype.startswith("float") else (left + right) // 2
    elif reduction is Reduction.PROD:
        both = np.multiply(left, right)
    else:
        both = (np.maximum if reduction is Reduction.MAX else np.minimum)(left, right)
    wanted[1:3] = both.astype(dtype)
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize(
    ("reduction", "dtype", "value"),
    [
        (None, "float32", 0),
        (Reduction.SUM, "int32", 0),
        (Reduction.AVG, "float32", 0),
        (Reduction.PROD, "float16", 1),
        (Reduction.MAX, "float32", -np.inf),
        (Reduction.MIN, "float64", np.inf),
        (Reduction.MAX, "int8", -128),
        (Reduction.MIN, "uint8", 255),
        (Reduction.MAX, "bool", False),
        (Reduction.MIN, "bool", True),
    ],
)
def test_boxing_zeros_holds_the_identity(reduction, dtype, value):
    _, _, y = run_slice(
        dtype=dtype, shape=(2, 2), pieces=[], reduction=reduction, kind=TaskKind.BOXING_ZEROS
    )
    np.testing.assert_array_equal(y, np.full((2, 2), value, dtype))


def test_slice_of_nothing():
    _, _, y = run_slice(shape=(0, 3), pieces=[])
    assert y.shape == (0, 3)


def test_slice_that_does_not_fit():
    with pytest.raises(ExecutionError, match="box does not fit"):
        run_slice(shape=(4, 3), pieces=[(0, ((0, 1), (0, 3)), whole((4, 3)))])


# --- kernels --------------------------------------------------------------------------------------


def one_op(kind, shape=(3,), **options):
    sketch = Sketch(1)
    x = sketch.input(0, 0, "x", shape, stream=Stream.COMPUTE)
    inplace = x if options.pop("in_place", False) else -1
    (y,) = sketch.compute(
        0, 1, kind, [x], [(shape, "float32")], inplace_of=inplace, name="the_op", **options
    )
    sketch.output(0, 2, "y", y, finite=True)
    return sketch.build()


def test_a_shared_view_runs_no_kernel(test_ops):
    x = floats(3)
    with LocalWorld(one_op("test_view", in_place=True, attrs={"step": 0})) as world:
        np.testing.assert_array_equal(world.step({"x": x})["y"], x)


def test_a_view_with_memory_of_its_own_is_made(test_ops):
    x = floats(3)
    with LocalWorld(one_op("test_view", attrs={"step": 9})) as world:
        np.testing.assert_array_equal(world.step({"x": x})["y"], x)


def test_kernels_know_the_step(test_ops):
    with LocalWorld(one_op("test_step"), first_step=5) as world:
        outputs = [world.step({"x": floats(3)})["y"][0] for _ in range(3)]
    assert outputs == [5, 6, 7]


def test_kernels_cannot_write_their_inputs(test_ops):
    with (
        LocalWorld(one_op("test_greedy")) as world,
        pytest.raises(ExecutionError, match="read-only"),
    ):
        world.step({"x": floats(3)})


def test_empty_tensors(test_ops):
    with LocalWorld(one_op("test_fail", (0, 2), attrs={"step": 0})) as world:
        assert world.step({"x": floats(0, 2)})["y"].shape == (0, 2)


def test_overflow_is_reported_by_the_output_only(test_ops):
    with LocalWorld(with_op("test_overflow")) as world:
        with pytest.raises(NonFiniteError, match="is not finite in step 0") as caught:
            world.step({"x": np.ones(3, np.float32)})
        assert caught.value.report.got == "inf (3 of 3 elements)"
        assert caught.value.report.op in ("y0", "y1")
        assert caught.value.report.rank in (0, 1)


def test_tasks_for_a_gpu_are_refused():
    sketch = Sketch(1)
    sketch.task(0, 0, TaskKind.COPY_HD, Stream.COPY, None)
    with pytest.raises(DeviceError, match="CopyHd is for devices"):
        LocalWorld(sketch.build())


# --- feeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feeds", "text"),
    [
        ({}, "'x' is not fed"),
        ({"x": np.zeros((3, 4), np.float32), "z": 1}, "'z' is no input"),
        ({"x": np.zeros((3, 5), np.float32)}, "wrong shape or dtype"),
        ({"x": np.full((3, 4), 1e40)}, "out of range"),
        ({"x": [[0.0] * 4, [0.0]]}, "wrong shape or dtype"),
        ({"x": [["a"] * 4] * 3}, "wrong shape or dtype"),
        ({"x": 1.0}, "wrong shape or dtype"),
    ],
)
def test_bad_feeds_are_refused_and_the_world_lives_on(feeds, text):
    with LocalWorld(chain()) as world:
        with pytest.raises(FeedError, match=text):
            world.step(feeds)
        assert world.step({"x": floats(3, 4)})["y"].shape == (3, 2)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("float32", 1, True),
        ("float32", 0.5, True),
        ("int64", True, True),
        ("int64", 3, True),
        ("int64", 0.5, False),
        ("bool", True, True),
        ("bool", 1, False),
        ("uint8", 300, False),
        ("float32", np.float32(2), True),
        ("float32", np.float64(2), True),
        ("float16", 70000.0, False),
        ("float16", float("inf"), True),
        ("uint8", 255, True),
        ("uint8", -1, False),
        ("int32", np.int64(2**31), False),
        ("float64", 2**70, False),
    ],
)
def test_scalars_fed(dtype, value, fits):
    sketch = Sketch(1)
    sketch.output(0, 1, "y", sketch.input(0, 0, "x", (), dtype))
    with LocalWorld(sketch.build()) as world:
        if fits:
            assert world.step({"x": value})["y"] == value
        else:
            with pytest.raises(FeedError):
                world.step({"x": value})


@pytest.mark.parametrize(
    "fed",
    [
        lambda rows: rows.tolist(),
        lambda rows: [list(map(int, row)) for row in rows],
        lambda rows: rows.astype(np.float64),
        lambda rows: rows.astype(np.uint8),
        np.asfortranarray,
    ],
)
def test_what_is_of_the_kind_of_an_input_is_converted(fed):
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    with LocalWorld(chain()) as world:
        wanted = world.step({"x": rows})["y"]
        np.testing.assert_array_equal(world.step({"x": fed(rows)})["y"], wanted)


def test_all_steps_must_be_fed():
    with Runtime(chain()[0], LocalHub().link(0)) as runtime:
        runtime.prepare()
        runtime.feed({"x": floats(3, 4)})
        with pytest.raises(FeedError, match="not fed for all steps"):
            runtime.run(2)
        runtime.run(1)
        assert runtime.steps_done == 1


def test_a_world_with_inputs_cannot_run_without_feeds():
    with LocalWorld(chain()) as world:
        assert world.run(0) == []
        with pytest.raises(FeedError, match="'x' is not fed"):
            world.run(3)


# --- variables and life --------------------------------------------------------------------------


def test_given_variables():
    w = floats(4, 2)
    with LocalWorld(chain(), variables={0: {"w": w}}) as world:
        np.testing.assert_array_equal(world.variables(0)["w"], w)
        x = floats(3, 4)
        np.testing.assert_allclose(world.step({"x": x})["y"], np.maximum(x @ w, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"v": floats(4, 2)}, "does not have"),
        ({"w": floats(4, 3)}, "does not fit its shard"),
        ({"w": np.zeros((4, 2))}, "does not fit its shard"),
    ],
)
def test_wrong_variables(given, text):
    with pytest.raises(FeedError, match=text):
        LocalWorld(chain(), variables={0: given})


def test_variables_are_copies():
    with LocalWorld(chain()) as world:
        world.variables(0)["w"][...] = 0
        assert world.variables(0)["w"].any()
        with pytest.raises(RankError):
            world.variables(1)


def test_initial_values_do_not_depend_on_the_run():
    with LocalWorld(chain()) as first, LocalWorld(chain()) as second:
        np.testing.assert_array_equal(first.variables(0)["w"], second.variables(0)["w"])


def test_close_is_idempotent_and_final():
    runtime = Runtime(chain()[0], LocalHub().link(0))
    runtime.prepare()
    with pytest.raises(UsageError):
        runtime.prepare()
    runtime.close()
    runtime.close()
    with pytest.raises(UsageError):
        runtime.run(1)
    with pytest.raises(UsageError):
        runtime.variables()


def test_misuse():
    runtime = Runtime(chain()[0], LocalHub().link(0))
    with pytest.raises(UsageError, match="prepared"):
        runtime.run(1)
    runtime.close()
    with pytest.raises(UsageError, match="another rank"):
        Runtime(chain()[0], LocalHub().link(3))
    with LocalWorld(chain()) as world, pytest.raises(UsageError, match="negative"):
        world.run(-1)


def test_a_single_stream_runs_in_the_callers_thread(test_ops):
    threads = []
    with Runtime(
        one_op("test_step")[0],
        LocalHub().link(0),
        on_outputs=lambda step, name, value: threads.append(threading.current_thread()),
    ) as runtime:
        runtime.prepare()
        runtime.feed({"x": floats(3)})
        runtime.run(1)
    assert threads == [threading.current_thread()]


def test_ranks_with_different_jobs_are_refused():
    with pytest.raises(TransportError, match="disagree about the collectives"):
        LocalWorld({0: data_parallel(2)[0], 1: with_op("add", 2, -1)[1]}, deadline=20)
