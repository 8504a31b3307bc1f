"""The page has a place for every kind, and tables say what came of the cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.campaign import page
from benchmarks.campaign.__main__ import KINDS
from benchmarks.campaign.case import Case, Result

RESULTS = [
    Result(Case("kills", 1, 0), "launch: rank killed", "x", "an error names it", 0.25),
    Result(Case("kills", 1, 1), "launch: rank killed", "x", "an error names it", 1.75),
    Result(Case("kills", 1, 2), "cluster: master killed", "x", "", 3.0, ["wrong"]),
]


def test_a_table_has_a_row_for_each_group() -> None:
    rows = page.table(RESULTS).splitlines()[2:]
    assert rows == [
        "| cluster: master killed | 1 |  | 3.0 | 1 |",
        "| launch: rank killed | 2 | 2 an error names it | 1.8 | 0 |",
    ]


def test_the_page_has_a_place_for_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.PAGE.read_text()
    assert sorted(re.findall(r"<!-- (\w+) -->", text)[::2]) == sorted([*KINDS, "service"])
    copy = tmp_path / "page.md"
    copy.write_text(text)
    monkeypatch.setattr(page, "PAGE", copy)
    page.write("kills", RESULTS)
    written = copy.read_text()
    assert "3 cases with seed 1; 1 went wrong." in written
    page.write("kills", RESULTS)
    assert copy.read_text() == written
