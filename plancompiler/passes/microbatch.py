"""Steps of several micro-batches: what each op does with a piece of the batch, and when.

The job keeps its global meaning. Micro-batches are a mesh axis in time: along it a value is split
(each micro-batch has a piece), partial (each adds its part) or broadcast (the same for all), and
the op table's own signatures say which layouts an op can work in, as they do for devices.

1. A walk in op order gives every op a signature along that axis. Data is split; variables are
   broadcast. An op of broadcast values alone runs once per step, *early*, before all micro-batches.
   A part that somebody needs whole is accumulated, and what reads it is *late*: it runs once per
   step, after all of them.
2. A walk backwards splits early ops that are only wanted in pieces, so that nothing of the size of
   the batch is made as a whole.
3. Ops that change between pieces, parts and whole values are put in (`ops/microbatch.py`), every op
   gets its segment of the step (`passes/stages.py`), and the ops are ordered by segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from plancompiler.errors import MicrobatchError
from plancompiler.ir import (
    BROADCAST,
    Attrs,
    Job,
    Op,
    Partial,
    Phase,
    Sbp,
    Split,
    Value,
    freeze_attrs,
)
from plancompiler.ir.halo import Halo
from plancompiler.ir.pipeline import SCHEDULES, Pipeline, SegmentKind
from plancompiler.ir.settings import option
from plancompiler.ops.microbatch import ACCUMULATED
from plancompiler.ops.registry import Types, mesh_signatures, op_def
from plancompiler.ops.rule import Signature
from plancompiler.passes.base import PassResult, counted, producers_of, with_ops
from plancompiler.passes.stages import Rate, Timed, place_in_segments, verify_pipeline
from plancompiler.passes.zero import ZeroOptions

_ACCUMULATE, _TAKE = 1000, 1
"""Costs of changing an input's layout. Taking a piece is a view's worth of work; accumulating makes
all that follows wait for the last micro-batch."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchOptions(ZeroOptions, owner="microbatch"):
    """Pieces of a step and their order. The stage of ZeRO says when gradients are reduced."""

    schedule: str = option(
        "gpipe",
        "Order of the micro-batches on the stages of a pipeline.",
        choices=SCHEDULES,
        metavar="NAME",
        asks=True,
    )
    microbatches: int = option(
        1, "Pieces that each batch is cut into.", least=1, metavar="M", asks=True
    )


def split_into_microbatches(job: Job, options: MicrobatchOptions) -> PassResult:
    """The job with `pipeline` set, and `micro` on every op.

    Raises MicrobatchError where a batch or the job's stages cannot be cut like this, naming the op.
    """
    if options.microbatches == 1:
        return PassResult(job, "off")
    layouts = _LayoutsInTime(job, options)
    layouts.walk()
    layouts.split_early()
    timed = list(_with_conversions(job, layouts))
    if not any(each.rate is Rate.MICRO for each in timed):
        raise MicrobatchError(
            "nothing in the job works on a batch that could be cut",
            op=job.ops[0].name,
            source=job.ops[0].source,
            got=f"microbatches={options.microbatches}, and no input or data file that is read",
            hint="batches come from pc.input and pc.data; or leave microbatches out",
        )
    ops, pipeline = place_in_segments(timed, options.schedule, options.microbatches)
    cut = replace(with_ops(job, ops), pipeline=pipeline)
    verify_pipeline(cut)
    return PassResult(cut, _summary(cut, pipeline))


def batch_axes(job: Job, options: MicrobatchOptions) -> dict[str, int]:
    """The axis of each value, by its name, along which so many micro-batches would cut it.

    Raises MicrobatchError as `split_into_microbatches` does.
    """
    layouts = _LayoutsInTime(job, options)
    layouts.walk()
    return {name: sbp.axis for name, sbp in layouts.made.items() if isinstance(sbp, Split)}


def _summary(job: Job, pipeline: Pipeline) -> str:
    kinds = [pipeline.segments[op.micro.segment].kind for op in job.ops if op.micro is not None]
    before, after = kinds.count(SegmentKind.PROLOGUE), kinds.count(SegmentKind.EPILOGUE)
    collected = sum(op_def(op.kind).collects for op in job.ops)
    return (
        f"{pipeline.microbatches} micro-batches, {counted(pipeline.stages, 'stage')} "
        f"({pipeline.schedule}): {counted(len(kinds) - before - after, 'op')} per micro-batch, "
        f"{before} before, {after} after; {counted(collected, 'value')} accumulated"
    )


# --- layouts along micro-batches ------------------------------------------------------------------


@dataclass(slots=True)
class _Choice:
    """How an op works along the axis of micro-batches."""

    signature: Signature
    rate: Rate


class _LayoutsInTime:
    """The layout of every value along micro-batches, and the signature of every op."""

    def __init__(self, job: Job, options: MicrobatchOptions) -> None:
        self._job = job
        self._parts = options.microbatches
        self._reduce_each = options.zero >= 2
        """Whether gradients are reduced over devices in every micro-batch, not once per step."""
        self.of: dict[str, _Choice] = {}
        """By the name of the op."""
        self.made: dict[str, Sbp] = {}
        """By the name of the value."""
        self._late: set[str] = set()
        """Values that are there only after all micro-batches."""
        self._producers = producers_of(job)
        self._whole: set[str] = set()
        """Names of data ops that are read as a whole before the micro-batches."""
        self._choices: dict[object, tuple[Signature, Rate]] = {}
        """By all that a choice depends on: repeated layers cost once."""

    # The walk in op order.

    def walk(self) -> None:
        """Give every op the signature that changes least.

        Where an op needs whole what follows from data alone (how many labels count), the data is
        read as a whole before the micro-batches, and the walk starts again.
        """
        self.of.clear()
        self.made.clear()
        self._late.clear()
        for op in self._job.ops:
            choice = self._choose(op)
            if choice is None:
                if self._read_whole(op):
                    self.walk()
                    return
                raise self._whole_batch_error(op)
            self.of[op.name] = choice
            for value, sbp in zip(op.outputs, choice.signature.outputs, strict=True):
                self.made[value.name] = sbp
                if choice.rate is Rate.LATE:
                    self._late.add(value.name)

    def _choose(self, op: Op) -> _Choice | None:
        whole = Signature((BROADCAST,) * len(op.inputs), (BROADCAST,) * len(op.outputs))
        if (
            op_def(op.kind).source
            and op.outputs[0].shape
            and op.name not in self._whole
            and op.attr("batched", True)
        ):
            return _Choice(self._split_source(op), Rate.MICRO)
        if op_def(op.kind).mutates:
            # Before they change, variables are read by all micro-batches.
            return None if self._price(op, whole) is None else _Choice(whole, Rate.LATE)
        if op.kind == "output":
            collected = any(self.made[value.name] != BROADCAST for value in op.inputs)
            late = collected or any(value.name in self._late for value in op.inputs)
            return _Choice(whole, Rate.LATE if late else Rate.EARLY)
        if all(self._is_early(value) for value in op.inputs):
            return _Choice(whole, Rate.EARLY)
        key = (
            op.kind,
            op.attrs,
            op.origin.phase,
            tuple(
                (
                    value.type,
                    self.made[value.name],
                    value.name in self._late,
                    value.placement == op.placement,
                )
                for value in op.inputs
            ),
            op.output_types,
        )
        known = self._choices.get(key)
        if known is None:
            if self._is_for_sums(op) and self._price(op, whole) is not None:
                known = whole, Rate.LATE
            else:
                known = self._cheapest(op, whole)
            if known is None:
                return None
            self._choices[key] = known
        return _Choice(*known)

    def _cheapest(self, op: Op, whole: Signature) -> tuple[Signature, Rate] | None:
        """The signature that changes the op's inputs least, the first of equals."""
        best: Signature | None = None
        least = 0
        for candidate in self.candidates(op):
            price = self._price(op, candidate)
            if price is not None and (best is None or price < least):
                best, least = candidate, price
        if best is None:
            return None
        return best, Rate.LATE if best == whole else Rate.MICRO

    def _is_for_sums(self, op: Op) -> bool:
        """Whether an update's op had better run once on the sum of a gradient than on every part:
        it leaves size and dtype as they are, as the division by a loss's scale does. Where
        gradients are reduced in every micro-batch, their sums would be held whole before it.
        """
        (made,) = op.outputs[:1]
        return (
            op.origin.phase is Phase.UPDATE
            and not self._reduce_each
            and all(
                value.type == made.type
                for value in op.inputs
                if isinstance(self.made[value.name], Partial)
            )
        )

    def _read_whole(self, op: Op) -> bool:
        """Have the data read as a whole behind what an op wants whole; whether there is such data.

        An op that couples the pieces of a batch itself is none of these cases.
        """
        behind: set[str] = set()
        for value in op.inputs:
            if not isinstance(self.made[value.name], Split):
                behind |= self._data_behind(value)
        before = len(self._whole)
        self._whole |= behind
        return len(self._whole) > before

    def _data_behind(self, value: Value) -> set[str]:
        """The data ops from which a value follows; none where a tensor of the model is in it, for
        then making it as a whole would be the work that is to be cut.
        """
        data: set[str] = set()
        seen: set[str] = set()
        pending = [value]
        while pending:
            op = self._producers[pending.pop().name]
            if op.name in seen:
                continue
            seen.add(op.name)
            if op_def(op.kind).mutates or (op.kind == "variable" and op.outputs[0].shape):
                return set()
            if op_def(op.kind).source:
                data.add(op.name)
            pending.extend(op.inputs)
        return data

    def _is_early(self, value: Value) -> bool:
        return self.made[value.name] == BROADCAST and value.name not in self._late

    def _split_source(self, op: Op) -> Signature:
        extent = op.outputs[0].shape[0]
        if extent % self._parts:
            raise MicrobatchError(
                "a batch does not divide into micro-batches",
                at=op,
                got=f"{extent} rows of {op.kind} for {self._parts} micro-batches",
                expected=f"a multiple of {self._parts}",
                hint="change the batch or microbatches",
            )
        return Signature((), (Split(0),))

    def candidates(self, op: Op) -> tuple[Signature, ...]:
        """All signatures of an op along micro-batches, in rule order."""
        if op.kind == "redistribute":
            return self._passed_through(op)
        return _signatures(op.kind, op.input_types, op.output_types, op.attrs, self._parts)

    def _passed_through(self, op: Op) -> tuple[Signature, ...]:
        """A change of layout keeps what it is given. Parts are accumulated before it, so that
        devices exchange them once per step, unless what is kept of them is a shard.
        """
        (value,) = op.inputs
        got = self.made[value.name]
        whole = Signature((BROADCAST,), (BROADCAST,))
        moved = value.placement != op.placement
        if isinstance(got, Partial) and (moved or not self._reduce_each):
            return (whole,)
        layouts: list[Sbp] = [got]
        if got == BROADCAST:
            layouts += [Split(axis) for axis in range(len(value.shape))]
        unchanged = (Signature((sbp,), (sbp,)) for sbp in layouts)
        types = (value.type, value.type)
        return tuple(each for each in unchanged if _divides(types, each, self._parts))

    def _price(self, op: Op, wanted: Signature) -> int | None:
        """What it costs to have the inputs in these layouts; None where it cannot be."""
        late = all(sbp == BROADCAST for sbp in wanted.inputs)
        # Pieces are put together for what changes variables alone: anywhere else that would be
        # to give up micro-batches without a word.
        collects = op.origin.phase is Phase.UPDATE or bool(op_def(op.kind).mutates)
        price = 0
        for value, sbp in zip(op.inputs, wanted.inputs, strict=True):
            got = self.made[value.name]
            if value.name in self._late and not late:
                return None
            if got == sbp:
                continue
            if got == BROADCAST and isinstance(sbp, Split):
                price += _TAKE
            elif late and (isinstance(got, Partial) or collects):
                price += _ACCUMULATE
            else:
                return None
        return price

    def _whole_batch_error(self, op: Op) -> MicrobatchError:
        layouts = [
            f"%{value.name} {self.made[value.name]}"
            + (", known only after all micro-batches" if value.name in self._late else "")
            for value in op.inputs
        ]
        expected = [each for each in self.candidates(op) if not op_def(op.kind).mutates]
        return MicrobatchError(
            f"{op.kind} needs the whole batch where micro-batches give it pieces",
            at=op,
            got="; ".join(layouts),
            expected=" or ".join(map(str, expected)) or "values that are whole",
            hint="what couples the rows of a batch cannot stand between the model and its loss: "
            "normalise over features (layer_norm, group_norm), divide losses by what follows from "
            "the data alone, or leave microbatches out",
        )

    # The walk backwards.

    def split_early(self) -> None:
        """Make early values in pieces where nobody wants them whole."""
        wanted: dict[str, set[Sbp]] = {}
        for op in reversed(self._job.ops):
            choice = self.of[op.name]
            if choice.rate is Rate.EARLY:
                signature = self._wanted_signature(op, wanted)
                if signature is not None:
                    choice.signature, choice.rate = signature, Rate.MICRO
                    for value, sbp in zip(op.outputs, signature.outputs, strict=True):
                        self.made[value.name] = sbp
            for value, sbp in zip(op.inputs, choice.signature.inputs, strict=True):
                wanted.setdefault(value.name, set()).add(sbp)

    def _wanted_signature(self, op: Op, wanted: Mapping[str, set[Sbp]]) -> Signature | None:
        """The signature that makes an early op's outputs in the pieces that their readers want."""
        if op.kind in ("input", "variable", "output") or op.attr("late") is not None:
            return None
        pieces: dict[int, Sbp] = {}
        for position, value in enumerate(op.outputs):
            layouts = wanted.get(value.name, set())
            if len(layouts) > 1 or BROADCAST in layouts:
                return None
            pieces.update((position, sbp) for sbp in layouts)
        if not pieces:
            return None
        fitting = [
            signature
            for signature in self.candidates(op)
            if all(signature.outputs[position] == sbp for position, sbp in pieces.items())
            and not any(isinstance(sbp, Partial) for sbp in signature.inputs)
        ]
        return min(fitting, key=lambda each: _pieces(each.inputs), default=None)


@lru_cache(maxsize=4096)
def _signatures(
    kind: str, inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> tuple[Signature, ...]:
    """The signatures of an op along `parts` micro-batches, in rule order."""
    flat = (
        Signature(
            tuple(sbp[0] for sbp in signature.inputs), tuple(sbp[0] for sbp in signature.outputs)
        )
        for signature in mesh_signatures(kind, inputs, outputs, attrs, (parts,))
    )
    return tuple(each for each in flat if _divides((*inputs, *outputs), each, parts))


def _divides(types: Types, signature: Signature, parts: int) -> bool:
    """Whether all pieces are of one size, and all parts can be accumulated; an op that reads
    pieces and makes the same whole value in every micro-batch has no place in a step.
    """
    for tensor, sbp in zip(types, (*signature.inputs, *signature.outputs), strict=True):
        if isinstance(sbp, Halo):
            return False  # pieces of a value do not overlap
        if isinstance(sbp, Split) and tensor.shape[sbp.axis] % parts:
            return False
        if isinstance(sbp, Partial) and sbp.reduction not in ACCUMULATED:
            return False
    split = any(sbp != BROADCAST for sbp in signature.inputs)
    return not (split and BROADCAST in signature.outputs)


def _pieces(layouts: Sequence[Sbp]) -> int:
    return sum(isinstance(sbp, Split) for sbp in layouts)


# --- conversions ----------------------------------------------------------------------------------


def _with_conversions(job: Job, layouts: _LayoutsInTime) -> Iterator[Timed]:
    """The ops with those that change layouts along micro-batches, each right after its producer."""
    needed: dict[str, dict[Sbp, Value]] = {}
    for op in job.ops:
        for value, sbp in zip(op.inputs, layouts.of[op.name].signature.inputs, strict=True):
            if sbp != layouts.made[value.name]:
                forms = needed.setdefault(value.name, {})
                suffix = f"piece_{sbp.axis}" if isinstance(sbp, Split) else "whole_step"
                forms.setdefault(sbp, replace(value, name=f"{value.name}:{suffix}"))
    for op in job.ops:
        choice = layouts.of[op.name]
        signature = choice.signature
        if any(value.name in needed for value in op.inputs):
            inputs = tuple(
                needed.get(value.name, {}).get(sbp, value)
                for value, sbp in zip(op.inputs, signature.inputs, strict=True)
            )
            yield Timed(replace(op, inputs=inputs), signature, choice.rate)
        else:
            yield Timed(op, signature, choice.rate)
        for value, made in zip(op.outputs, signature.outputs, strict=True):
            for sbp, form in needed.get(value.name, {}).items():
                yield Timed(
                    _conversion(op, value, made, form, sbp), Signature((made,), (sbp,)), Rate.MICRO
                )


def _conversion(producer: Op, value: Value, made: Sbp, form: Value, wanted: Sbp) -> Op:
    if isinstance(made, Partial):
        kind, attrs = "accumulate", freeze_attrs({"reduction": str(made.reduction)})
    elif isinstance(made, Split):
        kind, attrs = "collect_pieces", freeze_attrs({"axis": made.axis})
    else:
        assert isinstance(wanted, Split)
        kind, attrs = "take_piece", freeze_attrs({"axis": wanted.axis})
    origin = replace(producer.origin, region="", checkpoint=False)
    return Op(
        form.name, kind, (value,), (form,), attrs, producer.placement, None, producer.source, origin
    )
