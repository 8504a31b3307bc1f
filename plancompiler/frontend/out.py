"""`out=`: results of the public functions in existing tensors, for all of these functions alike.

A function names `out` in its signature and leaves the rest to the decorator `takes_out`, so that
type checkers and `help()` know the keyword, and a call without it costs one look-up more. The
decorator also takes keywords as NumPy and PyTorch spell them (`ir.spelling`), and lets a tensor
without axes be named one: axis 0 or -1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

from plancompiler.errors import IndexingError, PlanCompilerError, UsageError
from plancompiler.ir.argument_errors import BARE, wrong_argument
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.source import user_line
from plancompiler.ir.spelling import respelled, spellings_of
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

    signature = inspect.signature(function)
    spelled = spellings_of(signature)
    along_axis = _works_along_axis(signature)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            if named:
                if not spelled.keys().isdisjoint(named):
                    named = respelled(function, spelled, named)
                if "out" in named:
                    return _into(function, named.pop("out"), args, named)
            return function(*args, **named)
        except PlanCompilerError as error:
            if along_axis and isinstance(error, IndexingError) and _is_scalar_tensor(args):
                with suppress(PlanCompilerError):
                    return _as_vector(function, args, named)
            error.at(op=function.__name__, source=user_line())
            raise
        except BARE as failure:
            refused = wrong_argument(function, args, named, failure)
            if refused is None:
                raise
            raise refused from failure

    call.__doc__ = (function.__doc__ or "").rstrip() + _HELP
    # Who asks for it next, such as the table of methods, need not put it together again.
    vars(call)["__signature__"] = signature
    return cast("Function", call)


def _works_along_axis(signature: inspect.Signature) -> bool:
    """Whether a function takes a tensor and an axis of it, and makes tensors as of one element of
    a vector.
    """
    first, *others = signature.parameters.values()
    return (
        first.annotation == "Tensor"
        and any(each.name in ("axis", "axes") for each in others)
        and signature.return_annotation in ("Tensor", "tuple[Tensor, Tensor]", "Indexed[Tensor]")
    )


def _is_scalar_tensor(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], TensorOperators) and not args[0].ndim


def _as_vector(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    """What a function makes of a tensor without axes, which stands for a vector of one element."""

    def wide(value: Any) -> Any:
        scalar = isinstance(value, TensorOperators) and not value.ndim
        return value.reshape((1,)) if scalar else value

    def narrow(value: Any) -> Any:
        return value.reshape(()) if value.shape == (1,) else value

    made = function(*map(wide, args), **{name: wide(value) for name, value in named.items()})
    if not isinstance(made, tuple):
        return narrow(made)
    kept = map(narrow, made)
    return type(made)(*kept) if hasattr(made, "_fields") else tuple(kept)


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
