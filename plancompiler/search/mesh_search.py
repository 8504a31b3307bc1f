"""The best layouts on every shape that a mesh of so many devices may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
    """The collectives of a block: of values that as many others are like as the model has blocks.

    What a block does to parameters and gradients is among them.
    """
    groups = tie_ops(result.job, ROUNDS[0]).groups
    times = {name: len(group.names) for group in groups for name in group.names}
    counts = Counter(times.values())
    counts.pop(1, None)
    if not counts:
        return BlockCollectives(1, collectives(result, times))
    blocks = max(counts, key=lambda each: (counts[each], each))
    inside = collectives(result, [name for name, count in times.items() if count == blocks])
    return BlockCollectives(blocks, {kind: count / blocks for kind, count in inside.items()})


def collectives(result: LayoutSearch, names: Iterable[str]) -> dict[str, float]:
    """Those that values with these names go through, by primitive."""
    job, chosen = result.job, set(names)
    machine = machine_of_job(job)
    made = result.layouts()
    wanted: dict[str, dict[NdSbp, None]] = {}
    values = {value.name: value for op in job.ops for value in op.outputs}
    for op, signature in zip(job.ops, result.signatures, strict=True):
        for value, sbp in zip(op.inputs, signature.inputs, strict=True):
            wanted.setdefault(value.name, {})[sbp] = None
    counts: Counter[str] = Counter()
    for name, value in values.items():
        if name not in chosen:
            continue
        steps: dict[tuple[NdSbp, NdSbp], BoxingStep] = {}
        links = links_of(machine, value.placement)
        for sbp in wanted.get(name, ()):
            if sbp.has_halo:
                continue
            hierarchy = value.placement.hierarchy
            for step in boxing_path(made[name], sbp, *value.type, hierarchy, links):
                steps[step.before, step.after] = step
        counts.update(
            str(step.primitive.name).lower()
            for step in steps.values()
            if step.kind is TaskKind.COLLECTIVE_BOXING
        )
    return dict(counts)
