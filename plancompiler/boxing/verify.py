"""The verifier of boxing task graphs and slices: ids resolve, layouts fit their tensors and meshes.

It is for those that come from elsewhere, so that nothing after it needs to doubt an index. It takes
one pass over ops and families; what a family does with its layouts is proved on the plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from plancompiler.boxing.graph import (
    BoxingTaskGraph,
    FamilyOutput,
    PlacedGraph,
    PlacedOp,
    TaskFamily,
    Transfer,
)
from plancompiler.boxing.primitives import primitive_between
from plancompiler.errors import VerifyError
from plancompiler.ir import NdSbp, Placement
from plancompiler.ir.halo import Halo
from plancompiler.ir.sbp import Sbp, Split
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import CROSSING, Primitive, TaskKind, require_rank_fits
from plancompiler.ops.registry import op_def
from plancompiler.ops.verify_types import MAX_TENSOR_BYTES
from plancompiler.plan.plan import COLLECTIVE_STREAMS, Stream

_COMPUTING = frozenset((TaskKind.COMPUTE, TaskKind.INPUT, TaskKind.VARIABLE, TaskKind.OUTPUT))
_ALONG_AXES = frozenset(Primitive) - {Primitive.EXCHANGE, Primitive.COPY}
"""Primitives that change a layout along mesh axes of one placement."""
Shape = tuple[int, ...]


def verify_boxing_graph(graph: PlacedGraph) -> None:
    """Raise VerifyError, naming the op or family, where a graph or slice does not hold together.

    A slice need not hold the ancestors of families that are not its rank's; which registers a rank
    has is seen when its tasks are rebuilt.
    """
    _Verifier(graph).verify()


class _Verifier:
    def __init__(self, graph: PlacedGraph) -> None:
        self._graph = graph
        self._whole = isinstance(graph, BoxingTaskGraph)
        self._families = {family.number: family for family in graph.families}
        self._outputs = {placed.family: len(placed.op.outputs) for placed in graph.ops}
        self._placements: set[int] = set()
        self._layouts: set[tuple[int, int, int]] = set()
        """Both by the ids of what was found right: tables of the wire share their entries."""

    def verify(self) -> None:
        graph = self._graph
        if graph.world_size < 1:
            raise VerifyError("a graph is of no ranks", got=graph.world_size)
        require_rank_fits(graph.world_size - 1)
        _ascending("ops", [placed.family for placed in graph.ops])
        _ascending("families", [family.number for family in graph.families])
        for family in graph.families:
            count = self._outputs.setdefault(family.number, len(family.outputs))
            if count != len(family.outputs):
                raise _wrong(family, "a family has other outputs than its op", count)
        for placed in graph.ops:
            self._op(placed)
        for family in graph.families:
            self._family(family)

    def _op(self, placed: PlacedOp) -> None:
        op, signature = placed.op, placed.signature
        if not len(placed.inputs) == len(op.inputs) == len(signature.inputs):
            raise _wrong(op, "an op's inputs do not fit its signature", len(signature.inputs))
        if len(op.outputs) != len(signature.outputs):
            raise _wrong(op, "an op's outputs do not fit its signature", len(signature.outputs))
        definition = op_def(op.kind)
        for target, source in (*definition.inplace, *definition.view, *definition.mutates):
            if target >= len(op.outputs) or source >= len(op.inputs):
                raise _wrong(op, "an op has too few inputs or outputs for its kind", op.kind)
        self._placement(op, op.placement)
        for values, sbps in ((op.inputs, signature.inputs), (op.outputs, signature.outputs)):
            for value, sbp in zip(values, sbps, strict=True):
                self._layout(op, value.shape, sbp, op.placement)
        if op.micro is not None:
            for values, pieces in ((op.inputs, op.micro.inputs), (op.outputs, op.micro.outputs)):
                for value, piece in zip(values, pieces, strict=True):
                    _splits(op, value.shape, (piece,))
        self._sources(op, placed.family, placed.inputs, known=True)

    def _family(self, family: TaskFamily) -> None:
        self._placement(family, family.placement)
        for layout in family.outputs:
            self._layout(family, layout.shape, layout.sbp, family.placement)
        transfer = family.transfer
        if (transfer is None) is not (family.kind in _COMPUTING):
            raise _wrong(family, "a family has no transfer, or one too many", family.kind)
        self._sources(family, family.number, family.inputs, known=self._whole)
        if transfer is not None:
            self._transfer(family, transfer)

    def _transfer(self, family: TaskFamily, transfer: Transfer) -> None:
        kind, primitive = family.kind, transfer.primitive
        collective = kind is TaskKind.COLLECTIVE_BOXING
        exchanged = primitive is Primitive.EXCHANGE
        inputs = 2 if exchanged and kind in (TaskKind.SLICE_BOXING, TaskKind.BOXING_ZEROS) else 1
        if collective:
            inputs = max(1, len(family.outputs))
        if len(family.inputs) != inputs or len(family.outputs) != (inputs if collective else 1):
            raise _wrong(
                family,
                "a transport family has too many or too few inputs or outputs",
                f"{len(family.inputs)} and {len(family.outputs)}",
            )
        source = transfer.src_placement if exchanged else family.placement
        if source is None or transfer.src_sbp is None:
            raise _wrong(family, "a transport family lacks its source layout", primitive)
        self._placement(family, source)
        layout = family.outputs[-1]  # of a fused reduction, the one whose source layout is kept
        self._layout(family, layout.shape, transfer.src_sbp, source)
        if kind in CROSSING:
            read = family.inputs[0]
            producer = self._families.get(read.family)
            if not exchanged or producer is None or producer.placement != source:
                raise _wrong(family, "a copy between ranks lacks its producer", read)
        axes = transfer.mesh_axes
        if len(set(axes)) != len(axes) or not all(0 <= axis < source.ndim for axis in axes):
            raise _wrong(family, "a transfer is along axes that its mesh lacks", axes)
        possible = COLLECTIVE_STREAMS.values() if collective else (Stream.COLLECTIVE,)
        if transfer.stream not in possible:
            raise _wrong(family, "a transfer is on a stream that is not for it", transfer.stream)
        for axis in (transfer.src_axis, transfer.dst_axis):
            if not -1 <= axis < len(layout.shape):
                raise _wrong(family, "a transfer is along an axis that its tensor lacks", axis)
        if primitive in _ALONG_AXES:
            row = None
            if axes:
                row = primitive_between(transfer.src_sbp[axes[0]], layout.sbp[axes[0]])
            if row is None:
                raise _wrong(
                    family,
                    "no primitive leads from one layout to the other",
                    f"{transfer.src_sbp} to {layout.sbp} along {axes}",
                )

    def _sources(
        self,
        reader: PlacedOp | TaskFamily | object,
        number: int,
        sources: Iterable[FamilyOutput],
        *,
        known: bool,
    ) -> None:
        for source in sources:
            count = self._outputs.get(source.family)
            if count is None and not known:
                count = source.slot + 1
            if count is None or not 0 <= source.slot < count or source.family >= number:
                raise _wrong(reader, "an input is no output of an earlier op or family", source)

    def _placement(self, where: object, placement: Placement) -> None:
        if id(placement) in self._placements:
            return
        if max(placement.rank_list) >= self._graph.world_size:
            raise _wrong(where, "a placement has ranks outside the world", placement)
        self._placements.add(id(placement))

    def _layout(self, where: object, shape: Shape, sbp: NdSbp, placement: Placement) -> None:
        key = (id(shape), id(sbp), placement.ndim)
        if key in self._layouts:
            return
        if len(sbp) != placement.ndim:
            raise _wrong(where, "a layout does not fit its mesh", f"{sbp} on {placement}")
        _splits(where, shape, sbp)
        if min(shape, default=0) < 0 or element_count(shape) * 16 > MAX_TENSOR_BYTES:
            raise _wrong(where, "a tensor has an impossible shape", shape)
        self._layouts.add(key)


def _splits(where: object, shape: Shape, entries: Iterable[Sbp]) -> None:
    cut: dict[int, Sbp] = {}
    for entry in entries:
        if not isinstance(entry, (Split, Halo)):
            continue
        if entry.axis >= len(shape):
            raise _wrong(
                where, "a layout splits an axis that the tensor lacks", f"{entry}, {shape}"
            )
        if cut.setdefault(entry.axis, entry) != entry:
            raise _wrong(where, "an axis is cut with a halo and in another way", entry)
        if isinstance(entry, Halo) and entry.reaches[-1].extent != shape[entry.axis]:
            raise _wrong(where, "a halo is of an axis of another extent", f"{entry}, {shape}")


def _ascending(what: str, numbers: Sequence[int]) -> None:
    if any(left >= right for left, right in pairwise(numbers)):
        raise VerifyError(f"the {what} of a graph are not in ascending order, each once")
    if numbers and numbers[0] < 0:
        raise VerifyError(f"the {what} of a graph have negative numbers", got=numbers[0])


def _wrong(where: object, what: str, got: object) -> VerifyError:
    name = getattr(where, "name", None)
    return VerifyError(f"the boxing graph does not hold together: {what}", op=name, got=str(got))
