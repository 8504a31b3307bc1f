"""Compiler steps as text in, text out: one file per case, what is expected beside the job.

A file is the text of a job, which `plancompiler compile` takes as it is. Its first line says what
is run, the comment below it what the case shows, and lines that begin with `#>` are the whole text
that comes out, of an error too. `PLANCOMPILER_UPDATE_GOLDEN=1` writes these lines anew; read the
difference before keeping it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.fuse import fuse_reductions
from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.slices import slice_for_rank
from plancompiler.boxing.streams import choose_streams
from plancompiler.boxing.text import format_boxing_graph, format_op_graph, format_slice
from plancompiler.errors import PlanCompilerError
from plancompiler.ir import Job, verify_job
from plancompiler.ir.job_parser import parse_job
from plancompiler.lower.control import control_tasks
from plancompiler.lower.emit import place_tasks, write_plan
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.lower.text import format_control, format_offsets, format_order, format_storage
from plancompiler.ops.verify_types import verify_types
from plancompiler.passes import PASSES, config_of
from plancompiler.plan.text import format_plan
from plancompiler.plan.verify import verify_plan

FOLDER = Path(__file__).parent
CASES = sorted(FOLDER.glob("*/*.txt"))
OUT = "#>"
RUN = re.compile(r"# RUN: (\w+)(?: (\w+))?(?:, rank (\d+))?")


def one_pass(job: Job, name: str, _: int) -> str:
    (chosen,) = [each for each in PASSES if each.name == name]
    result = chosen.run(job)
    verify_job(result.job)
    changes = "".join(f"change: {change}\n" for change in result.changes)
    notes = "".join(f"note: {note}\n" for note in result.notes)
    return f"{result.summary}\n{changes}{notes}{result.job}"


def boxed(job: Job) -> BoxingTaskGraph:
    graph = build_boxing_task_graph(infer_sbp(job), job.world_size)
    return choose_streams(graph, config_of(job).streams)


def fused(job: Job) -> BoxingTaskGraph:
    return fuse_reductions(boxed(job), config_of(job).fuse_bytes)[0]


def lowered(job: Job, step: str, rank: int) -> str:
    placed = place_tasks(rebuild_rank_task_graph(slice_for_rank(fused(job), rank), rank))
    stored = placed.stored
    if step == "plan":
        plan = write_plan(placed)
        verify_plan(plan)
        return format_plan(plan, sources=False)
    return {
        "order": lambda: format_order(stored.ordered),
        "control": lambda: format_control(control_tasks(stored.ordered)),
        "storage": lambda: format_storage(stored),
        "offsets": lambda: format_offsets(placed),
    }[step]()


LOWER = ("order", "control", "storage", "offsets", "plan")
STEPS: dict[str, Callable[[Job, str, int], str]] = {
    "pass": one_pass,
    "infer": lambda job, *_: format_op_graph(infer_sbp(job)),
    "box": lambda job, *_: format_boxing_graph(boxed(job)),
    "fuse": lambda job, *_: format_boxing_graph(fused(job)),
    "slice": lambda job, _, rank: format_slice(slice_for_rank(fused(job), rank)),
    "lower": lowered,
}


def run(text: str, name: str) -> str:
    """What comes out; lines of the file itself are not shown as sources of ops."""
    match = RUN.match(text)
    assert match is not None, "the first line is `# RUN: STEP NAME, rank NUMBER`"
    job = parse_job(text, name)
    verify_job(job)
    verify_types(job)
    try:
        out = STEPS[match[1]](job, match[2] or "", int(match[3] or 0))
        return re.sub(rf" +# {name}:\d+", "", out)
    except PlanCompilerError as error:
        return f"error: {error}\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_text_that_comes_out_is_the_one_beside_the_job(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not line.startswith(OUT)]
    results = [f"{OUT} {line}".rstrip() for line in run(text, path.name).splitlines()]
    expected = "\n".join([*kept, *results]) + "\n"
    if os.environ.get("PLANCOMPILER_UPDATE_GOLDEN") == "1":
        path.write_text(expected, encoding="utf-8")
        text = expected
    assert text == expected


def test_every_step_has_at_least_three_cases() -> None:
    firsts = (path.read_text().partition("\n")[0] for path in CASES)
    runs = Counter(first.partition(",")[0] for first in firsts)
    wanted = {f"# RUN: pass {each.name}" for each in PASSES}
    wanted |= {f"# RUN: {step}" for step in ("infer", "box", "fuse", "slice")}
    wanted |= {f"# RUN: lower {step}" for step in LOWER}
    assert {each: runs[each] for each in wanted if runs[each] < 3} == {}
    assert runs.keys() <= wanted
