"""Folders of compiled plans: read again as they were written, or refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.errors import (
    JobFileError,
    PlanCompilerError,
    RankError,
    UsageError,
    VersionError,
    WireFormatError,
)
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.compiled_plans import CompiledPlans, read_plans
from tests.examples import mlp

INDEX = "plans.json"


@pytest.fixture(scope="module")
def compiled() -> CompiledPlans:
    made = compile_plans(mlp(ranks=2), 2)
    return CompiledPlans(made.job, 2, made.plans, b"a graph")


@pytest.fixture
def folder(compiled: CompiledPlans, tmp_path: Path) -> Path:
    compiled.save(tmp_path)
    return tmp_path


def change(folder: Path, **fields: object) -> None:
    file = folder / INDEX
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """With its SHA-256, as whoever meant it would."""
    (folder / name).write_bytes(data)
    files = json.loads((folder / INDEX).read_text())["files"]
    change(folder, files={**files, name: hashlib.sha256(data).hexdigest()})


def test_plans_are_read_as_they_were_written(compiled: CompiledPlans, folder: Path) -> None:
    plans_read = pc.read_plans(str(folder))
    assert plans_read.plans == compiled.plans
    assert (plans_read.world_size, plans_read.graph) == (2, b"a graph")
    assert plans_read.digest == compiled.digest
    assert str(plans_read.job) == str(compiled.job)
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "rank_7.plan").write_bytes(b"of an earlier run")
    (folder / "notes").write_bytes(b"mine")
    plans_read.save(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        **written,
        "notes": b"mine",
    }


def flip(folder: Path) -> None:
    file = folder / "rank_1.plan"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, type[PlanCompilerError], str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), UsageError, "holds no plans"),
    "a model": (
        lambda f: (f / INDEX).rename(f / "model.json"),
        UsageError,
        "runs no imported models",
    ),
    "index cut off": (lambda f: (f / INDEX).write_text("{"), WireFormatError, INDEX),
    "no ranks": (lambda f: change(f, ranks=0), WireFormatError, "ranks"),
    "another format": (lambda f: change(f, format=2), VersionError, "another version"),
    "another version": (lambda f: change(f, version="9.1.0"), VersionError, "version 9.1.0"),
    "more ranks": (lambda f: change(f, ranks=3), RankError, "all ranks"),
    "fewer ranks": (lambda f: change(f, ranks=1), RankError, "rank 0 of 2"),
    "no plan": (lambda f: (f / "rank_1.plan").unlink(), WireFormatError, "cannot be read"),
    "a changed bit": (flip, WireFormatError, r"changed or damaged.*rank_1\.plan"),
    "no plan at all": (lambda f: replace_file(f, "rank_0.plan", b"x"), WireFormatError, "rank_0"),
    "another rank's plan": (
        lambda f: replace_file(f, "rank_0.plan", (f / "rank_1.plan").read_bytes()),
        RankError,
        "another rank",
    ),
    "no job": (lambda f: replace_file(f, "job.bin", b"x"), WireFormatError, r"job\.bin"),
    "another digest": (lambda f: change(f, digest="0"), WireFormatError, "digest 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_or_of_another_version_is_refused_by_name(
    folder: Path, damage: str
) -> None:
    do, error, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(error, match=words):
        read_plans(folder)
    result = CliRunner().invoke(cli, ["run", str(folder)])
    if damage in ("no index", "a model"):  # then it may be a folder of another kind
        error = JobFileError if damage == "no index" else WireFormatError
    assert result.exit_code == error.exit_code
    assert "plancompiler: [" in result.stderr


def test_what_would_change_compiled_plans_is_refused(folder: Path) -> None:
    for wrong in (
        ("-D", "hidden=3"),
        ("--zero", "1"),
        ("--ranks", "3"),
        ("--mode", "naive"),
    ):
        result = CliRunner().invoke(cli, ["run", str(folder), *wrong])
        assert result.exit_code == 2, wrong
        assert "compiled" in result.stderr
