"""Layouts demanded along one mesh axis, and the op that demands one of its gradient."""

from __future__ import annotations

from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import BROADCAST, NdSbp, Partial, Sbp, Split
from plancompiler.ir.value import Value, current_tracer
from plancompiler.ops.attributes import Int
from plancompiler.ops.gradient import of_one
from plancompiler.ops.kernel import copy_unless_shared
from plancompiler.ops.registry import AttrMap, Types, define_op
from plancompiler.ops.shape import keeps_extremes


def mesh_axis(placement: Placement, along: str | int | None) -> int:
    """The position of a mesh axis given by name or position; None for the only one there is.

    AttributeValueError for an axis that the mesh does not have.
    """
    names = placement.axes or ()
    if along is None and placement.ndim == 1:
        return 0
    if isinstance(along, str) and along in names:
        return names.index(along)
    if type(along) is int and 0 <= along < placement.ndim:
        return along
    positions = f"0 to {placement.ndim - 1}"
    raise AttributeValueError(
        "a mesh axis is needed to say along which devices to communicate",
        got="none" if along is None else repr(along),
        expected=f"one of {', '.join(names)}, or {positions}" if names else positions,
    )


def redistribute_along(x: Any, along: str | int | None, entry: Sbp) -> Any:
    """A tensor with another layout along one mesh axis.

    Along the others it stays as it is; in a job what is partial along them is reduced too.
    """
    placement: Placement = x.placement
    position = mesh_axis(placement, along)
    if placement.size == 1:
        return x  # on one device all layouts are one
    if not isinstance(x, Value):
        return x.redistribute(sbp=x.spec.sbp.replace(position, entry))
    tracer = current_tracer()
    whole = NdSbp.broadcast(placement.ndim).replace(position, entry)
    if placement.ndim == 1:
        return tracer.redistribute(x, None, whole)
    if placement.axes is None:
        raise AttributeValueError(
            "in a job a layout along one axis needs a mesh with named axes",
            got=str(placement),
            hint='pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))',
        )
    return tracer.redistribute(x, None, whole, along=placement.axes[position])


def reduced(x: Any, along: str | int | None) -> Any:
    """A tensor that is not partial along a mesh axis, or along any for None.

    What is split there stays split. In a job it is reduced along all axes: which are partial is
    known only later.
    """
    if x.placement.size == 1:
        return x
    if isinstance(x, Value):
        return current_tracer().reduced(x)
    entries = list(x.spec.sbp)
    positions = range(len(entries)) if along is None else (mesh_axis(x.placement, along),)
    for position in positions:
        if isinstance(entries[position], Partial):
            entries[position] = BROADCAST
    return x.redistribute(sbp=NdSbp(tuple(entries)))


# --- place_gradient -------------------------------------------------------------------------------


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    if attrs["split"] >= len(inputs[0].shape):
        raise AttributeValueError(
            "attribute 'split' has a wrong value",
            got=attrs["split"],
            expected=f"an axis of {inputs[0]}",
        )
    return inputs


def _gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    along, split = attrs["along"], attrs["split"]
    where = None if along < 0 else along
    if split < 0:
        return reduced(dy, where)
    return redistribute_along(dy, where, Split(split))


define_op(
    "place_gradient",
    infer=_infer,
    rule="... -> ...",
    attrs=(
        Int("along", -1, least=-1),
        Int("split", -1, least=-1),
    ),
    kernel=lambda context, inputs, outputs: copy_unless_shared(inputs[0], outputs[0]),
    gradient=of_one(_gradient),
    linear=((0,),),
    extra=keeps_extremes,
    flops=0,
    view=((0, 0),),
    takes_bfloat16=True,
    precision="following",
    doc="The same values; their gradient takes its layout here, along mesh axis `along` (-1: "
    "all): split by axis `split`, or with -1 reduced.",
)
