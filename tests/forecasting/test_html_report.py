"""The page of a forecast: whole, true to the forecast's JSON, and usable in a browser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.forecasting.html_report import html_report
from plancompiler.forecasting.job_forecast import COMMUNICATION
from plancompiler.forecasting.timelines import MOST_BARS, memory_curves, rows_of, step_window
from tests.cluster.browser import CHROMIUM, browser
from tests.examples import EXAMPLES, gpt
from tests.passes.worlds import mesh

VOID = {"meta", "input"}
MOST_BYTES = 3 << 20


@dataclass
class Page(HTMLParser):
    """A document's parts; an error where an element is closed that is not open."""

    open: list[str] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    """By id."""
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    """Cells by the label of the table's region: the value of `data`, or else the text."""
    values: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._script = self._region = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.addresses += [known[name] for name in ("href", "src", "action") if name in known]
        self.labels += [known["aria-label"]] if "aria-label" in known else []
        if tag == "script":
            self._script = known.get("id", "")
        elif known.get("role") == "region":
            self._region = known["aria-label"]
            assert known["tabindex"] == "0"
            self.tables[self._region] = []
        elif tag == "tr":
            self.tables[self._region].append([])
        elif tag == "td":
            self.tables[self._region][-1].append("")
        elif tag == "data":
            self.values.append(known["value"])
            if "td" in self.open:
                self.tables[self._region][-1][-1] = known["value"]
        if tag == "svg":
            assert known["role"] == "img"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[self._script] = data
        elif self.open[-1:] == ["td"]:
            self.tables[self._region][-1][-1] += data


def page_of(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.addresses == []
    assert "http:" not in text
    assert "https:" not in text
    return page


def test_the_page_has_the_figures_of_the_forecast() -> None:
    job = gpt(dp=2, tp=2, pp=2, microbatches=4)
    forecast = pc.forecast(job, "h100-sxm")
    text = html_report(forecast)
    page, plain = page_of(text), json.loads(json.dumps(forecast.json()))
    assert len(text.encode()) <= MOST_BYTES
    assert json.loads(page.scripts["forecast"]) == plain
    for value in (
        plain["step_seconds"],
        plain["memory_bytes"]["max"],
        plain["traffic_bytes"]["total"],
        plain["mfu"],
        plain["bubble_fraction"],
    ):
        assert repr(value) in page.values
    rows = {name: table[1:] for name, table in page.tables.items()}
    assert [[float(cell) for cell in row] for row in rows["Classes of ranks"]] == [
        [each["rank"], each["count"], *each["memory_bytes"].values(), each["received_bytes"]]
        for each in plain["classes"]
    ]
    assert {row[0]: float(row[1]) for row in rows["Traffic by link"]} == plain["traffic_bytes"][
        "by_link"
    ]
    lines = {line["source"]: line["seconds"] for line in plain["lines"]}
    assert {row[0]: float(row[-1]) for row in rows["By source line"] if ":" in row[0]} == {
        source: seconds for source, seconds in lines.items() if source
    }
    # The dearest are of the user's lines, and no more than these take.
    for name in ("Dearest ops", "Dearest collectives"):
        seconds = [float(row[-1]) for row in rows[name]]
        assert seconds == sorted(seconds, reverse=True)
        assert 0 < len(seconds) <= 10
        assert all(0 < float(row[-1]) <= lines[row[2]] for row in rows[name])
    parameters = {
        variable.name: str(variable.sbp)
        for each in forecast.rank_classes.classes
        for variable in each.plan.variables
        if dict(variable.attrs).get("trainable")
    }
    assert {row[0]: row[3] for row in rows["Layouts of parameters"]} == parameters


def test_rows_and_curves_are_those_of_the_simulation() -> None:
    forecast = pc.forecast(gpt(dp=2, tp=2, pp=2, microbatches=4), "h100-sxm")
    start, stop = step_window(forecast)
    assert stop - start + forecast.machine.host.step_seconds == pytest.approx(
        forecast.step_seconds, rel=0.05
    )
    rows = rows_of(forecast)
    assert len(rows) == 2 * len(forecast.simulation.plans)
    for row in rows:
        ends = [bar.end for bar in row.bars]
        assert all(0 <= bar.begin <= bar.end <= stop - start for bar in row.bars)
        assert ends == sorted(ends)
        if row.what == "computation":
            slots = {bar.label for bar in row.bars if bar.kind in ("forward", "backward")}
            assert len(slots) == 2 * 4
            covered = sum(bar.end - bar.begin for bar in row.bars)
            seconds = sum(
                run.end - max(run.begin, start)
                for run in forecast.simulation.runs
                if run.rank == row.rank and run.task.kind not in COMMUNICATION and run.end > start
            )
            assert covered == pytest.approx(seconds, rel=1e-6)
            (of_class,) = {
                each.compute_seconds for each in forecast.classes if each.rank == row.rank
            }
            # Of the step's tasks a few ran before the step before had ended.
            assert covered == pytest.approx(of_class, rel=0.05)
    for curve, known in zip(memory_curves(forecast), forecast.classes, strict=True):
        fixed = known.memory.total - known.memory.activations
        assert fixed < max(curve.nbytes) <= known.memory.total
        assert min(curve.nbytes) >= fixed


def test_many_tasks_are_drawn_as_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = pc.forecast(gpt(dp=2, layers=2), "h100-sxm")
    whole = rows_of(forecast)
    monkeypatch.setattr("plancompiler.forecasting.timelines.MOST_BARS", 40)
    fewer = rows_of(forecast)
    assert sum(len(row.bars) for row in whole) > sum(len(row.bars) for row in fewer)
    assert sum(len(row.bars) for row in fewer) <= 40 < MOST_BARS
    for one, other in zip(whole, fewer, strict=True):
        assert one.bars[0].begin == other.bars[0].begin
        assert one.bars[-1].end == other.bars[-1].end


def test_what_users_write_is_text() -> None:
    with pc.job("</script><script>alert(1)</script>") as job:
        x = pc.input("x", (4, 4), "float32", mesh(2), "S(0)")
        pc.output("y", x.exp().sum())
    text = html_report(pc.forecast(job))
    page = page_of(text)
    assert "alert(1)</script>" not in text
    assert json.loads(page.scripts["forecast"])["job"] == job.name
    assert "Layouts of parameters" not in page.tables


SMALL = ("-D", "layers=2", "-D", "dim=32", "-D", "length=16", "-D", "dp=2", "-D", "pp=2")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    target, file = str(EXAMPLES / "gpt.py"), tmp_path / "report.html"
    words = ["forecast", target, *SMALL, "-D", "microbatches=2", "--html", str(file), "--json"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    page = page_of(file.read_text())
    assert json.loads(page.scripts["forecast"]) == json.loads(done.stdout)
    words[-2] = str(tmp_path / "missing" / "report.html")
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "report" in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium"
)
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    forecast = pc.forecast(gpt(dp=2, tp=2, pp=2, microbatches=4), "h100-sxm")
    file = tmp_path / "report.html"
    file.write_text(html_report(forecast))
    with browser(tmp_path / "profile") as view:
        view.open(file.as_uri(), "")
        roles = view.roles()
        assert ("slider", "Time in the step") in roles
        for name in ("Classes of ranks", "Dearest ops", "Layouts of parameters"):
            assert ("region", name) in roles
        pictures = [name for role, name in roles if role in ("img", "image")]
        assert len(pictures) == 2
        # By keyboard: the slider moves, and the table tells of another moment.
        shown = "document.getElementById('moment').textContent"
        before = view.evaluate(shown)
        view.evaluate("document.querySelector('input').focus()")
        for kind in ("keyDown", "keyUp"):
            view.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="PageUp",
                code="PageUp",
                windowsVirtualKeyCode=33,
            )
        assert view.evaluate("Number(document.querySelector('input').value)") > 0
        assert view.evaluate(shown) != before
        assert "ms, at most" in view.evaluate(
            "document.querySelector('input').getAttribute('aria-valuetext')"
        )
        # By pointer: the middle of a picture is the middle of the step.
        view.evaluate(
            "(() => { const box = document.querySelector('svg').getBoundingClientRect();"
            "document.querySelector('svg').dispatchEvent(new PointerEvent('pointermove', "
            "{clientX: box.left + box.width * 650 / 1150, clientY: box.top + 5})); })()"
        )
        assert view.evaluate("document.querySelector('input').value") == "500"
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            view.call("Emulation.setEmulatedMedia", features=features)
            colours = view.evaluate(
                "(() => { const style = getComputedStyle(document.body);"
                "return [style.color, style.backgroundColor]; })()"
            )
            assert colours[0] != colours[1]
        asked = [
            event["params"]["request"]["url"]
            for event in view.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert asked == [file.as_uri()]
        assert not [each for each in view.events if each["method"] == "Runtime.exceptionThrown"]
