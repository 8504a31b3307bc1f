"""Heads over very many classes."""

from __future__ import annotations

from plancompiler.frontend.functions.classes import (
    class_center_rows,
    class_center_sample,
    margin_cross_entropy,
)
from plancompiler.frontend.functions.elementwise import rsqrt, square
from plancompiler.frontend.functions.linear import matmul
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.ir import DType, Value
from plancompiler.ops.gradient import widened


class PartialFC(Module):
    """The margin loss of features [n, dim] against a sample of the classes (X. An et al., 2021).

    In each step of training the loss is over the classes among the labels and random others, up to
    `num_samples` of each of `shards` ranges; in `eval` mode over all. `weight` [classes, dim] holds
    the centers: place it split by classes, over as many devices as there are shards. The margins
    are those of `pc.margin_cross_entropy`.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        num_samples: int,
        shards: int | None = None,
        margin1: float = 1.0,
        margin2: float = 0.5,
        margin3: float = 0.0,
        scale: float = 64.0,
        dtype: DType | str = "float32",
    ) -> None:
        self.num_samples, self.shards = num_samples, shards
        self.margins = (margin1, margin2, margin3)
        self.scale = scale
        self.weight = Parameter((classes, dim), dtype, "normal", (0.0, 0.01))

    def forward(self, features: Value, labels: Value) -> Value:
        """The mean loss of the batch."""
        centers = self.weight.value
        if self.training:
            sampled, labels, sizes = class_center_sample(
                labels, centers.shape[0], self.num_samples, self.shards
            )
            centers = class_center_rows(centers, sampled, sizes)
        cosines = matmul(_unit(features), _unit(centers), transpose_b=True)
        loss: Value = margin_cross_entropy(cosines, labels, *self.margins, scale=self.scale)
        return loss

    def cosines(self, features: Value) -> Value:
        """The cosines of features [n, dim] with all centers: [n, classes]."""
        return matmul(_unit(features), _unit(self.weight.value), transpose_b=True)


def _unit(x: Value) -> Value:
    """Rows of length 1."""
    wide = widened(x)
    unit: Value = wide * rsqrt(square(wide).sum(-1, keepdims=True) + _LEAST_SQUARE)
    return unit if wide is x else unit.cast(x.dtype)


_LEAST_SQUARE = 1e-12
"""Keeps rows of zeros finite."""
