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
from plancompiler.plan.compiled_plans import GRAPH_FILE
from tests.cli.conftest import Invoke

pytest.importorskip("highspy")

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
    assert sorted(plan["mesh"] for plan in plans) == [[2, 2], [4]]
    assert plans[0]["objective_seconds"] == min(plan["objective_seconds"] for plan in plans)
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
        (("--devices", "2", "--memory", "1KiB"), "no layouts fit"),
        (("--devices", "2", "--memory", "much"), "not an amount of memory"),
        (("--devices", "2", "--machine", "abacus"), "no such machine"),
    ],
)
def test_bad_input_is_named(invoke: Invoke, options: tuple[str, ...], message: str) -> None:
    done = invoke("search", *MLP, *options)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = [2]\n[layouts]\nothers = ['B']\n", "another model"),
        ("mesh = [2]\n[layouts]\n'0.weight' = ['S(2)']\n", "does not fit"),
        ("mesh = [2]\n[layouts]\n'0.weight' = 3\n", "does not fit"),
        ("mesh = [3]\n[layouts]\n", "cannot have this shape"),
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


@pytest.mark.processes
def test_the_answer_does_not_depend_on_the_hash_seed() -> None:
    command = [sys.executable, "-m", "plancompiler", "search", *MLP, "--devices", "4", "--json"]
    answers = []
    for seed in ("0", "1", "2", "3"):
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=300,
        )
        answer = json.loads(done.stdout)
        del answer["seconds"]
        answers.append(answer)
    assert answers.count(answers[0]) == 4
