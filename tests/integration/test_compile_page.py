"""The command that measures compiling: its rows, its tables and its picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import compile as page
from benchmarks.line_chart import Line, line_chart

PEER = {
    "layout": "dp_tp",
    "ranks": 512,
    "master_seconds": 0.2,
    "worker_seconds": 0.1,
    "seconds": 0.3,
    "load_average": 0.5,
}
GROWTH = {
    "variant": page.PLAIN,
    "ranks": 16384,
    "master_seconds": 1.5,
    "worker_seconds": 0.08,
    "master_ratio": 1.05,
    "worker_ratio": 1.0,
    "tasks": 872,
    "slice_bytes": 76800,
    "boxing_graph_bytes": 1241344,
    "master_rss_mib": 118,
    "load_average": 2.5,
}


def test_rows_without_the_peer_say_so() -> None:
    alone, beside = page.peer_table([PEER, {**PEER, "jax_seconds": 3.0, "ratio": 0.1}]).split("\n")[
        2:
    ]
    assert alone == "| dp × tp 8 | 512 | 0.200 | 0.100 | 0.300 | not run |  |"
    assert beside == "| dp × tp 8 | 512 | 0.200 | 0.100 | 0.300 | 3.00 | 0.100 |"


def test_the_page_has_a_place_for_every_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.PAGE.read_text()
    marks = re.findall(r"<!-- (\w+) -->", text)
    assert sorted(marks[::2]) == sorted(page.TABLES)
    assert set(marks[1::2]) == {"end"}
    copy = tmp_path / "page.md"
    copy.write_text(text)
    monkeypatch.setattr(page, "PAGE", copy)
    page.write({"growth": [GROWTH]})
    written = copy.read_text()
    assert "| plain | 16,384 | 1.50 | 1.05 | 0.080 | 1.00 | 872 | 75 | 1212 | 118 |" in written
    assert "meanwhile: 2.5 to 2.5" in written
    # Other sections stay, and writing twice is writing once.
    page.write({"growth": [GROWTH]})
    assert copy.read_text() == written
    assert re.findall(r"<!-- \w+ -->", written) == re.findall(r"<!-- \w+ -->", text)


@pytest.mark.processes
def test_a_real_run_is_counted_without_tracing() -> None:
    settings = {"preset": "tiny", "layers": 1, "dim": 32, "length": 8, "tp": 2}
    actual = page.compiled(settings, "--mode", "rank_per_process", ranks=(0,))
    spent = actual["master_seconds"]
    parts = sum(spent[stage] for stage in ("passes", "sbp", "boxing", "serialize"))
    assert page.master_seconds(actual) == pytest.approx(parts)
    assert 0 < page.ranks_seconds(actual) <= actual["rank_seconds"]["max"]
    assert page.on_master("naive", actual) <= page.on_master("rank_per_process", actual)


@pytest.mark.parametrize("layout", page.LAYOUTS)
def test_both_layouts_have_the_parameters_of_the_peer(layout: str) -> None:
    dim, length, vocabulary, layers = 256, 128, 256, 4
    block = 4 * (dim * dim + dim) + (8 * dim * dim + 5 * dim) + 4 * dim
    expected = 2 * vocabulary * dim + length * dim + layers * block + 2 * dim
    assert page.parameters_of(layout, 8) == expected == 3_323_392


def test_a_chart_places_points_on_logarithmic_axes() -> None:
    lines = [Line("a < b", "#000", [(8, 0.01), (64, 0.1), (512, 1)]), Line("c", "#111", [(8, 1)])]
    root = ET.fromstring(line_chart(lines, "ranks", "seconds"))
    space = {"svg": "http://www.w3.org/2000/svg"}
    first = root.findall("svg:polyline", space)[0].get("points")
    assert first is not None
    corners = [tuple(map(float, corner.split(","))) for corner in first.split()]
    (x0, y0), (x1, y1), (x2, y2) = corners
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) != 0
    texts = [each.text for each in root.findall("svg:text", space)]
    assert {"a < b", "8", "512", "0.01", "1", "ranks", "seconds"} <= set(texts)
