"""ZeRO (S. Rajbhandari et al., 2020): training state split over the data-parallel mesh axes.

A parameter that is broadcast along those axes is stored in shards there, and so is its optimizer
state; the optimizer updates shards. What reads the parameter reads it in the user's layout again,
after an all-gather. The stages differ in when that happens and in what becomes of gradients:

    1   one gather per parameter and step; gradients are all-reduced, then cut to shards
    2   one gather per parameter and step; gradients are reduce-scattered to shards
    3   as 2, but a gathered parameter is freed when its layer is done and gathered again when the
        layer is next needed; gathers start `prefetch` layers ahead of their use

A gradient that backward casts to a wider dtype, as the program has cast its parameter, is reduced
before the cast, which then works on the shard.

What a layer is follows from the names of parameters: all up to the first number (`blocks.3.`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from plancompiler.errors import UsageError
from plancompiler.ir import (
    BROADCAST,
    Job,
    NdSbp,
    Op,
    Origin,
    Phase,
    Placement,
    Split,
    Value,
    freeze_attrs,
)
from plancompiler.ir.settings import Settings, option
from plancompiler.ir.shard import element_count, shard_region
from plancompiler.ops.registry import mesh_signatures, op_def
from plancompiler.passes.base import (
    PassResult,
    check_axes,
    counted,
    producers_of,
    readers_of,
    rewired,
    with_ops,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ZeroOptions(Settings, owner="zero"):
    """What is split, and along which axes."""

    zero: int = option(
        0,
        "What is split over the data-parallel axes: 1: optimizer state, 2: gradients too, 3: "
        "parameters too.",
        most=3,
        metavar="STAGE",
        asks=True,
    )
    prefetch: int = option(
        1, "With `zero=3`, layers whose parameters are gathered ahead of the one computed."
    )
    dp_axes: tuple[str, ...] = option(("dp",), "Mesh axes that are data-parallel.")


def split_training_state(job: Job, config: ZeroOptions) -> PassResult:
    """The job with parameters, optimizer state and gradients split as `config.zero` says.

    On one device along the data-parallel axes, shards are whole: the job stays as it is, which a
    warning says. Raises UsageError where a data-parallel axis is in no placement, and where there
    are several devices and nothing can be split.
    """
    if config.zero == 0:
        return PassResult(job, "off")
    check_axes(job, config.dp_axes, "zero", "dp_axes")
    if not any(_split_axes(op.placement, config.dp_axes) for op in job.ops):
        said = f"zero {config.zero} splits nothing: one device along {_listed(config.dp_axes)}"
        _log.warning("job %s: %s", job.name, said)
        return PassResult(job, said)
    facts = _analyse(job, config.dp_axes)
    shards = facts.shards
    if not shards:
        parameter = next(op for op in job.ops if op.kind == "variable")
        raise UsageError(
            "zero finds nothing to split",
            at=parameter,
            got=facts.notes[0]
            if facts.notes
            else "no trainable variable that an optimizer updates",
            expected=f"a trainable variable that is broadcast along {_listed(config.dp_axes)}",
            hint="leave zero out, or place variables that an optimizer updates broadcast along "
            "the data-parallel axes",
        )
    decisions = _decide(facts, config)
    states = sum(len(shard.variables) - 1 for shard in shards)
    before, after = (sum(each.nbytes(split) for each in shards) for split in (False, True))
    summary = (
        f"zero {config.zero} split {counted(len(shards), 'parameter')} and "
        f"{counted(states, 'state')} along {_listed(config.dp_axes)}: {before} to {after} bytes "
        f"per device; {counted(len(decisions.gathers), 'gather')}"
    )
    return PassResult(with_ops(job, _rewritten(facts, decisions)), summary, facts.notes)


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(axes)


# --- analysis: which variables can be split, and how ----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shard:
    """A parameter that is split, with its state."""

    parameter: Op
    """The parameter's variable op."""
    variables: tuple[Op, ...]
    """The variable ops that are split: the parameter's and its states'."""
    changes: tuple[Op, ...]
    """The ops that change them."""
    sbp: NdSbp
    """Their layout from now on."""

    @property
    def layout(self) -> NdSbp:
        """The layout that the user gave."""
        return _layout(self.parameter)

    @property
    def layer(self) -> tuple[str, ...]:
        """What parameters of one layer have in common: their names up to the first number."""
        parts = str(self.parameter.attr("name")).split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdigit()]
        return tuple(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)

    def nbytes(self, split: bool) -> int:
        """Bytes of the variables on the first device."""
        value, placement = self.parameter.outputs[0], self.parameter.placement
        sbp = self.sbp if split else self.layout
        region = shard_region(value.shape, placement.hierarchy, sbp, (0,) * placement.ndim)
        elements = element_count([stop - start for start, stop in region])
        return len(self.variables) * elements * value.dtype.itemsize


@dataclass(frozen=True)
class _Splittable:
    """A job, and what of it can be split."""

    job: Job
    shards: tuple[_Shard, ...]
    notes: tuple[str, ...]
    """Why other parameters are left alone."""

    @cached_property
    def readers(self) -> dict[str, list[Op]]:
        """The ops that read each value."""
        return readers_of(self.job)

    @cached_property
    def producers(self) -> dict[str, Op]:
        """The op that makes each value."""
        return producers_of(self.job)

    @cached_property
    def place(self) -> dict[str, int]:
        """Each op's place in the job."""
        return {op.name: place for place, op in enumerate(self.job.ops)}

    @cached_property
    def shard_of(self) -> dict[str, _Shard]:
        """By the name of a variable op or of an op that changes one."""
        return {
            op.name: shard for shard in self.shards for op in (*shard.variables, *shard.changes)
        }


def _analyse(job: Job, dp_axes: Sequence[str]) -> _Splittable:
    facts = _Splittable(job, (), ())
    shards, notes = [], []
    for op in job.ops:
        if op.kind != "variable" or op.attr("trainable") is not True:
            continue
        variables, changes = _state_of(op, facts)
        if not changes:
            continue
        sbp = _shard_layout(op.outputs[0], op.placement, _layout(op), dp_axes)
        if isinstance(sbp, str):
            notes.append(f"{op.attr('name')}: {sbp}")
            continue
        names = {variable.outputs[0].name for variable in variables}
        refusing = next((change for change in changes if not _splits(change, names, sbp)), None)
        if refusing is not None:
            notes.append(f"{op.attr('name')}: {refusing.kind} cannot work on {sbp}")
        else:
            shards.append(_Shard(op, variables, changes, sbp))
    return _Splittable(job, tuple(shards), tuple(notes))


def _layout(variable: Op) -> NdSbp:
    """A variable's layout; on mesh axes of one device all are broadcast."""
    placement = variable.placement
    given = variable.sbp or NdSbp.broadcast(placement.ndim)
    entries = zip(given.entries, placement.hierarchy, strict=True)
    return NdSbp(tuple(entry if extent > 1 else BROADCAST for entry, extent in entries))


def _changed(op: Op) -> Iterator[tuple[Value, Value]]:
    """The variables that an op changes, and their next values."""
    for target, source in op_def(op.kind).mutates:
        yield op.inputs[source], op.outputs[target]


def _state_of(parameter: Op, facts: _Splittable) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """A parameter with the state that goes with it, and the ops that change them.

    That is what is changed by an op that reads the parameter or its next value, and is of its shape
    on the same devices in the same layout. Nothing where no op changes the parameter itself.
    """
    value = parameter.outputs[0]
    variables = {value.name: parameter}
    changes: dict[str, Op] = {}

    def take(change: Op, before: Value) -> None:
        state = facts.producers[before.name]
        if (
            before.shape == value.shape
            and state.placement == parameter.placement
            and state.kind == "variable"
            and _layout(state) == _layout(parameter)
        ):
            variables[before.name] = state
            changes[change.name] = change

    nexts = [
        after
        for reader in facts.readers.get(value.name, ())
        for before, after in _changed(reader)
        if before.name == value.name
    ]
    if not nexts:
        return (), ()
    for read in (value, *nexts):
        for reader in facts.readers.get(read.name, ()):
            for before, _ in _changed(reader):
                take(reader, before)
    # And what such an op reads as it is changed in the same step: gradients of several steps.
    for reader in tuple(changes.values()):
        for read in reader.inputs:
            maker = facts.producers[read.name]
            for before, after in _changed(maker):
                if after.name == read.name:
                    take(maker, before)
    return tuple(variables.values()), tuple(changes.values())


def _split_axes(placement: Placement, dp_axes: Sequence[str]) -> list[int]:
    """The data-parallel mesh axes of a placement that have several devices."""
    return [
        axis
        for axis, name in enumerate(placement.axes or ())
        if name in dp_axes and placement.hierarchy[axis] > 1
    ]


def _shard_layout(
    value: Value, placement: Placement, layout: NdSbp, dp_axes: Sequence[str]
) -> NdSbp | str:
    """The layout that splits a value along the data-parallel axes too, or why there is none.

    Splits of one tensor axis nest in the order of mesh axes, so an axis that a mesh axis further in
    cuts already cannot be cut again further out. Of the others one with equal pieces is taken if
    there is one, else the longest.
    """
    mesh = _split_axes(placement, dp_axes)
    if not mesh:
        return f"{placement} has no second device along {_listed(dp_axes)}"
    if any(layout[axis] != BROADCAST for axis in mesh):
        return f"it is not broadcast along {_listed(dp_axes)}, but {layout}"
    inner = {
        entry.axis
        for axis, entry in enumerate(layout.entries)
        if isinstance(entry, Split) and axis > mesh[0]
    }
    options = [axis for axis, extent in enumerate(value.shape) if extent > 1 and axis not in inner]
    if not options:
        return f"no axis of {value.type} is left to split ({layout})"

    def split(tensor_axis: int) -> NdSbp:
        split_layout = layout
        for axis in mesh:
            split_layout = split_layout.replace(axis, Split(tensor_axis))
        return split_layout

    def pieces(tensor_axis: int) -> int:
        cutting = [
            extent
            for extent, entry in zip(placement.hierarchy, split(tensor_axis), strict=True)
            if entry == Split(tensor_axis)
        ]
        return element_count(cutting)

    best = max(options, key=lambda axis: (value.shape[axis] % pieces(axis) == 0, value.shape[axis]))
    return split(best)


def _splits(op: Op, variables: set[str], sbp: NdSbp) -> bool:
    """Whether an op can change these variables in this layout."""
    pairs = [
        (target, source)
        for target, source in op_def(op.kind).mutates
        if op.inputs[source].name in variables
    ]
    signatures = mesh_signatures(
        op.kind, op.input_types, op.output_types, op.attrs, op.placement.hierarchy
    )
    return any(
        all(
            signature.inputs[source] == signature.outputs[target] == sbp for target, source in pairs
        )
        and (op.sbp is None or all(output == sbp for output in signature.outputs))
        for signature in signatures
    )


# --- decisions: what is exchanged, and where ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A value that is stored in shards and gathered for its readers: a parameter, or its cast."""

    shard: _Shard
    value: Value
    readers: tuple[Op, ...]
    """Ops of forward and backward, in order."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A stretch of ops that keep a layer's parameters gathered."""

    layer: tuple[str, ...]
    start: int
    """Place of its first op in the job."""
    readers: list[tuple[Op, _Stored]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A value in another layout, for some of its readers."""

    value: Value
    layouts: tuple[tuple[str, NdSbp], ...]
    """The layouts that it goes through, each with the name of the value in it."""
    readers: tuple[Op, ...]
    before: Op
    """What the exchange stands before."""
    phase: Phase
    late: str | None = None
    """The op before which it may begin."""
    widening: tuple[Op, ...] = ()
    """What makes the value of a narrower one: a cast, and moves. That one is exchanged instead, and
    cast afterwards."""


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """What becomes of a job."""

    early: tuple[Op, ...]
    """Ops that move to the front, so that gathers can stand before any reader."""
    gathers: tuple[_Exchange, ...]
    """In a step."""
    reductions: tuple[_Exchange, ...]


def _decide(facts: _Splittable, config: ZeroOptions) -> _Exchanges:
    early: dict[str, Op] = {}
    stored = tuple(each for shard in facts.shards for each in _stored(shard, facts, early))
    visits = _visits(facts.job, stored, config.prefetch)
    wanted = (
        ((each, each.readers, None) for each in stored)
        if config.zero < 3
        else _gathers_of_visits(facts.job, visits, config.prefetch)
    )
    gathers = tuple(
        _Exchange(
            each.value,
            ((f"{each.value.name}:gather_{number}", each.shard.layout),),
            readers,
            readers[0],
            readers[0].origin.phase,
            late,
        )
        for number, (each, readers, late) in enumerate(one for one in wanted if one[1])
    )
    reductions: dict[str, _Exchange] = {}
    for shard in facts.shards:
        there = visits.get(shard.parameter.placement, ())
        for each in _reductions(shard, facts, there, config):
            # Two parameters that are added, such as biases of parallel branches, have one gradient.
            reductions.setdefault(each.value.name, each)
    return _Exchanges(tuple(early.values()), gathers, tuple(reductions.values()))


def _stored(shard: _Shard, facts: _Splittable, early: dict[str, Op]) -> Iterator[_Stored]:
    """What is gathered of a parameter: itself, and casts of it that are smaller than it. Adds the
    ops that make these to `early`.
    """
    variable = shard.parameter
    early[variable.name] = variable
    value = variable.outputs[0]
    readers = []
    for op in facts.readers[value.name]:
        if op.origin.phase is Phase.UPDATE or op.name in facts.shard_of:
            continue
        if op.kind == "cast" and op.outputs[0].dtype.itemsize < value.dtype.itemsize:
            early[op.name] = op
            cast = op.outputs[0]
            yield _Stored(shard, cast, tuple(facts.readers.get(cast.name, ())))
        else:
            readers.append(op)
    yield _Stored(shard, value, tuple(readers))


def _visits(job: Job, stored: Sequence[_Stored], prefetch: int) -> dict[Placement, list[_Visit]]:
    """Per placement, the visits to its layers in order of their first reader.

    A layer that is needed again while at most the prefetch window of others came between stays
    gathered: it would be in memory anyway.
    """
    reading: dict[str, list[_Stored]] = {}
    for each in stored:
        for reader in each.readers:
            reading.setdefault(reader.name, []).append(each)
    visits: dict[Placement, list[_Visit]] = {}
    for place, op in enumerate(job.ops):
        for each in reading.get(op.name, ()):
            there = visits.setdefault(each.value.placement, [])
            recent = there[-1 - prefetch :]
            visit = next((one for one in recent if one.layer == each.shard.layer), None)
            if visit is None:
                visit = _Visit(each.shard.layer, place)
                there.append(visit)
            visit.readers.append((op, each))
    return visits


def _gathers_of_visits(
    job: Job, visits: Mapping[Placement, Sequence[_Visit]], prefetch: int
) -> Iterator[tuple[_Stored, tuple[Op, ...], str]]:
    """The values of each visit, gathered from some visits ahead on."""
    for there in visits.values():
        for number, visit in enumerate(there):
            ahead = there[max(0, number - prefetch)]
            readers: dict[str, tuple[_Stored, list[Op]]] = {}
            for op, stored in visit.readers:
                readers.setdefault(stored.value.name, (stored, []))[1].append(op)
            for stored, ops in readers.values():
                yield stored, tuple(ops), job.ops[ahead.start].name


def _reductions(
    shard: _Shard, facts: _Splittable, visits: Sequence[_Visit], config: ZeroOptions
) -> Iterator[_Exchange]:
    """What reads a parameter's gradient for the update reads its shard.

    The shard is read a layer or two after the gradient was made, so that reductions overlap
    with backward and yet the whole gradients of a few layers at most are in memory.
    """
    for value in _gradients(shard, facts):
        made = facts.place[facts.producers[value.name].name]
        later = [visit.start for visit in visits if visit.start > made]
        readers = tuple(
            op for op in facts.readers[value.name] if op.origin.phase is not Phase.BACKWARD
        )
        # Layers may be visited after the update too, by what the program evaluates then.
        at = min((facts.place[readers[0].name], *later[config.prefetch :][:1]))
        whole = ((f"{value.name}:whole", shard.layout),) if config.zero == 1 else ()
        layouts = (*whole, (f"{value.name}:shard", shard.sbp))
        widening = _widening(value, facts) if len(readers) == len(facts.readers[value.name]) else ()
        yield _Exchange(
            value, layouts, readers, facts.job.ops[at], Phase.BACKWARD, widening=widening
        )


def _widening(value: Value, facts: _Splittable) -> tuple[Op, ...]:
    """The ops of backward that make a gradient of a narrower one, where a program has cast its
    parameter: a cast, and what alone reads its result and only moves elements, such as a transpose.
    Nothing where there is no such cast.
    """
    ops: list[Op] = []
    while True:
        op = facts.producers[value.name]
        if len(op.inputs) != 1 or op.origin.phase is not Phase.BACKWARD:
            return ()
        ops.append(op)
        (source,) = op.inputs
        if op.kind == "cast":
            narrows = source.dtype.is_floating and source.dtype.itemsize < value.dtype.itemsize
            return tuple(reversed(ops)) if narrows else ()
        if not op_def(op.kind).moves or len(facts.readers[source.name]) > 1:
            return ()
        value = source


def _gradients(shard: _Shard, facts: _Splittable) -> list[Value]:
    """What backward makes and a parameter's update reads, be it through other ops of its shape
    (clipping).
    """
    shape = shard.parameter.outputs[0].shape
    gradients: dict[str, Value] = {}
    pending = [value for change in shard.changes for value in change.inputs]
    seen: set[str] = set()
    while pending:
        value = pending.pop()
        op = facts.producers[value.name]
        fits = value.shape == shape and value.placement == shard.parameter.placement
        if value.name in seen or not fits or op.name in facts.shard_of:
            continue
        seen.add(value.name)
        if op.origin.phase is Phase.BACKWARD:
            gradients[value.name] = value
        else:
            pending.extend(op.inputs)
    return list(gradients.values())


# --- rewriting ------------------------------------------------------------------------------------


def _rewritten(facts: _Splittable, decisions: _Exchanges) -> Iterator[Op]:
    """All ops in their new order."""
    before: dict[str, list[Op]] = {}
    instead: dict[str, dict[str, Value]] = {}
    narrowed: dict[str, Op] = {}
    moved: set[str] = set()
    for each in (*decisions.gathers, *decisions.reductions):
        value, source = each.value, facts.producers[each.value.name].source
        if each.widening:
            cast, *moves = each.widening
            moved.add(cast.name)
            (value,) = cast.inputs
            for move in moves:
                made = replace(move.outputs[0], dtype=value.dtype)
                narrowed[move.name] = replace(move, inputs=(value,), outputs=(made,))
                value = made
        for name, sbp in each.layouts:
            attrs = freeze_attrs({} if each.late is None else {"late": each.late})
            made = replace(value, name=name)
            before.setdefault(each.before.name, []).append(
                Op(
                    *(name, "redistribute", (value,), (made,), attrs),
                    *(value.placement, sbp, source, Origin(each.phase)),
                )
            )
            value = made
        if each.widening:
            made = replace(each.value, name=f"{each.value.name}:wide")
            before[each.before.name].append(replace(cast, inputs=(value,), outputs=(made,)))
            value = made
        for reader in each.readers:
            instead.setdefault(reader.name, {})[each.value.name] = value
    early = {op.name for op in decisions.early}
    yield from (_laid_out(op, facts) for op in decisions.early)
    for op in facts.job.ops:
        if op.name not in early:
            yield from before.get(op.name, ())
            if op.name not in moved:
                left = rewired(narrowed.get(op.name, op), instead.get(op.name, {}))
                yield _laid_out(left, facts)


def _laid_out(op: Op, facts: _Splittable) -> Op:
    """Variables and the ops that change them, with their new layout."""
    shard = facts.shard_of.get(op.name)
    if shard is None or (op.sbp is None and op.kind != "variable"):
        return op
    return replace(op, sbp=shard.sbp)
