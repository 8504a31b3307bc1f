"""What all optimizers share: gradients, clipping, state variables, learning rate."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from plancompiler.errors import GradientError, JobError, UsageError
from plancompiler.frontend.autodiff import gradients
from plancompiler.frontend.functions.training import clip_by_global_norm
from plancompiler.frontend.nn.module import Parameter, parameters_read
from plancompiler.frontend.optim.eager import EagerSteps, Parameters, listed, say_what_moves
from plancompiler.frontend.optim.schedule import Rate, Schedule, fed_rate, rate_at, schedule_of
from plancompiler.frontend.trace import JobBuilder, current_builder, current_recorder
from plancompiler.hooks.eager_world import eager_world
from plancompiler.ir import AttrValue, DType, NdSbp, Phase, Value
from plancompiler.ir.arguments import real_number
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import op_def

State = tuple[str, tuple[int, ...], NdSbp | None]
"""Suffix, shape and layout of a state variable of a parameter."""
Update = tuple[Value, Value, Sequence[Value], Value]
"""Parameter, gradient, states and learning rate."""


class _Sealed(ABCMeta):
    """Makes objects that take no other attributes once they are made."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        object.__setattr__(made, "_sealed", True)
        return made


class Optimizer(metaclass=_Sealed):
    """Base of the optimizers. `lr` is a number, a schedule, or any function of the step.

    `parameters` are what it updates where `minimize` and `step` name none; without, these update
    all that were read so far. `lr` may be set between steps; everything else stays as it was made.
    """

    eager_steps: type[EagerSteps] = EagerSteps
    """What does the steps outside of jobs."""
    _sealed = False

    def __init__(
        self, lr: Rate, weight_decay: float = 0.0, parameters: Parameters | None = None
    ) -> None:
        self.schedule: Callable[[int], float] = schedule_of(lr)
        """The learning rate as a function of the step."""
        self.weight_decay = real_number("weight_decay", weight_decay)
        self.parameters = None if parameters is None else listed(parameters)
        self._rate_was_set = False
        self._eager: WeakKeyDictionary[Any, EagerSteps] = WeakKeyDictionary()

    def __setattr__(self, name: str, value: object) -> None:
        if self._sealed and name != "lr" and not name.startswith("_"):
            raise UsageError(
                f"{type(self).__name__} has no attribute {name!r} that can be set",
                source=user_line(),
                got=f"{name} = {value!r}"[:80],
                expected="lr, the learning rate",
                hint="make another optimizer for other numbers; state_dict() takes its state along",
            )
        object.__setattr__(self, name, value)

    @property
    def lr(self) -> float:
        """The learning rate of the next eager step. Set it to a number, a schedule or a function of
        the step: the next step uses it, eager or compiled by `pc.compile`. A job keeps the rate
        that it was traced with; `Session.lr` changes that.
        """
        return rate_at(self.schedule, self._steps_of(eager_world()).done)

    @lr.setter
    def lr(self, rate: Rate) -> None:
        object.__setattr__(self, "schedule", schedule_of(rate))
        self._rate_was_set = isinstance(self.schedule, Schedule) and not callable(rate)

    @property
    def rate_to_save(self) -> float | None:
        """The number that `lr` was set to; a schedule belongs to the program, not to its state."""
        return self.schedule(0) if self._rate_was_set else None

    def minimize(
        self,
        loss: Value,
        parameters: Iterable[Parameter | Value] | None = None,
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
        `step` in one call.
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

    def apply(self, parameters: Iterable[Parameter | Value], gradients: Sequence[Value]) -> None:
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
        attrs = self._rate_attrs(builder)
        for value, grad in zip(variables, gradients, strict=True):
            rate = builder.source(value.placement, "learning_rate", attrs)[0]
            states = [
                _state_variable(builder, value, *state)
                for state in self.states_of(value, builder.producer(value).sbp)
            ]
            yield value, grad, states, rate

    def _rate_attrs(self, builder: JobBuilder) -> dict[str, AttrValue]:
        """The attributes of the op that gives the learning rate in a job."""
        numbers = builder.attachments.setdefault(Optimizer, {})
        assert isinstance(numbers, dict)
        number = numbers.setdefault(self, len(numbers))
        if isinstance(self.schedule, Schedule):
            return self.schedule.attrs | ({"optimizer": number} if number else {})
        builder.rates[number] = self.schedule
        return fed_rate(number)

    # Outside of jobs.

    def step(
        self, parameters: Iterable[Parameter | Any] | None = None, clip_norm: float | None = None
    ) -> None:
        """Update eager parameters by the gradients that `backward` has left in them, all at once.

        `parameters` defaults to those of the optimizer, without such to all trainable parameters
        that were read outside of jobs so far, as far as they have a gradient. Partial gradients are
        reduced here, once. `clip_norm` as in `minimize`.
        """
        self._steps_of(eager_world()).step(parameters, clip_norm)

    def zero_grad(self, parameters: Iterable[Parameter | Any] | None = None) -> None:
        """Forget the gradients of eager parameters (default: as in `step`)."""
        self._steps_of(eager_world()).zero_grad(parameters)

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

    def update_all(
        self, world: Any, updates: Sequence[tuple[Any, Any, Sequence[Any], Any]]
    ) -> None:
        """Run the updates of eager parameters: parameter, gradient, states and learning rate."""
        for tensor, grad, states, rate in updates:
            self.append_update(world, tensor, grad, states, rate)

    def _steps_of(self, world: Any) -> EagerSteps:
        steps = self._eager.get(world)
        if steps is None:
            steps = self._eager[world] = self.eager_steps(self, world)
        return steps

    def append_updates(self, builder: JobBuilder, updates: Iterable[Update]) -> None:
        """Append the updates of parameters."""
        for value, grad, states, rate in updates:
            self.append_update(builder, value, grad, states, rate)

    @abstractmethod
    def states_of(self, value: Value, sbp: NdSbp | None) -> Iterable[State]:
        """The state variables of a parameter that is held as `sbp`."""

    @abstractmethod
    def append_update(
        self, builder: JobBuilder, value: Value, grad: Value, states: Sequence[Value], rate: Value
    ) -> None:
        """Append the update of a parameter and of its states, at the learning rate `rate`."""


class ElementwiseOptimizer(Optimizer):
    """An optimizer whose update is one op, with states of the parameter's shape."""

    states: Sequence[str] = ()
    """Suffixes of the state variables of a parameter."""

    def states_of(self, value: Value, sbp: NdSbp | None) -> Iterable[State]:
        return [(suffix, value.shape, sbp) for suffix in self.states]

    def append_update(
        self, builder: JobBuilder, value: Value, grad: Value, states: Sequence[Value], rate: Value
    ) -> None:
        kind, attrs = self.update_op()
        sbp = builder.producer(value).sbp
        builder.add(kind, (value, grad, *states, rate), attrs, value.placement, sbp)

    def update_all(
        self, world: Any, updates: Sequence[tuple[Any, Any, Sequence[Any], Any]]
    ) -> None:
        """See `Optimizer.update_all`: every update is one kernel."""
        kind, attrs = self.update_op()
        rows = [(tensor, grad, *states, rate) for tensor, grad, states, rate in updates]
        world.mode.update_all(kind, attrs, rows)

    @abstractmethod
    def update_op(self) -> tuple[str, dict[str, AttrValue]]:
        """Kind and attributes of the update, whose inputs are parameter, gradient, states, rate."""


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


def _variables(builder: JobBuilder, parameters: Iterable[Parameter | Value] | None) -> list[Value]:
    """The values of the parameters to update, each once."""
    if parameters is None:
        variables = [
            op.outputs[0]
            for op in builder.ops
            if op.kind == "variable" and op.attr("trainable") is True
        ]
    else:
        by_name: dict[str, Value] = {}
        for each in parameters:
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
