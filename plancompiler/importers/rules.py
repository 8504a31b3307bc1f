"""Rules: how the operations of another system are written with the functions of this package.

A rule is a function of an operation's arguments as its author's system has them, tensors being
symbolic or eager tensors of this package. What depends on no parameter and no input is known when
a model is imported; a rule sees it as a tensor, or as a NumPy array if it asks for `arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from plancompiler.errors import UsageError

Function = Callable[..., Any]
Defined = TypeVar("Defined", bound=Function)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operation is computed."""

    function: Function
    arrays: bool = False
    """Constants come as NumPy arrays."""
    promotes: bool = False
    """Operands broadcast, and take the dtype of the result before anything is computed."""
    typed: bool = False
    """The function takes `result`, the type of the result."""


TORCH_RULES: dict[str, Rule] = {}
"""By `namespace.op.overload`, such as `aten.add.Tensor`."""


def torch_rule(
    *targets: str, arrays: bool = False, promotes: bool = False, typed: bool = False
) -> Callable[[Defined], Defined]:
    """Decorates the rule of operations of PyTorch: `@pc.torch_rule("mylib.scale.default")`.

    The function takes the operation's arguments by position and by keyword, and returns a tensor,
    or a tuple of them. A rule replaces an older one. With `arrays`, arguments that are known when
    the model is imported come as NumPy arrays. With `promotes`, tensors are cast to the dtype of
    the result first. With `typed`, the function takes the keyword `result`: shape and dtype of the
    result. UsageError for a name that is no `namespace.op.overload`.
    """
    for target in targets:
        if target.count(".") != 2 and target != "getitem":
            raise UsageError(
                "a rule is for one overload of an operation of PyTorch",
                got=repr(target),
                expected="namespace.op.overload, such as 'aten.add.Tensor'",
            )

    def define(function: Defined) -> Defined:
        for target in targets:
            TORCH_RULES[target] = Rule(function, arrays, promotes, typed)
        return function

    return define


def define(functions: Mapping[str, Function], *, promotes: bool = False) -> None:
    """Rules of a table: targets, several with spaces between them, and their function."""
    for targets, function in functions.items():
        torch_rule(*targets.split(), promotes=promotes)(function)
