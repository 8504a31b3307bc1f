"""How losses are reduced, and errors that name the function that was called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from plancompiler.errors import AttributeValueError, PlanCompilerError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.ir.argument_errors import BARE, wrong_argument
from plancompiler.ir.source import user_line
from plancompiler.ops.gradient import widened

Function = TypeVar("Function", bound=Callable[..., Any])


def public(function: Function) -> Function:
    """Decorator: errors of a public function name it and the user's line, those of arguments that
    no tensor op has checked, too.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except PlanCompilerError as error:
            error.at(op=function.__name__, source=user_line())
            raise
        except BARE as failure:
            refused = wrong_argument(function, args, named, failure)
            if refused is None:
                raise
            raise refused from failure

    return cast("Function", call)


def check_reduction(reduction: str, *more: str) -> None:
    """AttributeValueError for an unknown reduction."""
    known = ("none", "mean", "sum", *more)
    if reduction not in known:
        raise AttributeValueError(
            "unknown reduction of a loss", got=repr(reduction), expected=", ".join(known)
        )


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Losses as `reduction` says: "none", "mean" or "sum". Those of 16 bits are added up in
    float32.
    """
    check_reduction(reduction)
    if reduction == "none":
        return losses
    wide: Tensor = widened(losses)
    loss = wide.mean() if reduction == "mean" else wide.sum()
    return loss if loss.dtype is losses.dtype else loss.cast(losses.dtype)
