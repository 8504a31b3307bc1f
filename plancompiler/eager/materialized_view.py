"""Views that cannot share memory: copies of a part of their base that are kept up to date.

The elements of a slice along a split axis, or of a reshape that moves elements between ranks, lie
on other ranks than the same elements of the base. Such a view holds a copy. The copy is made again
when it is read after a change of its base, and a change of the view is written into the base at
once. Both may exchange data between the ranks, and all ranks do so in the order of the program.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import InplaceError
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array
from plancompiler.ops.shape import SLICED, slice_bounds
from plancompiler.ops.view import view_of

_HELD: Any = vars(DistTensor)["local"]


class MaterializedView(DistTensor):
    """A view with memory of its own."""

    __slots__ = ()

    @classmethod
    def of(cls, source: DistTensor, plan: Any, array: Array) -> MaterializedView:
        """A view of a tensor, by the plan of the op that has just made the array; without a plan
        the same tensor once more.
        """
        spec = source.spec if plan is None else plan.outputs[0]
        view = cls(spec, array)
        view.view_of(source, plan)
        root = view.root
        assert view.more is not None
        # Who counts the references to the base's memory, to find out whether others share it, finds
        # this view, too.
        view.more |= {"seen": root.changed, "memory": root.local}
        return view

    @property  # over the attribute of the base, which holds the copy
    def local(self) -> Array:
        more = self.more
        if more is not None:
            changed = more["base"].changed
            if changed > more["seen"]:
                more["seen"] = changed
                _HELD.__set__(self, self._made())
        copy: Array = _HELD.__get__(self)
        return copy

    @local.setter
    def local(self, array: Array) -> None:
        _HELD.__set__(self, array)

    @property
    def held(self) -> Array:
        """The copy as it is, which may be older than the base."""
        copy: Array = _HELD.__get__(self)
        return copy

    def _made(self) -> Array:
        plan, source = self.by, self.source
        assert source is not None
        made: Array = source.local if plan is None else plan.again(source)
        return made

    def written(self) -> None:
        """See `DistTensor.written`: what is held now is written into the base."""
        world, more, source = self.spec.world, self.more, self.source
        assert more is not None
        assert source is not None
        if world.mode.traces:
            super().written()
            return
        before, world.recording = world.recording, False
        try:
            write(source, DistTensor(self.spec, self.held), self.by)
        finally:
            world.recording = before
        super().written()
        more["seen"] = more["base"].changed

    def __repr__(self) -> str:
        """What is held, and whether that is old: one rank alone may ask."""
        more = self.more
        old = more is not None and more["base"].changed > more["seen"]
        shown = repr(DistTensor(self.spec, self.held))
        return f"{shown[:-1]}, from before its base was changed)" if old else shown

    def detach(self) -> DistTensor:
        """See `DistTensor.detach`."""
        return MaterializedView.of(self, None, self.local)

    def __copy__(self) -> DistTensor:
        """See `DistTensor.__copy__`."""
        duplicate = self.detach()
        duplicate.follow(self)
        return duplicate


def write(source: DistTensor, value: DistTensor, plan: Any) -> None:
    """Write a changed view into the tensor that it is a view of, by the plan that made the view."""
    if plan is not None and view_of(plan.kind) is SLICED:
        scatter = _scatter_plan(source, value, plan)
        if scatter.moves[0] is None and scatter.outputs[0] is source.spec:
            x, move = source.local, scatter.moves[1]
            part = value.local if move is None else value.moved(scatter.used[1], move)
            scatter.kernel(scatter.context, (x, part), (x,))
            source.written()
            return
    np.copyto(source.local, replaced(source, value, plan).local)
    source.written()


def replaced(source: DistTensor, value: DistTensor, plan: Any) -> DistTensor:
    """What a tensor becomes where a view of it, made by a plan, becomes `value`: in its layout."""
    made = value
    if plan is None:
        if not source.spec.same_but_layout(value.spec):
            raise InplaceError(
                "a rank's part of a view that has no memory of its own cannot be changed in place",
                source=user_line(),
                got=str(value.spec),
                hint="change the view itself, or take the part of a copy: x * 1",
            )
    else:
        put = view_of(plan.kind).put
        assert put is not None  # else nobody could change the view
        made = put(source, value, plan.attrs)
    return made.redistribute(sbp=source.sbp)


def _scatter_plan(source: DistTensor, value: DistTensor, plan: Any) -> Any:
    bounds = slice_bounds(plan.attrs, source.ndim)
    return source.spec.world.mode.plan("slice_scatter", (source.spec, value.spec), bounds)
