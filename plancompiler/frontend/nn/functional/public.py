"""Errors of public functions name the function and the user's line."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from plancompiler.errors import PlanCompilerError
from plancompiler.ir.argument_errors import BARE, wrong_argument
from plancompiler.ir.source import user_line

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
