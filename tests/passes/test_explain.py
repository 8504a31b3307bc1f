"""`compile --explain` says what each pass did, and the numbers are those of the compiler."""

from __future__ import annotations

import json
import logging

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.boxing.fuse import AUTO
from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.step_time import step_time
from plancompiler.cli.explain import explain
from plancompiler.cli.program import cli
from plancompiler.costs import generic_machine
from plancompiler.ir import DType
from plancompiler.lower.compile import compile_plans
from plancompiler.passes import PASSES, Config
from tests.examples import EXAMPLES, gpt, mlp
from tests.passes.worlds import arena, compiled, configured, mesh


def test_rows_are_what_the_compiler_makes() -> None:
    job = configured(mlp(layout="dp", ranks=2), fuse_bytes=AUTO)
    rows = list(explain(job, 2))
    assert [row.name for row in rows] == [
        "traced",
        *(each.name for each in PASSES if each.default),
        "fuse_reductions",
    ]
    whole = compile_plans(job, 2, "rank_per_iter")
    assert rows[0].ops == len(job.ops)
    assert rows[-1].ops == len(whole.graph.ops)
    assert rows[-1].arena_bytes == arena(whole)
    assert rows[-1].predicted_seconds == step_time(whole.graph).seconds
    assert rows[-1].bytes_per_rank == sum(each.bytes_per_rank for each in boxing_costs(whole.graph))
    # One reduction per parameter, for the loss and for the accuracy become a few.
    assert rows[-2].collectives == 8
    assert rows[-1].collectives < rows[-2].collectives
    assert rows[-1].predicted_seconds < rows[-2].predicted_seconds


@pytest.mark.parametrize(("sbp", "share"), [("B", 1), ("S(0)", 4)])
def test_a_product_takes_its_arithmetic_or_its_memory(sbp: str, share: int) -> None:
    size = 512
    with pc.job("product") as job:
        x = pc.input("x", (size, size), "float32", mesh(4), sbp)
        w = pc.input("w", (size, size), "float32", mesh(4))
        pc.output("y", (x @ w).sum())
    actual = step_time(compiled(job).graph)
    device = generic_machine().device
    product = 2 * size**3 / share / device.peak_flops(DType.FLOAT32)
    addition = (size * size / share + 1) * 4 / device.memory_bytes_per_second
    assert actual.compute_seconds == pytest.approx(product + addition, rel=1e-6)
    assert (actual.transport_seconds > 0) == (sbp != "B")


def test_the_busiest_rank_counts() -> None:
    with pc.job("stages") as job:
        x = pc.input("x", (64, 64), "float32", mesh(1))
        y = (x @ x).redistribute(placement=mesh(1, first=1))
        for _ in range(3):
            y = y @ y
        pc.output("y", y.sum())
    assert step_time(compiled(job).graph).rank == 1


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_a_table_and_reasons() -> None:
    target = str(EXAMPLES / "mlp.py")
    out = run("compile", target, "--ranks", "2", "-D", "hidden=30", "--explain")
    for row in ("after", "traced", "fold", "cse", "prune_scaling", "dce", "fuse_reductions"):
        assert f"\n{row} " in out, row
    assert "prune_scaling: no gradient has a factor of its own to move" in out
    assert "8 reductions became" in out


def test_buckets_name_their_gradients_in_text_json_and_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = str(EXAMPLES / "gpt.py")
    small = ("-D", "layers=2", "-D", "dim=32", "-D", "length=16", "-D", "dp=2")
    report = json.loads(run("compile", target, *small, "--explain", "--json"))
    *_, last = report["explain"]
    members = [member["name"] for bucket in last["buckets"] for member in bucket["members"]]
    parameters = [
        str(op.attr("name"))
        for op in gpt(dp=2).ops
        if op.kind == "variable" and op.attr("trainable")
    ]
    assert sorted(members) == sorted(
        ["output loss", *(f"gradient of {name}" for name in parameters)]
    )
    assert {bucket["stream"] for bucket in last["buckets"]} == {"gradient"}
    assert all(bucket["ended"] for bucket in last["buckets"])
    text = run("compile", target, *small, "--explain")
    log = logging.getLogger("plancompiler.lower.compile")
    log.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, log.name):
            compile_plans(gpt(dp=2), 2, "rank_per_iter")
    finally:
        log.removeHandler(caplog.handler)
    for name in members:
        assert name in text
        assert name in caplog.text


@pytest.mark.slow
def test_what_stays_alone_has_its_reason() -> None:
    job = configured(gpt(dp=2, tp=2), fuse_bytes=0)
    *_, last = explain(job, job.world_size)
    assert {bucket.ended for bucket in last.buckets} == {"fuse_bytes=0"}
    *_, last = explain(configured(job, fuse_bytes=AUTO), job.world_size)
    tensor_parallel = [each for each in last.buckets if each.axes == ("tp",)]
    assert len(tensor_parallel) == 8
    for bucket in tensor_parallel:
        assert len(bucket.members) == 1
        assert "reads one of them" in bucket.ended


def test_json_and_options() -> None:
    target = str(EXAMPLES / "gpt.py")
    small = ("-D", "layers=2", "-D", "dim=32", "-D", "length=16", "-D", "dp=2")
    passes = ("--pass", "dce", "--pass", "zero", "--zero", "1", "--fuse-bytes", "0")
    report = json.loads(run("compile", target, *small, *passes, "--explain", "--json"))
    names = [row["name"] for row in report["explain"]]
    assert names == ["traced", "zero", "dce", "fuse_reductions"]
    assert report["explain"][-1]["collectives"] == report["explain"][-2]["collectives"]
    assert set(report["explain"][0]) == {
        "name",
        "summary",
        "notes",
        "changes",
        "buckets",
        "ops",
        "collectives",
        "bytes_per_rank",
        "arena_bytes",
        "predicted_seconds",
    }


def test_micro_batches_are_asked_for_on_the_command_line() -> None:
    target = str(EXAMPLES / "mlp.py")
    small = ("--ranks", "2", "-D", "hidden=30", "-D", "batch=30")
    asked = ("--microbatches", "3", "--schedule", "1f1b")
    report = json.loads(run("compile", target, *small, *asked, "--explain", "--json"))
    (row,) = [row for row in report["explain"] if row["name"] == "microbatch"]
    assert row["summary"].startswith("3 micro-batches, 1 stage (1f1b): ")


def test_settings_of_an_example_are_those_of_the_config() -> None:
    job = gpt(dp=2, zero=1, fuse_bytes=1024, passes="zero,dce")
    assert job.config == Config(zero=1, fuse_bytes=1024, passes=("zero", "dce"))
