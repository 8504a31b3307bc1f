"""Sequence parallelism (V. A. Korthikanti et al., 2022): activations between tensor-parallel blocks
are split along the sequence.

Under tensor parallelism a block ends in partial sums, which an all-reduce makes whole on every
device; norms, dropout and residual additions then do the same work on all of them. An all-reduce is
a reduce-scatter and an all-gather. This pass moves the two apart: partial sums are reduce-scattered
along the sequence, what follows works on one share of the positions, and the next block gathers its
input. Backward does the same with gradients, and gathers again what forward has gathered and both
read, so that each device keeps one share of the activations between blocks. But for that the bytes
moved stay the same.

The pass writes demands into the job (`redistribute` along one mesh axis) and leaves all else to the
inference of layouts. It follows each value's layout along the tensor-parallel axis, by a walk over
the ops of both phases:

    partial    `[batch, length, dim]`, and read by an op that needs it whole: demanded split
    whole      beside a split value in an op of forward that adds them (the embeddings that enter
               the stream): demanded split where it is made, or earlier, as far up as elementwise
               ops reach
    split      read by an op that works on split weights or heads: demanded whole for it

Whoever reads a value after a demand reads its new layout. Layouts of data-parallel axes stay open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from plancompiler.errors import UsageError
from plancompiler.ir import (
    BROADCAST,
    Job,
    NdSbp,
    Op,
    Origin,
    Partial,
    Phase,
    Placement,
    Sbp,
    Split,
    Value,
    freeze_attrs,
)
from plancompiler.ir.sbp import PARTIAL_SUM
from plancompiler.ir.settings import Settings, option
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import axis_signatures, op_def
from plancompiler.ops.rule import Signature
from plancompiler.passes.base import (
    PassResult,
    check_axes,
    counted,
    producers_of,
    rewired,
    with_ops,
)
from plancompiler.passes.microbatch import MicrobatchOptions

_WALKS = 4
"""Walks at most: each splits the values that enter the stream where they are made."""


@dataclass(frozen=True, kw_only=True)
class SequenceOptions(Settings, owner="sequence_parallel"):
    """Whether sequences are split, and along which axes."""

    sequence_parallel: bool = option(
        False,
        "Split activations between tensor-parallel blocks along the sequence.",
        metavar="",
        asks=True,
    )
    tp_axes: tuple[str, ...] = option(("tp",), "Mesh axes that are tensor-parallel.")


def split_sequences(job: Job, config: SequenceOptions) -> PassResult:
    """The job with the activations between tensor-parallel blocks split along the sequence.

    Raises UsageError where an axis of `config.tp_axes` is in no placement, and where no value is
    partial along them.
    """
    if not config.sequence_parallel:
        return PassResult(job, "off")
    check_axes(job, config.tp_axes, "sequence_parallel", "tp_axes")
    summaries, notes = [], []
    microbatches = cast("MicrobatchOptions", job.config).microbatches
    for axis in config.tp_axes:
        walk = _along(job, axis, microbatches)
        job = with_ops(job, walk.ops)
        notes += walk.notes
        if walk.scattered:
            summaries.append(
                f"{axis}: {counted(walk.scattered, 'partial value')} split along the sequence, "
                f"{counted(walk.entries, 'value')} on the way in, "
                f"{counted(walk.gathered, 'value')} gathered for the next block"
            )
    if not summaries:
        op = job.ops[0]
        raise UsageError(
            "sequence_parallel finds nothing to split",
            at=op,
            got=notes[0] if notes else "no activation that is partial",
            expected="activations [batch, length, dim] that are partial along "
            + ", ".join(config.tp_axes),
            hint="split the weights of the blocks over a tensor-parallel axis of several devices, "
            "or leave sequence_parallel out",
        )
    return PassResult(job, "; ".join(summaries), tuple(dict.fromkeys(notes)))


def _along(job: Job, axis: str, microbatches: int) -> _Walk:
    """The last walk along a mesh axis: the one that finds no new way into the stream."""
    entries: frozenset[str] = frozenset()
    for _ in range(_WALKS):
        walk = _Walk(job, axis, entries, microbatches)
        if walk.beside <= entries:
            break
        entries |= walk.beside
    return walk


SPLIT = Split(1)
"""The layout of the stream: activations [batch, length, dim] split along the positions."""


def _is_activation(value: Value) -> bool:
    return len(value.shape) == 3 and value.dtype.is_floating


def _read_by_updates(job: Job) -> set[str]:
    """Values that updates read, be it through other ops of their shape: gradients of parameters."""
    names: set[str] = set()
    for op in reversed(job.ops):
        shapes = {made.shape for made in op.outputs if made.name in names}
        names.update(
            value.name
            for value in op.inputs
            if op.origin.phase is Phase.UPDATE or value.shape in shapes
        )
    return names


class _Walk:
    """One walk over a job's ops, with layouts along one mesh axis."""

    def __init__(self, job: Job, axis: str, entries: frozenset[str], microbatches: int) -> None:
        self._axis, self._entries, self._microbatches = axis, entries, microbatches
        self._producers, self._for_updates = producers_of(job), _read_by_updates(job)
        self._split_shapes = {op.outputs[0].shape for op in job.ops if self._is_split_variable(op)}
        self._layout: dict[str, Sbp] = {}
        self._instead: dict[str, Value] = {}
        """What readers read from now on, by the name of what they would read."""
        self._stream: set[str] = set()
        """Values that are split along the sequence because of this pass."""
        self._whole: dict[tuple[str, Phase], Value] = {}
        """Gathered forms of values of the stream, by the phase that reads them."""
        self._forward: set[str] = set()
        """Values that forward makes."""
        self._working: dict[tuple[Phase, Placement], str] = {}
        """The last op that made a partial value or read a gathered one, by phase and mesh: while it
        works, what the next one reads may be gathered.
        """
        self.beside: frozenset[str] = frozenset()
        """Whole values that are read beside the stream."""
        self.notes: list[str] = []
        self.scattered = self.entries = self.gathered = 0
        self.ops = tuple(self._ops(job))

    def _ops(self, job: Job) -> Iterator[Op]:
        for op in job.ops:
            op = rewired(op, self._instead)
            demands: list[Op] = []
            op = self._visit(op, demands)
            yield from demands
            yield op
            if op.origin.phase is Phase.FORWARD:
                self._forward.update(
                    value.name for each in (*demands, op) for value in each.outputs
                )
            for value in op.outputs:
                if value.name in self._entries and self._of(value) == BROADCAST:
                    self.entries += 1
                    yield self._demand(value, op)

    # --- layouts ----------------------------------------------------------------------------------

    def _position(self, op: Op) -> int | None:
        """The mesh axis of an op's placement; None where it has no second device along it."""
        axes = op.placement.axes or ()
        if self._axis not in axes or op.placement.hierarchy[axes.index(self._axis)] == 1:
            return None
        return axes.index(self._axis)

    def _is_split_variable(self, op: Op) -> bool:
        position = self._position(op)
        return (
            op.kind == "variable"
            and op.sbp is not None
            and position is not None
            and isinstance(op.sbp[position], Split)
        )

    def _of(self, value: Value) -> Sbp:
        return self._layout.get(value.name, BROADCAST)

    def _visit(self, op: Op, demands: list[Op]) -> Op:
        """Give the op's outputs their layouts; the op, reading what it is better fed with.

        What must stand before the op is appended to `demands`.
        """
        position = self._position(op)
        if position is None or op.kind in ("input", "variable"):
            if position is not None and op.sbp is not None:
                self._layout[op.outputs[0].name] = op.sbp[position]
            return op
        if op.kind == "redistribute":
            if op.sbp is None:
                op = self._reduce(op, demands)
            self._move(op, position)
            return op
        if op.sbp is None and all(self._of(value) == BROADCAST for value in op.inputs):
            return op  # whole stays whole
        signatures = self._signatures(op, position)
        chosen = self._exact(op, signatures)
        if chosen is None:
            op = self._reduce(op, demands)
            chosen = self._exact(op, signatures) or self._sliced(op, signatures)
        if chosen is None:
            gathered = self._gather(op, signatures, demands)
            op, chosen = gathered or (op, None)
        if chosen is not None:
            self._record(op, chosen)
        return op

    def _move(self, op: Op, position: int) -> None:
        """The layout that a user's redistribute makes: the one demanded, else the input's own."""
        (source,), (made,) = op.inputs, op.outputs
        if op.sbp is not None:
            self._layout[made.name] = op.sbp[position]
        elif source.placement.ndim == op.placement.ndim:
            self._layout[made.name] = self._of(source)
            if source.name in self._stream:
                self._stream.add(made.name)

    def _signatures(self, op: Op, position: int) -> list[Signature]:
        """The op's signatures that keep to the layouts demanded of it."""
        mutates = op_def(op.kind).mutates
        return [
            each
            for each in axis_signatures(
                op.kind, op.input_types, op.output_types, op.attrs, op.placement.hierarchy[position]
            )
            if (op.sbp is None or all(entry == op.sbp[position] for entry in each.outputs))
            and all(
                each.inputs[source] == each.outputs[target] == self._of(op.inputs[source])
                for target, source in mutates
            )
        ]

    def _exact(self, op: Op, signatures: Sequence[Signature]) -> Signature | None:
        """The signature that takes the inputs as they are.

        Partial sums go through an op only where they do not become more bytes by it.
        """
        wanted = tuple(map(self._of, op.inputs))
        exact = next((each for each in signatures if each.inputs == wanted), None)
        if exact is not None and any(isinstance(entry, Partial) for entry in wanted):
            before = _partial_bytes(op.inputs, exact.inputs)
            if before < _partial_bytes(op.outputs, exact.outputs):
                return None
        return exact

    def _sliced(self, op: Op, signatures: Sequence[Signature]) -> Signature | None:
        """The signature that takes the inputs after whole ones are split: those that change least.

        Activations among them enter the stream: they had better be split where they are made. Those
        of backward follow from forward, and a gradient that does not is cut by its reader.
        """
        got = tuple(map(self._of, op.inputs))
        if not any(isinstance(entry, Split) for entry in got):
            return None

        def changed(each: Signature) -> list[int]:
            return [at for at, entry in enumerate(each.inputs) if entry != got[at]]

        fitting = [
            each
            for each in signatures
            if all(
                got[at] == BROADCAST and isinstance(each.inputs[at], Split) for at in changed(each)
            )
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: len(changed(each)))
        if self._adds_up_more(op, best, signatures):
            return None
        forward = op.origin.phase is Phase.FORWARD
        if forward and any(value.name in self._stream for value in op.inputs):
            for at in changed(best):
                value = op.inputs[at]
                if _is_activation(value) and best.inputs[at] == SPLIT:
                    self.beside |= self._ways_in(value)
        return best

    def _adds_up_more(self, op: Op, sliced: Signature, signatures: Sequence[Signature]) -> bool:
        """Whether gradients of split parameters had better be made of the gathered stream, each
        device its share of them: where a micro-batch of the stream has fewer bytes than the partial
        sums would have. Such is that of an embedding whose rows are split: every device would add
        up the gradient of the whole table.
        """
        if not all(
            value.name in self._for_updates and value.shape in self._split_shapes
            for value in op.outputs
        ):
            return False
        whole = tuple(
            BROADCAST if value.name in self._stream else entry
            for value, entry in zip(op.inputs, map(self._of, op.inputs), strict=True)
        )
        shared = any(
            each.inputs == whole and all(isinstance(made, Split) for made in each.outputs)
            for each in signatures
        )
        gathered = sum(_nbytes(value) for value in op.inputs if value.name in self._stream)
        partial = _partial_bytes(op.outputs, sliced.outputs)
        return shared and gathered < self._microbatches * partial

    def _record(self, op: Op, signature: Signature) -> None:
        streaming = any(value.name in self._stream for value in op.inputs)
        if any(isinstance(entry, Partial) for entry in signature.outputs):
            self._working[op.origin.phase, op.placement] = op.name
        for value, entry in zip(op.outputs, signature.outputs, strict=True):
            self._layout[value.name] = entry
            if streaming and _is_activation(value) and entry == SPLIT:
                self._stream.add(value.name)

    # --- demands ----------------------------------------------------------------------------------

    def _reduce(self, op: Op, demands: list[Op]) -> Op:
        """The op, reading its partial inputs split along the sequence, or else whole."""
        for value in op.inputs:
            if self._of(value) != PARTIAL_SUM or value.name in self._instead:
                continue  # the second: an op may read a value twice
            reason = self._unfit(value)
            if reason is None:
                self.scattered += 1
                producer = self._producers[value.name]
                demands.append(self._demand(value, producer))
            else:
                if len(value.shape) > 1 and value.name not in self._for_updates:
                    self.notes.append(f"{value.name}: {reason}")
                self._layout[value.name] = BROADCAST
        return rewired(op, self._instead)

    def _unfit(self, value: Value) -> str | None:
        """Why a partial value is not split along the sequence."""
        if not _is_activation(value):
            return f"{value.type} is partial, but no activation [batch, length, dim]"
        if value.shape[1] < 2:
            return f"{value.type} has one position"
        if value.name in self._for_updates:
            return f"{value.type} is partial, but the gradient of a parameter"
        return None

    def _gather(
        self, op: Op, signatures: Sequence[Signature], demands: list[Op]
    ) -> tuple[Op, Signature] | None:
        """The op, reading its inputs of the stream whole, if it can take them so."""
        before = dict(self._whole)
        own: list[Op] = []
        instead = {
            value.name: self._gathered(value, op, own)
            for value in op.inputs
            if value.name in self._stream
        }
        fed = rewired(op, instead)
        chosen = self._exact(fed, signatures) or self._sliced(fed, signatures)
        if chosen is None:
            self._whole = before
            return None
        self.gathered += len(own)
        demands += own
        self._working[op.origin.phase, op.placement] = op.name
        return fed, chosen

    def _gathered(self, value: Value, reader: Op, demands: list[Op]) -> Value:
        """The whole form of a value of the stream, for the op that reads it and later ones of its
        phase. Backward gathers again what forward has, so that only shares are kept for it.
        """
        phase = reader.origin.phase
        key = value.name, phase
        if key not in self._whole:
            suffix = "sequence_whole"
            late: str | None = None
            if phase is not Phase.FORWARD and value.name in self._forward:
                suffix = f"sequence_whole_{phase}"
                late = self._working.get((phase, reader.placement), "")
            demand = self._redistribute(value, BROADCAST, suffix, reader, late)
            demands.append(demand)
            self._whole[key] = demand.outputs[0]
        return self._whole[key]

    def _demand(self, value: Value, like: Op) -> Op:
        """What splits a value along the sequence; all later readers read that instead."""
        op = self._redistribute(value, SPLIT, "sequence_shard", like)
        self._instead[value.name] = op.outputs[0]
        self._stream.add(op.outputs[0].name)
        return op

    def _redistribute(
        self, value: Value, entry: Sbp, suffix: str, like: Op, late: str | None = None
    ) -> Op:
        made = replace(value, name=f"{value.name}:{suffix}")
        placement = value.placement
        position = (placement.axes or ()).index(self._axis)
        self._layout[made.name] = entry
        origin = Origin(like.origin.phase, stage=like.origin.stage)
        return Op(
            made.name,
            "redistribute",
            (value,),
            (made,),
            freeze_attrs({"along": self._axis} | ({} if late is None else {"late": late})),
            placement,
            NdSbp.broadcast(placement.ndim).replace(position, entry),
            like.source,
            origin,
        )

    def _ways_in(self, value: Value) -> frozenset[str]:
        """Where a whole value that enters the stream is split: as early as elementwise ops allow.

        An op makes its output split if it takes activations of that shape split alike.
        """
        op = self._producers.get(value.name)
        if op is None or not _is_activation(value) or op.kind == "variable":
            return frozenset()
        above = [one for one in op.inputs if one.shape == value.shape]
        position = self._position(op)
        if above and position is not None and op.sbp is None and op.kind != "redistribute":
            for each in self._signatures(op, position):
                same_split = all(
                    entry == SPLIT
                    for one, entry in zip(op.inputs, each.inputs, strict=True)
                    if one.shape == value.shape
                )
                whole = all(self._of(one) == BROADCAST for one in op.inputs)
                if same_split and whole and each.outputs == (SPLIT,):
                    return frozenset().union(*map(self._ways_in, above))
        return frozenset({value.name})


def _partial_bytes(values: Sequence[Value], layouts: Sequence[Sbp]) -> int:
    """Bytes of the partial ones among values."""
    return sum(
        _nbytes(value)
        for value, entry in zip(values, layouts, strict=True)
        if isinstance(entry, Partial)
    )


def _nbytes(value: Value) -> int:
    return element_count(value.shape) * value.dtype.itemsize
