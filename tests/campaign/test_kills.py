"""Some kills and interrupts of each world, with the code of the long campaigns."""

from __future__ import annotations

import pytest

from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.kills import WORLDS
from benchmarks.campaign.sandbox import Sandbox, until
from tests.campaign.conftest import Hold

CASES = {
    "a worker that is killed while it compiles": 24,
    "a rank as process that is killed": 7,
    "a rank under launch that is killed while it starts": 2,
    "a launcher that is killed while ranks start": 29,
}


@pytest.mark.processes
@pytest.mark.parametrize("index", CASES.values(), ids=list(CASES))
def test_the_others_name_what_was_killed(hold: Hold, index: int) -> None:
    (result,) = hold("kills", 1, [index])
    assert result.group.startswith(WORLDS[index % 3])


@pytest.mark.processes
def test_what_is_left_is_seen() -> None:
    """A process that outlives its parent, and a file."""
    with Sandbox() as sandbox:
        child = sandbox.start(
            "a parent",
            "-c",
            "import subprocess, sys, tempfile; tempfile.mkdtemp(prefix='kept-');"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
        )
        assert child.wait(20.0) == 0
        left = sandbox.left()
        assert [each.partition(" ")[0] for each in left] == ["process", "file"]
        sandbox.clear()
        assert until(lambda: not sandbox.left(), 10.0)


@pytest.mark.parametrize(
    ("text", "of_a_script", "count"),
    [
        ("plancompiler: [E100 UsageError] wrong.\n", False, 0),
        ("Traceback (most recent call last):\n  a line\nKeyError: 3\n", False, 1),
        ("Traceback (most recent call last):\n  a line\nKeyError: 3\n", True, 1),
        ("Traceback (most recent call last):\n  x\nplancompiler.errors.ShapeError: y\n", True, 0),
        (
            (
                "Traceback (most recent call last):\n  x\nOSError: y\n\nThe above exception was "
                "the direct cause of\n\nTraceback (most recent call last):\n  z\n"
                "plancompiler.errors.ShapeError: y\n"
            ),
            True,
            0,
        ),
        ("ValueError: x (an error that plancompiler did not foresee)\n", False, 1),
        ("Exception ignored in: <function>\n", True, 1),
    ],
)
def test_what_was_not_foreseen_is_seen(text: str, of_a_script: bool, count: int) -> None:
    assert len(unforeseen_lines(text, of_a_script)) == count


def test_a_case_makes_the_same_choices_again() -> None:
    one, other = Case("kills", 1, 3), Case("kills", 1, 4)
    assert one.choices.random() == one.choices.random() != other.choices.random()
    assert "--kind kills --seed 1 --case 3" in one.replay
    result = Result(one, "group", "what")
    result.require(False, "wrong")
    assert result.as_json()["problems"] == ["wrong"]
