"""The command that trains in every layout: its rows, its verdicts, and the table it wrote."""

from __future__ import annotations

import re

import pytest

from benchmarks.layouts import ONE_RANK, TABLE, Row, compare, job_of, line, measure, rows
from plancompiler.ir.pipeline import SCHEDULES

GOOD = {"transports": {"all_reduce": 3}, "variables_mib": 1.0, "arena_mib": 2.0, "ranks": 2}


def test_rows_cover_every_setting() -> None:
    texts = [str(row) for row in rows()]
    assert texts[0] == str(ONE_RANK) == "1 rank"
    assert len(set(texts)) == len(texts)
    settings = [row.settings for row in rows()]
    for name, values in {
        "zero": (1, 2, 3),
        "schedule": SCHEDULES,
        "recompute": ("auto",),
        "sequence_parallel": (True,),
        "precision": ("float16", "bfloat16"),
    }.items():
        assert {given[name] for given in settings if name in given} == set(values)


@pytest.mark.slow
def test_a_row_is_trained_and_counted() -> None:
    row = Row({"tp": 2})
    actual = measure(row, 2)
    # Two per half block, in 4 layers, forward and backward, and those of the head and the tokens.
    assert actual["transports"]["all_reduce"] >= 16
    assert actual["ranks"] == 2
    assert actual["variables_mib"] < 38.0
    compared = compare(row, actual, measure(ONE_RANK, 2)["losses"])
    assert compared["within_tolerance"]
    assert line(row, compared).startswith("| tp 2 |  | 2 | ")


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([2.0, 1.0], "0.0e+00 | 1.0000"),
        ([2.0, 1.001], "1.0e-03 (too far)"),
        ([2.0, float("nan")], "(too far)"),
    ],
)
def test_a_difference_is_judged(losses: list[float], text: str) -> None:
    compared = compare(Row({"dp": 2}), {**GOOD, "losses": losses}, [2.0, 1.0])
    assert compared["within_tolerance"] == ("far" not in text)
    assert text in line(Row({"dp": 2}), compared)


def test_a_difference_of_half_precision_is_tolerated() -> None:
    row = Row({"dp": 2}, {"precision": "float16"})
    assert compare(row, {**GOOD, "losses": [1.01]}, [1.0])["within_tolerance"]


def test_what_the_compiler_refuses_is_a_row() -> None:
    actual = measure(Row({}, {"sequence_parallel": True}), 1)
    assert "sequence" in actual["refused"]
    assert line(ONE_RANK, compare(ONE_RANK, actual, [])).startswith("| 1 rank |  | | refused: ")


def test_chunks_are_a_matter_of_the_job() -> None:
    row = next(row for row in rows() if row.settings.get("schedule") == "interleaved")
    assert "chunks 2" in str(row)
    job = job_of(row, 3)
    placements = {
        op.attr("name"): op.placement.rank_list for op in job.ops if op.kind == "variable"
    }
    homes = [placements[f"blocks.{layer}.norm1.weight"] for layer in range(4)]
    assert homes[0] == homes[2] != homes[1] == homes[3]


def test_the_table_has_every_row() -> None:
    written = re.findall(r"^\| (.+?) \| (.*?)\s*\|", TABLE.read_text(), re.M)
    assert written[1:] == [(row.layout_text, row.settings_text) for row in rows()]
