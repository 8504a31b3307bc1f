"""Which stream of its ranks runs each collective.

What a rank computes waits for most collectives at once: the partial sums of tensor parallelism are
on its critical path. For others it does not wait: a gradient is read by the optimizer after
backward, and a parameter is known before anything computes with it. On one stream the former stand
behind the latter, so each of these kinds gets a stream of its own:

- `gradient`: reductions of what is made after forward and for which backward does not wait: it does
  not read them, directly or through ops that only pass them on (those of one input, such as casts
  and changes of layout); and reductions of what is only reported, such as the loss, so that both
  can share a call;
- `parameter`: collectives of what is known from variables alone, such as the gathers of ZeRO;
- `collective`: all others.

The streams of a rank run side by side, and each runs its collectives in the global order. As all
ranks have that order, no ranks can wait for each other in a circle, whatever the streams'
interleaving. Ranks that meet on several streams have a communicator for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plancompiler.boxing.graph import BoxingTaskGraph, PlacedOp, TaskFamily
from plancompiler.errors import AttributeValueError
from plancompiler.ir import Op, Phase
from plancompiler.ir.settings import Settings, option
from plancompiler.ir.task import TaskKind
from plancompiler.plan.plan import COLLECTIVE_STREAMS, Stream

_ONE_STREAM = {"one": Stream.COLLECTIVE, "compute": Stream.COMPUTE}
PER_GROUP = "group"


@dataclass(frozen=True, kw_only=True)
class StreamOptions(Settings):
    """Where collectives run."""

    streams: str = option(
        PER_GROUP,
        "Streams of collectives: one for each kind of `group` (gradients, parameters, all others), "
        "`one` for all, or the `compute` stream.",
        metavar="HOW",
        choices=(PER_GROUP, *_ONE_STREAM),
    )


def choose_streams(graph: BoxingTaskGraph, streams: str = PER_GROUP) -> BoxingTaskGraph:
    """The graph with the stream of every collective, as `StreamOptions.streams` says, or the op
    that demands the collective's layout: `redistribute` with the attribute `stream`.

    AttributeValueError for an op that names no stream of collectives.
    """
    entries = graph.in_order()
    collectives = [family for family in graph.families if family.kind is TaskKind.COLLECTIVE_BOXING]
    if streams == PER_GROUP:
        kinds = _kinds(entries)
        chosen = {family.number: kinds[family.number] for family in collectives}
    else:
        chosen = dict.fromkeys((family.number for family in collectives), _ONE_STREAM[streams])
    chosen.update(_demanded(graph, collectives))
    families = tuple(
        replace(family, transfer=replace(family.transfer, stream=chosen[family.number]))
        if family.transfer is not None and family.number in chosen
        else family
        for family in graph.families
    )
    return replace(graph, families=families)


def _kinds(entries: Sequence[PlacedOp | TaskFamily]) -> dict[int, Stream]:
    """The stream of each transport family, by the kind of its value."""
    late, stored = _made(entries)
    awaited, reported = _awaited(entries)
    kinds = {}
    for entry in entries:
        if isinstance(entry, TaskFamily):
            number = entry.number
            kinds[number] = Stream.COLLECTIVE
            unhurried = number in reported or (number in late and number not in awaited)
            if unhurried and _reduces(entry):
                kinds[number] = Stream.GRADIENT
            elif number in stored:
                kinds[number] = Stream.PARAMETER
    return kinds


def _reduces(family: TaskFamily) -> bool:
    return family.transfer is not None and family.transfer.reduction is not None


def _made(entries: Sequence[PlacedOp | TaskFamily]) -> tuple[set[int], set[int]]:
    """Families whose values are made after forward, and those whose values follow from one variable
    each. (In compiled functions all that is given to the function is a variable, too.)
    """
    late: set[int] = set()
    stored: set[int] = set()
    for entry in entries:
        sources = {source.family for source in entry.inputs}
        if isinstance(entry, TaskFamily):
            number = entry.number
            if sources <= late:
                late.add(number)
        else:
            number = entry.family
            if entry.op.origin.phase is not Phase.FORWARD:
                late.add(number)
        alone = isinstance(entry, TaskFamily) or len(entry.op.inputs) == 1
        if (alone and sources <= stored) or _is_variable(entry):
            stored.add(number)
    return late, stored


def _is_variable(entry: PlacedOp | TaskFamily) -> bool:
    return isinstance(entry, PlacedOp) and entry.op.kind == "variable"


def _awaited(entries: Sequence[PlacedOp | TaskFamily]) -> tuple[set[int], set[int]]:
    """Families for whose values backward waits, as it computes with them; and those whose values
    are outputs of the job and nothing else.
    """
    awaited: set[int] = set()
    used: set[int] = set()
    numbers = set()
    for entry in reversed(entries):
        number = entry.number if isinstance(entry, TaskFamily) else entry.family
        numbers.add(number)
        sources = {source.family for source in entry.inputs}
        if number in awaited or (isinstance(entry, PlacedOp) and _computes(entry.op)):
            awaited |= sources
        if number in used or (isinstance(entry, PlacedOp) and entry.op.kind != "output"):
            used |= sources
    return awaited, numbers - used


def _computes(op: Op) -> bool:
    """Whether backward computes something with what an op reads, rather than passing it on."""
    return op.origin.phase is Phase.BACKWARD and len({value.name for value in op.inputs}) > 1


def _demanded(graph: BoxingTaskGraph, collectives: Sequence[TaskFamily]) -> dict[int, Stream]:
    """The stream of each collective for which an op names one; the first such op decides."""
    known = {family.number: family for family in collectives}
    transport = graph.family_by_number
    demanded: dict[int, Stream] = {}
    for placed in graph.ops:
        op = placed.op
        named = op.attr("stream", "") if op.kind == "redistribute" else ""
        if not named:
            continue
        if named not in COLLECTIVE_STREAMS:
            raise AttributeValueError(
                "an op names a stream that does not run collectives",
                op=op.name,
                source=op.source,
                got=repr(named),
                expected=f"one of {', '.join(COLLECTIVE_STREAMS)}",
            )
        pending = [placed.inputs[0].family]
        while pending:
            number = pending.pop()
            family = transport.get(number)
            if family is None or family.transfer is None:
                continue
            if number in known:
                demanded.setdefault(number, COLLECTIVE_STREAMS[str(named)])
            pending += [source.family for source in family.inputs]
    return demanded
