"""A plugin of pytest with which the array API's test suite runs on a library without complex
numbers: the suite computes its widest complex dtype when it is imported, also where there is none.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_NAME = "array_api_tests.dtype_helpers"


class _NoDtype:
    """Stands for the widest complex dtype, which no tensor has."""


def _greatest(*args: Any, **named: Any) -> Any:
    """`max`, which gives the stand-in where there is nothing."""
    if len(args) == 1 and not args[0]:
        return (_NoDtype, 0)
    return builtins.max(*args, **named)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["max"] = _greatest
        super().exec_module(module)
        names = module.__dict__["dtype_to_name"]
        if module.__dict__["widest_complex_dtype"] is _NoDtype:
            pairs = [*names._key_value_pairs, (_NoDtype, "complex128")]
            module.__dict__["dtype_to_name"] = type(names)(pairs)


class _Finder:
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _NAME:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        assert origin is not None
        return importlib.util.spec_from_file_location(name, origin, loader=_Loader(name, origin))


os.environ.setdefault("ARRAY_API_TESTS_SKIP_DTYPES", "complex64,complex128")
sys.meta_path.insert(0, _Finder)
