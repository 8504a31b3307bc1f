"""The generated code is what the .proto files give, and the check of that works from anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def check(root: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """`scripts/generate_proto --check` of a tree, run in a directory."""
    command = [sys.executable, str(root / "scripts" / "generate_proto"), "--check"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of all that has to do with the wire format."""
    for folder in ("proto", "scripts", "plancompiler/proto"):
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder)
    return tmp_path / "copy"


@pytest.mark.processes
def test_the_committed_code_is_up_to_date(tmp_path: Path) -> None:
    done = check(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_a_changed_proto_file_is_seen(copy: Path, tmp_path: Path) -> None:
    source = copy / "proto/plancompiler/proto/job.proto"
    source.write_text(source.read_text().replace("seed = 2;", "seed = 99;"))
    done = check(copy, tmp_path)
    assert done.returncode == 1
    assert "job_pb2.py" in done.stdout
    assert "1 generated files differ" in done.stderr


@pytest.mark.processes
def test_a_missing_and_a_superfluous_file_are_seen(copy: Path, tmp_path: Path) -> None:
    (copy / "plancompiler/proto/plan_pb2.pyi").unlink()
    (copy / "plancompiler/proto/old_pb2.py").write_text("")
    done = check(copy, tmp_path)
    assert done.returncode == 1
    assert "2 generated files differ" in done.stderr
