"""Between a tensor of many ranks and the parts that they hold, with gradients.

A part is a tensor on a placement of this rank alone, so ops on it run on this rank and exchange
nothing. The parts of all ranks are one program, whose loss is computed from the joined results. So
every rank's use of a broadcast value counts: on every rank, its gradient is the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.eager.creation import from_local
from plancompiler.eager.spec import AnyWorld, TensorSpec
from plancompiler.eager.tape import OneToOne
from plancompiler.eager.tensor import DistTensor, record
from plancompiler.errors import GradientError, PlacementError, ShapeError, TracingError, UsageError
from plancompiler.ir import BROADCAST, Broadcast, NdSbp, Partial, Placement, Reduction
from plancompiler.ir.argument_errors import names_wrong_arguments
from plancompiler.ir.operators import SbpLike
from plancompiler.ir.source import user_line

_SUM = Partial(Reduction.SUM)


@names_wrong_arguments
def local_part(tensor: DistTensor) -> DistTensor:
    """This rank's part of a tensor as a tensor of this rank alone, on the tape and sharing memory.

    The gradient of a part of a split tensor is a part of the gradient. The gradient of a broadcast
    value is the sum of the gradients of all ranks' parts, on every rank. Raises GradientError for a
    partial value that requires a gradient (its summands are not determined by its value:
    redistribute it first), and PlacementError on a rank outside of the placement.
    """
    spec, world = tensor.spec, tensor.spec.world
    _refuse_tracing(world)
    if not spec.inside:
        raise PlacementError(
            "this rank holds no part of the tensor",
            source=user_line(),
            rank=world.rank,
            got=str(spec),
        )
    recorded = tensor.node is not None and world.recording
    if recorded and spec.sbp.has_partial:
        raise GradientError(
            "the parts of a partial value have no gradients of their own",
            source=user_line(),
            got=str(spec),
            hint='reduce it first: x.redistribute(sbp="B")',
        )
    tensor.packed()
    part = DistTensor(_own_spec(world, spec), tensor.local)
    part.view_of(tensor)
    if recorded:
        record(part, _Parting(spec, part.spec), tensor)
    return part


@names_wrong_arguments
def join_parts(
    part: DistTensor,
    placement: Placement,
    sbp: SbpLike | None = None,
    shape: Sequence[int] | None = None,
) -> DistTensor:
    """A tensor of the parts of all ranks of `placement`, each a tensor of its rank alone.

    The inverse of `local_part`. `shape` is the global shape; without it, global extents along split
    axes are the sums of the parts' extents. A rank outside of the placement must pass `shape`, and
    its part is ignored. For a broadcast value all ranks pass the same part, and the gradient goes
    to one of them. ShapeError if the parts are not those of a balanced split.
    """
    world = part.spec.world
    _refuse_tracing(world)
    layout = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)
    if world.rank not in placement and shape is None:
        raise UsageError(
            "a rank that holds no part cannot know the global shape",
            source=user_line(),
            rank=world.rank,
            hint="give shape=",
        )
    if part.placement.rank_list != (world.rank,):
        raise UsageError(
            "only a tensor of this rank alone is a part",
            source=user_line(),
            got=str(part.spec),
            hint="see pc.eager.local_part",
        )
    joined = from_local(part.local, placement, layout, shape, check=shape is None)
    if joined.dtype is not part.dtype:
        raise ShapeError("a part has another dtype than the tensor", got=part.dtype)
    if part.node is not None and world.recording and joined.dtype.is_floating:
        record(joined, _Joining(part.spec, joined.spec), part)
    return joined


@names_wrong_arguments
def local_map(
    function: Callable[..., Any],
    *tensors: Any,
    sbp: SbpLike | Sequence[SbpLike | None] | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`function` of this rank's parts, its results joined to tensors in the layout `sbp`.

    `tensors` are DistTensors of one placement, None, or other values, which are passed unchanged.
    The function takes and returns tensors of this rank alone; their parts may be uneven or empty.
    `sbp` is one layout, or a list of one layout per result if the function returns a tuple. A rank
    outside of the placement does not call the function, and needs `shape`, the result's shape.
    """
    given = [each for each in tensors if isinstance(each, DistTensor)]
    if not given:
        raise UsageError("local_map needs at least one DistTensor", source=user_line())
    placement, world = given[0].placement, given[0].spec.world
    for tensor in given:
        if tensor.placement != placement:
            raise PlacementError(
                "local_map works on tensors of one placement",
                source=user_line(),
                got=f"{placement} and {tensor.placement}",
                hint="move a tensor first: tensor.redistribute(placement=...)",
            )
    if world.rank not in placement:
        if shape is None:
            raise UsageError(
                "a rank that holds no part cannot know the global shape",
                source=user_line(),
                rank=world.rank,
                hint="give shape=",
            )
        layout: Any = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)  # type: ignore[arg-type]  # one result
        spec = world.spec(tuple(shape), given[0].dtype, placement, layout)
        return DistTensor(spec, spec.empty())
    parts = [local_part(each) if isinstance(each, DistTensor) else each for each in tensors]
    results = function(*parts)
    if not isinstance(results, tuple):
        return join_parts(results, placement, sbp, shape)  # type: ignore[arg-type]  # one layout
    layouts: list[Any] = list(sbp) if isinstance(sbp, (list, tuple)) else [sbp] * len(results)
    if len(layouts) != len(results):
        raise UsageError(
            "local_map was given another number of layouts than the function has results",
            source=user_line(),
            got=len(layouts),
            expected=len(results),
        )
    return tuple(
        None if part is None else join_parts(part, placement, layout)
        for part, layout in zip(results, layouts, strict=True)
    )


class _Parting(OneToOne):
    """From a tensor to this rank's part."""

    kind = "local_part"

    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        """The parts' gradients joined: along mesh axes of broadcast they are summands."""
        source = self.source
        layout = NdSbp(tuple(_SUM if entry is BROADCAST else entry for entry in source.sbp))
        return join_parts(grad, source.placement, layout, source.shape)


class _Joining(OneToOne):
    """From this rank's part to a tensor."""

    kind = "join_parts"

    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        """This rank's part of the gradient. Where all ranks gave one value, one of them gets it."""
        part, (target,) = self.source, self.outputs
        layout = NdSbp(
            tuple(
                _SUM
                if isinstance(entry, Broadcast)
                else BROADCAST
                if isinstance(entry, Partial)
                else entry
                for entry in target.sbp
            )
        )
        if not (create_graph and grad.node is not None):
            moved = grad.redistribute(sbp=layout)
            return DistTensor(part, moved.local.copy())
        # Summands of a partial gradient are no function of its value; those of the whole one are.
        whole = grad.redistribute(sbp=NdSbp.broadcast(target.placement.ndim))
        shared = DistTensor(part, whole.redistribute(sbp=layout).local.copy())
        record(shared, _Sharing(target, part), whole)
        return shared


class _Sharing(OneToOne):
    """From the gradient of a tensor to that of the part which this rank gave to it."""

    kind = "join_parts"

    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        """What all ranks' parts get, joined; of those that gave one value only the first counts."""
        target = self.source
        placement = target.placement
        at = placement.coordinates(placement.parallel_id(target.world.rank))
        if any(isinstance(each, Broadcast) and at[axis] for axis, each in enumerate(target.sbp)):
            grad = grad * 0.0  # not left out: all ranks must record the same
        layout = NdSbp(
            tuple(_SUM if isinstance(each, (Broadcast, Partial)) else each for each in target.sbp)
        )
        return join_parts(grad, placement, layout, target.shape)


def _own_spec(world: AnyWorld, spec: TensorSpec) -> TensorSpec:
    """A spec of this rank alone for its part."""
    placement = Placement(spec.placement.device_type, [world.rank])
    return world.spec(spec.local_shape, spec.dtype, placement, NdSbp.broadcast(1))


def _refuse_tracing(world: AnyWorld) -> None:
    if world.mode.traces:
        raise TracingError(
            "parts of tensors are not known while a function is compiled",
            source=user_line(),
            hint="write the function on whole tensors, or call it outside of the compiled one",
        )
