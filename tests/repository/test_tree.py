"""What holds for every file of the repository."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from plancompiler.version import VERSION

ROOT = Path(__file__).resolve().parents[2]

# Folders that tools leave behind; .gitignore names them too.
GENERATED = {"__pycache__", "build", "dist", "shared"}


def tree_files() -> Iterator[Path]:
    """Every file that is, or could be, committed."""
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(
            name
            for name in names
            if name not in GENERATED
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name == ".ci")
        )
        for file in sorted(files):
            path = Path(folder, file)
            # `.git` is a file in a linked checkout.
            if not path.is_symlink() and file != ".git":
                yield path


def test_no_file_holds_an_absolute_path_of_a_machine() -> None:
    # In two pieces, so that this file does not hold what it looks for.
    pattern = re.compile(rb"/(?:" + rb"home|work|root|Users|mnt" + rb")/[A-Za-z0-9_.]")
    holding = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in tree_files()
        if (match := pattern.search(path.read_bytes())) is not None
    ]
    assert holding == []


@pytest.mark.parametrize(
    "script", ["scripts/test", "scripts/demo", "scripts/generate_proto", ".ci/run"]
)
def test_scripts_can_be_run(script: str) -> None:
    mode = (ROOT / script).stat().st_mode
    assert mode & stat.S_IXUSR


@pytest.mark.processes
@pytest.mark.parametrize("script", ["scripts/test", "scripts/demo", "scripts/venv.sh", ".ci/run"])
def test_shell_scripts_parse(script: str) -> None:
    done = subprocess.run(
        ["bash", "-n", str(ROOT / script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_changelog_has_the_version_of_the_package() -> None:
    assert re.search(rf"^## \[{re.escape(VERSION)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
