"""The wheel: one top-level name, the linked packages inside it, types marked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("plancompiler", "master", "worker", "executor")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the tree, without a network."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", "--wheel-dir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.processes
def test_the_only_top_level_name_is_plancompiler(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"plancompiler"}


@pytest.mark.processes
def test_it_holds_every_module_of_the_tree(wheel_names: set[str]) -> None:
    modules = {
        f"plancompiler/{'' if folder == 'plancompiler' else folder + '/'}"
        f"{file.relative_to(ROOT / folder).as_posix()}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {"master", "worker", "executor"} <= {name.split("/")[1] for name in modules}
    assert modules <= wheel_names


@pytest.mark.processes
def test_it_says_that_it_is_typed_and_carries_its_licence(wheel_names: set[str]) -> None:
    assert "plancompiler/py.typed" in wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


@pytest.mark.processes
@pytest.mark.parametrize("package", ["master", "worker", "executor"])
def test_a_linked_package_cannot_be_imported_under_its_bare_name(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"plancompiler.{package}" in done.stderr


@pytest.mark.parametrize("package", ["master", "worker", "executor"])
def test_the_links_are_relative(package: str) -> None:
    link = ROOT / "plancompiler" / package
    assert link.is_symlink()
    assert link.readlink() == Path("..") / package
