"""`checkpoint`: what is computed again for its gradients instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from plancompiler.errors import UsageError
from plancompiler.frontend.nn.module import Module
from plancompiler.frontend.trace import current_recorder

Target = TypeVar("Target", bound=Callable[..., Any])


def checkpoint(target: Target) -> Target:
    """Compute what `target` computes again where its gradients need it, instead of keeping it.

    Between forward and backward each call then keeps its inputs and results alone. Random numbers
    depend on the step and the element, so that the second time gives the same. A module is marked,
    for all its calls, and returned; of a function a checkpointed one is returned. What a call does
    must be computable again: a job whose checkpointed calls read inputs or data files, report
    outputs or change variables is refused when it is compiled.
    """
    if isinstance(target, Module):
        target.checkpointed = True
        return target
    if not callable(target):
        raise UsageError(
            "only a module or a function can be checkpointed", got=type(target).__name__
        )
    name = getattr(target, "__name__", type(target).__name__)

    @wraps(target)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with current_recorder().region(name, checkpoint=True):
            return target(*args, **kwargs)

    return cast(Target, checkpointed)
