"""`compile --profile` says what each stage of the compiler took."""

from __future__ import annotations

import json

import pytest

from plancompiler.lower.compile import MODES
from plancompiler.passes import PASSES
from tests.cli.conftest import Invoke

PASS_STAGES = [f"pass {each.name}" for each in PASSES if each.default]
MASTER = ["trace", "before passes", *PASS_STAGES, "sbp", "boxing", "serialize"]
RANKS = {
    "naive": ["expand", "emit", "verify"],
    "rank_per_iter": ["rebuild", "emit", "verify"],
    "rank_per_thread": ["rebuild", "emit", "verify"],
    "rank_per_process": ["read", "rebuild", "emit", "verify", "write"],
}


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_every_stage_has_its_time_in_every_mode(invoke: Invoke, mlp: str, mode: str) -> None:
    result = invoke("compile", mlp, "--ranks", "2", "--mode", mode, "--profile", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    spent = {(each["part"], each["stage"]): each["seconds"] for each in report["profile"]}
    expected = [("master", stage) for stage in MASTER]
    expected += [("ranks", stage) for stage in (*RANKS[mode], "verify together")]
    assert list(spent) == expected
    assert sum(each["share"] for each in report["profile"]) == pytest.approx(1)
    master = report["master_seconds"]
    passes = sum(spent["master", stage] for stage in ("before passes", *PASS_STAGES))
    assert passes == pytest.approx(master["passes"])
    assert spent["master", "sbp"] == pytest.approx(master["sbp"])
    # Stages are parts of what each rank took, whose median over two ranks is their mean.
    ranks = sum(spent["ranks", stage] for stage in RANKS[mode])
    assert 0 < ranks <= 2 * report["rank_seconds"]["median"] * 1.000001


def test_the_table_has_a_line_per_stage(invoke: Invoke, mlp: str) -> None:
    result = invoke("compile", mlp, "--ranks", "2", "--profile")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    start = rows.index(["part", "stage", "ms", "share"])
    stages = [" ".join(row[1:-2]) for row in rows[start + 1 :]]
    assert stages == [*MASTER, *RANKS["rank_per_iter"], "verify together"]


def test_no_profile_where_none_was_asked_for(invoke: Invoke, mlp: str) -> None:
    result = invoke("compile", mlp, "--ranks", "2", "--json")
    assert "profile" not in json.loads(result.stdout)
