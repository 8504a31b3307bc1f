"""Text forms of the op graph, the boxing task graph and its slices: what a dump shows."""

from __future__ import annotations

from plancompiler.boxing.graph import BoxingTaskGraph, OpGraph, PlacedOp, RankSlice, TaskFamily
from plancompiler.ir import Op
from plancompiler.ir.task import TaskKind


def format_op_graph(graph: OpGraph) -> str:
    """One line per op with its signature."""
    lines = [f"op graph {graph.job.name}"]
    lines += [
        f"  {op.name} @{op.placement}: {signature}  # {op.source}"
        for op, signature in zip(graph.job.ops, graph.signatures, strict=True)
    ]
    return "\n".join(lines) + "\n"


def format_boxing_graph(graph: BoxingTaskGraph) -> str:
    """Ops and transport families in global order."""
    lines = [f"boxing task graph {graph.job_name}, {graph.world_size} ranks, seed {graph.seed}"]
    lines += _entries(graph.ops, graph.families)
    return "\n".join(lines) + "\n"


def format_slice(rank_slice: RankSlice) -> str:
    """What one rank is told, in global order."""
    lines = [f"slice of {rank_slice.job_name}, {rank_slice.world_size} ranks"]
    lines += _entries(rank_slice.ops, rank_slice.families)
    return "\n".join(lines) + "\n"


def _entries(ops: tuple[PlacedOp, ...], families: tuple[TaskFamily, ...]) -> list[str]:
    numbers = {placed.family for placed in ops}
    entries = [(placed.family, _format_op(placed)) for placed in ops]
    entries += [
        (family.number, _format_family(family))
        for family in families
        if family.number not in numbers
    ]
    return [text for _, text in sorted(entries)]


def _format_op(placed: PlacedOp) -> str:
    inputs = ", ".join(f"{source.family}.{source.slot}" for source in placed.inputs)
    return (
        f"  {placed.family}: {placed.op.kind} {placed.op.name}({inputs}) "
        f"@{placed.op.placement}: {placed.signature}{_micro(placed.op)}"
    )


def _micro(op: Op) -> str:
    """An op's segment, and its layouts over micro-batches."""
    micro = op.micro
    if micro is None:
        return ""
    inputs, outputs = (", ".join(map(str, sbps)) for sbps in (micro.inputs, micro.outputs))
    return f" in segment {micro.segment}, over micro-batches {inputs} -> {outputs}"


def _format_family(family: TaskFamily) -> str:
    inputs = ", ".join(f"{source.family}.{source.slot}" for source in family.inputs)
    outputs = ", ".join(
        f"{layout.dtype}{list(layout.shape)} {layout.sbp}" for layout in family.outputs
    )
    what = ""
    if family.transfer is not None:
        transfer = family.transfer
        what = f" {transfer.primitive}"
        if transfer.mesh_axes:
            what += f" along {transfer.mesh_axes}"
        if transfer.src_placement is not None:
            what += f" from {transfer.src_placement} {transfer.src_sbp}"
        if transfer.late:
            what += " late"
        if family.kind is TaskKind.COLLECTIVE_BOXING:
            what += f" on stream {transfer.stream}"
    if family.segment:
        what += f" in segment {family.segment}"
    head = f"  {family.number}: {family.kind}{what} {family.name}"
    return f"{head}({inputs}) @{family.placement}: {outputs}"
