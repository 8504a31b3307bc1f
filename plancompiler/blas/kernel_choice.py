"""Which of OpenBLAS's kernel sets NumPy loads.

OpenBLAS picks a set by the CPU's model, once, when it is loaded, unless OPENBLAS_CORETYPE names
one. For two families of CPUs its pick is not the fastest (float32 products, one core, NumPy 2.4):

    AMD Zen 5  Haswell  125 GFLOP/s, where SkylakeX gives 230: AVX-512 units are 512 bits wide
    AMD Zen 4  SkylakeX  97 GFLOP/s, where Haswell gives 106: they are 256 bits wide

The choice is made when NumPy is imported, by any module, if plancompiler was imported before. If
NumPy is already loaded, its kernel set does not change; worker processes that this process starts
are given the same set (`blas.loaded_library`).
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

VARIABLE = "OPENBLAS_CORETYPE"
"""OpenBLAS's own variable: the kernel set to use, whatever the CPU."""
AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
"""What the kernels of the set SkylakeX use, and all that follow it."""
ZEN_4, ZEN_5 = 25, 26
"""AMD's family numbers. Family 25 is Zen 3 too, which has no AVX-512."""
_CPU_INFO = Path("/proc/cpuinfo")
_FIRST_CPU_BYTES = 1 << 13


@dataclass(frozen=True, slots=True)
class Cpu:
    """What the choice depends on."""

    vendor: str
    """As the CPU names its maker: `AuthenticAMD`."""
    family: int
    flags: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Cpu | None:
        """The first CPU of Linux's /proc/cpuinfo; None where it is not described as x86 ones are.

        >>> Cpu.parse("vendor_id : AuthenticAMD\\ncpu family : 26\\nflags : avx2\\n").family
        26
        """
        fields: dict[str, str] = {}
        for line in text.splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
        try:
            return cls(fields["vendor_id"], int(fields["cpu family"]), _words(fields["flags"]))
        except (KeyError, ValueError):
            return None


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def kernel_set_for(cpu: Cpu | None, environment: Mapping[str, str]) -> str | None:
    """The kernel set to ask for; None to leave the choice to the user or to OpenBLAS."""
    if environment.get(VARIABLE) or cpu is None:
        return None
    if cpu.vendor != "AuthenticAMD" or not cpu.flags >= AVX512:
        return None
    if cpu.family >= ZEN_5:
        return "SkylakeX"
    return "Haswell" if cpu.family == ZEN_4 else None


def this_cpu() -> Cpu | None:
    """The CPU of this machine; None where Linux does not describe it."""
    if platform.system() != "Linux":
        return None
    try:
        # The first of what may be hundreds of equal CPUs is enough.
        with _CPU_INFO.open(encoding="ascii", errors="replace") as file:
            return Cpu.parse(file.read(_FIRST_CPU_BYTES))
    except OSError:
        return None


def numpy_spec() -> ModuleSpec | None:
    """How to import NumPy so that its BLAS loads the chosen kernel set; None without NumPy.

    The variable is there only while the library is loaded: programs that this one starts see what
    the user has set, and nothing else.
    """
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.loader is None:
        return spec
    load = spec.loader.exec_module

    def load_with_choice(module: ModuleType) -> None:
        global CHOSEN
        CHOSEN = kernel_set_for(this_cpu(), os.environ)
        if CHOSEN is None:
            load(module)
            return
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = CHOSEN
        try:
            load(module)
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

    spec.loader.exec_module = load_with_choice  # type: ignore[method-assign]  # of this loader only
    return spec


CHOSEN: str | None = None
"""The kernel set that was chosen here for this process; None where none was, or not yet."""
