"""`DenseTensor`: whole arrays that run every op at once, to evaluate gradient functions on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plancompiler.ir import AttrValue, DType, NdSbp, Placement
from plancompiler.ir.operators import Scalar, TensorOperators
from plancompiler.ops import op_def
from tests.ops.sharding import run_dense

SEED, STEP = 7, 3


class DenseTensor(TensorOperators):
    """An array with the operators of every tensor."""

    __slots__ = ("array", "dtype", "placement", "shape")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = DType.parse(array.dtype)
        self.placement = Placement("cpu", [0])

    def _apply(
        self, kind: str, inputs: Sequence[DenseTensor], attrs: Mapping[str, AttrValue]
    ) -> tuple[DenseTensor, ...]:
        outputs = run_dense(kind, [one.array for one in inputs], attrs, seed=SEED, step=STEP)
        return tuple(map(DenseTensor, outputs))

    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> DenseTensor:
        return DenseTensor(np.full(shape, value, dtype.numpy))

    def _source(self, kind: str, attrs: Mapping[str, AttrValue]) -> tuple[DenseTensor, ...]:
        return self._apply(kind, (), attrs)

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> DenseTensor:
        return self


def gradients_of(
    kind: str,
    inputs: Sequence[np.ndarray],
    attrs: Mapping[str, AttrValue],
    grads: Sequence[np.ndarray | None],
) -> list[np.ndarray | None]:
    """What the op's own gradient function gives for these output gradients."""
    tensors = [DenseTensor(array) for array in inputs]
    outputs = [DenseTensor(array) for array in run_dense(kind, inputs, attrs, seed=SEED, step=STEP)]
    gradients = op_def(kind).gradients(
        attrs,
        tensors,
        outputs,
        [None if grad is None else DenseTensor(grad) for grad in grads],
    )
    assert len(gradients) == len(inputs)
    return [None if grad is None else grad.array for grad in gradients]
