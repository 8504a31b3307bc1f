"""Whether loops over elements are compiled by numba, which the extra `jit` installs.

They are compiled if numba is installed, unless PLANCOMPILER_JIT=0. This module does not import it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import metadata

VARIABLE = "PLANCOMPILER_JIT"


@lru_cache(maxsize=1)
def numba_version() -> str | None:
    """The version of numba that compiles loops in this process; None where NumPy does all."""
    if os.environ.get(VARIABLE, "").strip() == "0":
        return None
    try:
        return metadata.version("numba")
    except metadata.PackageNotFoundError:
        return None
