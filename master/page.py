"""The page on which a master shows itself: one HTML document without anything external.

It is whole without a script; the script only replaces its content every two seconds, and can be
stopped. What users have written (names, errors, printed lines) is escaped.
"""

from __future__ import annotations

import hashlib
import math
import time
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from plancompiler.cluster.messages import JobStatus
from plancompiler.ir.html_table import number_cell, shown_text, table, text_cell
from plancompiler.master.observation import ObservedJob
from plancompiler.master.snapshot import Snapshot, open_descriptors, resident_bytes

_WIDTH, _HEIGHT = 220, 44
_SHOWN = 50
"""Jobs on the page, the latest."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem;
  max-width: 75rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem; }
dl div { border-left: 4px solid #3367d6; padding-left: .75rem; }
dt { font-size: .9rem; } dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
caption { text-align: left; padding-bottom: .25rem; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #8888;
  vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { display: block; } svg polyline { fill: none; stroke: #3367d6; stroke-width: 1.5; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; min-width: 16rem; }
.scroll:focus-visible, button:focus-visible { outline: 3px solid #3367d6; outline-offset: 2px; }
button { font: inherit; padding: .3rem .8rem; }
@media (prefers-color-scheme: dark) {
  dl div { border-color: #8ab4f8; } svg polyline { stroke: #8ab4f8; }
  .scroll:focus-visible, button:focus-visible { outline-color: #8ab4f8; }
}
"""
_SCRIPT = """
const button = document.querySelector("button");
const regions = () => new Map([...document.querySelectorAll(".scroll")].map(each =>
  [each.getAttribute("aria-label"), each]));
let running = true;
button.hidden = false;
button.addEventListener("click", () => {
  running = !running;
  button.textContent = running ? "Stop updating" : "Go on updating";
});
setInterval(async () => {
  if (!running || document.hidden) return;
  const note = document.querySelector("#note");
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const before = [...regions().values()].map(each =>
      [each.getAttribute("aria-label"), each.scrollLeft, each === document.activeElement]);
    document.querySelector("main").replaceWith(page.querySelector("main"));
    for (const [name, left, focused] of before) {
      const region = regions().get(name);
      if (!region) continue;
      region.scrollLeft = left;
      if (focused) region.focus({ preventScroll: true });
    }
    note.textContent = "";
  } catch (error) {
    note.textContent = "The master does not answer.";
  }
}, 2000);
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: this style and this script, and nothing else."""


def page(seen: Snapshot) -> str:
    """The document."""
    title = f"plancompiler master {escape(seen.address)}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<button type="button" hidden>Stop updating</button>
<p id="note" role="status"></p>
</header>
<main>
{_summary(seen)}
{_jobs(seen)}
{_workers(seen)}
{_errors(seen)}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _summary(seen: Snapshot) -> str:
    workers, observed = seen.workers, seen.observation
    rate = sum(job.rate(seen.now) for job in observed.jobs.values())
    facts = (
        ("Ranks that work", f"{workers['busy']} of {seen.status.world_size}"),
        ("Idle ranks", f"{workers['idle']}"),
        ("Ranks without a worker", f"{workers['missing']}"),
        ("Jobs that wait", f"{seen.queue_length}"),
        ("Steps per second", _number(rate)),
        ("Steps in all", f"{observed.steps:,}"),
        ("Memory of the master", f"{resident_bytes() / 2**20:,.0f} MiB"),
        ("Open descriptors", f"{open_descriptors()}"),
        ("Refused calls", f"{sum(seen.refused.values())}"),
    )
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f"<section aria-label=Summary><dl>{items}</dl></section>"


def _jobs(seen: Snapshot) -> str:
    latest = sorted(seen.status.jobs, key=lambda job: -job.job_id)[:_SHOWN]
    rows = [_job(job, seen.observation.jobs.get(job.job_id), seen.now) for job in latest]
    heads = ("Job", "Name", "Phase", "Ranks", "Seconds", "Steps", "Steps/s", "Loss", "Curve")
    return table("Jobs", f"The latest {_SHOWN} jobs, the newest first", heads, rows)


def _job(job: JobStatus, observed: ObservedJob | None, now: float) -> Sequence[str]:
    error = "" if job.error is None else f"<br>{shown_text(job.error.what)}"
    curve = [] if observed is None else observed.curve
    loss = None if observed is None else observed.last_loss
    return (
        number_cell(f"{job.job_id}"),
        text_cell(shown_text(job.name)),
        text_cell(f"{job.phase}{error}"),
        number_cell(f"{job.ranks}"),
        number_cell(f"{job.seconds:,.1f}"),
        number_cell("0" if observed is None else f"{observed.steps:,}"),
        number_cell("0" if observed is None else _number(observed.rate(now))),
        number_cell("—" if loss is None else f"{loss:.6g}"),
        text_cell(_curve(job.job_id, curve)),
    )


def _curve(job_id: int, points: Sequence[tuple[int, float]]) -> str:
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if len(finite) < 2:
        return ""
    steps, losses = zip(*finite, strict=True)
    low, high = min(losses), max(losses)
    across = (_WIDTH - 2) / max(steps[-1] - steps[0], 1)
    down = (_HEIGHT - 2) / ((high - low) or 1.0)
    drawn = " ".join(
        f"{1 + (step - steps[0]) * across:.1f},{1 + (high - loss) * down:.1f}"
        for step, loss in finite
    )
    label = (
        f"Loss of job {job_id}: {losses[0]:.4g} at step {steps[0]}, "
        f"{losses[-1]:.4g} at step {steps[-1]}, between {low:.4g} and {high:.4g}"
    )
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><polyline points="{drawn}"/></svg>'
    )


def _workers(seen: Snapshot) -> str:
    rows = [
        (
            text_cell(f"{worker.slot}"),
            text_cell(shown_text(worker.host)),
            text_cell(shown_text(worker.device)),
            text_cell(f"rank {worker.rank} of job {worker.job_id}" if worker.job_id else "idle"),
        )
        for worker in seen.status.workers
    ]
    return table("Workers", "Workers by slot", ("Slot", "Host", "Device", "Works on"), rows)


def _errors(seen: Snapshot) -> str:
    rows = [
        (
            number_cell(f"{job_id}"),
            number_cell(f"{line.rank}"),
            text_cell(time.strftime("%H:%M:%S", time.localtime(line.time))),
            text_cell(f"<pre>{shown_text(line.text)}</pre>"),
        )
        for job_id, line in seen.errors
    ]
    heads = ("Job", "Rank", "Time", "Line")
    return table("Standard error", "The latest line of each rank", heads, rows)


def _number(value: float) -> str:
    return f"{value:,.1f}"
