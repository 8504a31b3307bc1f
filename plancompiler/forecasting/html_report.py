"""A forecast as one HTML page without anything external.

All figures and pictures are in the page without its script, which only tells what there is at a
moment of the step: the pointer or a slider chooses it. What users have written is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from plancompiler.forecasting.job_forecast import Forecast, times_on
from plancompiler.forecasting.timelines import (
    COMMUNICATING,
    MemoryCurve,
    Row,
    memory_curves,
    rows_of,
    step_window,
)
from plancompiler.forecasting.user_lines import written
from plancompiler.ir.html_table import number_cell, shown_text, table, text_cell
from plancompiler.ir.shard import element_count
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec

DEAREST = 10
MOST_ROWS = 64
"""Ranks whose computation and communication are drawn."""
MOST_PARAMETERS = 4000
_LEFT, _WIDTH, _HEIGHT, _ROW = 150, 1000, 280, 16
_DASHES = ("", "6 3", "2 2", "9 3 2 3")
_HUES = 6
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_STYLE = """
:root { color-scheme: light dark; --c0: #3367d6; --c1: #b3261e; --c2: #137333; --c3: #8430ce;
  --c4: #9a5b00; --c5: #00696f; --grid: #8886; }
@media (prefers-color-scheme: dark) { :root { --c0: #8ab4f8; --c1: #f2b8b5; --c2: #81c995;
  --c3: #d7aefb; --c4: #fcc77c; --c5: #78d9e0; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem;
  max-width: 80rem; background: Canvas; color: CanvasText; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: 1rem; }
dl div { border-left: 4px solid var(--c0); padding-left: .75rem; }
dt { font-size: .9rem; } dd { margin: 0; font-size: 1.2rem; }
.scroll { overflow: auto; max-height: 32rem; }
.scroll:focus-visible, input:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8888;
  vertical-align: top; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 12px; fill: CanvasText; }
svg path { fill: none; } .cursor { stroke: CanvasText; stroke-dasharray: 3 3; }
.grid { stroke: var(--grid); } label { display: block; } input[type=range] { width: 100%; }
.key { display: inline-block; width: 1em; height: 1em; vertical-align: -.15em; }
"""
_SCRIPT = """
const read = id => JSON.parse(document.getElementById(id).textContent);
const { seconds, labels, rows, curves, left, width } = read("timelines");
const slider = document.querySelector("input"), moment = document.getElementById("moment");
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
const bytes = count => {
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return count.toFixed(unit ? 1 : 0) + " " + units[unit];
};
const runs = (bars, at) => {
  const bar = bars.findLast(bar => bar[0] <= at);
  return bar && at < bar[0] + bar[1] ? labels[bar[2]] : "nothing";
};
const show = () => {
  const part = slider.value / slider.max;
  const time = (part * seconds * 1e3).toFixed(3) + " ms";
  for (const line of document.querySelectorAll(".cursor")) {
    line.setAttribute("x1", left + part * width);
    line.setAttribute("x2", left + part * width);
  }
  const body = document.createElement("tbody");
  const add = words => {
    const row = body.insertRow();
    for (const word of words) row.insertCell().textContent = word;
  };
  let most = 0;
  for (const [rank, points] of curves) {
    const held = points[Math.min(points.length - 1, Math.floor(part * points.length))];
    most = Math.max(most, held);
    add(["class of rank " + rank, "memory in use", bytes(held)]);
  }
  for (const [rank, what, bars] of rows) add(["rank " + rank, what, runs(bars, part * 1e6)]);
  moment.tBodies[0].replaceWith(body);
  slider.setAttribute("aria-valuetext", time + ", at most " + bytes(most) + " in use");
  document.getElementById("time").textContent = time;
};
slider.addEventListener("input", show);
for (const picture of document.querySelectorAll("svg")) {
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * (left + width) - left;
    slider.value = Math.round(Math.max(0, Math.min(1, x / width)) * slider.max);
    show();
  });
}
document.getElementById("explore").hidden = false;
show();
"""


def html_report(forecast: Forecast) -> str:
    """The document. Elements `data` hold the figures of `Forecast.json` as their values."""
    plain = forecast.json()
    start, stop = step_window(forecast)
    rows, curves = rows_of(forecast)[: 2 * MOST_ROWS], memory_curves(forecast)
    title = f"Forecast of {shown_text(forecast.job.name)} on {shown_text(forecast.machine.name)}"
    sections = (
        _summary(plain),
        _memory(forecast, plain, curves),
        _gantt(forecast, rows, stop - start),
        _explore(),
        _traffic(plain),
        *_dearest(forecast),
        _lines(plain),
        _parameters(forecast),
    )
    body = "\n".join(sections)
    drawn = _plain(rows, curves, stop - start)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{body}
</main>
<script type="application/json" id="forecast">{_embedded(plain)}</script>
<script type="application/json" id="timelines">{_embedded(drawn)}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _embedded(value: object) -> str:
    """JSON that ends no script."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _plain(rows: Sequence[Row], curves: Sequence[MemoryCurve], seconds: float) -> dict[str, Any]:
    """Bars as [begin, duration, label], in millionths of the step."""
    labels: dict[str, int] = {}
    scale = 1e6 / (seconds or 1.0)
    listed = [
        [
            row.rank,
            row.what,
            [
                [
                    round(bar.begin * scale),
                    round((bar.end - bar.begin) * scale),
                    labels.setdefault(bar.label, len(labels)),
                ]
                for bar in row.bars
            ],
        ]
        for row in rows
    ]
    return {
        "seconds": seconds,
        "labels": list(labels),
        "rows": listed,
        "curves": [[curve.rank, curve.nbytes] for curve in curves],
        "left": _LEFT,
        "width": _WIDTH,
    }


def _summary(plain: Mapping[str, Any]) -> str:
    facts = [
        ("Ranks", _count(plain["ranks"])),
        ("Step", _time(plain["step_seconds"])),
        ("Memory of the fullest rank", _bytes(plain["memory_bytes"]["max"])),
        ("It fits", "yes" if plain["fits"] else "no"),
        ("Between ranks, in a step", _bytes(plain["traffic_bytes"]["total"])),
        ("Computing, busiest rank", _time(plain["compute_seconds"])),
        ("Communication not hidden", _time(plain["exposed_communication_seconds"])),
        ("Model FLOPs utilization", _share(plain["mfu"])),
    ]
    if plain["bubble_fraction"] is not None:
        facts.append(("Bubble", _share(plain["bubble_fraction"])))
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<section aria-label="Summary"><dl>{items}</dl></section>'


def _memory(forecast: Forecast, plain: Mapping[str, Any], curves: Sequence[MemoryCurve]) -> str:
    top = max(max(curve.nbytes) for curve in curves) or 1
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        ends = f'x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{_up(share)}" y2="{_up(share)}"'
        beside = f'x="{_LEFT - 8}" y="{_up(share) + 4:g}" text-anchor="end"'
        parts += [f'<line class="grid" {ends}/>', f"<text {beside}>{_size(share * top)}</text>"]
    keys = []
    for number, curve in enumerate(curves):
        hue, dash = number % _HUES, _DASHES[number // _HUES % len(_DASHES)]
        corners: list[str] = []
        drawn = -1
        for point, nbytes in enumerate(curve.nbytes):
            if nbytes != drawn:
                x, y = _LEFT + point * _WIDTH / len(curve.nbytes), _up(nbytes / top)
                corners.append(f"H{x:.1f}V{y:g}" if corners else f"M{x:.1f} {y:g}")
                drawn = nbytes
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<path d="{"".join(corners)}H{_LEFT + _WIDTH}" stroke="var(--c{hue})" '
            f'stroke-width="2"{dashes}/>'
        )
        keys.append(f'<span class="key" style="background:var(--c{hue})"></span> rank {curve.rank}')
    picture = _svg(
        f"Memory in use over the step by class of ranks, at most {_size(top)}; "
        "the table of classes has what each holds",
        _HEIGHT,
        parts,
    )
    kinds = list(plain["memory_bytes"]["by_kind"])
    heads = (
        ">First rank",
        ">Ranks",
        *(f">{kind.capitalize()}" for kind in kinds),
        ">Total",
        ">Received",
    )
    rows = [
        (
            number_cell(_count(each["rank"])),
            number_cell(_count(each["count"])),
            *(number_cell(_bytes(each["memory_bytes"][kind])) for kind in (*kinds, "total")),
            number_cell(_bytes(each["received_bytes"])),
        )
        for each in plain["classes"]
    ]
    capacity = _size(forecast.machine.device.memory_bytes)
    return (
        "<h2>Memory over time</h2><p>Variables, what transport takes, and what is alive of the "
        f"activations. A device holds {capacity}. The activations' arena is held as a whole.</p>"
        f"{picture}<p>{', '.join(keys)}</p>"
        + table(
            "Classes of ranks",
            "What each rank of a class holds, and receives in a step",
            heads,
            rows,
        )
    )


def _up(share: float) -> float:
    return round(10 + (1 - share) * (_HEIGHT - 20), 1)


_HUE_OF_KIND = {"forward": 0, "backward": 1, "weight": 3, "epilogue": 5, COMMUNICATING: 2}


def _gantt(forecast: Forecast, rows: Sequence[Row], seconds: float) -> str:
    parts, kinds = [], {}
    for number, row in enumerate(rows):
        middle = (number + 0.5) * _ROW
        name = f"rank {row.rank}" if number % 2 == 0 else ""
        parts.append(f'<text x="{_LEFT - 8}" y="{middle + 4:g}" text-anchor="end">{name}</text>')
        paths: dict[int, list[str]] = {}
        for bar in row.bars:
            hue = _HUE_OF_KIND.get(bar.kind, 4)
            kinds[bar.kind] = hue
            x, across = (
                each * _WIDTH / (seconds or 1.0) for each in (bar.begin, bar.end - bar.begin)
            )
            paths.setdefault(hue, []).append(
                f"M{_LEFT + x:.1f} {middle:g}h{max(across - 0.2, 0.2):.1f}"
            )
        parts += [
            f'<path d="{"".join(bars)}" stroke="var(--c{hue})" stroke-width="{_ROW - 4}"/>'
            for hue, bars in paths.items()
        ]
    keys = ", ".join(
        f'<span class="key" style="background:var(--c{hue})"></span> {shown_text(kind)}'
        for kind, hue in kinds.items()
    )
    pipeline = forecast.graph.pipeline
    title = "The step's timeline" if pipeline is None else "The pipeline's Gantt chart"
    told = "" if pipeline is None else f" The pipeline: {shown_text(str(pipeline))}."
    left_out = len(forecast.simulation.plans) - len(rows) // 2
    more = f" {left_out} more are not drawn." if left_out else ""
    picture = _svg(
        f"What {len(rows) // 2} ranks compute and communicate in {_milliseconds(seconds)}",
        len(rows) * _ROW,
        parts,
    )
    return (
        f"<h2>{title}</h2><p>Of each class of ranks that is simulated one rank: what it computes, "
        f"and below what it communicates.{told}{more}</p>{picture}<p>{keys}</p>"
    )


def _svg(label: str, height: int, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {_LEFT + _WIDTH} {height}">{"".join(parts)}'
        f'<line class="cursor" x1="{_LEFT}" x2="{_LEFT}" y1="0" y2="{height}"/></svg>'
    )


def _explore() -> str:
    return (
        '<section id="explore" hidden aria-label="A moment of the step">'
        "<h2>A moment of the step</h2><p>Point into a picture, or move the slider by keyboard.</p>"
        '<label>Time: <output id="time"></output>'
        '<input type="range" min="0" max="1000" value="0" aria-label="Time in the step"></label>'
        '<div class="scroll" tabindex="0" role="region" aria-label="What there is at this moment">'
        '<table id="moment"><caption>Memory in use, and what runs</caption><thead><tr>'
        '<th scope="col">Where</th><th scope="col">What</th><th scope="col">Value</th>'
        "</tr></thead><tbody></tbody></table></div></section>"
    )


def _traffic(plain: Mapping[str, Any]) -> str:
    total = plain["traffic_bytes"]["total"]
    rows = [
        (
            text_cell(shown_text(link)),
            number_cell(_bytes(nbytes)),
            number_cell(_share(nbytes / total)),
        )
        for link, nbytes in plain["traffic_bytes"]["by_link"].items()
    ]
    return table(
        "Traffic by link", "Payload of all ranks in a step", ("Link", ">Bytes", ">Share"), rows
    )


def _dearest(forecast: Forecast) -> tuple[str, str]:
    """The tasks that take the most time of all ranks together."""
    times = times_on(forecast.machine, forecast.ranks, forecast.backend)
    ops: dict[tuple[str, str, str], float] = {}
    collectives: dict[tuple[str, str, str], float] = {}
    for each in forecast.rank_classes.classes:
        plan = each.plan
        for task in plan.tasks:
            spec = task.spec
            if isinstance(spec, ComputeSpec):
                costs, what = ops, spec.kind
            elif isinstance(spec, CollectiveSpec):
                costs, what = collectives, str(spec.primitive)
            else:
                continue
            repeated = plan.segments[task.segment].kind.per_microbatch
            runs = len(each.ranks) * (plan.microbatches if repeated else 1)
            key = task.name, what, written(task.source)
            costs[key] = costs.get(key, 0.0) + runs * times.seconds(plan, task)
    return tuple(  # type: ignore[return-value]  # two of them
        table(
            title,
            "Seconds of a step, all ranks together",
            ("Name", "Op", "Source line", ">Time"),
            [
                (*(text_cell(shown_text(word)) for word in key), number_cell(_time(seconds)))
                for key, seconds in sorted(costs.items(), key=lambda item: (-item[1], item[0]))[
                    :DEAREST
                ]
                if seconds
            ],
        )
        for title, costs in (("Dearest ops", ops), ("Dearest collectives", collectives))
    )


def _lines(plain: Mapping[str, Any]) -> str:
    rows = [
        (
            text_cell(shown_text(line["source"] or "(no line)")),
            number_cell(_count(line["tasks"])),
            number_cell(_count(sum(line["collectives"].values()))),
            number_cell(_bytes(line["received_bytes"])),
            number_cell(_bytes(line["memory_bytes"])),
            number_cell(_time(line["seconds"])),
        )
        for line in sorted(plain["lines"], key=lambda line: -line["seconds"])
    ]
    heads = ("Source line", ">Tasks", ">Collectives", ">Received", ">Memory", ">Time")
    return table("By source line", "All ranks together", heads, rows)


def _parameters(forecast: Forecast) -> str:
    layouts: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    for each in forecast.rank_classes.classes:
        for variable in each.plan.variables:
            if not dict(variable.attrs).get("trainable"):
                continue
            register = each.plan.register_by_id[variable.register]
            nbytes = element_count(register.shape) * register.dtype.itemsize
            sizes[variable.name] = max(nbytes, sizes.get(variable.name, 0))
            layouts.setdefault(
                variable.name,
                (
                    variable.name,
                    f"{variable.dtype}{list(variable.shape)}",
                    str(variable.placement),
                    str(variable.sbp),
                ),
            )
    rows = [
        (*(text_cell(shown_text(word)) for word in words), number_cell(_bytes(sizes[name])))
        for name, words in layouts.items()
    ]
    more = len(rows) - MOST_PARAMETERS
    caption = f"{len(rows)} parameters" + (f", {more} of them not shown" if more > 0 else "")
    heads = ("Name", "Type", "Placement", "Layout", ">Bytes on a rank, at most")
    return table("Layouts of parameters", caption, heads, rows[:MOST_PARAMETERS])


def _data(value: float, shown: str) -> str:
    return f'<data value="{value!r}">{shown}</data>'


def _count(value: int) -> str:
    return _data(value, f"{value:,}")


def _bytes(value: float) -> str:
    return _data(value, _size(value))


def _time(seconds: float) -> str:
    return _data(seconds, _milliseconds(seconds))


def _share(value: float) -> str:
    return _data(value, f"{value:.1%}")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def _size(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.{1 if unit else 0}f} {_UNITS[unit]}"
