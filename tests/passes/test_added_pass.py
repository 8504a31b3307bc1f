"""A pass is one file, its line among the passes, and its options among those of `Config`: then the
command line, the cache, the text form and `compile --explain` know it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import plancompiler

PACKAGE = Path(plancompiler.__file__).parent
PASS = """
from dataclasses import dataclass

from plancompiler.ir import Job
from plancompiler.ir.settings import Settings, option
from plancompiler.passes.base import PassResult


@dataclass(frozen=True, kw_only=True)
class GreetOptions(Settings, owner="greet"):
    greetings: int = option(0, "How often to greet.", most=9, metavar="TIMES", asks=True)


def greet(job: Job, config: GreetOptions) -> PassResult:
    return PassResult(job, f"greeted {job.name} {config.greetings} times")
"""
LINES = (
    (
        "from plancompiler.passes.fold ",
        "from plancompiler.passes.greet import GreetOptions, greet\n",
    ),
    ('    Pass("fold", ', '    Pass("greet", greet, GreetOptions),\n'),
    ("    ZeroOptions,\n", "    GreetOptions,\n"),
)
"""Each with what it stands before."""
JOB = """
import plancompiler as pc

def build() -> pc.Job:
    with pc.job("hello") as job:
        pc.output("x", pc.ones((2,), "float32", pc.Placement("cpu", [0])))
    return job
"""
ASK = """
import json, sys
from click.testing import CliRunner
import plancompiler as pc
from dataclasses import replace
from plancompiler.cache.keys import job_key
from plancompiler.cli.job_file import load_job
from plancompiler.cli.program import cli
from plancompiler.errors import UsageError
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes

file = sys.argv[1]
def says(*arguments):
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    return done.output
def refused(**settings):
    try:
        pc.Config(**settings)
    except UsageError as error:
        return str(error)
job = load_job(file, {}, 1)
greeted = replace(job, config=pc.Config(greetings=3))
print(json.dumps({
    "help": says("compile", "--help"),
    "explain": says("compile", file, "--ranks", "1", "--greetings", "2", "--explain"),
    "text": str(greeted).splitlines()[0],
    "crosses": job_from_bytes(job_to_bytes(greeted)) == greeted,
    "keys": [job_key(each, 1) for each in (job, greeted)],
    "too many": refused(greetings=10),
    "not chosen": refused(greetings=1, passes=("dce",)),
    "unknown": refused(passes=("gret",)),
}))
"""


def test_a_pass_in_a_new_file_is_known_everywhere(tmp_path: Path) -> None:
    package = tmp_path / "plancompiler"
    (package / "passes").mkdir(parents=True)
    for whole, changed in ((PACKAGE, package), (PACKAGE / "passes", package / "passes")):
        for entry in whole.iterdir():
            if not (changed / entry.name).exists() and entry.name != "__pycache__":
                (changed / entry.name).symlink_to(entry.resolve())
    (package / "passes/greet.py").write_text(PASS)
    listing = (package / "passes/__init__.py").read_text()
    for before, line in LINES:
        assert listing.count(before) == 1
        listing = listing.replace(before, line + before)
    (package / "passes/__init__.py").unlink()
    (package / "passes/__init__.py").write_text(listing)
    (tmp_path / "hello.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path / "hello.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "--greetings TIMES" in said["help"]
    assert "How often to greet." in said["help"]
    assert "greet: greeted hello 2 times" in said["explain"]
    assert said["text"] == "job hello (seed 0) greetings=3"
    assert said["crosses"]
    assert len({*said["keys"]}) == 2
    assert None not in said["keys"]
    assert "Expected: 0 to 9" in said["too many"]
    assert "greet among the passes" in said["not chosen"]
    assert "mixed_precision, greet, fold" in said["unknown"]
