"""Conversions of a tensor to Python numbers; `DistTensor.numpy` reads the value."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from plancompiler.eager.spec import SpecTensor
from plancompiler.errors import ShapeError, UsageError
from plancompiler.ir.operators import Scalar
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array


class HostValue(SpecTensor):
    """Mixin: the value of a tensor of one element, and errors for conversions that do not exist."""

    __slots__ = ()

    @abstractmethod
    def numpy(self) -> Array:
        """The whole value."""

    def item(self) -> Scalar:
        """The value of a tensor of one element as a Python number: a collective."""
        if np.prod(self.shape) != 1:
            raise ShapeError(
                "only a tensor of one element can be read as a number",
                source=user_line(),
                got=self.shape,
                hint="numpy() returns all elements; reduce the tensor to get one",
            )
        number: Scalar = self.numpy().reshape(()).item()
        return number

    def __bool__(self) -> bool:
        if np.prod(self.shape) != 1:
            raise ShapeError(
                "a tensor has no truth value unless it has exactly one element",
                source=user_line(),
                got=f"shape {self.shape}",
                hint="choose by data with pc.where, ask pc.all(x) or pc.any(x), or tell tensors "
                "apart with `is`",
            )
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError(
                "a scalar has no length", source=user_line(), got="shape ()", expected="an axis"
            )
        return self.shape[0]

    def __array__(self, *args: object, **kwargs: object) -> Array:
        raise UsageError(
            "a DistTensor is not converted to an array implicitly",
            source=user_line(),
            hint="call .numpy() for the whole value or .to_local() for this rank's part",
        )

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "a DistTensor cannot be pickled: this rank holds only a part of it",
            source=user_line(),
            got=str(self.spec),
            hint="pc.eager.save(folder, state) writes the parts of all ranks",
        )
