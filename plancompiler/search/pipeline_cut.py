"""A job of one mesh, cut into pipeline stages: its ops on the meshes of a row of stages.

Forward ops are cut where little passes from one op to the next, so that all chunks have about the
same work; calls that may be computed again stay whole. Gradients go where the op lies whose they
are, parameters and what updates them where they are read. Between stages values are moved by
`redistribute`, as in a model that is placed by hand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from plancompiler.costs import machine_of_job, op_seconds
from plancompiler.errors import UsageError
from plancompiler.ir import Job, Op, Phase, Placement, Value
from plancompiler.ir.op import Origin
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import flops_of, op_def, pointwise_of
from plancompiler.search.mesh_shapes import is_open, placement_of

CUT_AXES = ("dp", "tp", "cp")
"""What the axes of a stage's mesh are called."""


def with_stages(
    job: Job,
    stages: int,
    shape: tuple[int, ...],
    chunks: int | None = None,
    axes: tuple[str, ...] | None = None,
) -> Job:
    """The job on `stages` meshes of this shape, in `chunks` runs of ops that are dealt to them in
    turn; by default one each.

    UsageError where the meshes do not have as many devices as the job, where something is placed
    already, and where the model has fewer places to cut.
    """
    old = placement_of(job)
    size = element_count(shape)
    count = stages if chunks is None else chunks
    if not is_open(job):
        raise UsageError(
            "a job with layouts of its own is not cut into stages",
            at=next(op for op in job.ops if op.sbp is not None),
            hint="take the layouts away, or place the stages in the model",
        )
    if stages * size != old.size or count % stages:
        raise UsageError(
            "the stages do not have the job's devices",
            got=f"{count} chunks on {stages} stages of {list(shape)} devices",
            expected=f"{old.size} devices, and a whole number of chunks on each stage",
        )
    ranks = np.array(old.rank_list).reshape(stages, *shape)
    names = axes or CUT_AXES[: len(shape)]
    meshes = [Placement(old.device_type, ranks[stage], names) for stage in range(stages)]
    if count == 1:
        return _Cutting(job, dict.fromkeys((op.name for op in job.ops), 0), meshes, False).job()
    return _Cutting(job, chunk_of_ops(job, count), meshes, True).job()


# --- which chunk an op belongs to -----------------------------------------------------------------


def chunk_of_ops(job: Job, chunks: int) -> dict[str, int]:
    """The chunk of every op, by its name; of ops without inputs only where they are variables or
    inputs, as the others are made wherever they are read.
    """
    maker = {value.name: op for op in job.ops for value in op.outputs}
    forward = [op for op in job.ops if op.inputs and op.origin.phase is Phase.FORWARD]
    starts = _starts(job, forward, chunks)
    of = {}
    for place, op in enumerate(forward):
        of[op.name] = bisect_left(starts, place + 1) - 1
    last_reader: dict[str, int] = {}
    for op in forward:
        for value in op.inputs:
            last_reader[value.name] = max(last_reader.get(value.name, 0), of[op.name])
            source = maker[value.name]
            if not source.inputs:
                of[source.name] = min(of.get(source.name, chunks), of[op.name])
    # Differentiation walks back: the chunks of gradients only go down, and an op of a gradient
    # reads what its own forward op read or made.
    reached = chunks - 1
    for op in job.ops:
        if op.name in of or not op.inputs:
            continue
        read = [value for value in op.inputs if maker[value.name].origin.phase is Phase.FORWARD]
        if op.origin.phase is Phase.BACKWARD:
            bounds = [
                max(last_reader.get(each.name, 0), of.get(maker[each.name].name, 0))
                for each in read
            ]
            reached = min([reached, *bounds])
            of[op.name] = reached
        else:
            changed = [op.inputs[source] for _, source in op_def(op.kind).mutates]
            known = [of[maker[each.name].name] for each in changed if maker[each.name].name in of]
            known += [
                of[maker[each.name].name] for each in op.inputs if maker[each.name].name in of
            ]
            of[op.name] = known[0] if known else 0
        for value in op.inputs:
            source = maker[value.name]
            if source.kind in ("variable", "input"):
                of.setdefault(source.name, of[op.name])
    for op in job.ops:
        if op.kind in ("variable", "input"):
            of.setdefault(op.name, 0)
    return of


def _starts(job: Job, forward: Sequence[Op], chunks: int) -> list[int]:
    """Where the chunks begin in a list of ops: where the chunk before has an even share of work,
    or near there, where less has to be moved.
    """
    machine = machine_of_job(job)
    work = [
        op_seconds(
            machine,
            flops_of(op.kind, op.input_types, op.output_types, dict(op.attrs)),
            0.0 if op_def(op.kind).view else sum(map(_bytes, (*op.inputs, *op.outputs))),
            (op.outputs or op.inputs)[0].dtype,
            pointwise_of(op.kind, op.input_types, op.output_types, dict(op.attrs)),
        )
        for op in forward
    ]
    done = list(accumulate(work, initial=0.0))
    per_byte = 1.0 / (machine.network or machine.node).bytes_per_second
    moving = {place: 2 * per_byte * nbytes for place, nbytes in _places(forward)}
    starts = [0]
    for chunk in range(1, chunks):
        wanted = done[-1] * chunk / chunks
        later = [place for place in moving if place > starts[-1]]
        if len(later) < chunks - chunk:
            raise UsageError(
                "the model has fewer places to cut than the pipeline has chunks",
                got=f"{chunks} chunks, and {len(moving)} places between calls and ops",
                hint="use fewer stages or chunks",
            )
        free = later[: len(later) - (chunks - chunk - 1)]
        # Backward does what forward does, twice; what is moved comes back once.
        starts.append(
            min(free, key=lambda place: (3 * abs(done[place] - wanted) + moving[place], place))
        )
    return starts


def _places(forward: Sequence[Op]) -> Iterator[tuple[int, int]]:
    """Places before which a list of ops may be cut, with the bytes that pass there: all but those
    within calls that may be computed again.
    """
    maker = {value.name for op in forward for value in op.outputs}
    ends = {
        value.name: place
        for place, op in enumerate(forward)
        for value in op.inputs
        if value.name in maker
    }
    region_ends = {op.origin.region: place for place, op in enumerate(forward) if op.origin.region}
    leaving = [0] * (len(forward) + 1)
    alive, inside = 0, -1
    for place, op in enumerate(forward):
        alive -= leaving[place]
        if place and inside < place:
            yield place, alive
        if op.origin.region:
            inside = max(inside, region_ends[op.origin.region])
        for value in op.outputs:
            if value.name in ends:
                alive += _bytes(value)
                leaving[ends[value.name] + 1] += _bytes(value)


def _bytes(value: Value) -> int:
    return element_count(value.shape) * value.dtype.itemsize


# --- the job on its stages ------------------------------------------------------------------------


class _Cutting:
    """Puts ops on the meshes of their chunks, and moves what they read."""

    def __init__(
        self, job: Job, chunk: Mapping[str, int], meshes: Sequence[Placement], named: bool
    ) -> None:
        self._job, self._chunk, self._meshes, self._named = job, chunk, meshes, named
        self._maker = {value.name: op for op in job.ops for value in op.outputs}
        self._there: dict[tuple[str, int], Value] = {}
        """Values by their name and the stage on which they are; by chunk where they are free."""
        self._open = set(job.open_layouts)
        self._ops: list[Op] = []

    def job(self) -> Job:
        for op in self._job.ops:
            if self._is_free(op):
                continue  # made where it is read
            chunk = self._chunk[op.name]
            inputs = tuple(self._read(value, op, chunk) for value in op.inputs)
            self._put(op, op.name, inputs, chunk)
        return replace(self._job, ops=tuple(self._ops), open_layouts=frozenset(self._open))

    def _is_free(self, op: Op) -> bool:
        return not op.inputs and op.kind not in ("variable", "input")

    def _put(self, op: Op, name: str, inputs: tuple[Value, ...], chunk: int) -> None:
        mesh = self._meshes[chunk % len(self._meshes)]
        suffix = name.removeprefix(op.name)
        outputs = tuple(
            replace(value, name=value.name + suffix, placement=mesh) for value in op.outputs
        )
        origin = replace(op.origin, stage=chunk) if self._named else op.origin
        self._ops.append(
            replace(op, name=name, inputs=inputs, outputs=outputs, placement=mesh, origin=origin)
        )
        key = chunk if self._is_free(op) else chunk % len(self._meshes)
        for value, made in zip(op.outputs, outputs, strict=True):
            self._there[value.name, key] = made
            if value.name in self._open:
                self._open.add(made.name)

    def _read(self, value: Value, reader: Op, chunk: int) -> Value:
        """The value on the mesh of a chunk."""
        source = self._maker[value.name]
        if self._is_free(source):
            if (value.name, chunk) not in self._there:
                again = any(each[0] == value.name for each in self._there)
                self._put(source, source.name + (f":chunk{chunk}" if again else ""), (), chunk)
            return self._there[value.name, chunk]
        stage = chunk % len(self._meshes)
        known = self._there.get((value.name, stage))
        if known is not None:
            return known
        mesh = self._meshes[stage]
        held = self._there[value.name, self._chunk[source.name] % len(self._meshes)]
        moved = replace(value, name=f"{value.name}:stage{stage}", placement=mesh)
        self._ops.append(
            Op(
                moved.name,
                "redistribute",
                (held,),
                (moved,),
                (),
                mesh,
                None,
                reader.source,
                Origin(reader.origin.phase, stage=chunk if self._named else -1),
            )
        )
        self._there[value.name, stage] = moved
        return moved
