"""What an optimizer does outside of jobs: it updates eager parameters in place, all in one call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
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
from plancompiler.frontend.optim.parameter_group import ParameterGroup, Parameters, listed
from plancompiler.frontend.optim.schedule import fed_rate, rate_at
from plancompiler.ir import SourceLine
from plancompiler.ir.source import user_line

Tensor = Any
"""An eager tensor."""

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


class EagerSteps:
    """The steps of one optimizer in one world: how many there were, and the state per parameter."""

    def __init__(self, optimizer: Any, world: Any) -> None:
        self.done = 0
        """Steps so far."""
        self._optimizer: Any = proxy(optimizer)  # which holds this object
        self._world: Any = proxy(world)
        self._states = _ByTensor()
        self._suffixes = _ByTensor()
        """What the states of each are called."""
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
            self._update(tensors, grads)
        finally:
            world.recording = recording
        if world.mode.traces:
            world.mode.stepped(self)
        else:
            self.done += 1
        return grads

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of the groups in the next step."""
        groups = self._optimizer.param_groups
        return tuple([rate_at(group.schedule, self.done) for group in groups])

    @property
    def version(self) -> object:
        """Changes with the numbers that updates are made with, the rates aside."""
        return self._optimizer.version

    def groups_of(self, tensors: Sequence[Tensor]) -> list[ParameterGroup]:
        """The group of each tensor; the first one's numbers hold for what is in none."""
        first, *others = self._optimizer.param_groups
        groups = {
            id(tensor): group for group in others for tensor in self._chosen(group.parameters)
        }
        return [groups.get(id(tensor), first) for tensor in tensors]

    def _rates(self, tensors: Sequence[Tensor], groups: Sequence[ParameterGroup]) -> list[Tensor]:
        """The learning rate of each, where it lies; of a compiled function that of the call."""
        world = self._world
        rates: dict[object, Tensor] = {}
        by_tensor = []
        placement = group = rate = None
        for tensor, its in zip(tensors, groups, strict=True):
            # Most have one placement, and it takes long to look up.
            if tensor.placement is not placement or its is not group:
                placement, group = tensor.placement, its
                key = placement, group.number
                if key not in rates:
                    rates[key] = self._rate_on(world, placement, group)
                rate = rates[key]
            by_tensor.append(rate)
        return by_tensor

    def _rate_on(self, world: Any, placement: Any, group: ParameterGroup) -> Tensor:
        if not world.mode.traces:
            return world.number(rate_at(group.schedule, self.done), placement)
        before = sum(len(steps.rates) for steps in world.mode.steps)
        return world.source(placement, "learning_rate", fed_rate(before + group.number))[0]

    def _laid_out(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients, laid out as their parameters are."""
        return [
            grad if grad.spec is tensor.spec else grad.redistribute(sbp=tensor.sbp)
            for tensor, grad in zip(tensors, grads, strict=True)
        ]

    def _update(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Update parameters by their gradients."""
        groups = self.groups_of(tensors)
        rates = self._rates(tensors, groups)
        updates = [
            (tensor, grad, self._states_of(tensor, group), rate, group.numbers)
            for tensor, grad, rate, group in zip(tensors, grads, rates, groups, strict=True)
        ]
        self._optimizer.update_all(self._world, updates)

    def zero_grad(self, parameters: Parameters | None, set_to_none: bool = True) -> None:
        """Forget gradients, or make them zeros."""
        given = self._optimizer.parameters if parameters is None else parameters
        for tensor in self._chosen(given):
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.zero_()

    # --- what is kept -----------------------------------------------------------------------------

    def state_dict(self) -> OptimizerState:
        """`step`, and the states of its parameters as `NAME.SUFFIX`, as a job names them; `lr`
        where it was set to a number, of other groups than the first as `lr.1` and so on.

        Its parameters are those that it was given, else those that it has updated so far. Of the
        latter there are none before the first step; `pc.eager.load` finds out which there are.
        """
        state = OptimizerState(self._as_saved)
        state["step"] = self.done
        state |= {
            name: group.rate_to_save
            for name, group in self._rate_names().items()
            if group.rate_to_save is not None
        }
        state.update(self._states_by_name(self._named(self._own()), ()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the steps and states of `state_dict`, from any layout."""
        check_state(state)
        rates = self._rate_names()
        holders = self._holders(state)
        wanted = self._states_by_name(holders, state)
        own = {name: type_text(kept) for name, kept in wanted.items()}
        given = {name: type_text(value) for name, value in state.items()}
        lacking = [f"{name} {kind}" for name, kind in own.items() if given.get(name) != kind]
        other = [
            f"{name} {kind}"
            for name, kind in given.items()
            if own.get(name) != kind and name != "step" and name not in rates
        ]
        if "step" not in state:
            lacking.append("step")
        if lacking or other:
            raise UsageError(
                "not the state of this optimizer and its parameters",
                source=user_line(),
                got="what it does not have: " + (", ".join(sorted(other)) or "nothing"),
                expected="what it has: " + (", ".join(sorted(lacking)) or "nothing else"),
                hint="give the optimizer its parameters, pc.optim.SGD(model.parameters(), "
                "lr=0.1), or read them first with model.state_dict()",
            )
        for name, kept in wanted.items():
            load_value(name, kept, state)
        self._loaded(holders, wanted)
        self.done = int(state["step"])
        for name, group in rates.items():
            if name in state:
                group["lr"] = float(state[name])

    def _as_saved(self, names: Collection[str]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.done}
        state |= {name: group["lr"] for name, group in self._rate_names().items() if name in names}
        return {**state, **self._states_by_name(self._holders(names), names)}

    def _rate_names(self) -> dict[str, ParameterGroup]:
        """The groups by what a state calls their rates."""
        groups = self._optimizer.param_groups
        return {f"lr.{each.number}" if each.number else "lr": each for each in groups}

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
        group = self._optimizer.param_groups[0]
        saved = {
            name: tensor
            for name, tensor in zip(names[len(own) :], others, strict=True)
            if any(each in states for each in self._names(name, tensor, group))
        }
        if saved and told_apart and len(saved) < len(others):
            raise UsageError(
                "it cannot be told which parameters this state is of: several models have some of "
                "the same names",
                source=user_line(),
                got=", ".join(sorted(saved)),
                hint="give the optimizer its parameters: pc.optim.SGD(model.parameters(), lr=0.1)",
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
        groups = self.groups_of(list(named.values()))
        return {
            each: kept
            for (name, tensor), group in zip(named.items(), groups, strict=True)
            for each, kept in zip(
                self._names(name, tensor, group), self._states_of(tensor, group), strict=True
            )
        }

    def _loaded(self, holders: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        """The states of these tensors have been loaded."""

    def _names(self, name: str, tensor: Tensor, group: ParameterGroup) -> list[str]:
        """What the states of a parameter are called."""
        states = self._optimizer.states_of(tensor, tensor.sbp, group.numbers)
        return [f"{name}.{each}" for each, _, _ in states]

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

    def _states_of(self, tensor: Tensor, group: ParameterGroup) -> Sequence[Tensor]:
        states = self._states.get(tensor)
        if states is None:
            wanted = [*self._optimizer.states_of(tensor, tensor.sbp, group.numbers)]
            states = [
                self._variable(suffix, shape, str(tensor.dtype), tensor.placement, sbp)
                for suffix, shape, sbp in wanted
            ]
            self._states.keep(tensor, states)
            self._suffixes.keep(tensor, [suffix for suffix, _, _ in wanted])
        elif group.changes and self._suffixes.get(tensor) != [
            suffix for suffix, _, _ in self._optimizer.states_of(tensor, tensor.sbp, group.numbers)
        ]:
            raise UsageError(
                "an optimizer that has stepped cannot have other states",
                source=user_line(),
                got=repr(group)[:200],
                hint="make another optimizer for these numbers",
            )
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


def say_what_moves(parameters: Sequence[Parameter]) -> None:
    """Say what an optimizer that was given no parameters updates, once for each line of the user's:
    as a warning where that is several models.
    """
    roots = list(dict.fromkeys(id(each.root) for each in parameters if each.root is not None))
    source = user_line()
    if source not in _said:
        _said.add(source)
        models = dict.fromkeys(type(each.root).__name__ for each in parameters if each.root)
        _log.log(
            logging.WARNING if len(roots) > 1 else logging.INFO,
            "%s: an optimizer without a list of parameters updates all that were read: %d "
            "parameters of %d models (%s); where that is not meant, give it a model or a list: "
            "SGD(model.parameters(), lr=...)",
            source,
            len(parameters),
            len(roots),
            ", ".join(models),
        )


_said: set[SourceLine] = set()
"""Lines of which it was said."""
