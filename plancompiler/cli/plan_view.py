"""Plans as plain data and as a graph, for people and other programs to read."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from plancompiler.ir import NdSbp, Placement, SourceLine
from plancompiler.ir.task import format_id
from plancompiler.plan.plan import Plan, Stream, Task


def plain_data(value: object) -> Any:
    """A plan or a part of one as dicts, lists, strings and numbers; ids stay numbers."""
    if isinstance(value, enum.Enum | NdSbp | SourceLine):
        return str(value)
    if isinstance(value, Placement):
        return {
            "device_type": value.device_type,
            "ranks": list(value.rank_list),
            "hierarchy": list(value.hierarchy),
            "axes": None if value.axes is None else list(value.axes),
        }
    if is_dataclass(value):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(each) for each in value]
    return value


def plans_to_dot(plans: Iterable[Plan]) -> str:
    """The plans' tasks as a Graphviz graph: a cluster per rank and stream.

    Solid edges are data (labelled with the value), dotted ones control, grey ones the stream's
    order; dashed edges cross ranks.
    """
    listed = list(plans)
    lines = [
        "digraph plan {",
        "  rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace"];',
    ]
    for plan in listed:
        lines += _rank_cluster(plan)
    drawn = {task.id for plan in listed for task in plan.tasks}
    for plan in listed:
        lines += (f"  {line}" for line in _edges(plan, drawn))
    lines.append("}")
    return "\n".join(lines) + "\n"


def _rank_cluster(plan: Plan) -> Iterator[str]:
    yield f"  subgraph cluster_{plan.rank} {{"
    yield f"    label={_quote(f'{plan.job}, rank {plan.rank} of {plan.world_size}')};"
    for stream in Stream:
        tasks = [task for task in plan.tasks if task.stream is stream]
        if not tasks:
            continue
        yield f"    subgraph cluster_{plan.rank}_{stream} {{"
        yield f'      label="{stream}"; style=filled; color="#eeeeee";'
        for task in tasks:
            yield f"      {_node(task.id)} [label={_quote(_label(plan, task))}];"
        for before, after in pairwise(tasks):
            yield f'      {_node(before.id)} -> {_node(after.id)} [color="#bbbbbb", weight=4];'
        yield "    }"
    yield "  }"


def _edges(plan: Plan, drawn: set[int]) -> Iterator[str]:
    for task in plan.tasks:
        for register_id in task.inputs:
            local = plan.register_by_id.get(register_id)
            register = local or plan.remote_register_by_id[register_id]
            if register.producer not in drawn:
                label = _quote(format_id(register.producer))
                yield f'{_node(register.producer)} [label={label}, fillcolor="#dddddd"];'
            style = "" if local else ", style=dashed"
            label = f"{register.name} {register.dtype}{list(register.shape)}"
            yield (
                f"{_node(register.producer)} -> {_node(task.id)} [label={_quote(label)}{style}];"
            )
        for register_id in task.controls_in:
            producer = plan.register_by_id[register_id].producer
            yield f"{_node(producer)} -> {_node(task.id)} [style=dotted];"


def _label(plan: Plan, task: Task) -> str:
    source = f"\n{task.source}" if task.source.file else ""
    segment = f"\n{plan.segments[task.segment]}" if plan.schedule else ""
    return f"{task.kind} {format_id(task.id)}\n{task.name}{segment}{source}"


def _node(task_id: int) -> str:
    return f"t{task_id}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
