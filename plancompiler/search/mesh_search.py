"""The best layouts on every shape that a mesh of so many devices may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plancompiler.boxing.planner import BoxingStep, boxing_path
from plancompiler.costs import links_of, machine_of_job
from plancompiler.errors import UsageError
from plancompiler.ir import Job, NdSbp
from plancompiler.ir.task import TaskKind
from plancompiler.search.layout_search import GAP, ROUNDS, LayoutSearch, search_layouts
from plancompiler.search.mesh_shapes import is_open, meshes_of, placement_of, shapes_of, with_mesh
from plancompiler.search.tied_ops import tie_ops


def search_meshes(job: Job, memory_bytes: float | None) -> list[LayoutSearch]:
    """The best layouts for each shape of the job's mesh, the cheapest first, whose bound is a good
    one; of its own shape alone where something is placed. UsageError where none fits.
    """
    jobs = [job]
    if is_open(job) and len(meshes_of(job)) == 1:
        jobs = [with_mesh(job, shape) for shape in shapes_of(placement_of(job).size)]
    results, last = [], None
    for each in jobs:
        try:
            results.append(search_layouts(each, memory_bytes, certify=len(jobs) == 1))
        except UsageError as error:
            if len(jobs) == 1:
                raise
            last = error
    if not results and last is not None:
        raise last
    # Of equals, the mesh with fewer axes: it comes first, and sorting is stable.
    best, *others = sorted(results, key=lambda each: round(each.objective_seconds, 12))
    if best.gap > GAP and len(jobs) > 1:
        best = search_layouts(best.job, memory_bytes)
    return [best, *others]


@dataclass(frozen=True)
class BlockCollectives:
    """The collectives of one of a model's repeated blocks."""

    blocks: int
    """How many there are."""
    counts: Mapping[str, float]
    """Of one, by primitive."""


def collectives_per_block(result: LayoutSearch) -> BlockCollectives:
    """The collectives of a block: of values that about as many others are like as the model has
    blocks, or as often as there are of them in a block. Blocks near an end may differ.

    What a block does to parameters and gradients is among them.
    """
    of_values = collectives(result)
    groups = [group.names for group in tie_ops(result.job, ROUNDS[0]).groups]
    counts = Counter(len(names) for names in groups for _ in names)
    counts.pop(1, None)
    blocks = max(counts, key=lambda each: (counts[each], each), default=1)
    inside: dict[str, float] = {}
    for names in groups:
        if 2 * len(names) > blocks:
            in_block = round(len(names) / blocks)
            for kind, count in sum((of_values[name] for name in names), Counter()).items():
                inside[kind] = inside.get(kind, 0.0) + count * in_block / len(names)
    return BlockCollectives(blocks, inside)


def collectives(result: LayoutSearch) -> dict[str, Counter[str]]:
    """Those that each value goes through, by primitive."""
    job = result.job
    machine = machine_of_job(job)
    made = result.layouts()
    wanted: dict[str, dict[NdSbp, None]] = {}
    for op, signature in zip(job.ops, result.signatures, strict=True):
        for value, sbp in zip(op.inputs, signature.inputs, strict=True):
            wanted.setdefault(value.name, {})[sbp] = None
    counts: dict[str, Counter[str]] = {}
    for value in (value for op in job.ops for value in op.outputs):
        steps: dict[tuple[NdSbp, NdSbp], BoxingStep] = {}
        links = links_of(machine, value.placement)
        for sbp in wanted.get(value.name, ()):
            if sbp.has_halo:
                continue
            hierarchy = value.placement.hierarchy
            for step in boxing_path(made[value.name], sbp, *value.type, hierarchy, links):
                steps[step.before, step.after] = step
        counts[value.name] = Counter(
            str(step.primitive.name).lower()
            for step in steps.values()
            if step.kind is TaskKind.COLLECTIVE_BOXING
        )
    return counts
