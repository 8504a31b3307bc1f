"""What cannot be written is an error with its path and cause, and exit code 1; never a success."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]
CAUSE = "No space left on device"


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A disk without room."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = shutil.which("mount") and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder],
            capture_output=True,
            check=False,
        )
        if not mounted or mounted.returncode:
            pytest.skip("this user may mount no small disk of its own")
        try:
            with Path(folder, "fill").open("wb", buffering=0) as fill:
                while True:
                    try:
                        fill.write(bytes(4096))
                    except OSError:
                        break
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def refused(result: Result, what: str, path: object) -> None:
    assert result.exit_code == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert what in last, last
    assert str(path) in last
    assert CAUSE in last
    assert "did not foresee" not in last
    assert "wrote the timeline" not in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_timeline(invoke: Invoke, mlp: str, disk: Path, backend: str) -> None:
    path = disk / "run.json"
    result = invoke("run", mlp, "--steps", "2", "--backend", backend, "--trace", str(path))
    refused(result, "[E133 OutputError] the timeline cannot be written", path)
    assert not path.exists()


@pytest.mark.processes
def test_a_timeline_on_a_full_device(invoke: Invoke, mlp: str) -> None:
    result = invoke("run", mlp, "--steps", "2", "--trace", "/dev/full")
    refused(result, "[E133 OutputError] the timeline cannot be written", "/dev/full")


@pytest.mark.processes
def test_a_dump(invoke: Invoke, mlp: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANCOMPILER_DUMP", str(disk / "dump"))
    result = invoke("run", mlp, "--steps", "2")
    refused(result, "a dump (PLANCOMPILER_DUMP) cannot be written", disk / "dump")


@pytest.mark.processes
def test_compiled_plans(invoke: Invoke, mlp: str, disk: Path) -> None:
    result = invoke("compile", mlp, "--out", str(disk / "out"))
    refused(result, "a compiled file cannot be written", disk / "out" / "job.bin")


@pytest.mark.processes
def test_a_checkpoint(invoke: Invoke, mlp: str, disk: Path) -> None:
    result = invoke("run", mlp, "--steps", "2", "--save", str(disk / "model"))
    refused(result, "a file of the checkpoint cannot be written", disk / "model")


@pytest.mark.processes
def test_the_cache_only_warns(
    invoke: Invoke,
    mlp: str,
    disk: Path,
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLANCOMPILER_CACHE", str(disk / "cache"))
    result = invoke("run", mlp, "--steps", "2")
    assert result.exit_code == 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    assert f"the plan cache {disk / 'cache'} cannot be written: {CAUSE}" in line


@pytest.mark.processes
def test_a_recording(
    invoke: Invoke, mlp: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the temporary folder until the run ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    result = invoke("run", mlp, "--steps", "2", "--trace", str(tmp_path / "run.json"))
    refused(result, "cannot record its timeline", disk)
    assert "TMPDIR" in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [("run", "--steps", "2", "--json"), ("compile",)])
def test_standard_output(mlp: str, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "plancompiler", command, mlp, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"PLANCOMPILER_LOG": ""},
        )
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert lines[-1].startswith(
        "plancompiler: [E133 OutputError] the result cannot be written. Got: standard output: "
        + CAUSE
    )


@pytest.mark.processes
def test_a_save_below_a_file_says_so(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file / "below", Path("/proc/none/model"), Path("/dev/null/model")):
        result = invoke("run", mlp, "--steps", "2", "--save", str(folder))
        assert result.exit_code == 1
        last = result.stderr.splitlines()[-1]
        assert "a file of the checkpoint cannot be written" in last
        assert str(folder) in last
        assert "missing" not in last
