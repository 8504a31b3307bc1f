"""Tracing: names, lines, pruning, layouts that the user demands, and every way to do it wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.engines.hosted import working_folder
from plancompiler.errors import (
    AttributeValueError,
    DTypeError,
    EngineError,
    JobError,
    PlacementMismatchError,
    SbpAxisError,
    SbpLengthError,
    SbpSyntaxError,
    ShapeError,
    TracingError,
    UsageError,
)
from plancompiler.ir.source import shown_path
from plancompiler.ir.whole_file import is_stream
from plancompiler.worker.allowed_paths import AllowedPaths
from tests.dense import run_dense
from tests.frontend import small_job
from tests.frontend.failing import raised
from tests.golden_text import check_golden

ROOT = Path(__file__).resolve().parents[2]
MESH = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])
HERE = "test_trace.py"


def test_a_small_job_has_this_text(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_golden("small_job.txt", str(small_job.build()))


def test_the_yielded_object_is_the_finished_job():
    with pc.job("j", seed=3) as job:
        x = pc.input("x", (2,), "float32", MESH)
        assert job.ops == ()
        assert job.inputs == {}
        pc.output("y", x + 1)
    assert isinstance(job, pc.Job)
    assert pc.as_job(job) is job
    assert [op.kind for op in job.ops] == ["input", "add_scalar", "output"]
    assert list(job.inputs) == ["x"]
    assert list(job.outputs) == ["y"]
    assert (job.name, job.seed, job.world_size) == ("j", 3, 2)


def test_names_count_per_kind_and_outputs_follow_their_op():
    with pc.job("j") as job:
        x = pc.input("x", (2, 4), "float32", MESH)
        gamma, beta = pc.ones((4,), "float32", MESH), pc.zeros((4,), "float32", MESH)
        y = pc.layer_norm(x + x, gamma, beta) + x
        pc.output("y", y)
    assert [op.name for op in job.ops] == [
        "input_0",
        "fill_0",
        "fill_1",
        "add_0",
        "layer_norm_0",
        "add_1",
        "output_0",
    ]
    assert [value.name for value in job.ops[4].outputs] == [
        "layer_norm_0.0",
        "layer_norm_0.1",
        "layer_norm_0.2",
    ]


def line_of(marker: str) -> int:
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    return 1 + next(n for n, line in enumerate(text) if line.endswith(f"# {marker}"))


def test_links_of_a_source_file_are_followed_once(monkeypatch):
    followed = []
    monkeypatch.setattr(os.path, "realpath", lambda path: followed.append(path) or path)
    for _ in range(2):
        assert shown_path("/somewhere/followed/once.py") == "followed/once.py"
    assert followed == ["/somewhere/followed/once.py"]


def test_ops_carry_the_users_line_relative_to_the_current_directory(monkeypatch, tmp_path):
    def build():
        with pc.job("j") as job:
            x = pc.input("x", (2, 2), "float32", MESH)
            pc.output("y", pc.nn.Linear(2, 2)(x))  # the user's line
        return job

    line = line_of("the user's line")
    monkeypatch.chdir(ROOT)
    assert {str(op.source) for op in build().ops[1:]} == {f"tests/frontend/{HERE}:{line}"}
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    for is_gone in (False, True):
        if is_gone:
            gone.rmdir()
        assert {str(op.source) for op in build().ops[1:]} == {f"frontend/{HERE}:{line}"}
    assert shown_path("relative.py") == "relative.py"
    assert is_stream(Path("/dev/stdout"))
    assert not is_stream(Path("out"))
    with pytest.raises(EngineError, match="started is gone"):
        working_folder()
    with pytest.raises(UsageError, match=r"a file of tensors .* directory, which is gone.*'w'"):
        _ = pc.data.Stored("w", "w").file
    assert pc.data.Stored("/a/../w", "w").file == "/w"
    with pytest.raises(UsageError, match="allowed folder"):
        AllowedPaths([Path("data")])
    monkeypatch.setenv("PLANCOMPILER_CACHE", "x")
    with pytest.raises(UsageError, match="PLANCOMPILER_CACHE is given relative to the current"):
        pc.run(build())


def test_gradient_ops_carry_the_line_of_their_forward_op():
    with pc.job("j") as job:
        x = pc.input("x", (4, 2), "float32", MESH)
        y = pc.nn.Linear(2, 2)(x)  # forward
        loss = y.mean()
        pc.optim.SGD(0.1).minimize(loss)  # minimize
        pc.output("loss", loss)
    by_kind = {op.kind: op.source.line for op in job.ops}
    assert by_kind["contract_leading"] == line_of("forward")
    assert by_kind["sgd_update"] == by_kind["learning_rate"] == line_of("minimize")


def test_ops_that_influence_nothing_are_left_out():
    with pc.job("j") as job:
        x = pc.input("x", (4,), "float32", MESH)
        pc.input("unread", (4,), "float32", MESH)
        x.exp().log()
        pc.output("y", x * 2)
    assert [op.kind for op in job.ops] == ["input", "input", "mul_scalar", "output"]


def test_one_causal_mask_serves_all_layers_of_a_placement():
    with pc.job("j") as job:
        x = pc.input("x", (1, 2, 4, 8), "float32", MESH)
        y = pc.causal_attention(x, x, x)
        pc.output("y", pc.causal_attention(y, y, y))
    assert sum(op.kind == "causal_mask" for op in job.ops) == 1


def test_scalar_floating_outputs_are_checked_by_default():
    with pc.job("j") as job:
        x = pc.input("x", (4,), "float32", MESH)
        pc.output("vector", x)
        pc.output("loss", x.sum())
        pc.output("count", x.argmax(0))
        pc.output("unchecked", x.max(), finite=False)
    finite = {op.attr("name"): op.attr("finite") for op in job.ops if op.kind == "output"}
    assert finite == {"vector": False, "loss": True, "count": False, "unchecked": False}


def test_redistribute_records_what_is_demanded():
    other = pc.Placement("cpu", [2, 3, 4])
    with pc.job("j") as job:
        x = pc.input("x", (4, 4), "float32", MESH, "S(0)")
        assert x.redistribute() is x
        assert x.redistribute(placement=MESH) is x
        moved = x.redistribute(placement=other)
        turned = x.redistribute(sbp=["S(1)"])
        both = x.redistribute(other, "B")
        for name, value in (("a", moved), ("b", turned), ("c", both)):
            pc.output(name, value)
    ops = [op for op in job.ops if op.kind == "redistribute"]
    assert [(op.placement, str(op.sbp)) for op in ops] == [
        (other, "None"),
        (MESH, "[S(1)]"),
        (other, "[B]"),
    ]
    assert job.outputs["a"].placement == other


def test_inputs_default_to_broadcast():
    with pc.job("j") as job:
        pc.output("y", pc.input("x", 4, "float32", GRID) + 0)
    assert str(job.ops[0].sbp) == "[B, B]"
    assert job.inputs["x"].shape == (4,)


def test_constants_hold_their_values():
    with pc.job("j") as job:
        pc.output("numbers", pc.constant([[1, 2], [3, 4]], "float64", MESH))
        pc.output("truth", pc.constant(np.array([True, False]), "bool", MESH))
        pc.output("scalar", pc.constant(2.5, "float32", MESH))
    outputs = run_dense(job, 1)[0]
    np.testing.assert_array_equal(outputs["numbers"], [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(outputs["truth"], [True, False])
    assert outputs["scalar"] == 2.5


def test_attributes_become_plain_data():
    with pc.job("j") as job:
        x = pc.input("x", (np.int64(2), np.int32(3)), "float32", MESH)
        pc.output("y", (x * np.float32(0.5)).reshape([3, np.int64(2)]))
    attrs = {key: value for op in job.ops for key, value in op.attrs}
    assert type(attrs["scalar"]) is float
    assert [type(extent) for extent in attrs["shape"]] == [int, int]


def test_indexing_is_slice_and_reshape():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    indices = [
        np.s_[0],
        np.s_[-1, 1],
        np.s_[:, 1:],
        np.s_[..., -1],
        np.s_[1, ..., :2],
        np.s_[:],
        np.s_[..., 0:0],
        np.s_[1, 2, 3],
    ]
    with pc.job("j") as job:
        x = pc.input("x", array.shape, "float32", MESH)
        for number, index in enumerate(indices):
            pc.output(str(number), x[index])
    outputs = run_dense(job, 1, {"x": array})[0]
    for number, index in enumerate(indices):
        np.testing.assert_array_equal(outputs[str(number)], array[index])


@pytest.mark.parametrize(
    ("index", "part"),
    [
        (np.s_[5], "outside axis 0"),
        (np.s_[0, 0, 0], "too many"),
        (np.s_[..., ...], "too many"),
        (np.s_["a"], "this is no index"),
        (np.s_[0.5], "this is no index"),
    ],
)
def test_other_indices_are_refused(index, part):
    with pytest.raises(AttributeValueError, match=part), pc.job("j"):
        pc.input("x", (2, 3), "float32", MESH)[index]


def test_walking_over_a_value_gives_its_rows():
    with pc.job("j"):
        rows = list(pc.input("x", (2, 3), "float32", MESH))
        assert [row.shape for row in rows] == [(3,), (3,)]
        with pytest.raises(ShapeError, match="no rows"):
            iter(rows[0][0])
        pc.output("y", rows[1])


# --- wrong use ------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_name_op_and_line():
    def body():
        x = pc.input("x", (2, 3), "float32", MESH)
        y = pc.input("y", (4, 5), "float32", MESH)
        x @ y  # does not fit

    report = raised(ShapeError, body)
    assert report.op == "matmul_0"
    assert report.source.endswith(f"{HERE}:{line_of('does not fit')}")


def test_errors_without_a_line_get_it_when_they_leave_the_job():
    def body():
        x = pc.input("x", (2, 3), "float32", MESH)
        x.sum(5)  # no such axis

    report = raised(AttributeValueError, body)
    assert report.source.endswith(f"{HERE}:{line_of('no such axis')}")


def test_mixed_dtypes_are_refused():
    def body():
        x = pc.input("x", (2,), "float32", MESH)
        y = pc.input("y", (2,), "float64", MESH)
        assert (y + x).dtype is pc.DType.FLOAT64
        with pc.strict_dtypes():
            y + x

    assert raised(DTypeError, body).op == "add_1"


def test_mixed_placements_are_refused_with_a_hint():
    def body():
        x = pc.input("x", (2,), "float32", MESH)
        pc.input("y", (2,), "float32", GRID) + x

    report = raised(PlacementMismatchError, body)
    assert "redistribute" in report.hint
    assert "%input_0" in report.got
    assert "%input_1" in report.got


@pytest.mark.parametrize(
    ("error", "sbp"),
    [(SbpAxisError, "S(2)"), (SbpLengthError, ["B", "B"]), (SbpSyntaxError, "S(x)")],
)
def test_sbp_that_does_not_fit_is_refused_with_the_line(error, sbp):
    def at_input():
        pc.input("x", (2, 3), "float32", MESH, sbp)  # at input

    def at_redistribute():
        pc.input("x", (2, 3), "float32", MESH).redistribute(sbp=sbp)  # at redistribute

    assert raised(error, at_input).source.endswith(f"{HERE}:{line_of('at input')}")
    report = raised(error, at_redistribute)
    assert report.source.endswith(f"{HERE}:{line_of('at redistribute')}")


def test_a_job_needs_an_output():
    with pytest.raises(JobError, match="no output"), pc.job("j"):
        pc.input("x", (2,), "float32", MESH)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_names_are_unique(kind):
    def body():
        x = pc.input("x", (2,), "float32", MESH)
        if kind == "input":
            pc.input("x", (2,), "float32", MESH)
        pc.output("y", x)
        if kind == "output":
            pc.output("y", x)

    raised(JobError, body, f"two {kind}s have one name")


def test_values_do_not_work_outside_their_job():
    with pc.job("first") as first:
        x = pc.input("x", (2,), "float32", MESH)
        pc.output("x", x)
    with pytest.raises(TracingError, match="while their job is traced"):
        x + 1
    raised(TracingError, lambda: x + 1, "another job")

    def body():
        pc.input("x", (2,), "float32", MESH)
        pc.output("y", x)

    raised(TracingError, body, "another job")
    assert len(first.ops) == 2


def test_inputs_outputs_and_stages_need_a_job():
    for call in (
        lambda: pc.input("x", (2,), "float32", MESH),
        lambda: pc.output("x", None),
        lambda: pc.stage(1),
    ):
        with pytest.raises(TracingError, match="while a job is traced"):
            call()


def test_jobs_do_not_nest():
    with pytest.raises(TracingError, match="already being traced"), pc.job("a"), pc.job("b"):
        pass


def test_an_error_in_the_body_propagates_and_leaves_the_job_empty():
    error = RuntimeError("mine")

    def body():
        pc.output("y", pc.input("x", (2,), "float32", MESH))
        raise error

    with pytest.raises(RuntimeError) as caught, pc.job("j") as job:
        body()
    assert caught.value is error
    with pytest.raises(JobError, match="is empty"):
        pc.as_job(job)
    with pc.job("after") as after:
        pc.output("y", pc.input("x", (2,), "float32", MESH))
    assert after.ops


@pytest.mark.parametrize(
    "call",
    [
        lambda: pc.job(""),
        lambda: pc.job("j", seed=-1),
        lambda: pc.job("j", seed="0"),
        lambda: pc.as_job("job"),
    ],
)
def test_wrong_arguments_of_jobs(call):
    with pytest.raises(UsageError):
        call()


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (UsageError, lambda x: pc.input("z", (2,), "float32", "cpu:0")),
        (UsageError, lambda x: pc.constant(np.zeros(3, complex), "float32", MESH)),
        (UsageError, lambda x: pc.constant("text", "float32", MESH)),
        (UsageError, lambda x: pc.concat([])),
        (DTypeError, lambda x: pc.input("z", (2,), "complex64", MESH)),
        (AttributeValueError, lambda x: pc.input("z", (None,), "float32", MESH)),
        (AttributeValueError, lambda x: pc.cross_entropy(x, x, reduction="average")),
        (TracingError, lambda x: x + np.ones(2)),
        (TracingError, lambda x: pc.maximum(x, "a")),
        (TracingError, lambda x: pc.where(x > 0, 1.0)),
        (TracingError, lambda x: bool(x > 0)),
        (TracingError, lambda x: pc.output("y", 3.0)),
    ],
)
def test_wrong_arguments_of_functions(error, body):
    raised(error, lambda: body(pc.input("x", (2,), "float32", MESH)))


@pytest.mark.processes
def test_tracing_imports_neither_grpc_nor_the_runtime():
    script = (
        "import sys, plancompiler as pc\n"
        "pc.nn.Linear(2, 2)\n"
        "print([name for name in sys.modules if name == 'grpc' or name.startswith("
        "('grpc.', 'plancompiler.running', 'plancompiler.executor', 'plancompiler.master'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists():
    for name in pc.__all__:
        assert getattr(pc, name) is not None
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = pc.nothing
