"""The plan cache from the command line: runs in processes of their own, `cache ls` and `clear`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Invoke, Write
from tests.cli.test_allow_ops import JOB, OPS

WAIT = 120


def start(file: str, *options: str) -> subprocess.Popen[str]:
    """`plancompiler run` with three steps."""
    command = [sys.executable, "-m", "plancompiler", "run", file, "--steps", "3", "--json"]
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PLANCOMPILER_LOG": "warning"},
    )


def ended(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=WAIT)
    assert child.returncode == 0, err
    assert "WARNING" not in err
    report: dict[str, Any] = json.loads(out)
    return report


def test_the_second_run_is_cached(mlp: str, invoke: Invoke, cache_folder: Path) -> None:
    first = invoke("run", mlp, "--steps", "3")
    assert "compiled the plans of small" in first.stderr
    second = invoke("run", mlp, "--steps", "3")
    assert "read the plans of small" in second.stderr
    assert "s, cached" in second.stdout
    values = [
        json.loads(invoke("run", mlp, "--steps", "3", "--json", *options).stdout)
        for options in ([], ["--no-cache"], ["-D", "hidden=9"], ["-D", "hidden=9"])
    ]
    assert [value["cached"] for value in values] == [True, False, False, True]
    assert values[0]["losses"] == values[1]["losses"]
    assert values[0]["digest"] == values[1]["digest"] != values[2]["digest"]


@pytest.mark.processes
def test_compile_always_compiles(mlp: str, invoke: Invoke, cache_folder: Path) -> None:
    for _ in range(2):
        summary = json.loads(invoke("compile", mlp, "--check-modes", "--explain", "--json").stdout)
        assert summary["master_seconds"]["sbp"] > 0
        assert summary["modes_equal"]
    assert not cache_folder.exists()


def test_listing_and_clearing(mlp: str, invoke: Invoke, cache_folder: Path) -> None:
    nothing = json.loads(invoke("cache", "ls", "--json").stdout)
    assert (nothing["entries"], nothing["bytes"]) == ([], 0)
    assert invoke("run", mlp, "--ranks", "3", "--steps", "1").exit_code == 0
    report = json.loads(invoke("cache", "ls", "--json").stdout)
    assert report["folder"] == str(cache_folder)
    assert report["limit"] == 1 << 30
    assert sorted((each["holds"], each["job"], each["ranks"]) for each in report["entries"]) == [
        ("plans", "small", [0, 1, 2]),
        ("slices", "small", [0, 1, 2]),
    ]
    on_disk = sum(path.stat().st_size for path in cache_folder.rglob("*") if path.is_file())
    assert report["bytes"] == sum(each["bytes"] for each in report["entries"]) == on_disk
    lines = invoke("cache", "ls").stdout.splitlines()
    assert lines[0].split() == ["key", "holds", "job", "ranks", "bytes", "last", "used"]
    assert {tuple(line.split()[1:6]) for line in lines[1:]} == {
        ("plans", "small", "0-2", "of", "3"),
        ("slices", "small", "0-2", "of", "3"),
    }
    removed = json.loads(invoke("cache", "clear", "--json").stdout)
    assert (removed["removed"], removed["bytes"]) == (4, on_disk)
    assert list(cache_folder.iterdir()) == []
    assert "removed 0 entries" in invoke("cache", "clear").stderr


def test_a_damaged_entry_is_listed_as_such(mlp: str, invoke: Invoke, cache_folder: Path) -> None:
    assert invoke("run", mlp, "--steps", "1").exit_code == 0
    (slices,) = cache_folder.rglob("slices")
    slices.write_bytes(b"")
    assert "(damaged)" in invoke("cache", "ls").stdout
    assert invoke("cache", "ls", "--json").exit_code == 0


def test_a_cache_that_is_off_cannot_be_listed(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANCOMPILER_CACHE", "0")
    for command in ("ls", "clear"):
        result = invoke("cache", command)
        assert result.exit_code == 2
        assert "the plan cache is switched off" in result.stderr


@pytest.mark.processes
def test_runs_at_the_same_time_share_the_cache(mlp: str, cache_folder: Path) -> None:
    children = [start(mlp), start(mlp), start(mlp, "--mode", "naive")]
    results = [ended(child) for child in children]
    assert len({value["digest"] for value in results}) == 1
    again = ended(start(mlp))
    assert again["cached"]
    assert again["digest"] == results[0]["digest"]
    assert again["losses"] == results[0]["losses"]


@pytest.mark.processes
def test_an_edit_of_a_custom_op_misses(write: Write, tmp_path: Path, cache_folder: Path) -> None:
    """In worker processes, which see the op only as a name in their slices."""
    ops = Path(write(OPS.format(kind=""), "cached_halving_ops.py"))
    file = write(JOB.format(imports="from cached_halving_ops import halved"))
    options = ("--backend", "processes", "--allow-ops", "cached_halving_ops")
    first, second = (ended(start(file, *options)) for _ in range(2))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["losses"] == second["losses"] == [3.0] * 3
    ops.write_text(ops.read_text().replace("x / 2", "x / 4"))
    third = ended(start(file, *options))
    assert not third["cached"]
    assert third["losses"] == [1.5] * 3
    threads = ended(start(file))
    assert threads["cached"]
    assert threads["losses"] == [1.5] * 3


@pytest.mark.processes
def test_a_cached_plan_gives_no_leave_to_import(
    write: Write, tmp_path: Path, cache_folder: Path
) -> None:
    write(OPS.format(kind=""), "kept_halving_ops.py")
    file = write(JOB.format(imports="from kept_halving_ops import halved"))
    options = ("--backend", "processes")
    assert not ended(start(file, *options, "--allow-ops", "kept_halving_ops"))["cached"]
    child = start(file, *options)
    _, err = child.communicate(timeout=WAIT)
    assert child.returncode != 0
    assert "UnknownOpError" in err
