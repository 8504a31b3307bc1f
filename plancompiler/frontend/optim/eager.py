"""What an optimizer does outside of jobs: it updates eager parameters in place, all in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, proxy

from plancompiler.errors import GradientError, UsageError
from plancompiler.frontend.functions.training import clip_by_global_norm
from plancompiler.frontend.nn.module import (
    Parameter,
    check_state,
    eager_names,
    eager_parameters,
    take_over,
)
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
        if not hasattr(loss, "backward"):
            raise UsageError(
                "what is minimised is a tensor of one number",
                op="minimize",
                source=user_line(),
                got=type(loss).__name__,
            )
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
        recording, world.recording = world.recording, False
        try:
            grads = self._gradients(tensors)
            if clip_norm is not None:
                grads, _ = clip_by_global_norm(grads, clip_norm)
            world.step = self.done
            rates = {
                placement: world.source(placement, "learning_rate", optimizer.schedule.attrs)[0]
                for placement in {tensor.placement: None for tensor in tensors}
            }
            self._update(tensors, grads, rates)
        finally:
            world.recording = recording
        if world.tracing is None:
            self.done += 1
        else:
            world.tracing.stepped(self)
        return grads

    def _gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, laid out as their parameters are."""
        return [
            grad if grad.spec is tensor.spec else grad.redistribute(sbp=tensor.sbp)
            for tensor, grad in [(tensor, tensor.grad) for tensor in tensors]
        ]

    def _update(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor], rates: Mapping[Any, Tensor]
    ) -> None:
        """Update parameters by their gradients, at the learning rate of their placement."""
        updates = []
        placement = rate = None
        for tensor, grad in zip(tensors, grads, strict=True):
            if tensor.placement is not placement:  # most have one, and it takes long to look up
                placement = tensor.placement
                rate = rates[placement]
            updates.append((tensor, grad, self._states_of(tensor), rate))
        self._optimizer.update_all(self._world, updates)

    def zero_grad(self, parameters: Iterable[Parameter | Tensor] | None) -> None:
        """Forget gradients."""
        for tensor in self._chosen(parameters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """`step`, and the states of all parameters so far as `NAME.SUFFIX`, as a job names them."""
        found: dict[str, Any] = {"step": self.done}
        for name, tensor in self._named().items():
            if tensor in self._states:
                found.update(zip(self._names(name, tensor), self._states[tensor], strict=True))
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the steps and states of `state_dict`, from any layout."""
        check_state(state)
        known = {"step"}
        for name, tensor in self._named().items():
            names = self._names(name, tensor)
            if not any(each in state for each in names):
                continue
            known.update(names)
            for each, kept in zip(names, self._states_of(tensor), strict=True):
                take_over(each, kept, state)
        unknown = sorted(state.keys() - known)
        if unknown or "step" not in state:
            raise UsageError(
                "not the state of this optimizer and the parameters that were read so far",
                source=user_line(),
                got=", ".join(unknown) or "no step",
                hint="read the parameters first: module.state_dict()",
            )
        self.done = int(state["step"])

    def _names(self, name: str, tensor: Tensor) -> list[str]:
        """What the states of a parameter are called."""
        return [f"{name}.{each}" for each, _, _ in self._optimizer.states_of(tensor, tensor.sbp)]

    def _named(self) -> dict[str, Tensor]:
        """Tensors that have states or could have, by the names of their parameters."""
        found = eager_names(self._world)
        known = {id(tensor) for tensor in found.values()}
        others = [tensor for tensor in self._states if id(tensor) not in known]
        return {**found, **{f"tensor_{at}": tensor for at, tensor in enumerate(others)}}

    def _chosen(self, parameters: Iterable[Parameter | Tensor] | None) -> list[Tensor]:
        if parameters is None:
            return eager_parameters(self._world)
        if not isinstance(parameters, Iterable) or isinstance(parameters, (str, Mapping)):
            raise UsageError(
                "an optimizer takes a list of parameters",
                source=user_line(),
                got=type(parameters).__name__,
                hint="module.parameters(), or [tensor]",
            )
        found = []
        for each in parameters:
            tensor: Tensor = each
            if isinstance(each, Parameter):
                if not each.trainable:
                    continue
                tensor = each.value
            if not (getattr(tensor, "requires_grad", False) and tensor.is_leaf):
                raise UsageError(
                    "only parameters, and tensors with requires_grad set, can be updated",
                    source=user_line(),
                    got=f"{type(tensor).__name__} {tensor}"[:80],
                )
            found.append(tensor)
        return found

    def _states_of(self, tensor: Tensor) -> Sequence[Tensor]:
        found = self._states.get(tensor)
        if found is None:
            found = self._states[tensor] = [
                self._variable(suffix, shape, str(tensor.dtype), tensor.placement, sbp)
                for suffix, shape, sbp in self._optimizer.states_of(tensor, tensor.sbp)
            ]
        return found

    def _variable(
        self, name: str, shape: tuple[int, ...], dtype: str, placement: Any, sbp: Any = None
    ) -> Tensor:
        """State that starts at zero."""
        attrs = {
            "name": name,
            "shape": shape,
            "dtype": dtype,
            "init": "zeros",
            "init_args": (),
            "trainable": False,
        }
        return self._world.add("variable", (), attrs, placement, sbp)[0]
