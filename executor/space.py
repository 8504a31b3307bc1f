"""`Space`: where arrays of one rank lie while its program decides as it runs what to do with them.

Arrays of the host are NumPy's. Those of a device are CuPy's: work on them is asked for in order and
done later, and the host waits only where it reads them. Both have NumPy's methods, so that most
code need not know which it has; what it must ask for is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.executor.comm.context import CommContext, ContextOwner
from plancompiler.executor.comm.rendezvous import Rendezvous
from plancompiler.executor.memory import Array
from plancompiler.ir import DType
from plancompiler.ir.source import user_line
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import Kernel, OpDef

if TYPE_CHECKING:
    from plancompiler.executor.cuda.interface import Device
    from plancompiler.executor.cuda.space import DeviceSpace


class Space(Protocol):
    """The memory of one device type, as one rank sees it, and what runs there."""

    @property
    def arrays(self) -> Any:
        """The namespace of its arrays: `numpy`, or what stands for it."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new array of unset elements."""

    def full(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any]) -> Array:
        """A new array of one number."""

    def put(self, array: Array) -> Array:
        """A contiguous copy here, of an array of the host or of this space."""

    def get(self, array: Array) -> Array:
        """A copy on the host, when what was asked for before has been done. Raises the error for
        which this rank was stopped, if it was.
        """

    def kernel(self, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
        """An op's kernel on arrays here, which may be empty and need not be contiguous."""

    def context(self, rendezvous: Rendezvous, owner: ContextOwner, stream: str) -> CommContext:
        """A member of a group that exchanges arrays of this space."""


class HostSpace:
    """The host's memory. See `Space`."""

    arrays = np

    def __init__(self) -> None:
        # NumPy's own, as eager ops call them each time.
        self.empty: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.empty
        self.full: Callable[[tuple[int, ...], float, np.dtype[Any]], Array] = np.full

    def put(self, array: Array) -> Array:
        """See `Space.put`."""
        return np.array(array, order="C")

    def get(self, array: Array) -> Array:
        """See `Space.get`."""
        return array.copy()

    def kernel(self, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
        """See `Space.kernel`."""
        return kernel_for(definition, (dtype.numpy for dtype in dtypes))

    def context(self, rendezvous: Rendezvous, owner: ContextOwner, stream: str) -> CommContext:
        """See `Space.context`."""
        return CommContext(rendezvous, owner, stream)


HOST: Space = HostSpace()


class Spaces:
    """The spaces of one rank: the host's, and its device's once something is placed there."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wanted: Device | str | None = None
        self._device: DeviceSpace | None = None

    def use(self, device: Device | str) -> None:
        """Take this device (`cuda:1`, or one that is open) instead of the rank's place on its host.

        UsageError once a device is in use.
        """
        if self._device is not None:
            raise UsageError(
                "the rank has a device already",
                source=user_line(),
                rank=self._rank,
                hint="choose one before anything is placed on CUDA devices",
            )
        self._wanted = device

    def of(self, device_type: str) -> Space:
        """The space of a placement's device type. DeviceError where the device cannot be used."""
        return HOST if device_type == "cpu" else self.device()

    def device(self) -> DeviceSpace:
        """The space of the rank's device, which is opened. DeviceError where it cannot be used."""
        space = self._device
        if space is None:
            # It takes long to load, and programs on CPUs have no use for it.
            from plancompiler.executor.cuda.space import open_space  # noqa: PLC0415  # see above

            try:
                space = self._device = open_space(self._rank, self._wanted)
            except PlanCompilerError as error:
                raise error.at(source=user_line(), rank=self._rank) from None
        return space

    def abort(self, error: PlanCompilerError) -> None:
        """End what waits on the device for other ranks: one of them has failed."""
        if self._device is not None:
            self._device.abort(error)

    def close(self) -> None:
        """Let go of the device."""
        if self._device is not None:
            self._device.close()
