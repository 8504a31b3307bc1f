"""What each command prints when all is well."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plancompiler.cli.compile import compare_texts
from plancompiler.cli.options import parse_setting
from plancompiler.cli.program import COMMANDS
from plancompiler.errors import VerifyError
from plancompiler.lower.compile import MODES
from plancompiler.ops.registry import op_table
from plancompiler.plan.serde import plan_from_bytes
from plancompiler.plan.text import format_plan
from tests.cli.conftest import Invoke

COMPILE_FIELDS = [
    "mode",
    "ranks",
    "logical_ops",
    "boxing_edges",
    "boxing_families",
    "boxing_graph_bytes",
    "slice_bytes",
    "distinct_slices",
    "master_seconds",
    "rank_seconds",
    "tasks_per_rank",
    "plan_bytes",
    "arena_bytes",
    "peak_live_bytes",
    "peak_rss_mib",
    "digest",
]
RUN_FIELDS = [
    "ranks",
    "backend",
    "mode",
    "steps",
    "losses",
    "step_seconds",
    "compile_seconds",
    "digest",
    "cached",
]


def json_of(invoke: Invoke, *arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    assert result.stdout.count("\n") == 1
    return value


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_an_example_and_json(invoke: Invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Example:" in result.stdout
    assert f"plancompiler {command}" in result.stdout.split("Example:")[1]
    assert "--json" in result.stdout


def test_the_version(invoke: Invoke) -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"plancompiler \d+\.\d+\.\d+\n", result.stdout)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=-2", -2),
        ("a=1.5", 1.5),
        ("a=1e-3", 1e-3),
        ("a=true", True),
        ("a=False", False),
        ("a=dp_tp", "dp_tp"),
        ("a=", ""),
        ("a=x=y", "x=y"),
    ],
)
def test_settings_become_the_first_type_that_fits(text: str, value: object) -> None:
    key, parsed = parse_setting(text)
    assert key == "a"
    assert parsed == value
    assert type(parsed) is type(value)


def test_compile_reports_every_field_of_the_contract(invoke: Invoke, mlp: str) -> None:
    report = json_of(invoke, "compile", mlp, "--ranks", "2")
    assert list(report) == COMPILE_FIELDS
    assert report["mode"] == "rank_per_iter"
    assert report["ranks"] == 2
    assert set(report["slice_bytes"]) == {"min", "median", "max"}
    assert set(report["master_seconds"]) == {
        "trace",
        "passes",
        "sbp",
        "boxing",
        "serialize",
        "total",
    }
    stages = [spent for stage, spent in report["master_seconds"].items() if stage != "total"]
    assert report["master_seconds"]["total"] == pytest.approx(sum(stages))
    assert set(report["rank_seconds"]) == {"median", "max"}
    assert set(report["tasks_per_rank"]) == {"min", "median", "max"}
    assert set(report["plan_bytes"]) == {"median", "max"}
    assert report["arena_bytes"]["max"] >= report["peak_live_bytes"]["max"] > 0
    assert report["boxing_edges"] >= 1
    assert report["boxing_families"] >= 1
    assert report["distinct_slices"] in (1, 2)
    assert re.fullmatch(r"[0-9a-f]{64}", report["digest"])


def test_compile_of_some_ranks_gives_those_ranks_plans(
    invoke: Invoke, mlp: str, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    json_of(invoke, "compile", mlp, "--ranks", "3", "--out", str(whole))
    json_of(invoke, "compile", mlp, "--ranks", "3", "--out", str(part), "--rank", "2")
    assert sorted(file.name for file in part.iterdir()) == [
        "boxing_task_graph.bin",
        "job.bin",
        "plans.json",
        "rank_2.plan",
        "rank_2.txt",
        "summary.json",
    ]
    assert (part / "rank_2.txt").read_bytes() == (whole / "rank_2.txt").read_bytes()
    assert (part / "rank_2.plan").read_bytes() == (whole / "rank_2.plan").read_bytes()
    refused = invoke("run", str(part))
    assert refused.exit_code == 2
    assert "does not hold the plans of all ranks" in refused.stderr


def test_compile_replaces_the_plans_of_an_earlier_run(
    invoke: Invoke, mlp: str, tmp_path: Path
) -> None:
    out = tmp_path / "plans"
    json_of(invoke, "compile", mlp, "--ranks", "3", "--out", str(out))
    (out / "notes.md").write_text("mine")
    report = json_of(invoke, "compile", mlp, "--ranks", "2", "--out", str(out))
    assert sorted(file.name for file in out.iterdir()) == [
        "boxing_task_graph.bin",
        "job.bin",
        "notes.md",
        "plans.json",
        "rank_0.plan",
        "rank_0.txt",
        "rank_1.plan",
        "rank_1.txt",
        "summary.json",
    ]
    assert json.loads((out / "summary.json").read_text()) == report
    plan = plan_from_bytes((out / "rank_1.plan").read_bytes())
    assert format_plan(plan) == (out / "rank_1.txt").read_text()


@pytest.mark.processes
def test_compile_checks_all_modes(invoke: Invoke, mlp: str) -> None:
    result = invoke("compile", mlp, "--check-modes", "--mode", "naive")
    assert result.exit_code == 0, result.output
    for mode in MODES:
        assert (f"{mode}: the same plans as naive" in result.stderr) == (mode != "naive")
    assert "digest" in result.stdout


def test_the_modes_check_names_the_first_rank_and_line_that_differ() -> None:
    with pytest.raises(VerifyError) as caught:
        compare_texts("naive", {0: "a\nb\n", 1: "a\nb\n"}, "fast", {0: "a\nb\n", 1: "a\nc\nd\n"})
    report = caught.value.report
    assert report.rank == 1
    assert report.got == "line 2 in fast: c"
    assert report.expected == "line 2 in naive: b"
    with pytest.raises(VerifyError, match=r"line 3 in fast: \(ended\)"):
        compare_texts("naive", {0: "a\nb\nc"}, "fast", {0: "a\nb"})


def test_the_environment_chooses_the_mode_and_the_option_wins(
    invoke: Invoke, mlp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", "naive")
    assert json_of(invoke, "compile", mlp)["mode"] == "naive"
    assert json_of(invoke, "compile", mlp, "--mode", "rank_per_iter")["mode"] == "rank_per_iter"


def test_the_environment_names_a_folder_for_every_stage(
    invoke: Invoke, mlp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, out = tmp_path / "dump", tmp_path / "plans"
    monkeypatch.setenv("PLANCOMPILER_DUMP", str(dump))
    json_of(invoke, "compile", mlp, "--ranks", "2", "--out", str(out))
    names = {file.name for file in dump.iterdir()}
    assert {"job.txt", "op_graph.txt", "boxing_task_graph.txt"} <= names
    assert (dump / "job.txt").read_text().startswith("job small")
    for rank in (0, 1):
        assert (dump / f"slice_{rank}.txt").stat().st_size > 0
        assert (dump / f"plan_{rank}.txt").read_text() == (out / f"rank_{rank}.txt").read_text()


def test_inspect_prints_plans_to_read(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    json_of(invoke, "compile", mlp, "--out", str(out))
    result = invoke("inspect", str(out), "--rank", "1")
    assert result.exit_code == 0
    assert result.stdout == (out / "rank_1.txt").read_text()
    assert "matmul" in result.stdout
    assert "job.py:" in result.stdout
    both = invoke("inspect", str(out))
    assert (out / "rank_0.txt").read_text() in both.stdout
    assert (out / "rank_1.txt").read_text() in both.stdout
    assert invoke("inspect", str(out / "rank_1.plan")).stdout == result.stdout


def test_inspect_gives_plans_as_json(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    json_of(invoke, "compile", mlp, "--out", str(out))
    (plan,) = json_of(invoke, "inspect", str(out), "--rank", "0")["plans"]
    same = invoke("inspect", str(out), "--rank", "0", "--format", "json")
    assert json.loads(same.stdout) == {"plans": [plan]}
    decoded = plan_from_bytes((out / "rank_0.plan").read_bytes())
    assert [task["id"] for task in plan["tasks"]] == [task.id for task in decoded.tasks]
    streams = [task.stream.value for task in decoded.tasks]
    assert [task["stream"] for task in plan["tasks"]] == streams
    assert {"compute", "gradient"} <= set(streams)
    assert plan["variables"][0]["placement"]["ranks"] == [0, 1]
    assert plan["job"] == "small"


def test_inspect_shows_what_fills_the_arena(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    summary = json_of(invoke, "compile", mlp, "--out", str(out))
    (report,) = json_of(invoke, "inspect", str(out), "--rank", "1", "--memory")["memory"]
    assert report["rank"] == 1
    assert report["arena_bytes"] == summary["arena_bytes"]["max"]
    assert report["lower_bound"] == summary["peak_live_bytes"]["max"]
    assert sum(each["nbytes"] for each in report["at_peak"]) == max(report["live"])
    result = invoke("inspect", str(out), "--rank", "1", "--memory")
    assert result.exit_code == 0, result.output
    for each in report["at_peak"]:
        assert each["name"] in result.stdout


def test_compile_lists_the_costs_of_layout_changes(invoke: Invoke, mlp: str) -> None:
    report = json_of(invoke, "compile", mlp, "--ranks", "2", "--costs")
    changes = {(each["primitive"], each["devices"]) for each in report["transfers"]}
    assert ("all_reduce", 2) in changes
    assert all(each["seconds"] >= 0 for each in report["transfers"])
    result = invoke("compile", mlp, "--ranks", "2", "--costs")
    assert result.exit_code == 0, result.output
    assert "all_reduce" in result.stdout


def test_inspect_gives_a_graph(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    json_of(invoke, "compile", mlp, "--out", str(out))
    text = invoke("inspect", str(out), "--format", "dot").stdout
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}")
    plans = [plan_from_bytes((out / f"rank_{rank}.plan").read_bytes()) for rank in (0, 1)]
    drawn = set(re.findall(r"^\s+(t\d+) \[label=", text, flags=re.M))
    assert drawn == {f"t{task.id}" for plan in plans for task in plan.tasks}
    ends = set(re.findall(r"(t\d+) -> (t\d+)", text))
    assert {end for pair in ends for end in pair} <= drawn


def test_run_reports_every_field_of_the_contract(invoke: Invoke, mlp: str) -> None:
    report = json_of(invoke, "run", mlp, "--ranks", "2", "--steps", "12")
    assert list(report) == RUN_FIELDS
    assert report["ranks"] == 2
    assert report["backend"] == "threads"
    assert report["mode"] == "rank_per_iter"
    assert report["steps"] == len(report["losses"]) == 12
    assert report["losses"][-1] < report["losses"][0]
    assert 0 < report["step_seconds"]["median"] <= report["step_seconds"]["p90"]
    assert report["digest"] == json_of(invoke, "compile", mlp, "--ranks", "2")["digest"]


def test_run_shows_progress_on_stderr_and_a_table_on_stdout(invoke: Invoke, mlp: str) -> None:
    result = invoke("run", mlp, "--steps", "10")
    assert result.exit_code == 0, result.output
    assert "step 10/10 loss" in result.stderr
    assert "step 10/10" not in result.stdout
    assert re.search(r"loss\s+\d", result.stdout)


def test_run_gives_the_same_losses_on_any_number_of_ranks(invoke: Invoke, mlp: str) -> None:
    one = json_of(invoke, "run", mlp, "--ranks", "1", "--steps", "20")
    three = json_of(invoke, "run", mlp, "--ranks", "3", "--steps", "20")
    np.testing.assert_allclose(three["losses"], one["losses"], rtol=1e-4)


def test_run_saves_and_restores(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = json_of(invoke, "run", mlp, "--ranks", "2", "--steps", "9")
    save = ("--save", folder, "--save-every", "3")
    json_of(invoke, "run", mlp, "--ranks", "2", "--steps", "4", *save)
    rest = json_of(invoke, "run", mlp, "--ranks", "3", "--steps", "5", "--restore", folder)
    np.testing.assert_allclose(rest["losses"], whole["losses"][4:], rtol=1e-4)


def test_ops_lists_the_table(invoke: Invoke) -> None:
    rows = json_of(invoke, "ops")["ops"]
    assert [row["kind"] for row in rows] == list(op_table())
    matmul = next(row for row in rows if row["kind"] == "matmul")
    assert matmul["gradient"] is True
    assert matmul["linear"] == [[0], [1]]
    assert matmul["kernels"] == ["numpy"]
    assert "matmul" in invoke("ops").stdout


def test_doctor_reports_what_works(invoke: Invoke) -> None:
    report = json_of(invoke, "doctor")
    assert report["healthy"] is True
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        "python",
        "versions",
        "cpu",
        "blas",
        "shared memory",
        "abstract sockets",
        "grpc loopback",
        "bfloat16",
        "cupy",
        "cuda libraries",
        "nccl",
        "mpi",
    ]
    assert all(check["state"] in ("ok", "absent") for check in checks.values())
    assert all(check["detail"] for check in checks.values())
    assert f"numpy {np.__version__}" in checks["versions"]["detail"]
    assert "chosen by" in checks["blas"]["detail"]
    assert "GFLOP/s" in checks["blas"]["detail"]


def test_inspect_shows_the_boxing_that_compile_wrote(
    invoke: Invoke, mlp: str, tmp_path: Path
) -> None:
    out = tmp_path / "plans"
    summary = json_of(invoke, "compile", mlp, "--ranks", "2", "--out", str(out), "--costs")
    shown = json_of(invoke, "inspect", str(out), "--boxing")
    assert shown["transfers"] == summary["transfers"]
    assert any(each["primitive"] == "all_reduce" for each in shown["transfers"])
    memory = invoke("inspect", str(out), "--memory", "--rank", "0")
    assert "alive over the step: " in memory.stdout
    assert "█" in memory.stdout
    (out / "boxing_task_graph.bin").write_bytes(b"not a graph")
    assert invoke("inspect", str(out), "--boxing").exit_code == 1
    (out / "boxing_task_graph.bin").unlink()
    missing = invoke("inspect", str(out), "--boxing")
    assert missing.exit_code == 2
    assert "holds no boxing task graph" in missing.stderr
