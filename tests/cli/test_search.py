"""`plancompiler search`, and layout files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.boxing.serde import graph_from_bytes
from plancompiler.costs.choice import FOLDER
from plancompiler.plan.compiled_plans import GRAPH_FILE
from tests.cli.conftest import Invoke

pytest.importorskip("highspy")

ROOT = Path(__file__).resolve().parents[2]
MLP = ("examples/mlp.py", "-D", "layout=auto", "-D", "evaluate=false")


def searched(invoke: Invoke, *options: str) -> dict[str, object]:
    done = invoke("search", *MLP, *options, "--json")
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_best_plans_come_first_with_a_bound(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "layout.toml"
    answer = searched(invoke, "--devices", "4", "--out", str(out))
    plans = answer["plans"]
    assert isinstance(plans, list)
    assert {(2, 2), (4,)} <= {tuple(plan["mesh"]) for plan in plans}
    assert plans[0]["step_seconds"] == min(plan["step_seconds"] for plan in plans)
    assert all(plan["step_seconds"] > 0 and plan["memory_bytes"] > 0 for plan in plans)
    assert plans[0]["layout_file"] == str(out)
    assert 0 < answer["bound_seconds"] <= answer["objective_seconds"]  # type: ignore[operator]
    assert answer["gap"] <= 0.01  # type: ignore[operator]


def test_a_layout_file_gives_the_layouts_again_and_may_be_edited(
    invoke: Invoke, tmp_path: Path
) -> None:
    out = tmp_path / "layout.toml"
    searched(invoke, "--devices", "2", "--out", str(out))
    text = out.read_text()
    edited = re.sub('"4.weight" = .*', '"4.weight" = ["S(1)"]', text)
    assert edited != text
    out.write_text(edited)
    job = ["compile", *MLP, "--ranks", "2", "--layout", str(out), "--out", str(tmp_path / "plans")]
    assert invoke(*job).exit_code == 0
    graph = graph_from_bytes((tmp_path / "plans" / GRAPH_FILE).read_bytes())
    layouts = {placed.op.attr("name"): placed.signature for placed in graph.ops}
    assert str(layouts["4.weight"].outputs[0]) == "[S(1)]"
    assert str(layouts["4.weight.adam_m"].outputs[0]) == "[S(1)]"


def test_why_a_tensor_has_its_layout_is_explained(invoke: Invoke) -> None:
    answer = searched(invoke, "--devices", "2", "--explain", "2.weight")
    explained = answer["explained"]
    assert isinstance(explained, dict)
    assert explained["second_seconds"] >= explained["objective_seconds"]
    assert explained["second"] != explained["layout"]
    assert explained["decided_by"] == "the cost"
    done = invoke("search", *MLP, "--devices", "2", "--explain", "2.weight")
    assert "second best" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "2", "--explain", "nothing"), "no tensor of this name"),
        pytest.param(
            *(("--devices", "2", "--memory", "1KiB"), "no plan that was tried fits"),
            marks=pytest.mark.slow,
        ),
        (("--devices", "2", "--memory", "much"), "not an amount of memory"),
        (("--devices", "2", "--machine", "abacus"), "no such machine"),
    ],
)
def test_bad_input_is_named(invoke: Invoke, options: tuple[str, ...], message: str) -> None:
    done = invoke("search", *MLP, *options)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("left_out", "message"),
    [("node", "missing table: node"), ("network", "has fewer devices")],
)
def test_machines_that_do_not_do_are_named(
    invoke: Invoke, tmp_path: Path, left_out: str, message: str
) -> None:
    text = (FOLDER / "h100-sxm.toml").read_text()
    path = tmp_path / "machine.toml"
    path.write_text(re.sub(rf"^\[{left_out}\]$.*?(?=^\[|\Z)", "", text, flags=re.M | re.S))
    done = invoke("search", *MLP, "--devices", "16", "--machine", str(path))
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = [2]\n[layouts]\nothers = ['B']\n", "another model"),
        ("mesh = [2]\n[layouts]\n'0.weight' = ['S(2)']\n", "does not fit"),
        ("mesh = [2]\n[layouts]\n'0.weight' = 3\n", "does not fit"),
        ("mesh = [2]\n[layouts]\n'0.weight' = ['P']\n", "is partial"),
        ("mesh = [2]\naxes = ['a', 'b']\n[layouts]\n", "does not name each axis of its mesh"),
        ("mesh = [2]\n[layouts]\n'0.weigth' = ['B']\n'0.bias' = ['B']\n", "Expected: 0.weight"),
        (
            "mesh = [2]\n[layouts]\n'0.weight' = ['S(0)']\n'0.weight.adam_m' = ['S(1)']\n",
            "0.weight.adam_m in [S(1)], its parameter in [S(0)]",
        ),
        ("mesh = [3]\n[layouts]\n", "cannot have this shape"),
        ("mesh = [2]\nstages = 2\n[layouts]\n", "do not have the job's devices"),
        ("mesh = [1]\nstages = 2\nchunks = 3\n[layouts]\n", "whole number of chunks"),
        ("mesh = [1]\nstages = 0\n[layouts]\n", "stages and chunks that are none"),
        ("mesh = [2]\n[config]\nspeed = 2\n[layouts]\n", "no such setting"),
        ("mesh = [2\n", "is no layout file"),
        ("other = 1\n", "is no layout file"),
    ],
)
def test_layout_files_that_do_not_fit_are_refused(
    invoke: Invoke, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "layout.toml"
    path.write_text(text)
    done = invoke("compile", *MLP, "--ranks", "2", "--layout", str(path))
    assert done.exit_code == 2
    assert message in done.stderr


ANSWERS = """
import json
from plancompiler.forecasting.plan_search import search_plans
from plancompiler.lower.compile import compile_plans
from tests.search.open_jobs import mlp, transformer
answers = {}
for job in (mlp((2,)), transformer((2, 2), 2)):
    ranks = job.world_size
    answers[f"{job.name} {ranks}"] = compile_plans(job, ranks).digest
plans = search_plans(mlp((2,)), None, 10)
answers["files"] = [plan.file_text() for plan in plans]
answers["digests"] = [compile_plans(plan.forecast.job, 2).digest for plan in plans]
answers["bound"] = plans[0].search.bound_seconds
print(json.dumps(answers))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_layouts_and_plans_do_not_depend_on_the_hash_seed() -> None:
    answers = []
    for seed in ("0", "1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", ANSWERS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=300,
        )
        answers.append(json.loads(done.stdout))
    assert len(answers[0]["files"]) > 1
    assert answers.count(answers[0]) == 4
