"""ZeRO (S. Rajbhandari et al., 2020): training state split over the data-parallel mesh axes.

A parameter that is broadcast along those axes is stored in shards there, and so is its optimizer
state; the optimizer updates shards. What reads the parameter reads it in the user's layout again,
after an all-gather. The stages differ in when that happens and in what becomes of gradients:

    1   one gather per parameter and step; gradients are all-reduced, then cut to shards
    2   one gather per parameter and step; gradients are reduce-scattered to shards
    3   as 2, but a gathered parameter is freed when its layer is done and gathered again when the
        layer is next needed; gathers start `prefetch` layers ahead of their use

What a layer is follows from the names of parameters: all up to the first number (`blocks.3.`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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
    shards, notes = _find_shards(job, config.dp_axes)
    if not shards:
        parameter = next(op for op in job.ops if op.kind == "variable")
        raise UsageError(
            "zero finds nothing to split",
            op=parameter.name,
            source=parameter.source,
            got=notes[0] if notes else "no trainable variable that an optimizer updates",
            expected=f"a trainable variable that is broadcast along {_listed(config.dp_axes)}",
            hint="leave zero out, or place variables that an optimizer updates broadcast along "
            "the data-parallel axes",
        )
    rewrite = _Rewrite(job, config, shards)
    states = sum(len(shard.variables) - 1 for shard in shards)
    before, after = (sum(each.nbytes(split) for each in shards) for split in (False, True))
    summary = (
        f"zero {config.zero} split {counted(len(shards), 'parameter')} and "
        f"{counted(states, 'state')} along {_listed(config.dp_axes)}: {before} to {after} bytes "
        f"per device; {counted(rewrite.gathers, 'gather')}"
    )
    return PassResult(with_ops(job, rewrite.ops()), summary, tuple(notes))


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(axes)


# --- which variables are split, and how -----------------------------------------------------------


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


def _layout(variable: Op) -> NdSbp:
    """A variable's layout; on mesh axes of one device all are broadcast."""
    given = variable.sbp or NdSbp.broadcast(variable.placement.ndim)
    return _canonical(given, variable.placement)


def _canonical(sbp: NdSbp, placement: Placement) -> NdSbp:
    entries = zip(sbp.entries, placement.hierarchy, strict=True)
    return NdSbp(tuple(entry if extent > 1 else BROADCAST for entry, extent in entries))


def _find_shards(job: Job, dp_axes: Sequence[str]) -> tuple[list[_Shard], list[str]]:
    """Parameters to split, and why others are left alone."""
    readers, producers = readers_of(job), producers_of(job)
    found, notes = [], []
    for op in job.ops:
        if op.kind != "variable" or op.attr("trainable") is not True:
            continue
        variables, changes = _state_of(op, readers, producers)
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
            found.append(_Shard(op, variables, changes, sbp))
    return found, notes


def _changed(op: Op) -> Iterator[tuple[Value, Value]]:
    """The variables that an op changes, and their next values."""
    for target, source in op_def(op.kind).mutates:
        yield op.inputs[source], op.outputs[target]


def _state_of(
    parameter: Op, readers: dict[str, list[Op]], producers: dict[str, Op]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """A parameter with the state that goes with it, and the ops that change them.

    That is what is changed by an op that reads the parameter or its next value, and is of its shape
    on the same devices in the same layout. Nothing where no op changes the parameter itself.
    """
    value = parameter.outputs[0]
    nexts = [
        after
        for reader in readers.get(value.name, ())
        for before, after in _changed(reader)
        if before.name == value.name
    ]
    if not nexts:
        return (), ()
    variables = {value.name: parameter}
    changes: dict[str, Op] = {}
    for read in (value, *nexts):
        for reader in readers.get(read.name, ()):
            for before, _ in _changed(reader):
                state = producers[before.name]
                alike = before.shape == value.shape and state.placement == parameter.placement
                if alike and state.kind == "variable" and _layout(state) == _layout(parameter):
                    variables[before.name] = state
                    changes[reader.name] = reader
    # And what such an op reads as it is changed in the same step: gradients of several steps.
    for reader in tuple(changes.values()):
        for read in reader.inputs:
            maker = producers[read.name]
            for before, after in _changed(maker):
                state = producers[before.name]
                alike = before.shape == value.shape and state.placement == parameter.placement
                known = state.kind == "variable" and _layout(state) == _layout(parameter)
                if after.name == read.name and alike and known:
                    variables[before.name] = state
                    changes[maker.name] = maker
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
        found = layout
        for axis in mesh:
            found = found.replace(axis, Split(tensor_axis))
        return found

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
        op.kind,
        tuple(value.type for value in op.inputs),
        tuple(value.type for value in op.outputs),
        op.attrs,
        op.placement.hierarchy,
    )
    return any(
        all(
            signature.inputs[source] == signature.outputs[target] == sbp for target, source in pairs
        )
        and (op.sbp is None or all(output == sbp for output in signature.outputs))
        for signature in signatures
    )


# --- the rewrite ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stored:
    """A value that is stored in shards and gathered for its readers: a parameter, or its cast."""

    shard: _Shard
    value: Value
    readers: list[Op]
    """Ops of forward and backward, in order."""


@dataclass(slots=True)
class _Visit:
    """A stretch of ops that keep a layer's parameters gathered."""

    layer: tuple[str, ...]
    start: int
    """Place of its first op in the job."""
    readers: list[tuple[Op, _Stored]] = field(default_factory=list)


class _Rewrite:
    def __init__(self, job: Job, config: ZeroOptions, shards: Sequence[_Shard]) -> None:
        self._job, self._config = job, config
        self._shard_of = {
            op.name: shard for shard in shards for op in (*shard.variables, *shard.changes)
        }
        self._readers, self._producers = readers_of(job), producers_of(job)
        self._place = {op.name: place for place, op in enumerate(job.ops)}
        self._early: dict[str, Op] = {}
        """Ops that move to the front, so that gathers can stand before any reader."""
        self._before: dict[str, list[Op]] = {}
        """New ops by the name of the op that they stand before."""
        self._instead: dict[str, dict[str, Value]] = {}
        """What an op reads instead, by its name and the name of what it read."""
        self.gathers = 0
        """Gathers of a step."""
        stored = [each for shard in shards for each in self._stored(shard)]
        visits = self._visits(stored)
        if config.zero < 3:
            for each in stored:
                self._gather(each, each.readers, None)
        else:
            for of_placement in visits.values():
                self._gather_visits(of_placement)
        for shard in shards:
            self._reduce_gradients(shard, visits.get(shard.parameter.placement, []))

    def ops(self) -> Iterator[Op]:
        """All ops in their new order."""
        yield from (self._laid_out(op) for op in self._early.values())
        for op in self._job.ops:
            if op.name in self._early:
                continue
            yield from self._before.get(op.name, ())
            instead = self._instead.get(op.name)
            if instead is not None:
                op = rewired(op, instead)
            yield self._laid_out(op)

    def _laid_out(self, op: Op) -> Op:
        """Variables and the ops that change them, with their new layout."""
        shard = self._shard_of.get(op.name)
        if shard is None or (op.sbp is None and op.kind != "variable"):
            return op
        return replace(op, sbp=shard.sbp)

    def _stored(self, shard: _Shard) -> Iterator[_Stored]:
        """What is gathered of a parameter: itself, and casts of it that are smaller than it."""
        variable = shard.parameter
        self._early[variable.name] = variable
        value = variable.outputs[0]
        readers = []
        for op in self._readers[value.name]:
            if op.origin.phase is Phase.UPDATE or op.name in self._shard_of:
                continue
            if op.kind == "cast" and op.outputs[0].dtype.itemsize < value.dtype.itemsize:
                self._early[op.name] = op
                yield _Stored(shard, op.outputs[0], self._readers.get(op.outputs[0].name, []))
            else:
                readers.append(op)
        yield _Stored(shard, value, readers)

    def _gather(self, stored: _Stored, readers: Sequence[Op], late: str | None) -> None:
        """Let these readers read the value in the user's layout, gathered before the first."""
        if not readers:
            return
        gathered = self._redistribute(
            stored.value,
            f"{stored.value.name}:gather_{self.gathers}",
            stored.shard.layout,
            readers[0],
            Origin(readers[0].origin.phase),
            late,
        )
        self.gathers += 1
        for reader in readers:
            self._instead.setdefault(reader.name, {})[stored.value.name] = gathered

    def _redistribute(
        self,
        value: Value,
        name: str,
        sbp: NdSbp,
        before: Op,
        origin: Origin,
        late: str | None = None,
    ) -> Value:
        """A new op before another; the value in that layout."""
        found = replace(value, name=name)
        attrs = freeze_attrs({} if late is None else {"late": late})
        source = self._producers[value.name].source
        op = Op(
            name, "redistribute", (value,), (found,), attrs, value.placement, sbp, source, origin
        )
        self._producers[name] = op
        self._before.setdefault(before.name, []).append(op)
        return found

    def _visits(self, stored: Sequence[_Stored]) -> dict[Placement, list[_Visit]]:
        """Per placement, the visits to its layers in order of their first reader.

        A layer that is needed again while at most the prefetch window of others came between stays
        gathered: it would be in memory anyway.
        """
        reading: dict[str, list[_Stored]] = {}
        for each in stored:
            for reader in each.readers:
                reading.setdefault(reader.name, []).append(each)
        found: dict[Placement, list[_Visit]] = {}
        for place, op in enumerate(self._job.ops):
            for each in reading.get(op.name, ()):
                visits = found.setdefault(each.value.placement, [])
                recent = visits[-1 - self._config.prefetch :]
                visit = next((one for one in recent if one.layer == each.shard.layer), None)
                if visit is None:
                    visit = _Visit(each.shard.layer, place)
                    visits.append(visit)
                visit.readers.append((op, each))
        return found

    def _gather_visits(self, visits: Sequence[_Visit]) -> None:
        """Gather the values of each visit, from some visits ahead on."""
        for number, visit in enumerate(visits):
            ahead = visits[max(0, number - self._config.prefetch)]
            readers: dict[str, tuple[_Stored, list[Op]]] = {}
            for op, stored in visit.readers:
                readers.setdefault(stored.value.name, (stored, []))[1].append(op)
            for stored, ops in readers.values():
                self._gather(stored, ops, self._job.ops[ahead.start].name)

    def _reduce_gradients(self, shard: _Shard, visits: Sequence[_Visit]) -> None:
        """Let what reads a parameter's gradient for the update read its shard.

        The shard is read a layer or two after the gradient was made, so that reductions overlap
        with backward and yet the whole gradients of a few layers at most are in memory.
        """
        for value in self._gradients(shard):
            made = self._place[self._producers[value.name].name]
            later = [visit for visit in visits if visit.start > made]
            readers = [
                op for op in self._readers[value.name] if op.origin.phase is not Phase.BACKWARD
            ]
            starts = [visit.start for visit in later[self._config.prefetch :]]
            # Layers may be visited after the update too, by what the program evaluates then.
            at = self._job.ops[min((self._place[readers[0].name], *starts[:1]))]
            origin = Origin(Phase.BACKWARD)
            reduced = value
            if self._config.zero == 1:
                name = f"{value.name}:whole"
                reduced = self._redistribute(value, name, shard.layout, at, origin)
            name = f"{value.name}:shard"
            reduced = self._redistribute(reduced, name, shard.sbp, at, origin)
            for reader in readers:
                self._instead.setdefault(reader.name, {})[value.name] = reduced

    def _gradients(self, shard: _Shard) -> list[Value]:
        """What backward makes and a parameter's update reads, be it through other ops of its shape
        (clipping).
        """
        shape = shard.parameter.outputs[0].shape
        found: dict[str, Value] = {}
        pending = [value for change in shard.changes for value in change.inputs]
        seen: set[str] = set()
        while pending:
            value = pending.pop()
            op = self._producers[value.name]
            alike = value.shape == shape and value.placement == shard.parameter.placement
            if value.name in seen or not alike or op.name in self._shard_of:
                continue
            seen.add(value.name)
            if op.origin.phase is Phase.BACKWARD:
                found[value.name] = value
            else:
                pending.extend(op.inputs)
        return list(found.values())
