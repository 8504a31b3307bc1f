"""One sample call of an op, and the maker of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plancompiler.ir import DType


@dataclass(frozen=True)
class Sample:
    """One call of an op on whole arrays."""

    kind: str
    inputs: tuple[np.ndarray, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    differentiable: bool = True
    """False where finite differences mean nothing (integers)."""

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, array.shape)) or "scalar" for array in self.inputs)
        attrs = "".join(f" {key}={value}" for key, value in self.attrs.items())
        return f"{self.kind}({shapes}){attrs}"


class Maker:
    def __init__(self, dtype: str, seed: int = 20240229) -> None:
        self.dtype = DType.parse(dtype).numpy
        self.rng = np.random.default_rng(seed)

    def real(self, *shape: int) -> np.ndarray:
        """Distinct numbers away from zero and from each other, so that no kink is near."""
        size = int(np.prod(shape))
        values = (self.rng.permutation(size) + self.rng.uniform(0.2, 0.8)) / max(size, 1) * 4 - 2
        values = np.where(np.abs(values) < 0.01, 0.013, values)
        return values.reshape(shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return np.asarray(np.abs(self.real(*shape)) + 0.3, self.dtype)

    def whole(self, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(0, high, shape)

    def truth(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 2, shape).astype(bool)
