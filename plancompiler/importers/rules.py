"""Rules: how the operations of another system are written with the functions of this package.

A rule is a function of an operation's arguments as its author's system has them, tensors being
symbolic or eager tensors of this package. What depends on no parameter and no input is known when
a model is imported; a rule sees it as a tensor, or as a NumPy array if it asks for `arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    placed: bool = False
    """The function takes `placement`, where it is computed: what has no operands needs it."""
    known: tuple[int, ...] = ()
    """Positions of arguments whose values decide about shapes: they are constants of the model,
    and come as NumPy arrays."""


TORCH_RULES: dict[str, Rule] = {}
"""By `namespace.op.overload`, such as `aten.add.Tensor`."""
STABLEHLO_RULES: dict[str, Rule] = {}
"""By dialect and operation, such as `stablehlo.add`, or `custom_call.` and a target."""
ONNX_RULES: dict[str, Rule] = {}
"""By domain, operator and the first opset that the rule is for: `onnx.Softmax.13`."""
ONNX_DOMAIN = "onnx"
"""How the domain of the standard's own operators, which has no name there, is called in rules."""


def onnx_rule(
    *names: str,
    since: int = 1,
    arrays: bool = False,
    promotes: bool = False,
    typed: bool = False,
    known: Sequence[int] = (),
) -> Callable[[Defined], Defined]:
    """Decorates the rule of operators of ONNX: `@pc.onnx_rule("com.microsoft.FastGelu")`.

    The function takes an operator's inputs by position, None for those that a node leaves out, and
    its attributes by keyword; it returns a tensor, or a tuple of them. Where it has a parameter
    `outputs`, that is the number of results that the node names. A rule holds for models with an
    opset of its domain from `since` on, until there is a newer one, and replaces an older rule with
    the same `since`. Inputs at the positions `known` must be constants of the model and come as
    NumPy arrays; with `arrays` all constants do. `promotes` and `typed` are as in `pc.torch_rule`.
    A name without a domain is one of the standard's operators.
    """

    def define(function: Defined) -> Defined:
        for name in names:
            domain, _, operator = name.rpartition(".")
            target = f"{domain or ONNX_DOMAIN}.{operator}.{since}"
            ONNX_RULES[target] = Rule(function, arrays, promotes, typed, known=tuple(known))
        return function

    return define


def torch_rule(
    *targets: str,
    arrays: bool = False,
    promotes: bool = False,
    typed: bool = False,
    placed: bool = False,
) -> Callable[[Defined], Defined]:
    """Decorates the rule of operations of PyTorch: `@pc.torch_rule("mylib.scale.default")`.

    The function takes the operation's arguments by position and by keyword, and returns a tensor,
    or a tuple of them. A rule replaces an older one. With `arrays`, arguments that are known when
    the model is imported come as NumPy arrays. With `promotes`, tensors are cast to the dtype of
    the result first. With `typed`, the function takes the keyword `result`: shape and dtype of the
    result. With `placed` it takes the keyword `placement`, for tensors that are made of nothing.
    UsageError for a name that is no `namespace.op.overload`.
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
            TORCH_RULES[target] = Rule(function, arrays, promotes, typed, placed)
        return function

    return define


def stablehlo_rule(
    *targets: str, arrays: bool = False, promotes: bool = False, typed: bool = False
) -> Callable[[Defined], Defined]:
    """Decorates the rule of operations of StableHLO, which JAX functions consist of:
    `@pc.stablehlo_rule("custom_call.my_target")`.

    The function takes the operation's operands by position and its attributes by keyword, and
    returns a tensor, or a tuple of them. Otherwise it is like that of `pc.torch_rule`.
    """

    def define(function: Defined) -> Defined:
        for target in targets:
            STABLEHLO_RULES[target] = Rule(function, arrays, promotes, typed)
        return function

    return define


def define(functions: Mapping[str, Function], *, promotes: bool = False) -> None:
    """Rules of a table: targets, several with spaces between them, and their function."""
    for targets, function in functions.items():
        torch_rule(*targets.split(), promotes=promotes)(function)
