"""SBP inference: give every op of a job the signature that is cheapest to feed.

Ops are visited in order. Of an op's legal signatures the one wins that is cheapest by four prices
in turn:

1. what is moved only for this op: gathering, splitting or re-splitting a value. It makes every
   device do the work of all, now or later, so no saving elsewhere pays for it.
2. reductions of its inputs now and of its outputs later, and local copies. A partial value must be
   reduced once, by whoever first needs it whole; here is decided on which side of the op it is
   less.
3. reductions of its inputs now: of equals, the one that keeps partial values partial.
4. how many inputs are used in another layout than they were made in: of equals, the one that keeps
   split values split.

A sum of pieces, each put into zeros, is reduced once: each piece owes its part of that only (2.).
Such is the gradient of a parameter that is used in pieces.

Of ties the one wins that makes its results in the layout in which they are read, and then the first
in rule order. What the user demands (inputs, variables, redistribute) is kept.

A walk does not see later readers. It is therefore repeated, with every layout that the walk before
asked for counted as free, until nothing changes: an op that comes early then shares the reduction
that a later one needs anyway, and the gradient of a split table is made in parts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plancompiler.boxing.exchange import halo_seconds
from plancompiler.boxing.graph import OpGraph
from plancompiler.boxing.planner import BoxingStep, boxing_path, canonical
from plancompiler.costs import (
    Machine,
    MeshLinks,
    generic_machine,
    links_of,
    machine_of_job,
    op_seconds,
)
from plancompiler.costs.links import uniform_links
from plancompiler.errors import PlanCompilerError, ShapeError
from plancompiler.ir import BROADCAST, Job, NdSbp, Op, Partial, Split, TensorType, Value
from plancompiler.ir.halo import Halo
from plancompiler.ir.op import Attrs
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import Primitive
from plancompiler.ops.exchange import Exchange
from plancompiler.ops.registry import (
    flops_of,
    mesh_signatures,
    op_def,
    passes,
    piece_signatures,
)
from plancompiler.ops.ring import Round
from plancompiler.ops.rule import NdSignature, Signature

logger = logging.getLogger("plancompiler.boxing")


_WALKS = 4
"""Walks at most; two or three reach a fixed point on the usual models."""

Seconds = tuple[float, float]
"""What is moved only for this op; what is reduced or copied."""
Price = tuple[float, float, float, int, int]
"""The four prices of a signature, and how many results are read in other layouts, compared in this
order."""


def infer_sbp(job: Job) -> OpGraph:
    """The job with a signature per op."""
    microbatches = 1 if job.pipeline is None else job.pipeline.microbatches
    boxed: dict[str, frozenset[NdSbp]] = {}
    signatures: tuple[NdSignature, ...] = ()
    layouts_read: dict[str, NdSbp] = {}
    choices, machine = _Choices(job), machine_of_job(job)
    for _ in range(_WALKS):
        layouts = _ValueLayouts(boxed, choices, microbatches, machine, layouts_read)
        walked = tuple(_walk(job, layouts))
        if walked == signatures:
            break
        signatures, boxed = walked, layouts.asked()
        layouts_read = _layouts_read(job, signatures, choices, layouts)
    _report(job, signatures)
    return OpGraph(job, signatures)


def _walk(job: Job, layouts: _ValueLayouts) -> Iterator[NdSignature]:
    for op in job.ops:
        try:
            signature = _signature_of(op, layouts)
        except PlanCompilerError as error:
            raise error.at(op=op.name, source=op.source) from None
        layouts.record(op, signature)
        yield signature


def _layouts_read(
    job: Job, signatures: Sequence[NdSignature], choices: _Choices, layouts: _ValueLayouts
) -> dict[str, NdSbp]:
    """The layouts of values that all their readers use in one. A reader that could as well pass it
    on, as elementwise ops do, uses a value as its own result is used; for one that makes a number
    of it, such as a norm, all layouts are much the same.
    """
    used: dict[str, NdSbp | None] = {}
    for op, signature in zip(reversed(job.ops), reversed(signatures), strict=True):
        if op.outputs and not any(value.shape for value in op.outputs):
            continue
        inputs = signature.inputs
        if len(op.outputs) == 1 and inputs and not op_def(op.kind).mutates:
            wanted = used.get(op.outputs[0].name)
            if wanted is not None and wanted != signature.outputs[0]:
                inputs = choices.passing_on(op, signature, wanted, layouts)
        for value, layout in zip(op.inputs, inputs, strict=True):
            if used.setdefault(value.name, layout) != layout:
                used[value.name] = None
    return {name: layout for name, layout in used.items() if layout is not None}


def _pieces_added_up(job: Job) -> dict[str, float]:
    """By the name of an op that puts a piece into a larger tensor: how many pieces of its size such
    ops add up to a sum that is the only reader of all of them.
    """
    readers = Counter(value.name for op in job.ops for value in op.inputs)
    sum_with: dict[str, dict[str, int]] = {}
    sums: list[dict[str, int]] = []
    for op in reversed(job.ops):
        if len(op.outputs) != 1:
            continue
        (made,) = op.outputs
        sizes = sum_with.get(made.name)
        if op.kind == "add" and op.sbp is None:
            if sizes is None:
                sizes = {}
                sums.append(sizes)
            for value in op.inputs:
                like = value.type == made.type and value.placement == op.placement
                if readers[value.name] == 1 and like:
                    sum_with[value.name] = sizes
        elif sizes is not None and len(op.inputs) == 1:
            size = element_count(op.inputs[0].shape)
            if 0 < size < element_count(made.shape):
                sizes[op.name] = size
    return {name: sum(sizes.values()) / size for sizes in sums for name, size in sizes.items()}


def _passing_on(op: Op, chosen: NdSignature, wanted: NdSbp, microbatches: int) -> tuple[NdSbp, ...]:
    """The layouts in which an op reads its inputs where it makes its result as wanted of inputs of
    the same type that have it so already; those of the chosen signature where it cannot.
    """
    (made,) = op.outputs
    inputs = tuple(
        wanted if value.type == made.type and value.placement == op.placement else own
        for value, own in zip(op.inputs, chosen.inputs, strict=True)
    )
    signature = NdSignature(inputs, (wanted,))
    return inputs if signature in legal_signatures(op, microbatches) else chosen.inputs


class _Choices:
    """Signatures chosen so far, by all that the choice depends on: repeated layers cost once."""

    def __init__(self, job: Job) -> None:
        self.by_key: dict[object, NdSignature] = {}
        self._changed = {
            value.name for op in job.ops if op.kind == "redistribute" for value in op.inputs
        }
        """Values whose layouts the job itself changes."""
        self._pieces = _pieces_added_up(job)
        self._passed_on: dict[object, tuple[NdSbp, ...]] = {}
        self._number_of: dict[str, int] = {}
        self._numbers: dict[object, int] = {}

    def sums(self, op: Op, microbatches: int) -> float:
        """How many results such as this op's are added up before devices reduce their sum: those of
        other pieces, and those of micro-batches unless the layout of each is to change.
        """
        over = over_microbatches(op)
        summed = (
            over is not None
            and all(isinstance(sbp, Partial) for sbp in over.outputs)
            and not any(value.name in self._changed for value in op.outputs)
        )
        return self._pieces.get(op.name, 1.0) * (microbatches if summed else 1)

    def passing_on(
        self, op: Op, chosen: NdSignature, wanted: NdSbp, layouts: _ValueLayouts
    ) -> tuple[NdSbp, ...]:
        """See `_passing_on`."""
        key = self.number(op, layouts), chosen, wanted
        known = self._passed_on.get(key)
        if known is None:
            known = _passing_on(op, chosen, wanted, layouts.microbatches)
            self._passed_on[key] = known
        return known

    def number(self, op: Op, layouts: _ValueLayouts) -> int:
        """A number that ops have in common which are equal but for the layouts that they are fed.

        It is looked up again in every walk, where hashing types and attributes would take most of
        the time.
        """
        number = self._number_of.get(op.name)
        if number is None:
            key = (
                op.kind,
                op.attrs,
                op.sbp,
                op.placement.hierarchy,
                links_of(layouts.machine, op.placement),
                over_microbatches(op),
                self.sums(op, layouts.microbatches),
                op.input_types,
                op.output_types,
            )
            number = self._number_of[op.name] = self._numbers.setdefault(key, len(self._numbers))
        return number


class _ValueLayouts:
    """Layouts known so far: where each value was made, and what it is boxed to."""

    def __init__(
        self,
        boxed: Mapping[str, frozenset[NdSbp]],
        choices: _Choices,
        microbatches: int,
        machine: Machine,
        read: Mapping[str, NdSbp],
    ) -> None:
        self.machine = machine
        self.read = read
        """In which layout all readers used a value in the walk before."""
        self.made: dict[str, NdSbp] = {}
        self.microbatches = microbatches
        self.choices = choices
        self._boxed = dict(boxed)
        self._asked: dict[str, set[NdSbp]] = {}

    def record(self, op: Op, signature: NdSignature) -> None:
        """Remember an op's choice."""
        own = op.attr("late") is not None  # a late boxing serves its redistribute alone
        for value, sbp in zip(op.inputs, signature.inputs, strict=True):
            if sbp != self.made[value.name] and not own and value.placement == op.placement:
                self._asked.setdefault(value.name, set()).add(sbp)
                known = self._boxed.get(value.name, frozenset())
                if sbp not in known:
                    self._boxed[value.name] = known | {sbp}
        for value, sbp in zip(op.outputs, signature.outputs, strict=True):
            self.made[value.name] = sbp

    def asked(self) -> dict[str, frozenset[NdSbp]]:
        """Every layout that some op's choice asked for, by value."""
        return {name: frozenset(layouts) for name, layouts in self._asked.items()}

    def boxed(self, value: Value) -> frozenset[NdSbp]:
        """Layouts in which a value is there besides the one it was made in."""
        return self._boxed.get(value.name, frozenset())


def _signature_of(op: Op, layouts: _ValueLayouts) -> NdSignature:
    ndim = op.placement.ndim
    whole = NdSbp.broadcast(ndim)
    if op.kind in ("input", "variable"):
        demanded = op.sbp or whole
        demanded.check(ndim, len(op.outputs[0].shape))
        return NdSignature((), (canonical(demanded, op.placement.hierarchy),))
    if op.kind == "output":
        return NdSignature((whole,), ())
    if op.kind == "redistribute":
        target = canonical(_redistributed(op, layouts), op.placement.hierarchy)
        return NdSignature((target,), (target,))
    return _cheapest(op, layouts)


def _redistributed(op: Op, layouts: _ValueLayouts) -> NdSbp:
    """The demanded layout; else, and along mesh axes for which nothing is demanded, the input's
    own, reduced, if the new mesh has as many axes.
    """
    along = op.attr("along")
    if op.sbp is not None:
        demanded = op.sbp.check(op.placement.ndim, len(op.outputs[0].shape))
        if along is None:
            return demanded
    value = op.inputs[0]
    if value.placement.ndim == op.placement.ndim:
        got = layouts.made[value.name]
        own = got.reduced()
    else:
        own = NdSbp.broadcast(op.placement.ndim)
    if op.sbp is None:
        return own
    position = (op.placement.axes or ()).index(str(along))
    return own.replace(position, demanded[position])


def _cheapest(op: Op, layouts: _ValueLayouts) -> NdSignature:
    key = (
        layouts.choices.number(op, layouts),
        tuple((layouts.made[value.name], layouts.boxed(value)) for value in op.inputs),
        tuple(layouts.read.get(value.name) for value in op.outputs),
    )
    known = layouts.choices.by_key.get(key)
    if known is None:
        known = layouts.choices.by_key[key] = _choose(op, layouts)
    return known


def over_microbatches(op: Op) -> Signature | None:
    """An op's signature over micro-batches; None where it does not see them."""
    micro = op.micro
    if micro is None or all(sbp is BROADCAST for sbp in (*micro.inputs, *micro.outputs)):
        return None
    return Signature(micro.inputs, micro.outputs)


def legal_signatures(op: Op, microbatches: int) -> tuple[NdSignature, ...]:
    """All that an op's rule allows on its mesh, in rule order."""
    facts = op.kind, op.input_types, op.output_types, op.attrs, op.placement.hierarchy
    over = over_microbatches(op)
    passing = passes(op.kind, op.placement.device_type)
    if over is None:
        return mesh_signatures(*facts, passing)
    return piece_signatures(*facts, over, microbatches, passing)


def _choose(op: Op, layouts: _ValueLayouts) -> NdSignature:
    hierarchy = op.placement.hierarchy
    return cheapest_signature(
        op.kind,
        legal_signatures(op, layouts.microbatches),
        [
            Operand(value.type, layouts.made[value.name], layouts.boxed(value))
            for value in op.inputs
        ],
        op.output_types,
        hierarchy,
        op.sbp,
        links_of(layouts.machine, op.placement),
        flops_if_hiding(op.kind, op.input_types, op.output_types, op.attrs),
        [layouts.read.get(value.name) for value in op.outputs],
        layouts.choices.sums(op, layouts.microbatches),
    )


def flops_if_hiding(
    kind: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], attrs: Attrs
) -> int:
    """What an op computes while it passes something between devices; 0 for ops that do not."""
    return 0 if op_def(kind).passing is None else flops_of(kind, inputs, outputs, dict(attrs))


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of an op, and the layouts in which it is there."""

    type: TensorType
    made: NdSbp
    boxed: frozenset[NdSbp] = frozenset()
    """Besides the one it was made in."""

    def moves(self, wanted: NdSbp) -> bool:
        """Whether having it in the wanted layout surely takes more than reductions and copies.

        A split is left by gathering or re-splitting only. From a broadcast to a split leads a
        slice, or a reduction of what is made partial first, which costs more; a slice of nothing
        is free, and so is a halo of nothing.
        """
        made = self.made
        if made == wanted or wanted in self.boxed:
            return False
        if any(
            isinstance(entry, Halo) and own == Split(entry.axis)
            for own, entry in zip(made.entries, wanted.entries, strict=True)
        ):
            return False
        if any(
            isinstance(own, Split) and own != entry
            for own, entry in zip(made.entries, wanted.entries, strict=True)
        ):
            return True
        return not made.has_partial and not wanted.has_partial and 0 not in self.type.shape

    def seconds(
        self, wanted: NdSbp, hierarchy: tuple[int, ...], links: MeshLinks | None = None
    ) -> Seconds:
        """What it costs to have it in the wanted layout."""
        if self.made == wanted or wanted in self.boxed:
            return 0.0, 0.0
        moved = reduced = 0.0
        if wanted.has_halo:
            steps, moved = halo_seconds(self.made, wanted, *self.type, hierarchy, links)
        else:
            steps = boxing_path(self.made, wanted, *self.type, hierarchy, links)
        for step in steps:
            if step.primitive in (Primitive.ALL_GATHER, Primitive.ALL_TO_ALL, Primitive.SLICE):
                # A slice is cheap, but what it splits will be gathered again by somebody.
                moved += step.seconds
                if step.primitive is Primitive.ALL_TO_ALL and self._idles(step, hierarchy):
                    # What few devices then make will be spread over all of them again.
                    moved += step.seconds
            elif step.primitive is Primitive.REDUCE_SCATTER:
                # Counted as an all-reduce: a split chosen only because it costs half would be
                # gathered again by the next op. Sequence parallelism is a decision of its own.
                reduced += 2 * step.seconds
            else:
                reduced += step.seconds
        return moved, reduced

    def _idles(self, step: BoxingStep, hierarchy: tuple[int, ...]) -> bool:
        """Whether a split leaves devices without elements."""
        devices = element_count([hierarchy[axis] for axis in step.mesh_axes])
        return self.type.shape[step.dst_axis] < devices


def cheapest_signature(
    kind: str,
    candidates: Sequence[NdSignature],
    operands: Sequence[Operand],
    output_types: Sequence[TensorType],
    hierarchy: tuple[int, ...],
    demanded: NdSbp | None = None,
    links: MeshLinks | None = None,
    flops: int = 0,
    read: Sequence[NdSbp | None] = (),
    sums: float = 1,
) -> NdSignature:
    """The candidate that is cheapest by the four prices, on a mesh of this hierarchy and of these
    links, by default those of the generic machine.

    `demanded` is the layout that all outputs must have, `flops` is what the op computes; it can
    hide inputs that go round. Of equals the one comes first whose outputs are as they are `read`,
    where that is known. `sums` is how many results are added up before they are reduced. ShapeError
    where no candidate has what is demanded, or keeps the layout of what the op updates in place.
    """
    target = None if demanded is None else canonical(demanded, hierarchy)
    mutates, passing = op_def(kind).mutates, op_def(kind).passing
    made = tuple(operand.made for operand in operands)
    best: NdSignature | None = None
    best_price: Price = (0.0, 0.0, 0.0, 0, 0)
    best_number = 0
    others: list[tuple[int, NdSignature]] = []
    # First those that take the inputs as they are: mostly one of them is the cheapest, and shows
    # it without a search for ways from layout to layout.
    for number, candidate in enumerate(candidates):
        if target is not None and any(target != sbp for sbp in candidate.outputs):
            continue
        if any(
            candidate.inputs[source] != made[source]
            or candidate.outputs[updated] != candidate.inputs[source]
            for updated, source in mutates
        ):
            continue
        if candidate.inputs != made:
            others.append((number, candidate))
            continue
        owed = _owed(output_types, candidate, hierarchy, links) / sums
        if passing is not None and passing.mesh_axes(
            candidate.inputs, candidate.outputs, hierarchy
        ):
            others.append((number, candidate))
            continue
        unlike = _unlike(candidate, read)
        if not owed and not unlike:
            return candidate
        price = (0.0, owed, 0.0, 0, unlike)
        if best is None or price < best_price:
            best, best_price, best_number = candidate, price, number
    costs: dict[tuple[int, NdSbp], Seconds] = {}
    for number, candidate in others:
        owed = _owed(output_types, candidate, hierarchy, links) / sums
        if best is not None:
            # It costs this much at least, and changes an input.
            if best_price < (0.0, owed, 0.0, 1, 0):
                continue
            if not best_price[0] and _moves(operands, candidate):
                continue
        moved = reduced = 0.0
        for position, wanted in enumerate(candidate.inputs):
            key = (position, wanted)
            if key not in costs:
                costs[key] = operands[position].seconds(wanted, hierarchy, links)
            moved += costs[key][0]
            reduced += costs[key][1]
        if passing is not None:
            types = [operand.type for operand in operands]
            moved += passing_seconds(passing, types, candidate, hierarchy, flops, links)
        changed = sum(wanted != own for own, wanted in zip(made, candidate.inputs, strict=True))
        price = (moved, reduced + owed, reduced, changed, _unlike(candidate, read))
        if best is None or (price, number) < (best_price, best_number):
            best, best_price, best_number = candidate, price, number
    if best is None:
        raise ShapeError(
            f"no sharding of {kind} fits the layouts demanded of it",
            got=", ".join(str(operand.made) for operand in operands),
            expected=f"outputs {demanded}"
            if demanded is not None
            else "the layout of its variables",
            hint="redistribute an input, or place the parameter with another SBP",
        )
    return best


def _unlike(candidate: NdSignature, read: Sequence[NdSbp | None]) -> int:
    """How many results are made in another layout than the one in which they are read."""
    return sum(
        wanted is not None and wanted != sbp
        for wanted, sbp in zip(read, candidate.outputs, strict=False)
    )


def passing_seconds(
    passing: Round | Exchange,
    types: Sequence[TensorType],
    signature: NdSignature,
    hierarchy: tuple[int, ...],
    flops: int,
    links: MeshLinks | None,
) -> float:
    """What it costs that the op's kernel passes something between devices."""
    axes = passing.mesh_axes(signature.inputs, signature.outputs, hierarchy)
    if not axes:
        return 0.0
    size = element_count([hierarchy[axis] for axis in axes])
    types = tuple(types)
    devices = element_count(
        [
            extent
            for entry, extent in zip(signature.inputs[0], hierarchy, strict=True)
            if isinstance(entry, Split)
        ]
    )
    links = links or uniform_links(generic_machine())
    link = links.along(axes)
    hidden = op_seconds(links.machine, flops / devices / size, 0.0, types[0].dtype)
    return passing.seconds(
        types, signature.inputs, axes, hierarchy, link.per_message, link.per_byte, hidden
    )


def _moves(operands: Sequence[Operand], candidate: NdSignature) -> bool:
    """Whether some input surely has to be moved."""
    return any(
        operand.moves(wanted) for operand, wanted in zip(operands, candidate.inputs, strict=True)
    )


def _owed(
    output_types: Sequence[TensorType],
    signature: NdSignature,
    hierarchy: tuple[int, ...],
    links: MeshLinks | None,
) -> float:
    """What reducing the op's partial outputs will cost."""
    seconds = 0.0
    for tensor, sbp in zip(output_types, signature.outputs, strict=True):
        if sbp.has_partial:
            path = boxing_path(sbp, sbp.reduced(), *tensor, hierarchy, links)
            seconds += sum(step.seconds for step in path)
    return seconds


def _report(job: Job, signatures: tuple[NdSignature, ...]) -> None:
    """Say once, at INFO, where an op uses a value in another layout than it was made in."""
    if not logger.isEnabledFor(logging.INFO):
        return
    made: dict[str, NdSbp] = {}
    for op, signature in zip(job.ops, signatures, strict=True):
        for value, used in zip(op.inputs, signature.inputs, strict=True):
            got = made[value.name]
            if value.placement != op.placement or got != used:
                logger.info(
                    "%s (%s) uses %%%s as %s, made as %s", op.name, op.source, value.name, used, got
                )
        for value, sbp in zip(op.outputs, signature.outputs, strict=True):
            made[value.name] = sbp
