"""`out=`: results of the public functions in existing tensors, for all of these functions alike.

A function names `out` in its signature and leaves the rest to the decorator `takes_out`, so that
type checkers and `help()` know the keyword, and a call without it costs one look-up more. The
decorator also takes keywords as PyTorch spells them: `dim` for `axis`, `keepdim` for `keepdims`,
`input` for the first tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.ir.argument_errors import BARE, wrong_argument
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER

Function = TypeVar("Function", bound=Callable[..., Any])

_HELP = """

With `out` the result is put into that eager tensor, which is returned: one of its global shape,
dtype and placement, whose layout it takes. For several results `out` holds a tensor for each, or
None. InplaceError where it has another shape, dtype or placement, or where a gradient would be
lost; UsageError where results and tensors do not pair up, and in a traced job, whose values have no
memory.
"""


def takes_out(function: Function) -> Function:
    """Decorator: puts the results of a function into what is given as its keyword `out`.

    The function itself names `out` in its signature for those who read it, and is never given one.
    """

    spelled = _spelled(function)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            if named:
                if not spelled.keys().isdisjoint(named):
                    named = _respelled(function, spelled, named)
                if "out" in named:
                    return _into(function, named.pop("out"), args, named)
            return function(*args, **named)
        except PlanCompilerError as error:
            error.at(op=function.__name__, source=user_line())
            raise
        except BARE as failure:
            refused = wrong_argument(function, args, named, failure)
            if refused is None:
                raise
            raise refused from failure

    call.__doc__ = (function.__doc__ or "").rstrip() + _HELP
    return cast("Function", call)


_SPELLINGS = {"dim": ("axis", "axes"), "dims": ("axes", "axis"), "keepdim": ("keepdims",)}
"""Keywords of PyTorch, and what a function of ours may call the same."""


def _spelled(function: Callable[..., Any]) -> dict[str, str]:
    """The function's keywords by PyTorch's spelling."""
    names = list(inspect.signature(function).parameters)
    spelled = {
        theirs: next(each for each in ours if each in names)
        for theirs, ours in {**_SPELLINGS, "input": tuple(names[:1])}.items()
        if theirs not in names and any(each in names for each in ours)
    }
    return {theirs: ours for theirs, ours in spelled.items() if ours != "out"}


def _respelled(
    function: Callable[..., Any], spelled: Mapping[str, str], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords in our own spelling. UsageError for one that is given in both."""
    ours = {spelled.get(name, name): value for name, value in named.items()}
    if len(ours) < len(named):
        twice = sorted(name for name in named if spelled.get(name) in named)
        raise UsageError(
            "an argument is given in two spellings",
            op=function.__name__,
            got=" and ".join(f"{name}, {spelled[name]}" for name in twice),
            expected="one of them",
        )
    return ours


def _into(
    function: Callable[..., Any], out: object, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    if out is None:
        return function(*args, **named)
    name = getattr(function, "__name__", "a function")
    if ACTIVE_TRACER.get() is not None:
        raise UsageError(
            f"{name} cannot put its result into a tensor here: values of a job have no memory",
            source=user_line(),
            got=f"out={type(out).__name__}",
            hint=f"use what it returns: y = pc.{name}(...)",
        )
    tensor = _first_tensor(out)
    if tensor is None:
        raise UsageError(
            f"{name} puts its results into eager tensors only",
            source=user_line(),
            got=f"out={type(out).__name__}",
            expected="a DistTensor, or a list or tuple of them for several results",
            hint="outside of jobs pc.tensor(array, placement, sbp) makes one",
        )
    return tensor._into(out, function, args, named)  # noqa: SLF001  # frontend knows no tensor class


def _first_tensor(out: object) -> Any:
    """Some tensor that has memory, among those given; None if there is none."""
    if isinstance(out, (list, tuple)):
        return next((each for each in map(_first_tensor, out) if each is not None), None)
    return out if isinstance(out, TensorOperators) and hasattr(out, "_into") else None
