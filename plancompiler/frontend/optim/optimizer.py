"""What all optimizers share: gradients, clipping, state variables, learning rate."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from plancompiler.errors import GradientError, JobError, UsageError
from plancompiler.frontend.autodiff import gradients
from plancompiler.frontend.functions.training import clip_by_global_norm
from plancompiler.frontend.nn.module import Parameter, parameters_read
from plancompiler.frontend.optim.eager import EagerSteps, say_what_moves
from plancompiler.frontend.optim.parameter_group import (
    ParameterGroup,
    Parameters,
    are_parameters,
    checked,
    grouped,
    listed,
    one_group,
    without_ways,
)
from plancompiler.frontend.optim.schedule import Rate, Schedule, fed_rate
from plancompiler.frontend.trace import JobBuilder, current_builder, current_recorder
from plancompiler.hooks.eager_world import eager_world
from plancompiler.ir import AttrValue, DType, NdSbp, Phase, Value
from plancompiler.ir.source import user_line
from plancompiler.ops.attributes import check_attributes
from plancompiler.ops.registry import op_def

State = tuple[str, tuple[int, ...], NdSbp | None]
"""Suffix, shape and layout of a state variable of a parameter."""
Update = tuple[Value, Value, Sequence[Value], Value, Mapping[str, Any]]
"""Parameter, gradient, states, learning rate, and the numbers of the group."""
EagerUpdate = tuple[Any, Any, Sequence[Any], Any, Mapping[str, Any]]
"""The same, of eager tensors."""


class _Sealed(ABCMeta):
    """Makes objects that take no other attributes once they are made.

    The parameters may be left out: a rate in their place is the rate. PyTorch's words for how a
    step is made (`foreach`, `fused`, `capturable`) change nothing here.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        rate = bool(args) and not are_parameters(args[0])
        if rate and (args[0] is not None or (len(args) == 1 and "lr" not in kwargs)):
            args = (None, *args)
        made = super().__call__(*args, **without_ways(kwargs))
        object.__setattr__(made, "_sealed", True)
        return made


class Optimizer(metaclass=_Sealed):
    """Base of the optimizers. `lr` is a number, a schedule, or any function of the step.

    `params` are what it updates where `minimize` and `step` name none: a model, a list of
    parameters or tensors, or a list of dicts, groups with 'params' and numbers of their own
    ('lr', 'weight_decay', …). Without them all parameters are updated that were read so far. The
    older keyword `parameters` says the same, and `SGD(0.1)` is `SGD(lr=0.1)`.

    The numbers of `param_groups` may be set between eager steps; a job keeps those that it was
    traced with. `maximize` goes up the gradient.
    """

    eager_steps: type[EagerSteps] = EagerSteps
    """What does the steps outside of jobs."""
    _sealed = False

    def __init__(
        self,
        params: Parameters | Rate | None,
        lr: Rate,
        parameters: Parameters | None = None,
        **numbers: Any,
    ) -> None:
        if parameters is not None and params is not None:
            raise UsageError(
                "the parameters are given twice",
                source=user_line(),
                got="params and parameters",
                hint="leave the keyword `parameters` out",
            )
        given = parameters if params is None else params
        self.defaults = {name: self._checked(name, value) for name, value in numbers.items()}
        """The numbers of groups that have none of their own, the rate aside."""
        self._lr = lr
        self._eager: WeakKeyDictionary[Any, EagerSteps] = WeakKeyDictionary()
        self.param_groups: list[ParameterGroup] = []
        """The groups of parameters."""
        if given is None:
            self._add_group(None, {})
        else:
            for each in grouped(cast("Parameters", given)):
                self._add_group(each.pop("params"), each)

    def _checked(self, name: str, value: Any) -> Any:
        """A number that the optimizer was given, as its signature's default is one."""
        known = signature(type(self).__init__).parameters
        return checked(name, value, known[name].default if name in known else value)

    def check(self, numbers: Mapping[str, Any]) -> None:
        """Raise an error for numbers of a group that are out of range, or do not go together."""

    def _add_group(self, parameters: list[Any] | None, own: Mapping[str, Any]) -> None:
        unknown = [name for name in own if name != "lr" and name not in self.defaults]
        if unknown:
            raise UsageError(
                f"a group of parameters of {type(self).__name__} has no number of this name",
                source=user_line(),
                got=", ".join(map(str, unknown)),
                expected=", ".join(["params", "lr", *self.defaults]),
            )
        twice = {id(each) for group in self.param_groups for each in group.parameters or ()}
        if any(id(each) in twice for each in parameters or ()):
            raise UsageError("a parameter is in two groups", source=user_line())
        numbers = {
            name: checked(name, own.get(name, value), value)
            for name, value in self.defaults.items()
        }
        number, rate = len(self.param_groups), own.get("lr", self._lr)
        itself = ref(self)

        def steps() -> int:
            optimizer = itself()
            return 0 if optimizer is None else optimizer.steps_done

        def check(numbers: Mapping[str, Any]) -> None:
            optimizer = itself()
            if optimizer is not None:
                optimizer.check(numbers)

        check(numbers)
        group = ParameterGroup(number, parameters, rate, numbers, steps, check)
        self.param_groups.append(group)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Update these parameters too: a dict with 'params', and numbers of their own."""
        if self.parameters is None:
            raise UsageError(
                "an optimizer that was given no parameters updates all; it has no groups",
                source=user_line(),
                hint="give it parameters: pc.optim.SGD(model.parameters(), lr=0.1)",
            )
        given = one_group(group)
        self._add_group(given.pop("params"), given)

    @property
    def parameters(self) -> list[Any] | None:
        """What it updates; None where that is everything that was read."""
        if self.param_groups[0].parameters is None:
            return None
        return [each for group in self.param_groups for each in group.parameters or ()]

    @property
    def schedule(self) -> Callable[[int], float]:
        """The learning rate of the first group as a function of the step."""
        return self.param_groups[0].schedule

    @property
    def steps_done(self) -> int:
        """Eager steps so far."""
        return self._steps_of(eager_world()).done

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when a number other than a rate is set, or a group added."""
        return tuple([group.changes for group in self.param_groups])

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("defaults", ()):
            return self.param_groups[0].numbers[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if self._sealed and name != "lr" and not name.startswith("_"):
            raise UsageError(
                f"{type(self).__name__} has no attribute {name!r} that can be set",
                source=user_line(),
                got=f"{name} = {value!r}"[:80],
                expected="lr, the learning rate",
                hint="optimizer.param_groups[0][name] = value sets other numbers",
            )
        object.__setattr__(self, name, value)

    @property
    def lr(self) -> float:
        """The learning rate of the next eager step; of several groups that of the first. Set it to
        a number, a schedule or a function of the step: the next step uses it for all groups, eager
        or compiled by `pc.compile`. A job keeps the rates that it was traced with; `Session.lr`
        changes these.
        """
        rate: float = self.param_groups[0]["lr"]
        return rate

    @lr.setter
    def lr(self, rate: Rate) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def minimize(
        self,
        loss: Value,
        parameters: Parameters | None = None,
        clip_norm: float | None = None,
    ) -> list[Value]:
        """Append the gradients of `loss` and the update of each parameter; returns the gradients
        that the updates use.

        `parameters` defaults to those of the optimizer, without such to all trainable parameters
        that the job has read so far; the gradients of others are left alone. With
        `clip_norm` all gradients together are scaled down to that 2-norm where theirs is greater,
        whatever placements they live on.

        Raises GradientError for a loss that is no floating scalar and for a parameter that does not
        influence it (freeze it if that is meant), UsageError for a norm that is not positive.

        Outside of jobs it differentiates and updates at once: `zero_grad`, `loss.backward()` and
        `step` in one call. Where nobody has named parameters, the log says what is updated.
        """
        recorder = current_recorder()
        if not isinstance(recorder, JobBuilder):
            return self._steps_of(recorder).minimize(loss, parameters, clip_norm)
        builder = recorder
        if parameters is None:
            parameters = self.parameters
        variables = _variables(builder, parameters)
        if parameters is None:
            say_what_moves(parameters_read(builder))
        grads: list[Value] = []
        for value, grad in zip(variables, gradients(loss, variables), strict=True):
            op = builder.producer(value)
            if grad is None:
                raise GradientError(
                    f"parameter {op.attr('name')!r} does not influence the loss",
                    op=op.name,
                    source=builder.source_line(),
                    hint="freeze it, or leave it out of `parameters`",
                )
            grads.append(grad)
        if clip_norm is not None:
            with builder.phase(Phase.UPDATE):
                grads, _ = clip_by_global_norm(grads, clip_norm)
        self.apply(variables, grads)
        return grads

    def apply(self, parameters: Parameters, gradients: Sequence[Value]) -> None:
        """Append the update of each parameter by a gradient that the caller made, in the same
        order: one of `pc.gradients`, scaled, clipped or summed.

        Raises UsageError where their numbers or types differ, JobError for a parameter that the
        job updates already.
        """
        builder = current_builder()
        variables = _variables(builder, parameters)
        if [value.type for value in variables] != [grad.type for grad in gradients]:
            raise UsageError(
                "every parameter needs a gradient of its shape and dtype",
                source=builder.source_line(),
                got=", ".join(str(grad.type) for grad in gradients) or "no gradient",
                expected=", ".join(str(value.type) for value in variables),
            )
        updated = {
            op.inputs[source].name for op in builder.ops for _, source in op_def(op.kind).mutates
        }
        for value in variables:
            if value.name in updated:
                raise JobError(
                    "a parameter would be updated twice in a step",
                    op=builder.producer(value).name,
                    source=builder.source_line(),
                    got=f"parameter {builder.producer(value).attr('name')!r}",
                    hint="minimize the sum of the losses, or name other `parameters`",
                )
        with builder.phase(Phase.UPDATE):
            self.append_updates(builder, self._updates(builder, variables, gradients))

    def _updates(
        self, builder: JobBuilder, variables: Sequence[Value], gradients: Sequence[Value]
    ) -> Iterator[Update]:
        """What each update takes; its states and learning rate are made as they are asked for."""
        groups = self._groups_of(variables)
        # By number: `==` of groups would compare their tensors, and ask for their rates.
        used = {group.number for group in groups}
        attrs = {
            group.number: self._rate_attrs(builder, group)
            for group in self.param_groups
            if group.number in used
        }
        for value, grad, group in zip(variables, gradients, groups, strict=True):
            rate = builder.source(value.placement, "learning_rate", attrs[group.number])[0]
            states = [
                _state_variable(builder, value, *state)
                for state in self.states_of(value, builder.producer(value).sbp, group.numbers)
            ]
            yield value, grad, states, rate, group.numbers

    def _groups_of(self, variables: Sequence[Value]) -> list[ParameterGroup]:
        """The group of each; the first one's numbers hold for what is in none."""
        first = self.param_groups[0]
        groups = {
            (each.value if isinstance(each, Parameter) else each).name: group
            for group in self.param_groups[1:]
            for each in group.parameters or ()
            if not isinstance(each, Parameter) or each.trainable
        }
        return [groups.get(value.name, first) for value in variables]

    def _rate_attrs(self, builder: JobBuilder, group: ParameterGroup) -> dict[str, AttrValue]:
        """The attributes of the op that gives the learning rate of a group in a job."""
        numbers = builder.attachments.setdefault(Optimizer, {})
        assert isinstance(numbers, dict)
        number = numbers.setdefault((self, group.number), len(numbers))
        if isinstance(group.schedule, Schedule):
            return group.schedule.attrs | ({"optimizer": number} if number else {})
        builder.rates[number] = group.schedule
        return fed_rate(number)

    # Outside of jobs.

    def step(
        self,
        parameters: Parameters | Callable[[], Any] | None = None,
        clip_norm: float | None = None,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Update eager parameters by the gradients that `backward` has left in them, all at once.

        `parameters` defaults to those of the optimizer, without such to all trainable parameters
        that were read outside of jobs so far, as far as they have a gradient. Partial gradients are
        reduced here, once. `clip_norm` as in `minimize`. A function in place of parameters, or as
        `closure`, is called once before: it computes the loss and its gradients, and what it
        returns is returned.
        """
        if closure is None and callable(parameters) and not are_parameters(parameters):
            closure, parameters = parameters, None
        loss = None if closure is None else closure()
        chosen = cast("Parameters | None", parameters)
        self._steps_of(eager_world()).step(chosen, clip_norm)
        return loss

    def zero_grad(self, parameters: Parameters | None = None, *, set_to_none: bool = True) -> None:
        """Forget the gradients of eager parameters (default: as in `step`); without `set_to_none`
        make them zeros.
        """
        self._steps_of(eager_world()).zero_grad(parameters, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """What its eager steps have left: their number, and the states of its parameters by name.

        Names follow from the parameters' modules alone. Without `parameters` its parameters are
        those that it has updated; before the first step `pc.eager.load` takes the states that the
        checkpoint holds.
        """
        state = self._steps_of(eager_world()).state_dict()
        state.optimizer = self
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, whose tensors may lie in any layout; the parameters must have
        been read before. UsageError where a state is missing, or belongs to no parameter, and where
        models have parameters of one name and the optimizer was not given its own.
        """
        self._steps_of(eager_world()).load_state_dict(state)

    def update_all(self, world: Any, updates: Sequence[EagerUpdate]) -> None:
        """Run the updates of eager parameters."""
        for update in updates:
            self.append_update(world, *update)

    def _steps_of(self, world: Any) -> EagerSteps:
        steps = self._eager.get(world)
        if steps is None:
            steps = self._eager[world] = self.eager_steps(self, world)
        return steps

    def append_updates(self, builder: JobBuilder, updates: Iterable[Update]) -> None:
        """Append the updates of parameters."""
        for update in updates:
            self.append_update(builder, *update)

    @abstractmethod
    def states_of(
        self, value: Value, sbp: NdSbp | None, numbers: Mapping[str, Any]
    ) -> Iterable[State]:
        """The state variables of a parameter that is held as `sbp`, in a group of these numbers."""

    @abstractmethod
    def append_update(
        self,
        builder: JobBuilder,
        value: Value,
        grad: Value,
        states: Sequence[Value],
        rate: Value,
        numbers: Mapping[str, Any],
    ) -> None:
        """Append the update of a parameter and of its states, at the learning rate `rate`."""


class FormulaOptimizer(Optimizer):
    """An optimizer whose update is one op, with states of the parameter's shape: those that the op
    names.
    """

    prefix: str
    """In front of the names of states."""

    @abstractmethod
    def kind(self, numbers: Mapping[str, Any]) -> str:
        """The op, for a group of these numbers."""

    def check(self, numbers: Mapping[str, Any]) -> None:
        check_numbers(self.kind(numbers), numbers)

    def states_of(
        self, value: Value, sbp: NdSbp | None, numbers: Mapping[str, Any]
    ) -> Iterable[State]:
        return [(name, value.shape, sbp) for name in self._names_of(self.kind(numbers))]

    def _names_of(self, kind: str) -> list[str]:
        line = op_def(kind).line
        assert line is not None
        kept = [each.name for each in line.inputs[2:] if each.shape != ()]
        return [f"{self.prefix}_{name}" for name in kept]

    def append_update(
        self,
        builder: JobBuilder,
        value: Value,
        grad: Value,
        states: Sequence[Value],
        rate: Value,
        numbers: Mapping[str, Any],
    ) -> None:
        kind = self.kind(numbers)
        attrs, sbp = attributes_of(kind, numbers), builder.producer(value).sbp
        builder.add(kind, (value, grad, *states, rate), attrs, value.placement, sbp)

    def update_all(self, world: Any, updates: Sequence[EagerUpdate]) -> None:
        """See `Optimizer.update_all`: every update is one kernel, and those of a group are made
        together.
        """
        by_group: dict[int, list[EagerUpdate]] = {}
        for update in updates:
            by_group.setdefault(id(update[-1]), []).append(update)
        for members in by_group.values():
            numbers = members[0][-1]
            kind = self.kind(numbers)
            rows = [(tensor, grad, *states, rate) for tensor, grad, states, rate, _ in members]
            world.mode.update_all(kind, attributes_of(kind, numbers), rows)


_NAMES = {
    "decoupled_weight_decay": "decoupled",
    "initial_accumulator_value": "initial",
    "trust_coefficient": "trust",
}
"""What users call some of the attributes of updates."""


def attributes_of(kind: str, numbers: Mapping[str, Any]) -> Mapping[str, AttrValue]:
    """The attributes of an update by a group's numbers."""
    return _attributes_of(kind, tuple(numbers.items()))


@lru_cache
def _attributes_of(kind: str, numbers: tuple[tuple[str, Any], ...]) -> Mapping[str, AttrValue]:
    named = {_NAMES.get(name, name): value for name, value in numbers}
    if "betas" in named:
        named["beta1"], named["beta2"] = named["betas"]
    if named.get("maximize"):
        named["grad_scale"] = -1.0
    return {
        each.name: named[each.name]
        for each in op_def(kind).attrs
        if each.name in named and named[each.name] != each.default
    }


def check_numbers(kind: str, numbers: Mapping[str, Any]) -> None:
    """Raise AttributeValueError unless a group's numbers are in the ranges of an update."""
    check_attributes(kind, op_def(kind).attrs, attributes_of(kind, numbers), ())


def _state_variable(
    builder: JobBuilder, parameter: Value, suffix: str, shape: tuple[int, ...], sbp: NdSbp | None
) -> Value:
    attrs: dict[str, AttrValue] = {
        "name": f"{builder.producer(parameter).attr('name')}.{suffix}",
        "shape": shape,
        "dtype": str(parameter.dtype),
        "init": "zeros",
        "init_args": (),
        "trainable": False,
    }
    return builder.add("variable", (), attrs, parameter.placement, sbp)[0]


def _variables(builder: JobBuilder, parameters: Parameters | None) -> list[Value]:
    """The values of the parameters to update, each once."""
    if parameters is None:
        variables = [
            op.outputs[0]
            for op in builder.ops
            if op.kind == "variable" and op.attr("trainable") is True
        ]
    else:
        by_name: dict[str, Value] = {}
        for each in listed(parameters):
            if isinstance(each, Parameter) and not each.trainable:
                continue
            value = each.value if isinstance(each, Parameter) else each
            op = builder.producer(value)
            if op.kind != "variable":
                raise UsageError(
                    "only parameters can be updated",
                    op=op.name,
                    source=builder.source_line(),
                    got=str(value),
                )
            by_name.setdefault(value.name, value)
        variables = list(by_name.values())
    not_floating = [value for value in variables if not value.dtype.is_floating]
    if not_floating:
        raise GradientError(
            "a trainable parameter must be floating",
            got=str(not_floating[0]),
            expected=DType.FLOAT32,
        )
    if not variables:
        raise UsageError(
            "there is no trainable parameter to update",
            source=builder.source_line(),
            expected="a loss of at least one parameter",
            hint="compute the loss with a module or pc.nn.Parameter of this job",
        )
    return variables
