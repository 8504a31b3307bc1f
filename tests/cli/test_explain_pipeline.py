"""`compile --explain` says what each stage of a pipeline does in a step."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from plancompiler.cli.explain import SLOTS_SHOWN, explain_pipeline, print_explained_pipeline
from plancompiler.cli.program import cli
from plancompiler.ir.pipeline import Pipeline
from tests.examples import EXAMPLES
from tests.simulate.stage_plans import stage_plans


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_slots_in_flight_and_bubble_of_each_stage() -> None:
    pipeline = Pipeline("zero_bubble", 3, 2, 2)
    first, last = explain_pipeline(pipeline, stage_plans(pipeline))
    assert (first.stage, first.schedule, first.in_flight) == (0, "zero_bubble", 2)
    assert first.slots == "F0 F1 B0 W0 F2 B1 W1 B2 W2"
    assert last.slots == "F0 B0 F1 B1 W0 F2 B2 W1 W2"
    assert first.bubble_fraction == last.bubble_fraction == pytest.approx(1 / 10)


def test_chunks_are_named_where_a_stage_has_several() -> None:
    pipeline = Pipeline("interleaved", 2, 2, 4)
    stages = explain_pipeline(pipeline, stage_plans(pipeline))
    assert stages[1].slots == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


def test_no_bubble_without_the_plans_of_all_ranks() -> None:
    pipeline = Pipeline("1f1b", 4, 2, 2)
    plans = stage_plans(pipeline)
    (first, _) = explain_pipeline(pipeline, {0: plans[0]})
    assert first.bubble_fraction is None
    assert explain_pipeline(None, plans) == []


def test_long_lists_of_slots_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline("gpipe", 20, 2, 2)
    print_explained_pipeline(explain_pipeline(pipeline, stage_plans(pipeline)))
    line = capsys.readouterr().out.splitlines()[1]
    assert f"... {40 - SLOTS_SHOWN} more" in line
    assert "B3" in line
    assert "B4" not in line


GPT = (
    *("compile", str(EXAMPLES / "gpt.py"), "--explain", "-D", "layers=2", "-D", "dim=32"),
    *("-D", "length=16", "-D", "pp=2"),
)


@pytest.mark.slow
def test_the_command_explains_a_pipeline() -> None:
    settings = ("-D", "microbatches=4", "-D", "schedule=1f1b")
    lines = [line.split("  ") for line in run(*GPT, *settings).splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["0", "1f1b", "F0 F1 B0 F2 B1 F3 B2 B3", "2", "20.0%"] in rows
    assert ["1", "1f1b", "F0 B0 F1 B1 F2 B2 F3 B3", "1", "20.0%"] in rows
    report = json.loads(run(*GPT, *settings, "--json"))["pipeline"]
    assert [row["bubble_fraction"] for row in report] == [pytest.approx(0.2)] * 2


def test_the_command_says_nothing_of_stages_where_a_step_is_not_split() -> None:
    assert "pipeline" not in json.loads(run(*GPT, "--json"))
