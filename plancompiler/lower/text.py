"""Text forms of what each step of lowering makes: order, control edges, storage, offsets."""

from __future__ import annotations

from collections.abc import Iterable

from plancompiler.lower.aliases import Aliases
from plancompiler.lower.control import ControlledTasks
from plancompiler.lower.offsets import PlacedTasks
from plancompiler.lower.order import Edges, OrderedTasks
from plancompiler.lower.rank_task_graph import RankTaskGraph
from plancompiler.lower.storage import StoredTasks
from plancompiler.plan.index import STREAMS


def format_order(ordered: OrderedTasks) -> str:
    """A line per task: its place, stream, and the places of those whose results it reads."""
    lines = []
    segment = -1
    for place, task in enumerate(ordered.tasks):
        if ordered.segment[place] != segment:
            segment = ordered.segment[place]
            lines.append(f"segment {ordered.parts.segments[segment]}")
        after = "".join(f" [{each}]" for each in ordered.predecessors[place])
        kind = task.op_kind or str(task.kind)
        stream = STREAMS[ordered.streams[place]]
        lines.append(f"  [{place}] {stream}: {kind} {task.name}{after and ' after' + after}")
    return _text("order", ordered.graph, lines)


def format_control(controlled: ControlledTasks) -> str:
    """The control edges, then registers that are views or updates of others."""
    lines = [*_edges(controlled.ordered, controlled.edges)]
    graph, views = controlled.ordered.graph, controlled.views
    for group in views.members.values():
        lines += [f"  {_alias(graph, views, each)}" for each in group[1:]]
    return _text("control edges", graph, lines)


def format_storage(stored: StoredTasks) -> str:
    """The control edges that storage adds, then each group: its size, block and registers."""
    graph, names = stored.ordered.graph, ("arena", "variables", "staging")
    lines = [*_edges(stored.ordered, stored.holds)]
    for group in stored.groups:
        slots = f" in {group.slots} slots" if group.slots > 1 else ""
        shared = ", shared" if group.shared else ""
        lines.append(
            f"  {_register(graph, group.root)}: {group.nbytes} bytes{slots}, "
            f"{names[group.block]}{shared}"
        )
        lines += [f"    {_alias(graph, stored.aliases, each)}" for each in group.members[1:]]
    return _text("storage", graph, lines)


def format_offsets(placed: PlacedTasks) -> str:
    """Each block with what lies in it, by offset."""
    stored = placed.stored
    graph = stored.ordered.graph
    lines = [f"peak {placed.peak_live_bytes} bytes alive"]
    for block in placed.blocks:
        shared = ", shared" if block.shared else ""
        lines.append(f"{block.purpose} on {block.device}{shared}: {block.nbytes} bytes")
        lines += [
            f"  {offset} to {offset + group.nbytes}: {_register(graph, group.root)}"
            for offset, group in sorted(
                (
                    (placed.offsets[group.root], group)
                    for group in stored.groups
                    if group.block == block.index
                ),
                key=lambda each: each[0],
            )
        ]
    return _text("offsets", graph, lines)


def _text(what: str, graph: RankTaskGraph, lines: Iterable[str]) -> str:
    head = f"{what} of {graph.rank_slice.job_name}, rank {graph.rank}"
    return "\n".join([head, *lines]) + "\n"


def _edges(ordered: OrderedTasks, edges: Edges) -> Iterable[str]:
    for before, after in sorted(set(edges)):
        names = ordered.tasks[after].name, ordered.tasks[before].name
        yield f"  [{after}] {names[0]} waits for [{before}] {names[1]}"


def _register(graph: RankTaskGraph, register: int) -> str:
    return f"%{graph.registers[register].name}"


def _alias(graph: RankTaskGraph, aliases: Aliases, register: int) -> str:
    how = "over" if register in aliases.overwrites else "view of"
    source = aliases.alias_of[register]
    return f"{_register(graph, register)} {how} {_register(graph, source)}"
