"""CONTRIBUTING.md's recipes: their diffs apply to this tree, and what they add works everywhere.

All are applied to one copy of the tree, in which one process runs the checks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("tests/contributing")
FOLDERS = ("plancompiler", "executor", "master", "worker", "proto", "scripts", "tests", "docs")
FILES = ("examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")
LISTED = "tests/structure/test_architecture.py::test_a_package_lists_its_files_and_no_others"
DOCS = "tests/repository/test_docs.py"
DESCRIBED = f"{DOCS}::test_every_option_of_a_command_is_described"
TEXTS = "tests/filecheck/test_filecheck.py::test_the_text_that_comes_out_is_the_one_beside_the_job"
CHECKS = {
    "op": (
        "tests/contributing/checks/op.py",
        f"{LISTED}[ops]",
        "tests/ops/test_sharding.py::test_every_kind_has_a_sample",
        "tests/eager/test_out.py::test_every_function_of_tensors_takes_out",
    ),
    "pass": (
        "tests/contributing/checks/added_pass.py",
        f"{LISTED}[passes]",
        *(f"{DESCRIBED}[{command}]" for command in ("compile", "run", "submit")),
        f"{DOCS}::test_the_settings_of_the_compiler_are_described_as_they_are_declared",
        *(f"{TEXTS}[passes/census_{case}]" for case in ("none_asked", "one_asked", "two_kinds")),
        "tests/filecheck/test_filecheck.py::test_every_step_has_at_least_three_cases",
    ),
    "command": (
        "tests/cli/test_dtypes.py",
        f"{LISTED}[cli]",
        f"{DESCRIBED}[dtypes]",
    ),
    "dtype": (
        "tests/contributing/checks/dtype.py",
        "tests/serde/test_messages.py::test_enums_have_the_numbers_of_the_proto_files",
    ),
    "wire": (
        "tests/contributing/checks/wire.py",
        "tests/comm/test_links.py::test_unix_sockets",
        f"{LISTED}[executor]",
    ),
    "launcher": ("tests/eager/test_launchers.py::test_contradictions_are_said_at_once",),
}
"""Recipe to the tests that must pass in the tree to which all diffs were applied."""
RUN = """
import runpy, sys
import pytest
sys.argv[1:], tests = [], sys.argv[1:]
try:
    runpy.run_path("scripts/generate_proto", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
sys.exit(pytest.main(["-rA", *tests]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the checks came to in a copy of the tree with all diffs applied."""
    copy = tmp_path_factory.mktemp("contributing") / "copy"
    copy.mkdir()
    subprocess.run(
        ["cp", "-a", *(str(ROOT / name) for name in FOLDERS + FILES), str(copy)], check=True
    )
    # Without it git would take the copy for a part of a repository that it lies in.
    apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent), "PYTHONPATH": str(copy)}
    diffs = [str(copy / HERE / f"{recipe}.diff") for recipe in CHECKS]
    subprocess.run(["git", "apply", "--recount", *diffs], check=True, cwd=copy, env=apart)
    tests = [test for tests in CHECKS.values() for test in tests]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *tests],
        capture_output=True,
        text=True,
        check=False,
        cwd=copy,
        env=apart,
    )
    assert re.search(r"^\d+ passed|^\d+ failed", done.stdout, re.M), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", CHECKS)
def test_what_a_recipe_adds_works_everywhere(recipe: str, outcomes: str) -> None:
    ended = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", outcomes, re.M)
    for test in CHECKS[recipe]:
        states = {state for state, name in ended if name.startswith(test)}
        assert states == {"PASSED"}, f"{test}: {outcomes}"
