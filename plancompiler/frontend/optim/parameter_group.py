"""Groups of parameters that share the numbers of an optimizer: its rate, weight decay and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.frontend.optim.schedule import Rate, rate_at, schedule_of
from plancompiler.ir.arguments import number_pair, real_number
from plancompiler.ir.source import user_line

Tensor = Any
"""An eager tensor, or a value of a job."""
Parameters = Module | Iterable[Any]
"""A model, its parameters (with or without their names), tensors, or groups of these as dicts."""


class ParameterGroup(MutableMapping[str, Any]):
    """One group by the names of its numbers: `group["lr"]` is the rate of the next step outside of
    jobs, and may be set to a number, a schedule or a function of the step.

    `group["params"]` are the parameters; None are all that were read.
    """

    def __init__(
        self,
        number: int,
        parameters: list[Any] | None,
        lr: Rate,
        numbers: Mapping[str, Any],
        steps: Callable[[], int],
        check: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.number = number
        """Its place among the groups."""
        self.parameters = parameters
        self.schedule: Callable[[int], float] = schedule_of(lr)
        """The learning rate as a function of the step."""
        self.first_rate: float | None = None
        """The rate that schedulers go by; None before there is one."""
        self.numbers = dict(numbers)
        """All else that its updates are made with."""
        self.changes = 0
        """How often a number other than the rate was set."""
        self._were_set: set[str] = set()
        """What is a part of the optimizer's state: else it is as the program gives it."""
        self._steps = steps
        self._check = check

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            return self.parameters
        return rate_at(self.schedule, self._steps()) if name == "lr" else self.numbers[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._set({name: value})

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Set several at once, which are checked together."""
        self._set(dict(other, **more))

    def _set(self, values: Mapping[str, Any]) -> None:
        numbers = dict(self.numbers)
        for name, value in values.items():
            if name in numbers:
                numbers[name] = checked(name, value, numbers[name])
            elif name != "lr":
                raise UsageError(
                    f"a group of parameters has no {name!r} that can be set",
                    source=user_line(),
                    got=f"{name} = {value!r}"[:80],
                    expected=", ".join(["lr", *self.numbers]),
                )
        self._check(numbers)
        self._were_set |= values.keys()
        if "lr" in values:
            self.schedule = schedule_of(values["lr"])
            if callable(values["lr"]):
                self._were_set.discard("lr")
        self.changes += numbers != self.numbers
        self.numbers.update(numbers)

    def __delitem__(self, name: str) -> None:
        raise UsageError("a group keeps all of its numbers", source=user_line(), got=f"del {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", "lr", *self.numbers])

    def __len__(self) -> int:
        return 2 + len(self.numbers)

    def __repr__(self) -> str:
        count = "all" if self.parameters is None else str(len(self.parameters))
        named = ", ".join(f"{name}={self[name]}" for name in self if name != "params")
        return f"ParameterGroup({count} parameters, {named})"

    # --- in a state -------------------------------------------------------------------------------

    @property
    def labels(self) -> dict[str, tuple[str, int | None]]:
        """Names in a state, with the number that each is, and its place where that is a pair."""
        group = f".{self.number}" if self.number else ""
        labels: dict[str, tuple[str, int | None]] = {f"lr{group}": ("lr", None)}
        for name, value in self.numbers.items():
            if isinstance(value, tuple):
                labels |= {f"{name}_{place + 1}{group}": (name, place) for place in (0, 1)}
            else:
                labels[f"{name}{group}"] = name, None
        return labels

    def to_save(self) -> dict[str, float]:
        """The numbers that were set; those that nobody has set, and a schedule, are the program's,
        not its state's.
        """
        return {
            label: +(self[name] if place is None else self[name][place])
            for label, (name, place) in self.labels.items()
            if name in self._were_set
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the numbers that a state has."""
        values: dict[str, Any] = {}
        for label, (name, place) in self.labels.items():
            if label in state:
                if place is not None:
                    values.setdefault(name, list(self.numbers[name]))[place] = state[label]
                else:
                    values[name] = type(self.numbers.get(name, 0.0))(state[label])
        if values:
            self._set(values)


def without_ways(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, without PyTorch's words for how a step is made: all parameters are updated at
    once wherever that pays, and steps can be compiled. UsageError for a differentiable step.
    """
    if given.get("differentiable"):
        raise UsageError(
            "the steps of an optimizer are not differentiated",
            source=user_line(),
            got="differentiable=True",
            hint="write the step with tensors, w - lr * g, where g is of pc.eager.grad with "
            "create_graph=True",
        )
    return {name: value for name, value in given.items() if name not in _WAYS}


_WAYS = ("foreach", "fused", "capturable", "differentiable")


def checked(name: str, value: Any, like: Any) -> Any:
    """A number of an optimizer, as the one that is there; UsageError for what is none."""
    if isinstance(like, bool):
        if not isinstance(value, bool):
            raise UsageError(
                f"{name} must be True or False", source=user_line(), got=repr(value)[:80]
            )
        return value
    return number_pair(name, value) if isinstance(like, tuple) else real_number(name, value)


def are_parameters(value: object) -> bool:
    """Whether an optimizer's first argument gives its parameters, rather than its rate."""
    return isinstance(value, Module) or (
        isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    )


def listed(parameters: Parameters) -> list[Any]:
    """Parameters or tensors as a list. UsageError for what is no list of them."""
    if isinstance(parameters, Module):
        return list(parameters.parameters())
    if not are_parameters(parameters):
        raise UsageError(
            "an optimizer takes a list of parameters",
            source=user_line(),
            got=type(parameters).__name__,
            hint="a model, model.parameters(), or [tensor]",
        )
    given = [
        each[1] if isinstance(each, tuple) and _is_named(each) else each for each in parameters
    ]
    for each in given:
        if not isinstance(each, Parameter) and not hasattr(each, "_apply"):
            raise UsageError(
                "an optimizer takes a list of parameters",
                source=user_line(),
                got=f"a list with {each!r}"[:80],
                hint="pc.optim.SGD(model.parameters(), lr=0.1), or a list of dicts with 'params'",
            )
    return given


def _is_named(each: tuple[Any, ...]) -> bool:
    return len(each) == 2 and isinstance(each[0], str)


def grouped(parameters: Parameters) -> list[dict[str, Any]]:
    """The groups that are given, each with its parameters as a list, and its own numbers."""
    if isinstance(parameters, Module) or not are_parameters(parameters):
        return [{"params": listed(parameters)}]
    given = list(parameters)
    if not given or not isinstance(given[0], Mapping):
        given = [{"params": given}]
    return [one_group(each) for each in given]


def one_group(given: Any) -> dict[str, Any]:
    """One group that is given. UsageError for what is none."""
    if not isinstance(given, Mapping) or "params" not in given:
        raise UsageError(
            "a group of parameters is a dict with 'params'",
            source=user_line(),
            got=repr(given)[:80],
            expected="such as {'params': model.parameters(), 'lr': 0.01}",
        )
    params = given["params"]
    if isinstance(params, Parameter) or hasattr(params, "_apply"):
        params = [params]
    return {**without_ways(given), "params": listed(params)}
