"""Changes of layout of eager tensors, and their gradient."""

from __future__ import annotations

from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import OneToOne, gradient_layout
from plancompiler.eager.tensor import DistTensor, record
from plancompiler.ir import NdSbp


class Redistribution(OneToOne):
    """A change of layout of tensors of one spec."""

    kind = "redistribute"

    def __init__(self, source: TensorSpec, target: TensorSpec) -> None:
        super().__init__(source, target)
        self._move = None if source is target else source.world.mode.move(source, target)

    def __call__(self, tensor: DistTensor) -> DistTensor:
        if self._move is None:
            return tensor
        world, target = self.source.world, self.outputs[0]
        local = tensor.moved(target, self._move)
        moved = DistTensor(target, local)
        if self.source.sbp.has_partial:
            moved.more = {"shared": True}
        if tensor.node is not None and world.recording:
            record(moved, self, tensor)
        return moved

    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        """The same value in the layout that suits the input; see `gradient_layout`."""
        source = self.source
        if grad.placement == source.placement:
            return grad.redistribute(sbp=gradient_layout(source.sbp, grad.sbp))
        whole = gradient_layout(source.sbp, NdSbp.broadcast(source.placement.ndim))
        return grad.redistribute(source.placement, whole)
