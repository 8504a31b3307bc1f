"""Rules about what single tasks do: boxes of ops, collectives, slices, copies, outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from plancompiler.ir.shard import Region, balanced_range, element_count, region_shape
from plancompiler.ir.task import Primitive, TaskKind, family_of
from plancompiler.plan.index import PlanIndex
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Group,
    Piece,
    RegisterDesc,
    SliceSpec,
    Task,
    communicator_of,
)
from plancompiler.plan.text import format_region, format_shape

_SPEC_OF_KIND: dict[TaskKind, type[object]] = {
    TaskKind.COMPUTE: ComputeSpec,
    TaskKind.INPUT: ComputeSpec,
    TaskKind.VARIABLE: ComputeSpec,
    TaskKind.OUTPUT: ComputeSpec,
    TaskKind.COLLECTIVE_BOXING: CollectiveSpec,
    TaskKind.COPY_COMM_NET: CopySpec,
    TaskKind.SEND_RECV: CopySpec,
    TaskKind.COPY_HD: SliceSpec,
    TaskKind.SLICE_BOXING: SliceSpec,
    TaskKind.BOXING_ZEROS: SliceSpec,
    TaskKind.BOXING_IDENTITY: SliceSpec,
    TaskKind.STEP_END: type(None),
}

_REDUCING = (Primitive.ALL_REDUCE, Primitive.REDUCE_SCATTER)
_GATHERING = (Primitive.ALL_GATHER, Primitive.ALL_TO_ALL)
_SCATTERING = (Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL)


def check_specs(index: PlanIndex) -> None:
    """A task's spec is of its kind; transport has one output."""
    for task in index.plan.tasks:
        wanted = _SPEC_OF_KIND.get(task.kind)
        if wanted is not None and type(task.spec) is not wanted:
            raise index.broken(
                f"{task.name!r} has a spec of another kind of task",
                task,
                got=type(task.spec).__name__,
                expected=f"{wanted.__name__} for {task.kind}",
            )
        if not _register_count_fits(task):
            raise index.broken(
                f"{task.name!r} has a wrong number of registers",
                task,
                got=f"{len(task.inputs)} inputs and {len(task.outputs)} outputs",
                expected="one output, and one input but for slices; as many of both for "
                "collectives",
            )


def _register_count_fits(task: Task) -> bool:
    if isinstance(task.spec, CollectiveSpec):
        return len(task.inputs) == len(task.outputs) >= 1
    if isinstance(task.spec, CopySpec):
        return len(task.inputs) == len(task.outputs) == 1
    return not isinstance(task.spec, SliceSpec) or len(task.outputs) == 1


def check_boxes(index: PlanIndex) -> None:
    """An op's registers have the shapes of the boxes that it computes on."""
    registers = index.plan.register_by_id
    for task, spec in index.tasks_with(ComputeSpec):
        for keys, shapes, regions in (
            (task.inputs, spec.input_shapes, spec.input_regions),
            (task.outputs, spec.output_shapes, spec.output_regions),
        ):
            if not len(keys) == len(shapes) == len(regions):
                raise index.broken(
                    f"{task.name!r} has another number of registers than its op",
                    task,
                    got=f"{len(keys)} registers",
                    expected=f"{len(shapes)} shapes and {len(regions)} boxes",
                )
            for key, shape, region in zip(keys, shapes, regions, strict=True):
                register = registers[key]
                if not _is_box(region, shape, register.shape):
                    raise index.broken(
                        f"{task.name!r} computes on a box that {index.register_name(key)} is not",
                        task,
                        got=f"shape {format_shape(register.shape)}",
                        expected=f"box {format_region(region)} of {format_shape(shape)}",
                    )


@lru_cache(maxsize=4096)
def _is_box(region: Region, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
    """Whether a box of a tensor has this shape. Few differ in a plan, so answers are kept."""
    return _inside(region, shape) and region_shape(region) == local


def check_communicators(index: PlanIndex) -> None:
    """A group of ranks, this one among them, has one communicator for each stream on which it has
    collectives, with these in order.

    The communicator's stream runs them: members meet in the order in which each of them comes, and
    streams come in any order.
    """
    plan = index.plan
    groups: set[Group] = set()
    families: list[list[int]] = [[] for _ in plan.communicators]
    for task in plan.tasks:
        used = communicator_of(task.spec)
        if used is None:
            continue
        if not 0 <= used < len(families):
            raise index.broken(
                f"{task.name!r} uses a communicator that does not exist",
                task,
                got=f"communicator {used}",
                expected=f"one of {len(families)}",
            )
        families[used].append(family_of(task.id))
        expected = plan.communicators[used].stream
        if task.stream is not expected:
            raise index.broken(
                f"{task.name!r} is on another stream than its communicator",
                task,
                got=f"stream {task.stream}",
                expected=f"stream {expected}, on which all collectives of communicator {used} are",
            )
    for number, communicator in enumerate(plan.communicators):
        ranks, group = communicator.ranks, communicator.group
        if plan.rank not in ranks or len(set(ranks)) != len(ranks) or group in groups:
            raise index.broken(
                f"communicator {number} is not one of this rank, or its ranks have another one",
                got=f"ranks {group}",
                expected=f"distinct ranks with {plan.rank} among them, once per group of ranks "
                "and stream",
            )
        groups.add(group)
        if list(communicator.families) != families[number]:
            raise index.broken(
                f"communicator {number} lists its collectives in another order than the plan "
                "runs them",
                got=f"families {', '.join(map(str, communicator.families))}",
                expected=f"families {', '.join(map(str, families[number]))}",
            )


def check_collectives(index: PlanIndex) -> None:
    """A collective's registers have the shapes that its primitive gives this member."""
    registers, communicators = index.plan.register_by_id, index.plan.communicators
    for task, spec in index.tasks_with(CollectiveSpec):
        if (spec.reduction is not None) is not (spec.primitive in _REDUCING):
            raise index.broken(
                f"{task.name!r} has a reduction where its primitive has none, or lacks one",
                task,
                got=f"{spec.primitive} with reduction {spec.reduction}",
                expected="a reduction for all_reduce and reduce_scatter only",
            )
        ranks = communicators[spec.communicator].ranks
        for source, target in zip(task.inputs, task.outputs, strict=True):
            before, after = registers[source], registers[target]
            expected = collective_shapes(spec, before, after, ranks, index.plan.rank)
            if expected == (before.shape, after.shape) and before.dtype is after.dtype:
                continue
            raise index.broken(
                f"{task.name!r} has registers that do not fit its primitive",
                task,
                got=f"{before.dtype}{format_shape(before.shape)} -> "
                f"{after.dtype}{format_shape(after.shape)}",
                expected="axes of the tensor for its primitive"
                if expected is None
                else f"{format_shape(expected[0])} -> {format_shape(expected[1])} of one dtype for "
                f"{spec.primitive} among {len(ranks)} ranks",
            )


def collective_shapes(
    spec: CollectiveSpec,
    before: RegisterDesc,
    after: RegisterDesc,
    ranks: tuple[int, ...],
    rank: int,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Input and output shape that a member must have; None where the axes make no sense."""
    full = collective_extents(spec, before.shape, after.shape)
    if full is None or rank not in ranks:
        return None
    member = ranks.index(rank)
    source, target = list(full), list(full)
    if spec.primitive in _GATHERING:
        start, stop = balanced_range(full[spec.src_axis], len(ranks), member)
        source[spec.src_axis] = stop - start
    if spec.primitive in _SCATTERING:
        start, stop = balanced_range(full[spec.dst_axis], len(ranks), member)
        target[spec.dst_axis] = stop - start
    return tuple(source), tuple(target)


def collective_extents(
    spec: CollectiveSpec, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Shape of the value that all members hold together; None where the axes make no sense."""
    ndim = len(before)
    gathers, scatters = spec.primitive in _GATHERING, spec.primitive in _SCATTERING
    known = gathers or scatters or spec.primitive is Primitive.ALL_REDUCE
    if not known or len(after) != ndim:
        return None
    if gathers != (0 <= spec.src_axis < ndim) or scatters != (0 <= spec.dst_axis < ndim):
        return None
    if gathers and spec.src_axis == spec.dst_axis:
        return None
    full = list(before)
    if gathers:
        full[spec.src_axis] = after[spec.src_axis]
    return tuple(full)


def check_slices(index: PlanIndex) -> None:
    """Pieces lie inside their registers; copied pieces cover the output exactly once."""
    registers = index.plan.register_by_id
    for task, spec in index.tasks_with(SliceSpec):
        output = registers[task.outputs[0]]
        for piece in spec.pieces:
            _check_piece(index, task, piece, output)
        if spec.reduction is not None:
            continue
        targets = [piece.target for piece in spec.pieces]
        volume = sum(element_count(region_shape(target)) for target in targets)
        twice = _overlapping(targets)
        if twice is not None or volume != element_count(output.shape):
            raise index.broken(
                f"the pieces of {task.name!r} do not cover its output exactly once",
                task,
                got=f"{volume} elements"
                if twice is None
                else f"{format_region(twice[0])} and {format_region(twice[1])} overlap",
                expected=f"each of {element_count(output.shape)} elements of "
                f"{format_shape(output.shape)} once",
            )


def _check_piece(index: PlanIndex, task: Task, piece: Piece, output: RegisterDesc) -> None:
    if not 0 <= piece.input < len(task.inputs):
        raise index.broken(
            f"a piece of {task.name!r} comes from an input that the task does not have",
            task,
            got=f"input {piece.input}",
            expected=f"one of {len(task.inputs)} inputs",
        )
    source = index.plan.register_by_id[task.inputs[piece.input]]
    if (
        not _inside(piece.source, source.shape)
        or not _inside(piece.target, output.shape)
        or region_shape(piece.source) != region_shape(piece.target)
        or source.dtype is not output.dtype
    ):
        raise index.broken(
            f"a piece of {task.name!r} does not fit its registers",
            task,
            got=f"{format_region(piece.source)} -> {format_region(piece.target)}",
            expected=f"boxes of one shape inside {source.dtype}{format_shape(source.shape)} and "
            f"{output.dtype}{format_shape(output.shape)}",
        )


def _inside(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region) == len(shape) and all(
        0 <= start <= stop <= extent for (start, stop), extent in zip(region, shape, strict=True)
    )


def _overlapping(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two boxes that have an element in common, or None. A sweep along the first axis."""
    ordered = sorted(region for region in regions if all(start < stop for start, stop in region))
    for at, region in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if region and other[0][0] >= region[0][1]:
                break
            if all(
                start < other_stop and other_start < stop
                for (start, stop), (other_start, other_stop) in zip(region, other, strict=True)
            ):
                return region, other
    return None


def check_copies(index: PlanIndex) -> None:
    """A CopyCommNet reads a box inside the remote register, of its output's shape and dtype."""
    for task, spec in index.tasks_with(CopySpec):
        remote = index.plan.remote_register_by_id[task.inputs[0]]
        output = index.plan.register_by_id[task.outputs[0]]
        if (
            not _inside(spec.region, remote.shape)
            or region_shape(spec.region) != output.shape
            or remote.dtype is not output.dtype
        ):
            raise index.broken(
                f"{task.name!r} reads a box that does not fit its registers",
                task,
                got=f"{format_region(spec.region)} into {output.dtype}{format_shape(output.shape)}",
                expected=f"a box of the output's shape inside "
                f"{remote.dtype}{format_shape(remote.shape)}",
            )


def check_outputs(index: PlanIndex) -> None:
    """An output is an input of a task of kind Output."""
    names: set[str] = set()
    for output in index.plan.outputs:
        task = index.plan.task_by_id.get(output.task)
        if (
            task is None
            or task.kind is not TaskKind.OUTPUT
            or output.register not in task.inputs
            or output.name in names
        ):
            raise index.broken(
                f"output {output.name!r} is not what one task of kind Output reads",
                task,
                got=f"{index.register_name(output.register)} of {index.task_name(output.task)}"
                + (", a second time" if output.name in names else ""),
                expected="an input of a task of kind Output, and a name of its own",
            )
        names.add(output.name)
