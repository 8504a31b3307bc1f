"""docs/architecture.md names the rooms, files and doors that the tree and the linter have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "plancompiler"
TEXT = (ROOT / "docs/architecture.md").read_text()
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]

EDGES = {"cli", "client", "session", "worker_processes"}
"""What may import everything and is imported by no room."""


def documented() -> dict[str, dict[str, object]]:
    """Folder → its files and its `May import` rooms, as the sections of the page say."""
    found: dict[str, dict[str, object]] = {}
    for section in re.split(r"^### ", TEXT, flags=re.M)[1:]:
        folder = re.match(r"`([^`]+)/`", section)
        assert folder is not None, f"a section without a folder: {section[:60]!r}"
        doors = re.search(r"^May import: (.+?)\.$", section, flags=re.M)
        found[folder[1]] = {
            "files": re.findall(r"^- `([^`]+)`", section, flags=re.M),
            "doors": None if doors is None else set(re.findall(r"`(\w+)`", doors[1])),
        }
    return found


def modules_of(folder: Path) -> list[str]:
    """Written Python files below a folder, links not followed, without bare package markers."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if not path.parent.is_symlink()
        and path.name != "__init__.py"
        and "_pb2" not in path.name
        and "__pycache__" not in path.parts
    )


def unlisted_and_missing(listed: list[str], found: list[str]) -> tuple[list[str], list[str]]:
    """Files that no entry covers, and entries without a file; `nn/` covers a folder's files."""
    families = tuple(entry for entry in listed if entry.endswith("/"))
    unlisted = [file for file in found if file not in listed and not file.startswith(families)]
    missing = [
        entry
        for entry in listed
        if entry not in found and not any(file.startswith(entry) for file in found)
    ]
    return unlisted, missing


def rooms() -> set[str]:
    """Folders of the package that hold Python."""
    return {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}


def page_folder(room: str) -> str:
    """How the page calls a room: linked rooms by their real folder."""
    return room if (PACKAGE / room).is_symlink() else f"plancompiler/{room}"


def test_every_room_has_a_section_and_every_section_a_folder() -> None:
    sections = documented()
    assert {page_folder(room) for room in rooms()} <= set(sections)
    assert [folder for folder in sections if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_lists_its_files_and_no_others(room: str) -> None:
    listed = documented()[page_folder(room)]["files"]
    assert isinstance(listed, list)
    found = modules_of((PACKAGE / room).resolve())
    assert unlisted_and_missing(listed, found) == ([], [])


def test_the_package_root_lists_exactly_its_files() -> None:
    listed = documented()["plancompiler"]["files"]
    assert isinstance(listed, list)
    found = [path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(found)


def test_the_wire_format_lists_exactly_its_files() -> None:
    listed = documented()["proto/plancompiler/proto"]["files"]
    assert isinstance(listed, list)
    folder = ROOT / "proto/plancompiler/proto"
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.proto"))


def test_the_linter_closes_every_door_that_the_page_does_not_open() -> None:
    contracts = {contract["id"]: contract for contract in LINTER["contracts"]}
    guarded = rooms() - EDGES - {"proto"}
    for room in sorted(guarded):
        doors = documented()[page_folder(room)]["doors"]
        assert isinstance(doors, set), f"{room} has no line `May import: …`"
        closed = {
            name.removeprefix("plancompiler.") for name in contracts[room]["forbidden_modules"]
        }
        assert contracts[room]["source_modules"] == [f"plancompiler.{room}"]
        assert closed == (guarded | EDGES) - doors - {room}, room


BREAKS = (
    ("plancompiler.executor.actor", "plancompiler.master.state"),
    ("plancompiler.master.state", "plancompiler.worker.state"),
    ("plancompiler.worker.state", "plancompiler.master.state"),
    ("plancompiler.ir.dtype", "plancompiler.ops.registry"),
    ("plancompiler.executor.actor", "numpy"),
    ("plancompiler.simulate.clock", "plancompiler.executor.runtime"),
    ("plancompiler.simulate.cost", "time"),
    ("plancompiler.master.state", "threading"),
    ("plancompiler.worker.state", "grpc"),
    ("plancompiler.ops.registry", "mpi4py"),
)
"""Imports (from, to) that must not be: one per kind of door."""


def test_broken_doors_are_seen(tmp_path: Path) -> None:
    """The linter follows the links into master, worker and executor, and sees what is outside."""
    names = ("plancompiler", "master", "worker", "executor", "pyproject.toml")
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in names), str(tmp_path)], check=True)
    for importer, imported in BREAKS:
        with (tmp_path / f"{importer.replace('.', '/')}.py").open("a") as module:
            module.write(f"\nimport {imported}\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    unseen = [
        f"{importer} -> {imported}"
        for importer, imported in BREAKS
        if f"{importer} -> {imported} (l." not in done.stdout
    ]
    assert unseen == [], done.stdout
