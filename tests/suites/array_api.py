"""The test suite of the Python array API, run on `pc.array_api`, and its counts.

    python -m tests.suites.array_api CHECKOUT [--max-examples N] [--page FILE]

CHECKOUT is a clone of data-apis/array-api-tests with its submodule. Tests of complex numbers and of
Fourier transforms, which do not exist here, are counted apart.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ROOT / "tests/suites/array_api_left_out.txt"
BEGIN, END = "<!-- array_api: begin -->", "<!-- array_api: end -->"
WORDS = ("passed", "failed", "left out")


def left_out() -> list[str]:
    """Patterns of the ids of tests that are left out; the file says why."""
    lines = LEFT_OUT.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def run(checkout: Path, examples: int, report: Path) -> None:
    """Run the suite and write its report, in the form of JUnit."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ARRAY_API_TESTS_MODULE": "plancompiler.array_api",
    }
    command = [sys.executable, "-m", "pytest", "-q", "array_api_tests", "-p", "no:cacheprovider"]
    command += ["-p", "tests.suites.without_complex", "--disable-deadline", "--tb=line"]
    command += ["--hypothesis-derandomize", f"--max-examples={examples}", f"--junitxml={report}"]
    subprocess.run(command, cwd=checkout, env=environment, check=False)


def counts(report: Path) -> dict[str, Counter[str]]:
    """Per file of the suite, how many tests passed, failed, or are left out."""
    patterns = [re.compile(pattern) for pattern in left_out()]
    files: dict[str, Counter[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        file = case.attrib["classname"].split(".")[1]
        name = case.attrib["name"]
        if any(pattern.search(f"{file}::{name}") for pattern in patterns):
            outcome = "left out"
        elif case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            print(f"failed: {file}::{name}")
        else:
            outcome = "left out" if case.find("skipped") is not None else "passed"
        files.setdefault(file, Counter())[outcome] += 1
    return files


def table(files: dict[str, Counter[str]]) -> str:
    """The counts as a table of Markdown."""
    total: Counter[str] = sum(files.values(), Counter())
    rows = [(name.removeprefix("test_").replace("_", " "), files[name]) for name in sorted(files)]
    lines = ["| tests of | passed | failed | left out |", "|---|---|---|---|"]
    for name, count in [*rows, ("**all**", total)]:
        lines.append(f"| {name} | {' | '.join(str(count[word]) for word in WORDS)} |")
    share = total["passed"] / max(1, total["passed"] + total["failed"])
    lines.append(f"\n{share:.1%} of the tests that are not left out pass.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--max-examples", type=int, default=20)
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    parser.add_argument("--report", type=Path, help="count this report, and run nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = options.report or Path(folder) / "report.xml"
        if options.report is None:
            run(options.checkout, options.max_examples, report)
        files = counts(report)
    made = table(files)
    print(made)
    if options.page:
        head, _, rest = options.page.read_text().partition(BEGIN)
        tail = rest.partition(END)[2]
        options.page.write_text(f"{head}{BEGIN}\n{made}\n{END}{tail}")
    return 1 if any(count["failed"] for count in files.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
