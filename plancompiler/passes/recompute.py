"""Recomputation (T. Chen et al., 2016): activations are made again for backward instead of kept.

A *region* is what one call of a checkpointed module or function made. Its inputs, and what ops of
forward outside read of it, are kept. For all else that backward reads of it, its ops are repeated
right before their first reader there; so what lies between is freed after forward.

The copies give the same numbers: random ops follow from their key, the step and the element. Ops
with an effect besides their outputs cannot be repeated, and a region that holds one is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from plancompiler.errors import UsageError
from plancompiler.ir import Job, Op, Origin, Phase, Value
from plancompiler.ir.settings import Settings, option
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import op_def
from plancompiler.passes.base import PassResult, counted, readers_of, rewired, with_ops

AGAIN = ":again"
"""Ends the names of copies."""


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions(Settings, owner="recompute"):
    """Memory for time."""

    recompute: str = option(
        "none",
        "What is computed again for backward: `none`: what the job marks; `auto`: the compiler "
        "chooses among the calls of transformer blocks.",
        choices=("none", "auto"),
        metavar="HOW",
        asks=True,
    )
    memory_bytes: int = option(
        0,
        "With `recompute=auto` or `layout=auto`, most bytes that a device may take; 0: no limit "
        "for layouts, and as few as can be for recomputation.",
    )

    def check(self) -> None:
        layout = getattr(self, "layout", "given")
        if self.memory_bytes and self.recompute != "auto" and layout != "auto":
            raise UsageError(
                "memory_bytes is what recompute=auto and layout=auto keep to",
                got=f"memory_bytes={self.memory_bytes} recompute={self.recompute}",
                expected="recompute=auto, or layout=auto",
            )


def recompute_regions(job: Job) -> PassResult:
    """The job with the ops of checkpointed regions repeated for backward.

    Raises UsageError for a region with a side effect.
    """
    regions = {name: region for name, region in regions_of(job).items() if region.checkpoint}
    if not regions:
        return PassResult(job, "no call is checkpointed")
    readers = readers_of(job)
    copies: dict[str, list[Op]] = {}
    instead: dict[str, Value] = {}
    notes = []
    kept = 0
    for name, region in regions.items():
        effect = region.effect
        if effect is not None:
            raise _side_effect_error(name, effect)
        needed = _needed(region, readers)
        repeated = _repeat(region, needed, readers)
        if not repeated:
            notes.append(f"{name}: backward reads nothing that is not kept anyway")
            continue
        first = next(
            op
            for op in job.ops
            if op.origin.phase is not Phase.FORWARD
            and any(value.name in needed for value in op.inputs)
        )
        copies.setdefault(first.name, []).extend(repeated)
        instead.update((value.name, _again(value)) for value in needed.values())
        kept += sum(element_count(v.shape) * v.dtype.itemsize for v in needed.values())
    ops: list[Op] = []
    for op in job.ops:
        ops.extend(copies.get(op.name, ()))
        ops.append(op if op.origin.phase is Phase.FORWARD else rewired(op, instead))
    repeated_ops = len(ops) - len(job.ops)
    summary = (
        f"repeats {counted(repeated_ops, 'op')} of {counted(len(regions), 'region')}, so that "
        f"{kept} bytes (of global values) need not be kept for backward"
    )
    return PassResult(with_ops(job, ops), summary, tuple(notes))


def _side_effect_error(name: str, op: Op) -> UsageError:
    return UsageError(
        f"{name} cannot be computed again: it holds an op with a side effect",
        at=op,
        got=op.kind,
        expected="ops that only compute their outputs: no inputs, data files, outputs or updates",
        hint="move this op out of what is checkpointed",
    )


# --- regions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """What one call of a module or function made in forward, in order."""

    ops: tuple[Op, ...]
    checkpoint: bool
    """Whether it is to be computed again."""

    @property
    def effect(self) -> Op | None:
        """An op that does more than to compute its outputs."""
        for op in self.ops:
            definition = op_def(op.kind)
            if op.kind in ("input", "output") or definition.mutates or definition.source:
                return op
        return None


def regions_of(job: Job) -> dict[str, Region]:
    """All regions by name, in order. Variables belong to none: they are there anyway."""
    regions: dict[str, list[Op]] = {}
    for op in job.ops:
        origin = op.origin
        if origin.region and origin.phase is Phase.FORWARD and op.kind != "variable":
            regions.setdefault(origin.region, []).append(op)
    return {
        name: Region(tuple(ops), any(op.origin.checkpoint for op in ops))
        for name, ops in regions.items()
    }


def with_checkpoints(job: Job, names: Collection[str]) -> Job:
    """The job with these regions checkpointed too."""
    return with_ops(
        job,
        (
            replace(op, origin=replace(op.origin, checkpoint=True))
            if op.origin.region in names
            else op
            for op in job.ops
        ),
    )


def freed_values(job: Job) -> dict[str, list[str]]:
    """By region, the names of the values that need not be kept if it is computed again."""
    readers = readers_of(job)
    return {name: [*_needed(region, readers)] for name, region in regions_of(job).items()}


# --- copies ---------------------------------------------------------------------------------------


def _needed(region: Region, readers: dict[str, list[Op]]) -> dict[str, Value]:
    """What backward reads of a region and forward outside does not, which would have to be kept."""
    return {
        value.name: value
        for value in _freed(region, readers)
        if any(reader.origin.phase is not Phase.FORWARD for reader in readers.get(value.name, ()))
    }


def _freed(region: Region, readers: dict[str, list[Op]]) -> Iterator[Value]:
    """The values of a region that no op of forward outside reads."""
    inside = {op.name for op in region.ops}
    for op in region.ops:
        for value in op.outputs:
            if not any(
                reader.origin.phase is Phase.FORWARD and reader.name not in inside
                for reader in readers.get(value.name, ())
            ):
                yield value


def _repeat(
    region: Region, needed: dict[str, Value], readers: dict[str, list[Op]]
) -> tuple[Op, ...]:
    """Copies of the ops of a region that lead to the needed values, from what is kept."""
    freed = {value.name for value in _freed(region, readers)}
    wanted = set(needed)
    chosen = []
    for op in reversed(region.ops):
        if any(value.name in wanted for value in op.outputs):
            chosen.append(op)
            wanted.update(value.name for value in op.inputs if value.name in freed)
    instead = {value.name: _again(value) for op in chosen for value in op.outputs}
    # What is kept is read as it is, though an op that makes it may be repeated for another output.
    instead = {name: value for name, value in instead.items() if name in freed}
    return tuple(
        replace(
            rewired(op, instead),
            name=op.name + AGAIN,
            outputs=tuple(map(_again, op.outputs)),
            origin=Origin(Phase.BACKWARD, stage=op.origin.stage),
        )
        for op in reversed(chosen)
    )


def _again(value: Value) -> Value:
    return replace(value, name=value.name + AGAIN)
