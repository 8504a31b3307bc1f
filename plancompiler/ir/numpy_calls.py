"""NumPy's own functions on tensors: `np.sin(x)` is `pc.array_api.sin(x)`.

NumPy hands such calls over by its protocols `__array_ufunc__` (NEP 13) and `__array_function__`
(NEP 18). The functions that the Python array API has mean the same there as in NumPy 2: they take
the call. Where it has none, or none with these arguments, `array_api.numpy_functions` has those
that mean here what they mean in NumPy. Other functions are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.hooks.array_namespace import array_namespace
from plancompiler.ir.source import user_line
from plancompiler.ir.spelling import respelled, spellings_of

Function = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Those in their places, and those by name."""

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
    standard, own = _functions(name)
    function = standard or own
    assert function is not None
    return function(*inputs)


def function_on_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """What another one of NumPy's functions gives for tensors."""
    name = function.__name__
    if name in {"ndim", "shape", "size"} and len(args) == 1 and not options:
        return getattr(args[0], name)
    if name == "transpose" and len(args) == 1 and not options:
        return args[0].transpose()
    standard, own = _functions(name, function.__module__)
    refused = []
    for each, arguments in ((own, _arguments), (standard, _as_given)):
        if each is None:
            continue
        try:
            positional, named = arguments(function, each, args, options)
            signature(each).bind(*positional, **named)
        except TypeError as error:
            refused.append(error)
        else:
            return each(*positional, **named)
    known = [each for each in (own, standard) if each is not None]
    raise UsageError(
        f"np.{name} takes tensors with other arguments",
        source=user_line(),
        got=str(refused[0]),
        expected=" or ".join(f"{name}{signature(each)}" for each in known),
    )


def _as_given(
    function: Function, standard: Function, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Arguments:
    return args, options


def _arguments(
    function: Function, own: Function, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Arguments:
    """Arguments of NumPy's function as those of ours: those behind the tensors by their names, as
    they may stand in another order here.
    """
    try:
        parameters = [each.name for each in signature(function).parameters.values()]
    except ValueError:  # of a function that is written in C
        parameters = []
    tensors = 1
    while tensors < len(args) and hasattr(args[tensors], "__array_namespace__"):
        tensors += 1
    named = dict(options)
    if len(parameters) >= len(args):
        named = dict(zip(parameters[tensors:], args[tensors:], strict=False)) | named
        args = args[:tensors]
    return args, respelled(own, spellings_of(signature(own)), named)


def _functions(name: str, module: str = "numpy") -> tuple[Function | None, Function | None]:
    """The functions here that mean what one of NumPy means: that of the Python array API, and ours,
    which takes NumPy's arguments. UsageError where there is neither.
    """
    namespace, owner = array_namespace(None), "pc"
    ours = namespace.numpy_functions.FUNCTIONS
    if module == "numpy.linalg":
        ours = namespace.numpy_functions.LINALG
        namespace, owner = namespace.linalg, "pc.linalg"
    standard, own = getattr(namespace, _STANDARD_NAMES.get(name, name), None), ours.get(name)
    if not callable(standard):
        standard = None
    if standard is None and own is None:
        raise UsageError(
            f"{module}.{name} does not take tensors",
            source=user_line(),
            hint=f"{owner}.{name} is there, or its error says what stands for it",
        )
    return standard, own
