"""CONTRIBUTING.md: the names of its tour exist, and its diffs apply to this tree."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TOUR = TEXT.partition("## The tour")[2].partition("\n## ")[0]
STEPS = re.findall(r"^\| \d+ \| .* \| `([\w.]+)` \| `([\w.]+)`", TOUR, re.M)
DIFFS = sorted(path.name for path in (ROOT / "tests/contributing").glob("*.diff"))


def look_up(name: str) -> object:
    """What `package.module.Class.method` means below `plancompiler`."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(["plancompiler", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(name)


def test_the_names_of_the_tour_exist() -> None:
    assert len(STEPS) == len(re.findall(r"^\| \d+ \|", TOUR, re.M)) == 17
    for function, made in STEPS:
        assert callable(look_up(function))
        assert made == "dict" or isinstance(look_up(made), type)


@pytest.mark.processes
def test_the_diffs_apply() -> None:
    """`tests/contributing/test_recipes.py` also runs what they add."""
    subprocess.run(
        ["git", "apply", "--check", "--recount", *(f"tests/contributing/{each}" for each in DIFFS)],
        check=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("diff", DIFFS)
def test_the_page_lists_the_files_of_each_diff(diff: str) -> None:
    path = f"tests/contributing/{diff}"
    changed = re.findall(r"^\+\+\+ b/(\S+)", (ROOT / path).read_text(), re.M)
    recipe = diff.removesuffix(".diff")
    (section,) = re.findall(rf"^## Add an? {recipe}$(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert f"]({path})" in section
    assert sorted(re.findall(r"^\| `([^`]+)` \|", section, re.M)) == sorted(changed)
    assert f"{len(changed)} files" in section
