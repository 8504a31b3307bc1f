"""`plancompiler doctor`: what works on this machine, and why not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import click
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from plancompiler.blas.loaded_library import describe, faster_kernels, measured_gflops
from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_table
from plancompiler.ir import DType
from plancompiler.limits import time_limits
from plancompiler.version import VERSION

DISTRIBUTIONS = (
    "numpy",
    "grpcio",
    "protobuf",
    "networkx",
    "safetensors",
    "click",
    "rich",
    "threadpoolctl",
    "zstandard",
)
LOOPBACK_DEADLINE_SECONDS = time_limits.DOCTOR


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    state: str
    """`ok`, `absent` (an option that is not there) or `broken` (something needed that fails)."""
    detail: str


@click.command("doctor")
@json_option
@click.pass_context
def doctor_command(context: click.Context, as_json: bool) -> None:
    """Report versions, devices, BLAS, NCCL, MPI and shared memory: what works here and why not.

    Ends with code 1 where something that plancompiler cannot do without is broken.

    \b
    Example:
      plancompiler doctor
      plancompiler doctor --json
    """
    checks = examine()
    healthy = all(check.state != "broken" for check in checks)
    if as_json:
        print_json({"healthy": healthy, "checks": [asdict(check) for check in checks]})
    else:
        print_table(
            ("check", "state", "detail"),
            ((check.name, check.state, check.detail) for check in checks),
        )
    if not healthy:
        context.exit(1)


def examine() -> list[Check]:
    """All checks, in the order of the report."""
    return [
        Check("python", "ok", f"{platform.python_version()} ({sys.executable})"),
        Check("versions", "ok", _versions()),
        Check("cpu", "ok", _cpus()),
        _needed("blas", _blas),
        _needed("shared memory", _shared_memory),
        _needed("abstract sockets", _abstract_socket),
        _needed("grpc loopback", _grpc_loopback),
        _optional("bfloat16", _bfloat16),
        _optional("cupy", _cupy),
        _optional("cuda libraries", _cuda_libraries),
        _optional("nccl", _nccl),
        _optional("mpi", _mpi),
    ]


def _needed(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", look())
    except Exception as error:  # whatever fails here is the finding
        return Check(name, "broken", _reason(error))


def _optional(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", look())
    except Exception as error:  # optional libraries fail in their own ways, all of them findings
        return Check(name, "absent", _reason(error))


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _versions() -> str:
    return ", ".join((f"plancompiler {VERSION}", *map(_version, DISTRIBUTIONS)))


def _version(distribution: str) -> str:
    return f"{distribution} {importlib.metadata.version(distribution)}"


def _cpus() -> str:
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return f"{usable} usable of {os.cpu_count()}, {platform.machine()}"


def _blas() -> str:
    library = f"{describe()}; {measured_gflops():.0f} GFLOP/s of float32 on one core"
    advice = faster_kernels()
    return library if advice is None else f"{library}; {advice}"


def _shared_memory() -> str:
    size = 1 << 20
    descriptor = os.memfd_create("plancompiler-doctor")
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            memory[:2] = b"ok"
    finally:
        os.close(descriptor)
    return "memfd_create and mmap work"


def _abstract_socket() -> str:
    name = f"\0plancompiler-doctor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dialer:
            dialer.connect(name)
    return "bind and connect work"


def _grpc_loopback() -> str:
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=LOOPBACK_DEADLINE_SECONDS
            )
    finally:
        server.stop(None).wait()
    return "a health check over 127.0.0.1 was answered"


def _optional_module(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return importlib.import_module(name)


def _bfloat16() -> str:
    dtype = DType.BFLOAT16.numpy
    return f"ml_dtypes {importlib.metadata.version('ml_dtypes')}, {8 * dtype.itemsize} bits"


def _cupy() -> str:
    cupy = _optional_module("cupy")
    if int(cupy.__version__.split(".")[0]) < 14:
        raise ImportError(f"cupy {cupy.__version__} is too old: 14 or newer is needed")
    names = [
        cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        for index in range(cupy.cuda.runtime.getDeviceCount())
    ]
    return f"cupy {cupy.__version__}, devices: {', '.join(names) or 'none'}"


def _cuda_libraries() -> str:
    cuda = _optional_module("cupy").cuda
    try:
        # CuPy loads each of them when it is first asked for.
        nvrtc = ".".join(map(str, cuda.nvrtc.getVersion()))
        _ = cuda.cublas
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"products and kernels need cuBLAS and NVRTC: {error}; "
            "pip install 'cupy-cuda12x[ctk]' (or cupy-cuda13x)"
        ) from error
    return f"cuBLAS and NVRTC {nvrtc} can be loaded"


def _nccl() -> str:
    if importlib.util.find_spec("cupy") is None:
        raise ModuleNotFoundError("NCCL is reached through cupy, which is not installed")
    with warnings.catch_warnings():
        # What CuPy warns of is what is reported here.
        warnings.simplefilter("ignore")
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError("libnccl cannot be loaded: pip install nvidia-nccl-cu12 (or -cu13)")
    return f"NCCL {nccl.get_version()}"


def _mpi() -> str:
    _optional_module("mpi4py")
    mpi = importlib.import_module("mpi4py.MPI")
    return " ".join(mpi.Get_library_version().splitlines()[:1])
