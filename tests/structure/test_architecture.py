"""docs/architecture.md names the packages, layers and files that the tree and the linter have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.structure import graph

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "plancompiler"
TEXT = (ROOT / "docs/architecture.md").read_text()
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def documented() -> dict[str, list[str]]:
    """Folder → its files, as the sections of the page say."""
    listed: dict[str, list[str]] = {}
    for section in re.split(r"^### ", TEXT, flags=re.M)[1:]:
        folder = re.match(r"`([^`]+)/`", section)
        assert folder is not None, f"a section without a folder: {section[:60]!r}"
        listed[folder[1]] = re.findall(r"^- `([^`]+)`", section, flags=re.M)
    return listed


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


def unlisted_and_missing(listed: list[str], files: list[str]) -> tuple[list[str], list[str]]:
    """Files that no entry covers, and entries without a file; `nn/` covers a folder's files."""
    families = tuple(entry for entry in listed if entry.endswith("/"))
    unlisted = [file for file in files if file not in listed and not file.startswith(families)]
    missing = [
        entry
        for entry in listed
        if entry not in files and not any(file.startswith(entry) for file in files)
    ]
    return unlisted, missing


def op_families() -> list[str]:
    """The files that fill the op table."""
    filled = re.search(r"import \((.*?)\)", (PACKAGE / "ops/__init__.py").read_text(), re.S)
    assert filled is not None
    return [f"{name}.py" for name in re.findall(r"^    (\w+),$", filled[1], re.M)]


def packages() -> set[str]:
    """Folders of the package that hold Python."""
    return {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}


def page_folder(package: str) -> str:
    """How the page calls a package: linked ones by their real folder."""
    return package if (PACKAGE / package).is_symlink() else f"plancompiler/{package}"


def test_every_package_has_a_section_and_every_section_a_folder() -> None:
    sections = documented()
    assert {page_folder(package) for package in packages()} <= set(sections)
    assert [folder for folder in sections if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_lists_its_files_and_no_others(package: str) -> None:
    files = modules_of((PACKAGE / package).resolve())
    if package == "ops":
        # Each family of ops is listed where the op table is filled.
        families = op_families()
        assert set(families) <= set(files)
        files = sorted(set(files) - set(families))
    assert unlisted_and_missing(documented()[page_folder(package)], files) == ([], [])


def test_the_package_root_holds_no_other_files() -> None:
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "public.py", "errors.py", "version.py"}
    assert set(documented()["plancompiler"]) == files - {"__init__.py"}


def test_the_wire_format_lists_exactly_its_files() -> None:
    listed = documented()["proto/plancompiler/proto"]
    folder = ROOT / "proto/plancompiler/proto"
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.proto"))


def test_the_page_has_the_layers_of_the_linter() -> None:
    (layers,) = (each for each in LINTER["contracts"] if each["type"] == "layers")
    table = TEXT.partition("| layer | packages |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in table.splitlines()[2:]]
    assert [" | ".join(row) for row in rows] == layers["layers"]


@pytest.mark.slow
def test_the_import_graph_has_no_cycle() -> None:
    modules = graph.module_graph()
    assert graph.cycles(modules) == []
    assert graph.cycles(graph.packages(modules)) == []


@pytest.mark.slow
def test_a_cycle_is_seen(tmp_path: Path) -> None:
    """Also one through an import by name."""
    file = tmp_path / "late.py"
    file.write_text("import importlib\nimportlib.import_module('plancompiler.public')\n")
    assert list(graph.imports_by_name(file)) == ["plancompiler.public"]
    modules = graph.module_graph()
    modules.add_edge("plancompiler.ir.value", "plancompiler.public")
    assert len(graph.cycles(modules)[0]) > 100


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
"""Imports (from, to) that must not be: one per kind of contract."""


@pytest.mark.processes
def test_forbidden_imports_are_seen(tmp_path: Path) -> None:
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
