"""Conversions of a tensor to Python numbers; `DistTensor.numpy` reads the value."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import numpy as np

from plancompiler.eager.spec import SpecTensor
from plancompiler.errors import ShapeError, UsageError
from plancompiler.ir import Placement
from plancompiler.ir.operators import Scalar
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

_CPU = (1, 0)
"""What DLPack calls the CPU: kDLCPU and the number of the device."""


class HostValue(SpecTensor):
    """Mixin: the value of a tensor of one element, and errors for conversions that do not exist."""

    __slots__ = ()

    @abstractmethod
    def numpy(self) -> Array:
        """The whole value."""

    @abstractmethod
    def whole_local(self) -> Array:
        """The whole value in the tensor's own memory; BufferError where it is not there."""

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

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        """The value of a whole number without axes, where Python wants one: a collective."""
        if self.shape or not self.dtype.is_integer:
            raise TypeError(
                "only a tensor without axes, of whole numbers, can be an index; this is "
                f"{self.dtype} of shape {self.shape}"
            )
        return int(self.item())

    def __format__(self, spec: str) -> str:
        """The number of a tensor of one element as a format asks for it: a collective."""
        return format(self.item(), spec) if spec else str(self)

    @property
    def device(self) -> Placement:
        """Where it lies: `placement` under the name of the array API."""
        return self.placement

    def to_device(self, device: Placement, /, *, stream: object = None) -> Self:
        """The tensor on another placement: `redistribute` under the name of the array API."""
        if stream is not None:
            raise UsageError(
                "tensors are moved in the order of the program, on no stream",
                source=user_line(),
                got=type(stream).__name__,
                expected="None",
            )
        return self.redistribute(placement=device)

    def tolist(self) -> Any:
        """The whole value as nested lists of Python numbers: a collective."""
        return self.numpy().tolist()

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The whole value for another library of arrays: a collective.

        It is a copy, unless `copy` is False. BufferError where the memory of the CPU is not what is
        wanted, and where what must not be copied does not lie there as a whole on this rank.
        """
        if stream is not None or dl_device not in (None, _CPU):
            raise BufferError("a DistTensor is exported to the memory of the CPU")
        array = self.numpy().copy() if copy is not False else self.whole_local()
        return array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, to whose memory it is exported."""
        return _CPU

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
