"""Changes of layout of eager tensors, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import gradient_layout
from plancompiler.eager.tensor import DistTensor, Node, record
from plancompiler.ir import NdSbp


class Redistribution:
    """A change of layout of tensors of one spec."""

    kind = "redistribute"

    def __init__(self, source: TensorSpec, target: TensorSpec) -> None:
        self.source = source
        self.outputs = (target,)
        self._move = None if source is target else source.world.mode.move(source, target)

    def __call__(self, tensor: DistTensor) -> DistTensor:
        if self._move is None:
            return tensor
        world, target = self.source.world, self.outputs[0]
        local = tensor.moved(target, self._move)
        found = DistTensor(target, local)
        if self.source.sbp.has_partial:
            found.more = {"shared": True}
        if tensor.node is not None and world.recording:
            record(found, self, tensor)
        return found

    def backward(
        self,
        node: Node,
        grads: Sequence[DistTensor | None],
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Sequence[DistTensor | None]:
        """The same value in the layout that suits the input; see `gradient_layout`."""
        (grad,) = grads
        if grad is None:
            return (None,)
        source = self.source
        if grad.placement == source.placement:
            return (grad.redistribute(sbp=gradient_layout(source.sbp, grad.sbp)),)
        whole = gradient_layout(source.sbp, NdSbp.broadcast(source.placement.ndim))
        return (grad.redistribute(source.placement, whole),)
