"""NumPy's own functions on tensors: `np.sin(x)` is `pc.array_api.sin(x)`.

NumPy hands such calls over by its protocols `__array_ufunc__` (NEP 13) and `__array_function__`
(NEP 18). The functions that the Python array API has mean the same there as in NumPy 2: they take
the call. Other functions may mean something else here, as `split` does: they are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.hooks.array_namespace import array_namespace
from plancompiler.ir.source import user_line

_STANDARD_NAMES = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "concatenate": "concat",
    "invert": "bitwise_invert",
    "power": "pow",
    "transpose": "permute_dims",
}
"""What NumPy's older names are in the array API."""
_OPERATORS = {
    "add": ("__add__", "__radd__"),
    "subtract": ("__sub__", "__rsub__"),
    "multiply": ("__mul__", "__rmul__"),
    "divide": ("__truediv__", "__rtruediv__"),
    "floor_divide": ("__floordiv__", "__rfloordiv__"),
    "remainder": ("__mod__", "__rmod__"),
    "power": ("__pow__", "__rpow__"),
    "matmul": ("__matmul__", "__rmatmul__"),
    "bitwise_and": ("__and__", "__rand__"),
    "bitwise_or": ("__or__", "__ror__"),
    "bitwise_xor": ("__xor__", "__rxor__"),
    "left_shift": ("__lshift__", "__rlshift__"),
    "right_shift": ("__rshift__", "__rrshift__"),
    "equal": ("__eq__", "__eq__"),
    "not_equal": ("__ne__", "__ne__"),
    "less": ("__lt__", "__gt__"),
    "less_equal": ("__le__", "__ge__"),
    "greater": ("__gt__", "__lt__"),
    "greater_equal": ("__ge__", "__le__"),
}
"""Methods behind NumPy's operators, for a tensor on the left and on the right: an array or one of
NumPy's numbers on the left makes `array + x` a call of `np.add`.
"""


def ufunc_on_tensors(
    ufunc: Any, method: str, inputs: tuple[Any, ...], options: Mapping[str, Any], tensor: type
) -> Any:
    """What one of NumPy's functions of elements gives for tensors of this class."""
    name = ufunc.__name__
    if method != "__call__" or options:
        more = [f".{method}"] * (method != "__call__") + [f"{each}=" for each in options]
        raise UsageError(
            f"np.{name} takes tensors only as plain operands",
            source=user_line(),
            got=" ".join(more),
            expected="a call with tensors and numbers alone",
            hint="pc.sum and its like reduce; functions of plancompiler take out=",
        )
    if name in _OPERATORS:
        left, right = inputs
        if isinstance(left, tensor):
            return getattr(left, _OPERATORS[name][0])(right)
        return getattr(right, _OPERATORS[name][1])(left)
    return _standard_function(name)(*inputs)


def function_on_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """What another one of NumPy's functions gives for tensors."""
    name = function.__name__
    if name in {"ndim", "shape", "size"} and len(args) == 1 and not options:
        return getattr(args[0], name)
    if name == "transpose" and len(args) == 1 and not options:
        return args[0].transpose()
    standard = _standard_function(name, function.__module__)
    try:
        signature(standard).bind(*args, **options)
    except TypeError as error:
        raise UsageError(
            f"np.{name} takes tensors with the arguments of the Python array API only",
            source=user_line(),
            got=str(error),
            expected=f"{name}{signature(standard)}",
        ) from None
    return standard(*args, **options)


def _standard_function(name: str, module: str = "numpy") -> Callable[..., Any]:
    """A function of the Python array API, or of its linear algebra."""
    namespace, owner = array_namespace(None), "pc"
    if module == "numpy.linalg":
        namespace, owner = namespace.linalg, "pc.linalg"
    standard = getattr(namespace, _STANDARD_NAMES.get(name, name), None)
    if standard is None:
        raise UsageError(
            f"{module}.{name} does not take tensors",
            source=user_line(),
            expected="a function that the Python array API has",
            hint=f"{owner}.{name} is there, or its error says what stands for it",
        )
    function: Callable[..., Any] = standard
    return function
