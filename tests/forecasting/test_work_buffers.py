"""The arrays that kernels are said to make are those that NumPy takes while they run."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.blas.numba_choice import numba_version
from plancompiler.cli.job_file import load_job
from plancompiler.cli.program import cli
from plancompiler.executor.task import regions_of
from plancompiler.forecasting.counted_wire import CountedWorld
from plancompiler.forecasting.kernel_memory import (
    KernelArrays,
    Operand,
    kernel_arrays,
    operands_of,
    run_dry,
)
from plancompiler.forecasting.measured_run import held_arrays
from plancompiler.forecasting.memory import WorkBuffers, work_buffers
from plancompiler.ir import DType, Job, TensorType
from plancompiler.ir.op import freeze_attrs
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from plancompiler.ops import infer_types, stored
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import KernelContext, op_def
from plancompiler.plan.plan import ComputeSpec, Plan, Task
from tests.examples import EXAMPLES, gpt, mlp
from tests.ops.sample import Sample
from tests.ops.samples import samples

pytestmark = pytest.mark.skipif(
    numba_version() is not None, reason="compiled loops make other arrays"
)

NUMPYS_OWN = 3 * (8192 * 8) + 8192
"""Bytes that NumPy's functions may take for buffers of their iterators, 8192 elements for each
operand, and Python for objects."""
NUMBERS = 64
"""Bytes of arrays without axes, for the numbers that a kernel computes with."""
BY_DATA = {"arrays_batch", "cross_entropy", "cross_entropy_grad", "embedding_grad"}
"""Kinds of ops whose kernels make fewer arrays for some data."""
LARGE = {"dim": 64, "length": 96, "batch": 24, "vocabulary": 300}


def example(name: str, **config: Any) -> Job:
    return load_job(str(EXAMPLES / f"{name}.py"), config)


def imported() -> Job:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    made = import_module("tests.importers.models").made
    module, _ = made("llama")
    built: Job = import_module("examples.generate").build(module, batch=2, length=16)
    return built


JOBS: dict[str, Callable[[], Job]] = {
    "mlp": lambda: mlp(layout="dp", ranks=1, hidden=300, batch=400),
    "gpt": lambda: gpt(dp=1, **LARGE),
    "gpt float16": lambda: gpt(dp=1, precision="float16", **LARGE),
    "gpt bfloat16": lambda: gpt(dp=1, precision="bfloat16", microbatches=2, dropout=0.1, **LARGE),
    "gpt tp": lambda: gpt(dp=1, tp=2, split_vocabulary=True, sequence_parallel=True, **LARGE),
    "gpt recomputed": lambda: gpt(dp=1, recompute="auto", **LARGE),
    "fused gpt": lambda: example("fused_gpt", tp=2, layers=1),
    "moe": lambda: example("moe"),
    "generate": imported,
}


def plans_of(job: Job) -> dict[int, Plan]:
    return dict(compile_plans(job, job.world_size, "rank_per_iter").plans)


@contextmanager
def few_objects_to_collect() -> Iterator[None]:
    """Collections look at the objects of a test only: what the process has loaded is many more."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # also what conftest.py froze, so that all of it is again
        gc.collect()
        gc.freeze()


def arrays_of(operands: tuple[Operand, ...]) -> list[np.ndarray]:
    """Arrays that lie as the operands do: of ones, and zero where they are single numbers."""
    arrays: list[np.ndarray] = []
    buffers: list[np.ndarray] = []
    for (shape, dtype), first, start in operands:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        own = first == len(arrays)
        buffers.append(np.zeros(nbytes + 64, np.uint8) if own else buffers[first][start:])
        arrays.append(buffers[-1][:nbytes].view(dtype.numpy).reshape(shape))
    for array, (tensor, *_) in zip(arrays, operands, strict=True):
        if tensor.shape and tensor.dtype.is_floating:  # so no update is skipped
            array.fill(1)
    return arrays


def measured(
    spec: ComputeSpec, arrays: Sequence[np.ndarray], microbatches: int = 1
) -> tuple[int, int]:
    """What an op's kernel keeps of first runs, and makes beside that in further ones."""
    count = len(spec.input_shapes)
    given, made = tuple(arrays[:count]), tuple(arrays[count:])
    definition = op_def(spec.kind)
    context = KernelContext(
        definition.complete(dict(spec.attrs)),
        spec.input_shapes,
        spec.output_shapes,
        spec.input_regions,
        spec.output_regions,
    )
    kernel = kernel_for(definition, (each.dtype for each in arrays))
    regions = regions_of(spec, microbatches)

    def run() -> None:
        for context.microbatch in range(microbatches):
            if regions is not None:
                context.input_regions, context.output_regions = regions[context.microbatch]
            kernel(context, given, made)

    gc.freeze()  # so that collections look at what this call makes
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            before = held_arrays()
            run()
            kept = held_arrays() - before
            gc.collect()
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            run()
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return kept, peak - held


def kept_of(told: KernelArrays) -> int:
    return told.kept + sum(nbytes for _, nbytes in told.work)


@pytest.mark.parametrize("name", JOBS)
def test_kernels_make_the_arrays_that_they_say(name: str) -> None:
    plans = plans_of(JOBS[name]())
    seen = set()
    with few_objects_to_collect():
        for plan in plans.values():
            assert work_buffers(plan).not_counted == ()
            for task in plan.tasks:
                spec, operands = task.spec, operands_of(plan, task)
                if not isinstance(spec, ComputeSpec) or task.kind is not TaskKind.COMPUTE:
                    continue
                key = spec.kind, operands, spec.attrs
                if not spec.lanes and key not in seen and not op_def(spec.kind).view:
                    seen.add(key)
                    check(plan, task, spec)
    assert seen


def check(plan: Plan, task: Task, spec: ComputeSpec) -> None:
    told = kernel_arrays(plan, task, spec)
    assert told is not None
    per_microbatch = plan.segments[task.segment].kind.per_microbatch
    microbatches = plan.microbatches if per_microbatch else 1
    kept, passing = measured(spec, arrays_of(operands_of(plan, task)), microbatches)
    assert kept_of(told) <= kept < kept_of(told) + NUMBERS, spec.kind
    assert passing <= told.passing + NUMPYS_OWN, spec.kind
    assert told.passing <= passing or spec.kind in BY_DATA, spec.kind


def kept_and_passing(plans: Mapping[int, Plan]) -> tuple[int, int]:
    """Bytes of arrays that all ranks keep from their first steps on, and the most that Python and
    NumPy take beside what is held while a later one runs.
    """
    tracemalloc.start()
    try:
        with CountedWorld(plans) as world:
            before = held_arrays()
            for _ in range(3):
                world.payload_of_step()
            kept = held_arrays() - before
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            world.payload_of_step()
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return kept, peak - held


RUNS: dict[str, Callable[[], Job]] = {
    "mlp": lambda: mlp(layout="dp", ranks=1, hidden=100, batch=400),
    "float16": lambda: gpt(dp=1, precision="float16"),
    "bfloat16": lambda: gpt(dp=1, precision="bfloat16", microbatches=2, dropout=0.1),
    "dp": lambda: gpt(dp=2, zero=1),
    "tp": lambda: gpt(dp=1, tp=2, split_vocabulary=True, sequence_parallel=True),
    "pp": lambda: gpt(dp=1, pp=2, microbatches=4, schedule="zero_bubble"),
    "cp": lambda: gpt(dp=1, cp=2, precision="float16"),
    "zero 3": lambda: gpt(dp=2, zero=3, recompute="auto"),
    "fused gpt": lambda: example("fused_gpt", tp=2, layers=1, dropout=0.1),
    "moe": lambda: example("moe"),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps_take_the_arrays_that_a_forecast_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_arrays", WeakValueDictionary())  # of other tests' files
    plans = plans_of(RUNS[name]())
    told = [work_buffers(plan) for plan in plans.values()]
    assert {each.not_counted for each in told} == {()}
    with few_objects_to_collect():
        kept, passing = kept_and_passing(plans)
    expected = sum(each.kept for each in told)
    if name == "moe":  # ranks in one process unpack a file once
        with np.load(EXAMPLES / "data" / "digits.npz") as data:
            expected -= sum(data[key].nbytes for key in ("images", "labels"))
    assert 0 <= kept - expected < 4 * NUMBERS * len(plans)
    streams = sum(len({task.stream for task in plan.tasks}) for plan in plans.values())
    assert passing <= sum(each.passing for each in told) + streams * NUMPYS_OWN


UNTOLD = {
    "class_center_rows_grad",
    "class_center_sample",
    "cholesky",
    "cofactors",
    "det",
    "eigh",
    "input",
    "inv",
    "isclose",
    "isin",
    "matrix_exp",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "unique",
}
"""Kinds of ops whose kernels need what arrays without elements have not."""


def test_what_kernels_of_all_ops_keep_is_told(tmp_path: Path) -> None:
    untold, other = set(), []
    calls = samples(tmp_path, "float32")
    with few_objects_to_collect():
        for call in calls:
            spec, types = spec_of(call)
            told = run_dry(spec, tuple((each, place, 0) for place, each in enumerate(types)))
            if told is None:
                untold.add(call.kind)
                continue
            results = [np.empty(each.shape, each.dtype.numpy) for each in types[len(call.inputs) :]]
            kept, _ = measured(spec, [*map(np.copy, call.inputs), *results])
            # Calls of guarded updates skip them.
            if abs(kept - kept_of(told)) >= NUMBERS and not call.kind.startswith("guarded_"):
                other.append((str(call), kept_of(told), kept))
    assert untold == UNTOLD
    assert other == []


def spec_of(call: Sample) -> tuple[ComputeSpec, tuple[TensorType, ...]]:
    """A call of an op as a task of a plan, and the types of its operands."""
    given = tuple(TensorType(each.shape, DType.parse(each.dtype)) for each in call.inputs)
    made = infer_types(call.kind, given, call.attrs)
    shapes = [tuple(each.shape for each in types) for types in (given, made)]
    regions = [tuple(tuple((0, n) for n in shape) for shape in each) for each in shapes]
    return ComputeSpec(call.kind, freeze_attrs(call.attrs), *shapes, *regions), (*given, *made)


def test_the_forecast_says_which_kinds_it_does_not_count(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import plancompiler as pc\n"
        "def build(ranks=None):\n"
        "    with pc.job('inverse') as job:\n"
        "        x = pc.input('x', (4, 4), 'float32', pc.Placement('cpu', [0]))\n"
        "        pc.output('y', pc.linalg.inv(x))\n"
        "    return job\n"
    )
    shown = CliRunner().invoke(cli, ["forecast", str(job)])
    assert "work buffers" in shown.output
    assert "without inv" in shown.output
    plain = json.loads(CliRunner().invoke(cli, ["forecast", str(job), "--json"]).output)
    (row,) = plain["classes"]
    assert row["work_bytes"]["not_counted"] == ["inv"]
    assert plain["memory_bytes"]["max"] == row["memory_bytes"]["total"]


def test_what_kernels_of_devices_make_is_not_known() -> None:
    assert pc.forecast(gpt(dp=1), "a100-sxm").worst.work is None
    assert isinstance(pc.forecast(gpt(dp=1)).worst.work, WorkBuffers)
