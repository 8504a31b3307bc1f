"""What an optimizer does outside of jobs: it updates eager parameters in place, all in one call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import proxy, ref

from plancompiler.errors import GradientError, UsageError
from plancompiler.frontend.functions.training import clip_by_global_norm
from plancompiler.frontend.nn.module import (
    Parameter,
    check_state,
    eager_parameters,
    load_value,
    names_of,
    parameters_of,
    type_text,
)
from plancompiler.frontend.optim.schedule import fed_rate, rate_at
from plancompiler.ir import NdSbp, SourceLine
from plancompiler.ir.source import user_line

Tensor = Any
"""An eager tensor."""
Parameters = Iterable[Parameter | Tensor]

_log = logging.getLogger("plancompiler.optim")


class _ByTensor:
    """What is kept per tensor for as long as it lives. A dict of tensors would compare them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ref[Tensor], list[Tensor]]] = {}

    def get(self, tensor: Tensor) -> list[Tensor] | None:
        """What is kept of a tensor."""
        entry = self._kept.get(id(tensor))
        return None if entry is None else entry[1]

    def keep(self, tensor: Tensor, value: list[Tensor]) -> None:
        """Keep this, and nothing else of the tensor."""
        key, kept = id(tensor), self._kept
        kept[key] = ref(tensor, lambda _: kept.pop(key, None)), value

    def tensors(self) -> list[Tensor]:
        """Those that live, in the order in which they came."""
        return [tensor for each, _ in list(self._kept.values()) if (tensor := each()) is not None]


class OptimizerState(dict[str, Any]):
    """The state of an optimizer. It may not know yet which parameters it is to update: then what a
    checkpoint holds says which states there are.
    """

    def __init__(self, as_saved: Callable[[Collection[str]], dict[str, Any]]) -> None:
        super().__init__()
        self.as_saved = as_saved
        """The state to read a checkpoint into that has these names."""
        self.optimizer: object = None
        """Whose state it is, kept for `as_saved`."""


class Stepping(Protocol):
    """What steps ask of their optimizer."""

    schedule: Callable[[int], float]
    parameters: list[Parameter | Tensor] | None
    lr: float

    @property
    def rate_to_save(self) -> float | None:
        """See `Optimizer.rate_to_save`."""

    def states_of(
        self, value: Any, sbp: NdSbp | None
    ) -> Iterable[tuple[str, tuple[int, ...], NdSbp | None]]:
        """See `Optimizer.states_of`."""

    def update_all(
        self, world: Any, updates: Sequence[tuple[Any, Any, Sequence[Any], Any]]
    ) -> None:
        """See `Optimizer.update_all`."""


class EagerSteps:
    """The steps of one optimizer in one world: how many there were, and the state per parameter."""

    def __init__(self, optimizer: Stepping, world: Any) -> None:
        self.done = 0
        """Steps so far."""
        self._optimizer: Any = proxy(optimizer)  # which holds this object
        self._world: Any = proxy(world)
        self._states = _ByTensor()
        self._said = False

    def minimize(
        self, loss: Tensor, parameters: Parameters | None, clip_norm: float | None
    ) -> list[Tensor]:
        """Differentiate and update; returns the gradients that the updates used."""
        if not hasattr(loss, "backward"):
            raise UsageError(
                "what is minimised is a tensor of one number",
                op="minimize",
                source=user_line(),
                got=type(loss).__name__,
            )
        if parameters is None:
            parameters = self._optimizer.parameters
        tensors = self._chosen(parameters)
        self.zero_grad(tensors)
        if parameters is None:
            loss.backward()
            return self.step(None, clip_norm)
        # Those of others are not touched: another optimizer may be adding them up.
        for tensor, grad in zip(tensors, self._world.gradients(loss, tensors), strict=True):
            if grad is None:
                raise GradientError(
                    "a parameter does not influence the loss",
                    source=user_line(),
                    got=str(tensor),
                    hint="freeze it, or leave it out of `parameters`",
                )
            tensor.grad = grad
        return self.step(tensors, clip_norm)

    def step(self, parameters: Parameters | None, clip_norm: float | None) -> list[Tensor]:
        """Update every parameter that has a gradient; returns the gradients used."""
        optimizer = self._optimizer
        if parameters is None:
            parameters = optimizer.parameters
        tensors, grads = [], []
        for each in self._chosen(parameters):
            if (grad := each.grad) is not None:
                tensors.append(each)
                grads.append(grad)
        if not tensors:
            raise UsageError(
                "no parameter has a gradient",
                source=user_line(),
                hint="call loss.backward() before the step",
            )
        world = self._world
        if parameters is None and not self._said:
            self._said = True
            if world.rank == 0:
                updated = parameters_of(world, tensors)
                say_what_moves([each for each in updated if each is not None])
        recording, world.recording = world.recording, False
        try:
            grads = self._laid_out(tensors, grads)
            if clip_norm is not None:
                grads, _ = clip_by_global_norm(grads, clip_norm)
            world.step = self.done
            self._update(tensors, grads, self._rates(tensors))
        finally:
            world.recording = recording
        if world.mode.traces:
            world.mode.stepped(self)
        else:
            self.done += 1
        return grads

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return rate_at(self._optimizer.schedule, self.done)

    def _rates(self, tensors: Sequence[Tensor]) -> dict[Any, Tensor]:
        """The learning rate on every placement; of a compiled function that of the call."""
        world = self._world
        places = {tensor.placement: None for tensor in tensors}
        if not world.mode.traces:
            rate = self.rate
            return {place: world.number(rate, place) for place in places}
        attrs = fed_rate(len(world.mode.steps))
        return {place: world.source(place, "learning_rate", attrs)[0] for place in places}

    def _laid_out(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, laid out as their parameters are."""
        return [
            grad if grad.spec is tensor.spec else grad.redistribute(sbp=tensor.sbp)
            for tensor, grad in zip(tensors, grads, strict=True)
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
        given = self._optimizer.parameters if parameters is None else parameters
        for tensor in self._chosen(given):
            tensor.grad = None

    # --- what is kept -----------------------------------------------------------------------------

    def state_dict(self) -> OptimizerState:
        """`step`, and the states of its parameters as `NAME.SUFFIX`, as a job names them; `lr`
        where it was set to a number.

        Its parameters are those that it was given, else those that it has updated so far. Of the
        latter there are none before the first step; `pc.eager.load` finds out which there are.
        """
        state = OptimizerState(self._as_saved)
        state["step"] = self.done
        if self._optimizer.rate_to_save is not None:
            state["lr"] = self._optimizer.rate_to_save
        state.update(self._states_by_name(self._named(self._own()), ()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the steps and states of `state_dict`, from any layout."""
        check_state(state)
        holders = self._holders(state)
        wanted = self._states_by_name(holders, state)
        own = {name: type_text(kept) for name, kept in wanted.items()}
        given = {name: type_text(value) for name, value in state.items()}
        lacking = [f"{name} {kind}" for name, kind in own.items() if given.get(name) != kind]
        other = [
            f"{name} {kind}"
            for name, kind in given.items()
            if own.get(name) != kind and name not in ("step", "lr")
        ]
        if "step" not in state:
            lacking.append("step")
        if lacking or other:
            raise UsageError(
                "not the state of this optimizer and its parameters",
                source=user_line(),
                got="what it does not have: " + (", ".join(sorted(other)) or "nothing"),
                expected="what it has: " + (", ".join(sorted(lacking)) or "nothing else"),
                hint="give the optimizer its parameters, pc.optim.SGD(0.1, "
                "parameters=model.parameters()), or read them first with model.state_dict()",
            )
        for name, kept in wanted.items():
            load_value(name, kept, state)
        self._loaded(holders, wanted)
        self.done = int(state["step"])
        if "lr" in state:
            self._optimizer.lr = float(state["lr"])

    def _as_saved(self, names: Collection[str]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.done}
        if "lr" in names:
            state["lr"] = self.rate
        return {**state, **self._states_by_name(self._holders(names), names)}

    def _own(self) -> list[Tensor]:
        """The tensors that were given, else those that have been updated, in that order."""
        given = self._optimizer.parameters
        return self._states.tensors() if given is None else self._chosen(given)

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        names, _ = names_of(parameters_of(self._world, tensors))
        return dict(zip(names, tensors, strict=True))

    def _holders(self, states: Collection[str]) -> dict[str, Tensor]:
        """The tensors that states of these names belong to, by the names of their parameters.

        UsageError where that cannot be told.
        """
        own = self._own()
        if self._optimizer.parameters is not None:
            return self._named(own)
        others = self._others(own)
        _, told_apart = names_of(parameters_of(self._world, [*own, *others]))
        if told_apart and others:
            gc.collect()  # modules and their parts refer to each other, and so outlive their use
            others = self._others(own)
        names, told_apart = names_of(parameters_of(self._world, [*own, *others]))
        holders = dict(zip(names, own, strict=False))
        saved = {
            name: tensor
            for name, tensor in zip(names[len(own) :], others, strict=True)
            if any(each in states for each in self._names(name, tensor))
        }
        if saved and told_apart and len(saved) < len(others):
            raise UsageError(
                "it cannot be told which parameters this state is of: several models have some of "
                "the same names",
                source=user_line(),
                got=", ".join(sorted(saved)),
                hint="give the optimizer its parameters: pc.optim.SGD(0.1, "
                "parameters=model.parameters())",
            )
        return {**holders, **saved}

    def _others(self, own: Sequence[Tensor]) -> list[Tensor]:
        known = {id(tensor) for tensor in own}
        return [each for each in eager_parameters(self._world) if id(each) not in known]

    def _states_by_name(
        self, named: Mapping[str, Tensor], saved: Collection[str]
    ) -> dict[str, Tensor]:
        """The states of tensors by name; `saved` are the names that a state has which is to be
        taken over.
        """
        return {
            each: kept
            for name, tensor in named.items()
            for each, kept in zip(self._names(name, tensor), self._states_of(tensor), strict=True)
        }

    def _loaded(self, holders: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        """The states of these tensors have been loaded."""

    def _names(self, name: str, tensor: Tensor) -> list[str]:
        """What the states of a parameter are called."""
        return [f"{name}.{each}" for each, _, _ in self._optimizer.states_of(tensor, tensor.sbp)]

    def _chosen(self, parameters: Parameters | None) -> list[Tensor]:
        if parameters is None:
            return eager_parameters(self._world)
        tensors = []
        for each in listed(parameters):
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
            tensors.append(tensor)
        return tensors

    def _states_of(self, tensor: Tensor) -> Sequence[Tensor]:
        states = self._states.get(tensor)
        if states is None:
            states = [
                self._variable(suffix, shape, str(tensor.dtype), tensor.placement, sbp)
                for suffix, shape, sbp in self._optimizer.states_of(tensor, tensor.sbp)
            ]
            self._states.keep(tensor, states)
        return states

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


def listed(parameters: Parameters) -> list[Parameter | Tensor]:
    """Parameters as a list. UsageError for what is no list of them."""
    if not isinstance(parameters, Iterable) or isinstance(parameters, (str, Mapping)):
        raise UsageError(
            "an optimizer takes a list of parameters",
            source=user_line(),
            got=type(parameters).__name__,
            hint="module.parameters(), or [tensor]",
        )
    return list(parameters)


def say_what_moves(parameters: Sequence[Parameter]) -> None:
    """Say so, once for each line of the user's, where an optimizer that was given no parameters
    updates those of several models.
    """
    roots = list(dict.fromkeys(id(each.root) for each in parameters if each.root is not None))
    source = user_line()
    if len(roots) > 1 and source not in _said:
        _said.add(source)
        models = dict.fromkeys(type(each.root).__name__ for each in parameters if each.root)
        _log.warning(
            "%s: an optimizer without a list of parameters updates all that were read: %d "
            "parameters of %d models (%s); where that is not meant, give it "
            "parameters=model.parameters()",
            source,
            len(parameters),
            len(roots),
            ", ".join(models),
        )


_said: set[SourceLine] = set()
"""Lines of which it was said."""
