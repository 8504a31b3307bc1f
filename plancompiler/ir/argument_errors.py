"""Wrong arguments of public functions: an error that names the argument, in place of what Python or
NumPy says of it somewhere inside.

Nothing is checked beforehand, as that would cost every call. When a call has failed, its arguments
are compared with the types in the function's signature; where they all fit, the failure stays as it
was.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from plancompiler.errors import AttributeValueError, PlanCompilerError
from plancompiler.ir.dtype import DType
from plancompiler.ir.operators import TensorOperators, is_scalar
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp
from plancompiler.ir.source import user_line

BARE = (TypeError, AttributeError, ValueError, IndexError, OverflowError)
"""What wrong arguments lead to inside."""

Function = TypeVar("Function", bound=Callable[..., Any])

_WORDS: dict[object, str] = {
    TensorOperators: "a tensor",
    NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    DType: "a dtype",
    Placement: "a pc.Placement",
    NdSbp: "an SBP",
}


def names_wrong_arguments(function: Function) -> Function:
    """Decorator: a failed call says which argument was wrong."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except BARE as failure:
            refused = wrong_argument(function, args, named, failure)
            if refused is None:
                raise
            raise refused from failure

    return cast("Function", call)


def wrong_argument(
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    failure: Exception,
) -> PlanCompilerError | None:
    """The error to raise in place of a failure; None where no argument explains it."""
    try:
        given = inspect.signature(function).bind(*args, **named).arguments
    except TypeError:  # Python's own words on missing and unknown arguments are clear
        return None
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    for name, value in given.items():
        hint = hints.get(name, Any)
        several = parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        for each in value if several else (value,):
            if not _fits(each, hint):
                return AttributeValueError(
                    f"{function.__name__} cannot work with its argument {name!r}",
                    op=function.__name__,
                    source=user_line(),
                    got=_described(each),
                    expected=" or ".join(dict.fromkeys(_words(hint))),
                )
    if isinstance(failure, OverflowError) or "dimension exceeded" in str(failure):
        return AttributeValueError(
            f"{function.__name__} was given a number that is too large",
            op=function.__name__,
            source=user_line(),
            got=str(failure),
        )
    return None


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is one of the type that a signature names; unknown types take all."""
    hint = getattr(hint, "__bound__", None) or hint
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin in (Sequence, Iterable):
        if isinstance(value, (str, bytes, TensorOperators)):
            return False
        try:
            return all(_fits(each, get_args(hint)[0]) for each in value)  # type: ignore[attr-defined]  # it says whether it is one
        except TypeError:
            return False
    if origin is tuple:
        return isinstance(value, tuple)
    if hint is bool:
        return isinstance(value, (bool, np.bool_))
    if hint is int:
        return not isinstance(value, TensorOperators) and _whole(value)
    if hint is float:
        return is_scalar(value) and isinstance(_plain(value), (bool, int, float))
    if origin is Callable:
        return callable(value)
    if origin is Mapping:
        return isinstance(value, Mapping)
    if isinstance(hint, type) and hint is not object:
        return isinstance(value, hint)
    return True


def _whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # it says whether it is one
    except TypeError:
        return False
    return True


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, "item") else value


def _words(hint: Any) -> list[str]:
    hint = getattr(hint, "__bound__", None) or hint
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [word for each in get_args(hint) for word in _words(each)]
    if origin in (Sequence, Iterable):
        inner = " or ".join(_words(get_args(hint)[0]))
        return [f"a list of them: {inner}"]
    return [_WORDS.get(hint, getattr(hint, "__name__", str(hint)))]


def _described(value: object) -> str:
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in value))
        return f"a {type(value).__name__} of {kinds or 'nothing'}"
    if isinstance(value, TensorOperators):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 80 else type(value).__name__
