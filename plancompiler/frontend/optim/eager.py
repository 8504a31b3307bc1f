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


class _Kept:
    """What an optimizer keeps of a tensor."""

    __slots__ = ("counted", "missed", "states", "suffixes")

    def __init__(self, states: Sequence[Tensor], suffixes: Sequence[str]) -> None:
        self.states = states
        self.suffixes = suffixes
        """What the states are called."""
        self.missed = 0
        """Steps of the optimizer, of the first `counted`, that have not updated the tensor: where a
        formula goes by a count, it is that of the tensor's updates, not of all steps."""
        self.counted = 0


class _ByTensor:
    """What is kept per tensor for as long as it lives. A dict of tensors would compare them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ref[Tensor], _Kept]] = {}

    def get(self, tensor: Tensor) -> _Kept | None:
        """What is kept of a tensor."""
        entry = self._kept.get(id(tensor))
        return None if entry is None else entry[1]

    def keep(self, tensor: Tensor, value: _Kept) -> None:
        """Keep this, and nothing else of the tensor."""
        key, kept = id(tensor), self._kept
        kept[key] = ref(tensor, lambda _: kept.pop(key, None)), value

    def tensors(self) -> list[Tensor]:
        """Those that live, in the order in which they came."""
        return [tensor for each, _ in list(self._kept.values()) if (tensor := each()) is not None]


class StepCount:
    """The steps that have updated some parameters, so far; all of an optimizer's where it names
    none. Functions that are compiled read it in each call.
    """

    def __init__(self, steps: EagerSteps, kept: Sequence[_Kept] = ()) -> None:
        self.steps = steps
        self.kept = kept
        self.missed = kept[0].missed if kept else 0

    @property
    def now(self) -> int:
        """Their number."""
        return self.steps.done - self.missed

    def holds(self) -> bool:
        """Whether it is still one number for all of them; then it is that of now. A count of all
        steps stays one.
        """
        missed = {each.missed for each in self.kept} or {0}
        if len(missed) > 1 or (missed == {0}) != (self.missed == 0):
            return False
        (self.missed,) = missed
        return True


class OptimizerState(dict[str, Any]):
    """The state of an optimizer. It may not know yet which parameters it is to update: then what a
    checkpoint holds says which states there are.
    """

    def __init__(self, as_saved: Callable[[Collection[str], bool], dict[str, Any]]) -> None:
        super().__init__()
        self.as_saved = as_saved
        """The state to read a checkpoint into that has these names; with the steps that each
        parameter has missed, where the flag says so."""
        self.optimizer: object = None
        """Whose state it is, kept for `as_saved`."""


class EagerSteps:
    """The steps of one optimizer in one world: how many there were, and the state per parameter."""

    def __init__(self, optimizer: Any, world: Any) -> None:
        self.done = 0
        """Steps so far."""
        self._optimizer: Any = proxy(optimizer)  # which holds this object
        self._world: Any = proxy(world)
        self._kept = _ByTensor()
        self.updated: Sequence[_Kept] = ()
        """What is kept of the tensors that the latest step has updated."""
        self.recounts = 0
        """Changes when steps are found to have left a tensor out."""
        self._cohorts: list[list[int]] = []
        """Places in `updated` of those that have missed as many steps."""
        self._said = False
        self._rate: tuple[float, Any, Tensor] | None = None
        """The latest rate, where it lies, and its tensor: most steps have that of the last one."""

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
            self._update(tensors, grads)
            world.step = self.done
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
            rate = rate_at(group.schedule, self.done)
            kept = self._rate
            if kept is None or kept[0] != rate or kept[1] is not placement or world.compares:
                kept = self._rate = rate, placement, world.number(rate, placement)
            return kept[2]
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
        kept = [self._kept_of(each, group) for each, group in zip(tensors, groups, strict=True)]
        updates = [
            (tensor, grad, each.states, rate, group.numbers)
            for tensor, grad, each, rate, group in zip(
                tensors, grads, kept, rates, groups, strict=True
            )
        ]
        self.resume(kept)
        for places in self._cohorts:
            self._count_by([kept[place] for place in places])
            self._optimizer.update_all(self._world, [updates[place] for place in places])

    def _count_by(self, kept: Sequence[_Kept]) -> None:
        """Let the updates that follow go by the count of these."""
        world, count = self._world, StepCount(self, kept)
        world.step = count.now
        if world.mode.traces:
            world.mode.count(count)

    def resume(self, updated: Sequence[_Kept]) -> int:
        """Before a step that updates these: note the steps that have left them out. Returns
        `recounts`.
        """
        if updated is not self.updated and updated != self.updated:
            for each in self.updated:
                each.counted = self.done
            cohorts: dict[int, list[int]] = {}
            for place, each in enumerate(updated):
                if each.counted < self.done:
                    each.missed += self.done - each.counted
                    self.recounts += 1
                cohorts.setdefault(each.missed, []).append(place)
            self.updated, self._cohorts = updated, list(cohorts.values())
        return self.recounts

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
        """`step`, and the states of its parameters as `NAME.SUFFIX`, as a job names them; the
        numbers of groups that were set, `lr` and so on, of other groups than the first as `lr.1`
        (`betas_1` and `betas_2` are a pair); and `NAME.missed`, the number of steps that have not
        updated a parameter, where there are any.

        Its parameters are those that it was given, else those that it has updated so far. Of the
        latter there are none before the first step; `pc.eager.load` finds out which there are.
        """
        state = OptimizerState(self._as_saved)
        state["step"] = self.done
        for group in self._optimizer.param_groups:
            state.update(group.to_save())
        named = self._named(self._own())
        state.update(self._states_by_name(named, ()))
        self.resume(())  # so that all steps are counted
        for name, kept in self._counts_by_name(named).items():
            if missed := kept.missed + self.done - kept.counted:
                state[name] = missed
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the steps and states of `state_dict`, from any layout."""
        check_state(state)
        labels = self._labels()
        holders = self._holders(state)
        wanted = self._states_by_name(holders, state)
        counts = self._counts_by_name(holders)
        own = {name: type_text(kept) for name, kept in wanted.items()}
        given = {name: type_text(value) for name, value in state.items()}
        lacking = [f"{name} {kind}" for name, kind in own.items() if given.get(name) != kind]
        other = [
            f"{name} {kind}"
            for name, kind in given.items()
            if own.get(name) != kind and name not in ("step", *labels, *counts)
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
        self.updated, self.recounts = (), self.recounts + 1
        for name, each in counts.items():
            each.missed, each.counted = int(state.get(name, 0)), self.done
        for group in self._optimizer.param_groups:
            group.load(state)

    def _as_saved(self, names: Collection[str], missed: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.done}
        state |= {name: 0.0 for name in self._labels() if name in names}
        holders = self._holders(names)
        states = self._states_by_name(holders, names)
        state |= {name: 0 for name in self._counts_by_name(holders) if missed or name in names}
        return state | states

    def _labels(self) -> list[str]:
        """What a state calls the numbers of groups."""
        return [label for group in self._optimizer.param_groups for label in group.labels]

    def _own(self) -> list[Tensor]:
        """The tensors that were given, else those that have been updated, in that order."""
        given = self._optimizer.parameters
        return self._kept.tensors() if given is None else self._chosen(given)

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
                self._names(name, tensor, group),
                self._kept_of(tensor, group).states,
                strict=True,
            )
        }

    def _counts_by_name(self, named: Mapping[str, Tensor]) -> dict[str, _Kept]:
        """What is kept of the tensors that have states, by what a state calls the steps that they
        have missed.
        """
        every = {f"{name}.missed": self._kept.get(tensor) for name, tensor in named.items()}
        return {name: kept for name, kept in every.items() if kept is not None and kept.states}

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
                    expected="a list of them",
                    source=user_line(),
                    got=f"{type(tensor).__name__} {tensor}"[:80],
                )
            tensors.append(tensor)
        return tensors

    def _kept_of(self, tensor: Tensor, group: ParameterGroup) -> _Kept:
        kept = self._kept.get(tensor)
        if kept is None:
            wanted = [*self._optimizer.states_of(tensor, tensor.sbp, group.numbers)]
            states = [
                self._variable(suffix, shape, str(tensor.dtype), tensor.placement, sbp)
                for suffix, shape, sbp in wanted
            ]
            kept = _Kept(states, [suffix for suffix, _, _ in wanted])
            self._kept.keep(tensor, kept)
        elif group.changes and kept.suffixes != [
            suffix for suffix, _, _ in self._optimizer.states_of(tensor, tensor.sbp, group.numbers)
        ]:
            raise UsageError(
                "an optimizer that has stepped cannot have other states",
                source=user_line(),
                got=repr(group)[:200],
                hint="make another optimizer for these numbers",
            )
        return kept

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
