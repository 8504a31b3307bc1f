"""The pass `census` and its option are known to command line, text, wire and cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cache.keys import job_key
from plancompiler.cli.job_file import load_job
from plancompiler.cli.program import cli
from plancompiler.errors import UsageError
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes

JOB = """
import plancompiler as pc

def build() -> pc.Job:
    with pc.job("hello") as job:
        pc.output("x", pc.ones((2,), "float32", pc.Placement("cpu", [0])))
    return job
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "hello.py"
    path.write_text(JOB)
    return str(path)


def says(*arguments: str) -> str:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False).output


def test_on_the_command_line(file: str) -> None:
    text = says("compile", "--help")
    assert "--census KINDS" in text
    assert "Kinds of op that the census lists." in text
    text = says("compile", file, "--ranks", "1", "--census", "1", "--explain")
    assert "census: fill 1" in text


def test_in_the_text_of_a_job_on_the_wire_and_in_the_cache(file: str, cache_folder: Path) -> None:
    job = load_job(file, {}, 1)
    asking = replace(job, config=pc.Config(census=2))
    assert str(asking).splitlines()[0] == "job hello (seed 0) census=2"
    assert job_from_bytes(job_to_bytes(asking)) == asking
    keys = {job_key(each, 1) for each in (job, asking)}
    assert len(keys) == 2
    assert None not in keys


def test_errors_know_it() -> None:
    with pytest.raises(UsageError, match="Expected: 0 to 9"):
        pc.Config(census=10)
    with pytest.raises(UsageError, match="census among the passes"):
        pc.Config(census=1, passes=("dce",))
    with pytest.raises(UsageError, match="dce, census, microbatch"):
        pc.Config(passes=("censsus",))
