"""Loops over elements, compiled by numba: an optional package, which the extra `jit` installs.

numba is imported here alone, when a loop is first needed: that takes about a second, and compiling
a loop as long again. What is compiled is kept in the user's cache folder, per source, versions of
numba and NumPy, and CPU. Where loops are compiled at all, `blas.numba_choice` says.

Of fast-math there is `reassoc` and `contract`, without which sums are not vectorised; what would
take nan and inf for impossible is not.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from plancompiler.blas.numba_choice import VARIABLE, numba_version
from plancompiler.errors import ExecutionError
from plancompiler.ir.user_cache import user_cache_folder
from plancompiler.ir.whole_file import create_file
from plancompiler.ops import row_loops
from plancompiler.ops.kernel import stands_in
from plancompiler.ops.registry import Array

Loop = Callable[..., None]

LEAST = 1 << 14
"""Elements below which NumPy's kernels run: what a loop saves there does not pay for loading it."""
_FAST_MATH = {"reassoc", "contract"}


def loops_suit(*arrays: Array) -> bool:
    """Whether compiled loops take these arrays, the first of which says how much work there is.

    Ranks that hold the same arrays decide alike.
    """
    first = arrays[0]
    return (
        numba_version() is not None
        and first.size >= LEAST
        and first.dtype in (np.float32, np.float64)
        and all(
            isinstance(array, np.ndarray)
            and array.dtype == first.dtype
            and array.flags.c_contiguous
            and array.flags.aligned
            for array in arrays
        )
    )


def row_loop(function: Loop, *arrays: Array) -> Loop | None:
    """A function of `ops.row_loops`, compiled; None where NumPy has to do for these arrays."""
    if not loops_suit(*arrays):
        return None
    if stands_in(arrays[0]):
        return no_loop
    return compiled(_row_loops_text(), function.__name__, arrays[0].dtype)


def no_loop(*arguments: Any) -> None:
    """Stands for any loop where arrays stand for NumPy's: loops make none of NumPy's."""


@lru_cache(maxsize=1)
def _row_loops_text() -> str:
    return inspect.getsource(row_loops)


@lru_cache(maxsize=1024)
def compiled(source: str, name: str, dtype: np.dtype[Any]) -> Loop:
    """The function `name` of a module's text, compiled for arrays and numbers of one dtype.

    Its annotations say what its arguments are, in the names of `ops.row_loops`.
    """
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError as error:
        raise ExecutionError(
            "numba is installed and cannot be imported",
            got=" ".join(str(error).split()),
            hint=f"set {VARIABLE}=0 on all ranks to do without, or install what it asks for",
        ) from error
    scalar = numba.from_dtype(dtype)

    def type_of(annotation: str) -> Any:
        if annotation in ("int", "float"):
            return numba.intp if annotation == "int" else scalar
        readonly = annotation.startswith("In")
        return numba.types.Array(scalar, int(annotation[-1]), "C", readonly=readonly)

    path = _source_file(source, numba.__version__)
    # What numba keeps names the module of a function, and is loaded where that is known.
    module = ModuleType(f"plancompiler_loops_{_digest(source)}")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path or "<loops>"), "exec"), vars(module))  # noqa: S102  # our text
    function = getattr(module, name)
    arguments = [kind for key, kind in function.__annotations__.items() if key != "return"]
    made: Loop = numba.njit(
        numba.void(*map(type_of, arguments)),
        cache=path is not None,
        nogil=True,
        fastmath=_FAST_MATH,
        error_model="numpy",
    )(function)
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _source_file(source: str, version: str) -> Path | None:
    """A file of this text in the user's cache, beside which numba keeps what it makes of it; None
    where there is no folder that is the user's alone: what lies there is loaded and run.
    """
    folder = user_cache_folder()
    if folder is None or not hasattr(os, "getuid"):
        return None
    folder /= "loops"
    versions = f"numba {version} NumPy {np.__version__} Python {sys.version}"
    path = folder / f"{_digest(f'{versions} {source}')}.py"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if not private or status.st_uid != os.getuid():
            return None
        if not path.exists():
            # numba's files are of a text of this age: the first to write it stays.
            unfinished = folder / f"{path.stem}.{os.getpid()}.unfinished"
            with create_file(unfinished) as file:
                file.write(source.encode())
            with suppress(FileExistsError):
                os.link(unfinished, path)
            unfinished.unlink()
        return path
    return None
