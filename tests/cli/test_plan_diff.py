"""`plancompiler plan-diff`: what differs between plans or forecasts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plancompiler.plan.compiled_plans import read_plans
from plancompiler.plan.plan import CollectiveSpec
from tests.cli.conftest import Invoke, Write

LINES = """
import plancompiler as pc


def build(width=4, twice=False, demand="S(0)"):
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("lines") as job:
        x = pc.input("x", (4, width), "float32", mesh, ["S(0)"])
        y = x.exp()
        y = y.tanh() if twice else y
        pc.output("total", y.redistribute(sbp=[demand]).sum())
    return job
"""
EXP, TANH = 9, 10
"""Numbers of lines."""


def diff(invoke: Invoke, first: object, second: object, code: int) -> dict[str, Any]:
    done = invoke("plan-diff", str(first), str(second), "--json")
    assert done.exit_code == code, done.output
    known = json.loads(done.stdout)
    assert isinstance(known, dict)
    assert known["equal"] is (code == 0)
    return known


def by_name(figures: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {each["name"]: (each["first"], each["second"]) for each in figures}


def of_line(known: dict[str, Any], number: int) -> dict[str, tuple[Any, Any]]:
    (line,) = [each for each in known["lines"] if each["source"].endswith(f":{number}")]
    return by_name(line["figures"])


def test_plans_and_forecasts_by_line(invoke: Invoke, write: Write, tmp_path: Path) -> None:
    target = write(LINES)

    def made(name: str, *settings: str) -> Path:
        words = [word for each in settings for word in ("-D", each)]
        done = invoke("compile", target, *words, "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        done = invoke("forecast", target, *words, "--json")
        (tmp_path / f"{name}.json").write_text(done.stdout)
        return tmp_path / name

    plain, again = made("plain"), made("again")
    twice, whole = made("twice", "twice=true"), made("whole", "demand=B")

    def suffixed(folder: Path) -> Path:
        return folder.with_suffix(".json")

    for kind in (Path, suffixed):
        assert diff(invoke, kind(plain), kind(again), 0) | {"first": 0, "second": 0} == {
            "first": 0,
            "second": 0,
            "equal": True,
            "lines": [],
            "sums": [],
        }
        # A task of each rank more, and whatever it takes.
        known = diff(invoke, kind(plain), kind(twice), 1)
        assert of_line(known, TANH)["tasks"] == (0, 2)
        assert of_line(known, TANH)["seconds"][0] == 0 < of_line(known, TANH)["seconds"][1]
        assert not any(
            each["source"].endswith(f":{EXP}")
            for each in known["lines"]
            if "seconds" in by_name(each["figures"])
        )
        sums = by_name(known["sums"])
        assert sums["all lines.tasks"][1] - sums["all lines.tasks"][0] == 2
        assert sums["step_seconds"][0] < sums["step_seconds"][1]
        # A gather in place of the sum's reduction, with the bytes of the plans.
        known = diff(invoke, kind(plain), kind(whole), 1)
        sums = by_name(known["sums"])
        first, second = (read_plans(folder) for folder in (plain, whole))
        for primitive in ("all_reduce", "all_gather"):
            counts = tuple(
                sum(
                    isinstance(task.spec, CollectiveSpec) and str(task.spec.primitive) == primitive
                    for plan in each.plans.values()
                    for task in plan.tasks
                )
                for each in (first, second)
            )
            assert counts[0] != counts[1]
            assert sums[f"all lines.{primitive}"] == counts
            of_lines = [by_name(each["figures"]).get(primitive, (0, 0)) for each in known["lines"]]
            assert sum(b - a for a, b in of_lines) == counts[1] - counts[0]
        assert sums["traffic_bytes.total"] == sums["all lines.received_bytes"]
    text = invoke("plan-diff", str(plain), str(whole))
    assert text.exit_code == 1
    assert "all_gather" in text.stdout
    assert "traffic_bytes.total" in text.stdout
    # The same plans, of other lines.
    moved = write("\n\n" + LINES, "moved.py")
    assert invoke("compile", moved, "--out", str(tmp_path / "moved")).exit_code == 0
    known = diff(invoke, plain, tmp_path / "moved", 0)
    assert known["lines"]
    assert known["sums"] == []
    assert "other lines" in invoke("plan-diff", str(plain), str(tmp_path / "moved")).stdout
    done = invoke("plan-diff", str(plain), str(suffixed(plain)))
    assert done.exit_code == 2
    assert "cannot be compared" in done.stderr


LINE = {
    "source": "job.py:1",
    "tasks": 1,
    "collectives": {},
    "received_bytes": 0.0,
    "memory_bytes": 0,
    "seconds": 0.5,
}
FORECAST = {"job": "a", "machine": "cpu-generic", "ranks": 1, "step_seconds": 1.0, "lines": [LINE]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON text"),
        ("[]", "no JSON object"),
        ("{}", "'job'"),
        (json.dumps(FORECAST | {"step_seconds": "1"}), "'step_seconds'"),
        (json.dumps(FORECAST | {"lines": [LINE | {"tasks": -1}]}), "'tasks'"),
        (json.dumps(FORECAST | {"lines": [LINE | {"collectives": {"x": 0.5}}]}), "'x'"),
        (json.dumps(FORECAST | {"lines": [LINE, LINE]}), "twice"),
    ],
)
def test_what_is_no_forecast(invoke: Invoke, tmp_path: Path, text: str, says: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(FORECAST))
    bad.write_text(text)
    assert diff(invoke, good, good, 0)["sums"] == []
    done = invoke("plan-diff", str(good), str(bad))
    assert done.exit_code == 2
    assert says in done.stderr
    assert "bad.json" in done.stderr


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_holds_no_plans(invoke: Invoke, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / name)
    assert invoke("plan-diff", folder, folder).exit_code == 2


def test_every_field_of_a_forecast_is_compared(invoke: Invoke, tmp_path: Path) -> None:
    """All but what differs from time to time."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(FORECAST | {"seconds_taken": 1.0, "mfu": 0.5, "classes": [1]}))
    second.write_text(json.dumps(FORECAST | {"seconds_taken": 2.0, "mfu": 0.5, "classes": [1]}))
    diff(invoke, first, second, 0)
    second.write_text(json.dumps(FORECAST | {"mfu": 0.25, "classes": [2], "fits": True}))
    known = diff(invoke, first, second, 1)
    assert by_name(known["sums"]) == {
        "mfu": (0.5, 0.25),
        "classes": ([1], [2]),
        "fits": (None, True),
    }
    assert "others" in invoke("plan-diff", str(first), str(second)).stdout
