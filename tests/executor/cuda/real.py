"""Which real devices there are, and how many ranks NCCL can connect on them.

NCCL wants a device for each rank. From 2.30 on it lets ranks share one if it is told so, which the
tests do where there is one device only; NCCL_NVLS_ENABLE=1 in the environment forbids it. Ranks
that share a device are processes: of two threads one would load a kernel, for which CUDA waits
until the device is idle, while a kernel of NCCL waits there for this rank.
"""

from __future__ import annotations

import importlib
import os

import pytest

from plancompiler.errors import DeviceError
from plancompiler.executor.cuda.device import device_count, load_cupy

SHARED_DEVICE_NCCL = 23000


def _devices():
    try:
        return device_count(), "no CUDA device"
    except DeviceError as error:
        return 0, str(error)


def _ranks():
    """How many ranks NCCL can connect here, and why no more."""
    if COUNT != 1:
        return COUNT, REASON
    load_cupy()
    # Not a name of the package until it is imported.
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        return 1, "NCCL is not installed"
    if nccl.get_version() < SHARED_DEVICE_NCCL:
        return 1, "needs two CUDA devices, or NCCL 2.30 to share one"
    # NCCL reads them when the first communicator is made. Kernels that wait for each other must fit
    # on the device together.
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("NCCL_MAX_CTAS", "2")
    return 4, ""


COUNT, REASON = _devices()
RANKS, ALONE = _ranks()
on_real_devices = pytest.mark.skipif(COUNT == 0, reason=REASON)
several = pytest.mark.skipif(RANKS < 2, reason=ALONE)
several_devices = pytest.mark.skipif(COUNT < 2, reason=REASON if COUNT == 0 else "one CUDA device")
