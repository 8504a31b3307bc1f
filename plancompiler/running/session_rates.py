"""The learning rates of a session's steps: those of its job, until others are set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.executor.fed_rates import Rates
from plancompiler.frontend.optim.schedule import Rate, rate_at, schedule_of
from plancompiler.ir import Job, Op
from plancompiler.ir.op import freeze_attrs
from plancompiler.ir.source import user_line
from plancompiler.ops.structural import learning_rate_at

_MOST_LISTED = 1_000_000
"""Steps whose rates travel with a job: 8 MB for each optimizer."""


def with_listed_rates(job: Job, first: int, steps: int) -> Job:
    """The job for `steps` steps from `first` on that run without the client: rates that are the
    user's functions are evaluated here, and replaced by their values.
    """
    if steps > _MOST_LISTED:
        raise UsageError(
            f"job {job.name!r} has a learning rate that is a function of this program, whose "
            "values go with the job",
            got=f"{steps} steps",
            expected=f"at most {_MOST_LISTED} steps, or pc.optim.constant, linear or cosine",
        )

    def of(op: Op) -> Op:
        number = op.attr("optimizer", 0)
        if op.kind != "learning_rate" or not isinstance(number, int) or number not in job.rates:
            return op
        rates = tuple(rate_at(job.rates[number], step) for step in range(first, first + steps))
        attrs = {**dict(op.attrs), "schedule": "listed", "rates": rates, "first": first}
        return replace(op, attrs=freeze_attrs(attrs))

    return replace(job, ops=tuple(map(of, job.ops)), rates={})


class SessionRates:
    """The learning rates of a job's optimizers over the steps of a session.

    A job computes its own schedules itself. Rates that were set, and rates that are the user's
    functions, are evaluated here and fed. `first_step` returns the number of the first step.
    """

    def __init__(self, job: Job, first_step: Callable[[], int]) -> None:
        self._first_step = first_step
        self._done = 0
        """Steps of this session."""
        self._own: dict[int, Callable[[int], float]] = {}
        """What the job's ops compute."""
        self._fed: dict[int, Callable[[int], float]] = dict(job.rates)
        for op in job.ops:
            if op.kind == "learning_rate":
                number, attrs = op.attr("optimizer", 0), dict(op.attrs)
                assert isinstance(number, int)
                self._own[number] = partial(learning_rate_at, attrs=attrs)

    @property
    def lr(self) -> float | tuple[float, ...]:
        """The rate of the next step; of several optimizers that of each, in the order in which they
        were used. UsageError for a job without an optimizer.
        """
        step = self.next_step
        rates = tuple(
            rate_at(self._fed.get(number, own), step) for number, own in sorted(self._own.items())
        )
        self._checked(rates)
        return rates[0] if len(rates) == 1 else rates

    @lr.setter
    def lr(self, rate: Rate | Sequence[Rate]) -> None:
        numbers = sorted(self._own)
        self._checked(numbers)
        every: list[Any] = [rate] * len(numbers)
        if isinstance(rate, (list, tuple)):
            every = list(rate)
        if len(every) != len(numbers):
            raise UsageError(
                "a learning rate is set for all optimizers of the job, or for each of them",
                source=user_line(),
                got=f"{len(every)} rates",
                expected=f"1 or {len(numbers)}",
            )
        self._fed = {number: schedule_of(each) for number, each in zip(numbers, every, strict=True)}

    def of_next(self, steps: int) -> Rates:
        """The rates to feed for the next steps, by optimizer; of those that were set."""
        if not self._fed:
            return {}
        first = self.next_step
        return {
            number: [rate_at(schedule, step) for step in range(first, first + steps)]
            for number, schedule in self._fed.items()
        }

    def advance(self, steps: int) -> None:
        """So many steps were made."""
        self._done += steps

    @property
    def next_step(self) -> int:
        """The number of the next step, counted on from the checkpoint that the session began at."""
        return self._first_step() + self._done

    def _checked(self, optimizers: Sequence[object]) -> None:
        if not optimizers:
            raise UsageError(
                "the job has no optimizer, and so no learning rate", op="lr", source=user_line()
            )
