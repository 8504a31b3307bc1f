"""Views: which ops make a view of their input, how it shares memory, and how it is written.

Whether the result of an op is a view depends on the whole tensor, as in NumPy and PyTorch, and is
the same in every layout. A view shares memory if every rank finds its part of the result in its own
part of the input, which means that the view cuts no split axis and moves no elements between ranks.
Otherwise the view is a copy that is kept up to date (see `materialized_view`).
"""

from __future__ import annotations

from plancompiler.eager.spec import AttrMap, TensorSpec
from plancompiler.eager.tensor import DistTensor
from plancompiler.executor.space import HOST
from plancompiler.ir import Split
from plancompiler.ops.registry import Alias, View, op_def
from plancompiler.ops.view import view_strides


def alias_of(view: View, attrs: AttrMap, used: TensorSpec, made: TensorSpec) -> Alias | None:
    """What makes this rank's part of an op's result a view of its part of the input; None where it
    has to be a copy.
    """
    if view.on_host and made.space is not HOST:
        return None
    if view.cuts:
        if not made.inside or made.sbp != used.sbp:
            # It splits what all ranks have: a change of the result would not reach all copies.
            return None
        split = {entry.axis for entry in used.sbp if isinstance(entry, Split)}
        if any(made.shape[axis] != used.shape[axis] for axis in split):
            return None
    return view.take(attrs, made.local_shape)


def makes_view(
    tensor: DistTensor,
    kind: str,
    attrs: AttrMap,
    made: tuple[int, ...],
) -> bool:
    """Whether what an op that can make views makes of a tensor is one."""
    if op_def(kind).strided is not None or not tensor.is_view:
        return True
    return view_strides(kind, attrs, tensor.shape, tensor.whole_strides(), made) is not None


def only_thin(used: TensorSpec, made: TensorSpec) -> bool:
    """Whether a reshape only adds and drops axes of extent 1: then it is a view in any order."""
    return [each for each in used.shape if each != 1] == [each for each in made.shape if each != 1]
