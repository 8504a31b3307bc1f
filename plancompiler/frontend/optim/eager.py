"""What an optimizer does outside of jobs: it updates eager parameters in place, all in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, proxy

from plancompiler.errors import GradientError, UsageError
from plancompiler.frontend.functions.training import clip_by_global_norm
from plancompiler.frontend.nn.module import Parameter, eager_parameters
from plancompiler.ir.source import user_line

if TYPE_CHECKING:
    from plancompiler.frontend.optim.optimizer import Optimizer

Tensor = Any
"""An eager tensor."""


class EagerSteps:
    """The steps of one optimizer in one world: how many there were, and the state per parameter."""

    def __init__(self, optimizer: Optimizer, world: Any) -> None:
        self.done = 0
        """Steps so far."""
        self._optimizer: Any = proxy(optimizer)  # which holds this object
        self._world: Any = proxy(world)
        self._states: WeakKeyDictionary[Tensor, list[Tensor]] = WeakKeyDictionary()

    def minimize(
        self,
        loss: Tensor,
        parameters: Iterable[Parameter | Tensor] | None,
        clip_norm: float | None,
    ) -> list[Tensor]:
        """Differentiate and update; returns the gradients that the updates used."""
        tensors = self._chosen(parameters)
        self.zero_grad(tensors)
        loss.backward()
        for tensor in tensors:
            if tensor.grad is None and parameters is not None:
                raise GradientError(
                    "a parameter does not influence the loss",
                    source=user_line(),
                    got=str(tensor),
                    hint="freeze it, or leave it out of `parameters`",
                )
        return self.step(tensors, clip_norm)

    def step(
        self, parameters: Iterable[Parameter | Tensor] | None, clip_norm: float | None
    ) -> list[Tensor]:
        """Update every parameter that has a gradient; returns the gradients used."""
        tensors = [each for each in self._chosen(parameters) if each.grad is not None]
        if not tensors:
            raise UsageError(
                "no parameter has a gradient",
                source=user_line(),
                hint="call loss.backward() before the step",
            )
        world, optimizer = self._world, self._optimizer
        with world.no_grad():
            grads = [
                tensor.grad
                if tensor.grad.spec is tensor.spec
                else tensor.grad.redistribute(sbp=tensor.sbp)
                for tensor in tensors
            ]
            if clip_norm is not None:
                grads, _ = clip_by_global_norm(grads, clip_norm)
            world.step = self.done
            rates = {
                placement: world.source(placement, "learning_rate", optimizer.schedule.attrs)[0]
                for placement in {tensor.placement: None for tensor in tensors}
            }
            optimizer.update_all(
                world,
                [
                    (tensor, grad, self._states_of(tensor), rates[tensor.placement])
                    for tensor, grad in zip(tensors, grads, strict=True)
                ],
            )
        self.done += 1
        return grads

    def zero_grad(self, parameters: Iterable[Parameter | Tensor] | None) -> None:
        """Forget gradients."""
        for tensor in self._chosen(parameters):
            tensor.grad = None

    def _chosen(self, parameters: Iterable[Parameter | Tensor] | None) -> list[Tensor]:
        if parameters is None:
            return eager_parameters(self._world)
        found = []
        for each in parameters:
            if isinstance(each, Parameter) and not each.trainable:
                continue
            tensor: Tensor = each.value if isinstance(each, Parameter) else each
            if not (tensor.requires_grad and tensor.is_leaf):
                raise UsageError(
                    "only parameters, and tensors with requires_grad set, can be updated",
                    source=user_line(),
                    got=str(tensor),
                )
            found.append(tensor)
        return found

    def _states_of(self, tensor: Tensor) -> Sequence[Tensor]:
        found = self._states.get(tensor)
        if found is None:
            found = self._states[tensor] = [
                self._world.add(
                    "fill",
                    (),
                    {"shape": shape, "dtype": str(tensor.dtype), "value": 0.0},
                    tensor.placement,
                    sbp,
                )[0]
                for _, shape, sbp in self._optimizer.states_of(tensor, tensor.sbp)
            ]
        return found
