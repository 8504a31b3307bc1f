"""Loss scaling: keeps float16 gradients in range, and skips steps whose gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.eager.spec import WorldState
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import NonFiniteError, UsageError
from plancompiler.executor.space import Space
from plancompiler.frontend.optim.parameter_group import listed
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array, apply

SMALLEST = 2.0**-14
"""A scale below it does not help: the smallest normal number of float16."""


class LossScale:
    """Dynamic loss scaling (P. Micikevicius et al., Mixed Precision Training, ICLR 2018).

        scale = pc.eager.LossScale()
        scale.backward(loss)
        scale.step(optimizer, parameters)

    `backward` differentiates the loss times the scale. `step` divides the gradients by it again;
    where any element on any rank is not finite, it leaves the optimizer's step out and halves the
    scale, and after `growth_steps` steps without that it doubles it. All ranks decide alike.
    """

    def __init__(self, scale: float = 65536.0, growth_steps: int = 2000) -> None:
        if (
            isinstance(scale, bool)
            or not isinstance(scale, (int, float))
            or not (math.isfinite(scale) and scale >= SMALLEST)
        ):
            raise UsageError(
                "a loss scale is a finite number",
                source=user_line(),
                got=repr(scale),
                expected=f"at least {SMALLEST}",
            )
        if isinstance(growth_steps, bool) or not isinstance(growth_steps, int) or growth_steps < 1:
            raise UsageError(
                "a loss scale grows after a number of steps",
                source=user_line(),
                got=repr(growth_steps),
                expected="1 or more",
            )
        self.scale = float(scale)
        self.growth_steps = growth_steps
        self.good_steps = 0
        """Steps since the scale was changed last."""

    def backward(self, loss: DistTensor) -> None:
        """Differentiate the scaled loss. NonFiniteError for a loss that is not finite itself: no
        scale would help. Reads the loss where it lies, which is a collective.
        """
        if not isinstance(loss, DistTensor):
            raise UsageError(
                "only the loss of an eager program is scaled",
                op="loss scaling",
                source=user_line(),
                got=type(loss).__name__,
                expected="a DistTensor of one number",
            )
        value = float(loss.item()) if loss.spec.inside else 0.0
        if not math.isfinite(value):
            raise NonFiniteError(
                "the loss is not finite before it is scaled",
                op="loss scaling",
                source=user_line(),
                got=value,
                expected="a finite number",
                hint="lower the learning rate, or look for a division by zero or log of zero",
            )
        with np.errstate(all="ignore"):  # what overflows is found by `step`
            (loss * self.scale).backward()

    def step(
        self, optimizer: Any, parameters: Iterable[Any], clip_norm: float | None = None
    ) -> bool:
        """Let the optimizer step on these parameters, unless a gradient is not finite; whether it
        did. Gradients are forgotten where it did not. NonFiniteError where the scale has become so
        small that it cannot be what makes gradients overflow.

        Parameters may lie on several placements: all ranks that hold one decide together.
        """
        given: list[Any] = [getattr(each, "value", each) for each in listed(parameters)]
        for each in given:
            if not isinstance(each, DistTensor):
                raise UsageError(
                    "only parameters and eager tensors take a step",
                    op="loss scaling",
                    source=user_line(),
                    got=type(each).__name__,
                )
        tensors = [each for each in given if each.grad is not None]
        world = tensors[0].spec.world if tensors else None
        if world is None:
            raise UsageError(
                "no parameter has a gradient",
                source=user_line(),
                hint="call LossScale.backward(loss) before the step",
            )
        with world.no_grad(), np.errstate(all="ignore"):
            grads = [each.grad.redistribute(sbp=each.sbp) for each in tensors]
            bad = _any_infinite(world, grads)
            if bad:
                for tensor in tensors:
                    tensor.grad = None
                self._shrink()
                return False
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor.grad = grad * (1.0 / self.scale)
        optimizer.step(tensors, clip_norm=clip_norm)
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            self.scale, self.good_steps = self.scale * 2.0, 0
        return True

    def _shrink(self) -> None:
        self.scale, self.good_steps = self.scale / 2.0, 0
        if self.scale < SMALLEST:
            raise NonFiniteError(
                "gradients are not finite at any loss scale",
                op="loss scaling",
                source=user_line(),
                got=f"a scale of {self.scale}",
                expected=f"at least {SMALLEST}",
                hint="look for a division by zero or the square root of zero in the backward pass",
            )

    def state(self) -> dict[str, float]:
        """What `load_state` takes."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state. UsageError for what is none."""
        if not isinstance(state, Mapping) or set(state) != {"scale", "good_steps"}:
            raise UsageError(
                "this is not the state of a loss scale",
                source=user_line(),
                got=", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state),
                expected="scale, good_steps",
            )
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def _any_infinite(world: WorldState[Any], grads: Sequence[DistTensor]) -> bool:
    """Whether an element of a gradient is not finite on any rank that holds one of them.

    Each kind of memory is read once, and one collective tells all ranks, if they do not know yet.
    """
    flags = [apply("found_inf", grad) for grad in grads]
    by_space: dict[Space, list[Array]] = {}
    for flag in flags:
        if flag.spec.inside:
            by_space.setdefault(flag.spec.space, []).append(flag.local.reshape(1))
    broken = max(
        (float(space.get(np.concatenate(parts)).max()) for space, parts in by_space.items()),
        default=0.0,
    )
    ranks = tuple(sorted({rank for flag in flags for rank in flag.placement.rank_list}))
    told = all(not flag.sbp.has_partial and flag.placement.size == len(ranks) for flag in flags)
    if world.rank in ranks and not told:
        broken = float(world.comm.context(ranks).all_reduce(np.array(broken, np.float32), "max"))
    return bool(broken)
