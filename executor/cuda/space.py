"""`DeviceSpace`: a rank's device for programs that decide at run time what to do.

Arrays are made of CuPy's pool, and work on them runs on the calling thread's current stream, as
CuPy's own calls do: the legacy default one, or that of `with stream:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from plancompiler.executor.comm.context import ContextOwner
from plancompiler.executor.comm.rendezvous import Rendezvous
from plancompiler.executor.cuda.context import DeviceContext
from plancompiler.executor.cuda.device import CudaDevice, local_device
from plancompiler.executor.cuda.interface import Device
from plancompiler.executor.cuda.rank_device import RankDevice
from plancompiler.ir import DType
from plancompiler.ops.registry import Kernel, KernelContext, OpDef


class DeviceSpace(RankDevice):
    """One rank's device. See `Space`."""

    def kernel(self, definition: OpDef, dtypes: Iterable[DType]) -> Kernel:
        """See `Space.kernel`: kernels on devices want contiguous arrays, and some elements."""
        inner = self.device.kernel(definition, dtypes)

        def kernel(context: KernelContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            # What goes round a ring, or to peers, goes through ranks that make nothing of it.
            alone = context.ring is None and context.peers is None
            if alone and outputs and all(out.size == 0 for out in outputs):
                return
            given = (*inputs, *outputs)
            if all(array.flags.c_contiguous for array in given):
                inner(context, inputs, outputs)
                return
            # One copy of each: an output may be an input that changes in place.
            copies = {id(array): array.copy() for array in given if not array.flags.c_contiguous}
            inner(
                context,
                [copies.get(id(array), array) for array in inputs],
                [copies.get(id(array), array) for array in outputs],
            )
            for array in outputs:
                if id(array) in copies:
                    np.copyto(array, copies[id(array)])

        return kernel

    def context(self, rendezvous: Rendezvous, owner: ContextOwner, stream: str) -> DeviceContext:
        """See `Space.context`."""
        return DeviceContext(self, rendezvous, owner, stream)


def open_space(rank: int, wanted: Device | str | None) -> DeviceSpace:
    """The space of a rank's device: what is wanted, else by the rank's place on its host."""
    if wanted is None or isinstance(wanted, str):
        wanted = CudaDevice(local_device(rank, wanted))
    return DeviceSpace(wanted, rank)
