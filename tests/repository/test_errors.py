"""The error catalog: codes are unique, the documentation lists every class."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from plancompiler import errors
from plancompiler.errors import CATALOG, PlanCompilerError

ROOT = Path(__file__).resolve().parents[2]


def error_classes() -> list[type[PlanCompilerError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, PlanCompilerError)
    ]


def test_codes_are_unique_and_all_in_the_catalog() -> None:
    classes = error_classes()
    assert len(classes) > 20
    assert len({cls.code for cls in classes}) == len(classes)
    assert set(CATALOG.values()) == set(classes)
    assert all(CATALOG[cls.code] is cls for cls in classes)


def test_each_class_states_its_own_code_meaning_and_exit_code() -> None:
    for cls in error_classes():
        assert "code" in vars(cls), cls
        assert re.fullmatch(r"E\d{3}", cls.code), cls
        assert cls.__doc__, cls
        assert cls.exit_code in (1, 2), cls


def test_the_documentation_lists_every_error() -> None:
    listed = [
        line
        for line in (ROOT / "docs/errors.md").read_text().splitlines()
        if line.startswith("| E")
    ]
    assert listed == [
        f"| {code} | `{cls.__name__}` | {cls.exit_code} | {' '.join(str(cls.__doc__).split())} |"
        for code, cls in sorted(CATALOG.items())
    ]


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_a_report_crosses_processes_as_the_same_class(cls: type[PlanCompilerError]) -> None:
    error = cls(
        "it broke", op="matmul_3", source="job.py:7", rank=2, got="a", expected="b", hint="mend it"
    )
    rebuilt = PlanCompilerError.from_report(error.report)
    assert type(rebuilt) is cls
    assert str(rebuilt) == str(error)
    assert str(error) == (
        f"[{cls.code} {cls.__name__}] it broke. Where: op 'matmul_3' at job.py:7 on rank 2. "
        "Got: a. Expected: b. What to do: mend it."
    )


def test_an_error_within_an_error_ends_with_one_full_stop() -> None:
    inner = PlanCompilerError("rank 1 broke", rank=1)
    outer = PlanCompilerError("the run was stopped", got=str(inner), hint="see above.")
    assert ".." not in str(outer)
    assert str(outer).endswith("Where: on rank 1. What to do: see above.")


def test_an_unknown_code_becomes_the_base_class() -> None:
    report = PlanCompilerError("from a newer version").report
    rebuilt = PlanCompilerError.from_report(dataclasses.replace(report, code="E999"))
    assert type(rebuilt) is PlanCompilerError
    assert rebuilt.report.what == "from a newer version"
