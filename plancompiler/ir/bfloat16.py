"""The NumPy dtype of bfloat16, which NumPy itself lacks: it comes with the package `ml_dtypes`.

That package is optional (`pip install plancompiler[bfloat16]`) and imported here alone, when
bfloat16 is first asked for.
"""

from __future__ import annotations

import importlib
from functools import lru_cache

import numpy as np

from plancompiler.errors import DTypeError


@lru_cache(maxsize=1)
def bfloat16() -> np.dtype[np.generic]:
    """The dtype: 1 bit of sign, 8 of exponent as in float32, 7 of fraction.

    Raises DTypeError where `ml_dtypes` cannot be imported.
    """
    try:
        package = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise DTypeError(
            "bfloat16 needs the package ml_dtypes, for NumPy has no such dtype",
            got=" ".join(f"{type(error).__name__}: {error}".split()),
            hint="pip install 'plancompiler[bfloat16]' on every machine that works on the job, or "
            "use float16 or float32",
        ) from error
    dtype: np.dtype[np.generic] = np.dtype(package.bfloat16)
    return dtype
