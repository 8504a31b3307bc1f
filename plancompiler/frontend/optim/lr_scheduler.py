"""Learning rates of eager optimizers that a program moves on by itself, once per step or epoch:
`scheduler.step()`, with PyTorch's names and arguments.

Each rate is a function of the epochs so far and of the rate that the group had at first. A rate
over the steps of an optimizer needs no scheduler, and works in jobs too: `lr=pc.optim.cosine(…)`,
or any function of the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.frontend.optim.optimizer import Optimizer
from plancompiler.frontend.optim.parameter_group import ParameterGroup
from plancompiler.frontend.optim.schedule import constant
from plancompiler.hooks.other_names import no_such_name
from plancompiler.ir.arguments import real_number, whole_number
from plancompiler.ir.source import user_line

__all__ = [
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
]


class _Driver:
    """What sets the rates of an optimizer's groups; nothing else may do so in between."""

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                "a scheduler sets the rates of an optimizer",
                source=user_line(),
                got=type(optimizer).__name__,
                expected="an optimizer of pc.optim",
            )
        self.optimizer = optimizer
        self.last_epoch = 0
        """Calls of `step` so far."""
        for group in optimizer.param_groups:
            if group.schedule != constant(group["lr"]):
                raise UsageError(
                    "the rate is a schedule or a function already",
                    source=user_line(),
                    got=repr(group)[:200],
                    hint="give the optimizer a number, or leave the scheduler out",
                )
            if group.first_rate is None:
                group.first_rate = group["lr"]
        self._given = self._now()

    def _now(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _check(self) -> None:
        if self._now() != self._given:
            raise UsageError(
                "the rates are not those that their scheduler has set",
                source=user_line(),
                got=f"{self._now()}"[:80],
                expected=f"{self._given}"[:80],
                hint="schedulers follow each other in SequentialLR, and do not act together; "
                "after a group was added or a rate set, make another scheduler; after the "
                "optimizer's state was loaded, load the scheduler's",
            )

    def _give(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._given = self._now()

    def get_last_lr(self) -> list[float]:
        """The rates of the groups as they were set last."""
        return list(self._given)


class LRScheduler(_Driver, ABC):
    """A rate for each epoch. `last_epoch` is that of a program that goes on, -1 at first."""

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer)
        self.last_epoch = whole_number("last_epoch", last_epoch) + 1
        if self.last_epoch < 0:
            raise UsageError(
                "epochs count from 0", source=user_line(), got=last_epoch, expected="at least -1"
            )
        self._give(self.rates(self.last_epoch))

    @abstractmethod
    def rate(self, first: float, epoch: int, group: int) -> float:
        """The rate of the group of this number, which was `first`, in an epoch."""

    def rates(self, epoch: int) -> list[float]:
        """The rates of all groups in an epoch."""
        groups: list[ParameterGroup] = self.optimizer.param_groups
        return [
            self.rate(group["lr"] if group.first_rate is None else group.first_rate, epoch, number)
            for number, group in enumerate(groups)
        ]

    def step(self) -> None:
        """Go on to the next epoch. UsageError where something else has changed the rates."""
        self._check()
        self._give(self.rates(self.last_epoch + 1))
        self.last_epoch += 1

    def state_dict(self) -> dict[str, float]:
        """The epoch; all else is as the program gives it."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        _check_state(state, self.state_dict())
        self._give(self.rates(int(state["last_epoch"])))
        self.last_epoch = int(state["last_epoch"])


class LambdaLR(LRScheduler):
    """The first rate times a function of the epoch, or one of several, for each group."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        self._functions = _per_group(optimizer, "functions", lr_lambda)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        return first * real_number("what lr_lambda gives", self._functions[group](epoch))


class MultiplicativeLR(LambdaLR):
    """Times what a function of the epoch gives, or one of several, for each group, after every
    epoch.
    """

    def rate(self, first: float, epoch: int, group: int) -> float:
        for each in range(1, epoch + 1):
            first *= real_number("what lr_lambda gives", self._functions[group](each))
        return first


class StepLR(LRScheduler):
    """Times gamma after every `step_size` epochs."""

    def __init__(
        self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.step_size = _positive("step_size", step_size)
        self.gamma = real_number("gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        return first * self.gamma ** (epoch // self.step_size)


class MultiStepLR(LRScheduler):
    """Times gamma at each of the epochs `milestones`."""

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.milestones = sorted(whole_number("a milestone", each) for each in milestones)
        self.gamma = real_number("gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        return first * self.gamma ** bisect_right(self.milestones, epoch)


class ExponentialLR(LRScheduler):
    """Times gamma after every epoch."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = real_number("gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        return first * self.gamma**epoch


class LinearLR(LRScheduler):
    """The first rate times a factor that goes in a straight line from `start_factor` to
    `end_factor` in `total_iters` epochs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor = real_number("start_factor", start_factor)
        self.end_factor = real_number("end_factor", end_factor)
        self.total_iters = _positive("total_iters", total_iters)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        done = min(epoch, self.total_iters) / self.total_iters
        return first * (self.start_factor + (self.end_factor - self.start_factor) * done)


class ConstantLR(LRScheduler):
    """The first rate times `factor` for `total_iters` epochs, then the first rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float = 1.0 / 3,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.factor = real_number("factor", factor)
        self.total_iters = whole_number("total_iters", total_iters)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        return first * (self.factor if epoch < self.total_iters else 1.0)


class PolynomialLR(LRScheduler):
    """Down to 0 in `total_iters` epochs, as a power of what is left of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int = 5,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_iters = _positive("total_iters", total_iters)
        self.power = real_number("power", power)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        return float(first * (1.0 - min(epoch, self.total_iters) / self.total_iters) ** self.power)


class CosineAnnealingLR(LRScheduler):
    """Half a cosine down to `eta_min` in `T_max` epochs (I. Loshchilov, F. Hutter, 2017), and up
    again in as many.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,  # noqa: N803  # PyTorch's name
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.T_max = _positive("T_max", T_max)
        self.eta_min = real_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        share = (1.0 + math.cos(math.pi * epoch / self.T_max)) / 2
        return self.eta_min + (first - self.eta_min) * share


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half a cosine down to `eta_min`, again and again (I. Loshchilov, F. Hutter, 2017): in `T_0`
    epochs at first, each time in `T_mult` times as many.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_0: int,  # noqa: N803  # PyTorch's names
        T_mult: int = 1,  # noqa: N803
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.T_0, self.T_mult = _positive("T_0", T_0), _positive("T_mult", T_mult)
        self.eta_min = real_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        length = self.T_0
        if self.T_mult == 1:
            epoch %= length
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
        share = (1.0 + math.cos(math.pi * epoch / length)) / 2
        return self.eta_min + (first - self.eta_min) * share


class CyclicLR(LRScheduler):
    """Up from `base_lr` to `max_lr` in `step_size_up` steps and down in `step_size_down`, by
    default as many, again and again (L. N. Smith, 2017).

    The peaks stay ("triangular"), are half as high in each cycle ("triangular2"), are times gamma
    in each step ("exp_range"), or times what `scale_fn` gives for the cycle, or for the step with
    `scale_mode="iterations"`. Momentum is not cycled: say `cycle_momentum=False`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | Sequence[float],
        max_lr: float | Sequence[float],
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[int], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool = True,
        base_momentum: float = 0.8,
        max_momentum: float = 0.9,
        last_epoch: int = -1,
    ) -> None:
        if cycle_momentum:
            raise UsageError(
                "the momentum of an optimizer is not cycled",
                source=user_line(),
                got="cycle_momentum=True",
                expected="cycle_momentum=False",
            )
        gamma = real_number("gamma", gamma)
        modes: dict[str, tuple[Callable[[int], float], str]] = {
            "triangular": (lambda cycle: 1.0, "cycle"),
            "triangular2": (lambda cycle: 0.5 ** (cycle - 1), "cycle"),
            "exp_range": (lambda step: gamma**step, "iterations"),
        }
        if scale_mode not in ("cycle", "iterations") or (scale_fn is None and mode not in modes):
            raise UsageError(
                "CyclicLR knows no such mode",
                source=user_line(),
                got=f"mode={mode!r}, scale_mode={scale_mode!r}",
                expected=", ".join(modes) + "; scale_mode 'cycle' or 'iterations'",
            )
        self._scale, self._of = modes[mode] if scale_fn is None else (scale_fn, scale_mode)
        self._up = _positive("step_size_up", step_size_up)
        down = step_size_up if step_size_down is None else step_size_down
        self._whole = self._up + _positive("step_size_down", down)
        self._least, self._most = (
            [real_number(name, each) for each in _per_group(optimizer, name, given)]
            for name, given in (("base_lr", base_lr), ("max_lr", max_lr))
        )
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        cycle, place = epoch // self._whole, epoch % self._whole
        down = self._whole - self._up
        share = place / self._up if place <= self._up else (self._whole - place) / down
        factor = self._scale(cycle + 1 if self._of == "cycle" else epoch)
        return self._least[group] + (self._most[group] - self._least[group]) * share * factor


class OneCycleLR(LRScheduler):
    """Up to `max_lr` and down to almost 0 (L. N. Smith, N. Topin, 2017), in `total_steps`, or in
    `epochs` of `steps_per_epoch`; a step more raises UsageError. It starts at max_lr / div_factor
    and ends at that over `final_div_factor`. With `three_phase` it comes down to where it started
    before it goes on. Momentum is not cycled: say `cycle_momentum=False`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if cycle_momentum:
            raise UsageError(
                "the momentum of an optimizer is not cycled",
                source=user_line(),
                got="cycle_momentum=True",
                expected="cycle_momentum=False",
            )
        if anneal_strategy not in ("cos", "linear"):
            raise UsageError(
                "OneCycleLR knows no such curve",
                source=user_line(),
                got=repr(anneal_strategy),
                expected="'cos' or 'linear'",
            )
        if total_steps is None:
            total_steps = _positive("epochs", epochs) * _positive(
                "steps_per_epoch", steps_per_epoch
            )
        self.total_steps = _positive("total_steps", total_steps)
        self._cosine = anneal_strategy == "cos"
        self._greatest = [
            real_number("max_lr", each) for each in _per_group(optimizer, "max_lr", max_lr)
        ]
        self._start = real_number("pct_start", pct_start) * self.total_steps - 1
        self._divisor = real_number("div_factor", div_factor)
        self._last_divisor = real_number("final_div_factor", final_div_factor)
        self._three = three_phase
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        if epoch >= self.total_steps + 1:
            raise UsageError(
                "OneCycleLR is over",
                source=user_line(),
                got=f"step {epoch}",
                expected=f"at most {self.total_steps} steps",
            )
        top, end = self._greatest[group], float(self.total_steps - 1)
        low = top / self._divisor
        turns = [(0.0, low), (self._start, top)]
        if self._three:
            turns.append((2 * self._start, low))
        turns.append((end, low / self._last_divisor))
        phases = list(pairwise(turns))
        phase = next((each for each in phases if epoch <= each[1][0]), phases[-1])
        (begun, before), (until, after) = phase
        share = (epoch - begun) / (until - begun)
        if self._cosine:
            share = (1.0 - math.cos(math.pi * share)) / 2
        return before + (after - before) * share


class SequentialLR(LRScheduler):
    """One scheduler after another, each from the epoch that `milestones` says, with epochs of its
    own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        milestones: Sequence[int],
        last_epoch: int = -1,
    ) -> None:
        self._schedulers = list(schedulers)
        self._milestones = [whole_number("a milestone", each) for each in milestones]
        own = all(
            isinstance(each, LRScheduler) and each.optimizer is optimizer for each in schedulers
        )
        count = len(self._schedulers)
        if not own or count != len(milestones) + 1 or self._milestones != sorted(self._milestones):
            raise UsageError(
                "SequentialLR takes schedulers of the optimizer whose rates follow from the epoch, "
                "and the epochs in which those after the first begin",
                source=user_line(),
                got=f"{count} schedulers, milestones={self._milestones}",
            )
        super().__init__(optimizer, last_epoch)

    def rate(self, first: float, epoch: int, group: int) -> float:
        number = bisect_right(self._milestones, epoch)
        begun = self._milestones[number - 1] if number else 0
        return self._schedulers[number].rate(first, epoch - begun, group)


class ReduceLROnPlateau(_Driver):
    """Times `factor` where what is measured has not become better for more than `patience` epochs:
    `step(value)`, with the same value on all ranks. After that it waits `cooldown` epochs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs") or not factor < 1.0:
            raise UsageError(
                "ReduceLROnPlateau is given something else than it takes",
                source=user_line(),
                got=f"mode={mode!r}, threshold_mode={threshold_mode!r}, factor={factor}",
                expected="mode 'min' or 'max', threshold_mode 'rel' or 'abs', a factor below 1",
            )
        super().__init__(optimizer)
        self.factor = real_number("factor", factor)
        self.patience = whole_number("patience", patience)
        self.cooldown = whole_number("cooldown", cooldown)
        self._sign = 1.0 if mode == "min" else -1.0
        self._threshold, self._relative = (
            real_number("threshold", threshold),
            threshold_mode == "rel",
        )
        least = _per_group(optimizer, "min_lr", min_lr)
        self._least = [real_number("min_lr", each) for each in least]
        self._eps = real_number("eps", eps)
        self.best = self._sign * math.inf
        self.num_bad_epochs = self.cooldown_counter = 0

    def step(self, metrics: Any) -> None:
        """Note a value, and lower the rates where it is time for that."""
        self._check()
        value = float(metrics.item() if hasattr(metrics, "item") else metrics)
        self.last_epoch += 1
        margin = self._threshold * (self.best if self._relative else 1.0)
        if math.isinf(self.best):
            margin = 0.0
        better = self._sign * value < self._sign * self.best - margin
        if better:
            self.best = value
        self.num_bad_epochs = 0 if better else self.num_bad_epochs + 1
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            lower = [
                max(rate * self.factor, least)
                for rate, least in zip(self._given, self._least, strict=True)
            ]
            self._give(
                [
                    new if rate - new > self._eps else rate
                    for rate, new in zip(self._given, lower, strict=True)
                ]
            )
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def state_dict(self) -> dict[str, float]:
        """What it has counted. The rates are part of the optimizer's state: load that first."""
        return {name: getattr(self, name) for name in _PLATEAU}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        _check_state(state, self.state_dict())
        for name in _PLATEAU:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self._given = self._now()


_PLATEAU = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")


def _per_group(optimizer: Optimizer, name: str, given: Any) -> list[Any]:
    """One for each group, of one for all or as many as there are groups."""
    count = len(optimizer.param_groups)
    several = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(several) != count:
        raise UsageError(
            f"a list of {name} has one for each group of the optimizer",
            source=user_line(),
            got=len(several),
            expected=count,
        )
    return several


def _positive(name: str, given: Any) -> int:
    number = whole_number(name, given)
    if number < 1:
        raise UsageError(f"{name} is at least 1", source=user_line(), got=number)
    return number


def _check_state(state: object, own: Mapping[str, float]) -> None:
    if not isinstance(state, Mapping) or state.keys() != own.keys():
        raise UsageError(
            "this is not the state of a scheduler of this kind",
            source=user_line(),
            got=repr(state)[:80],
            expected=", ".join(own),
        )


def __getattr__(name: str) -> Any:
    raise no_such_name("pc.optim.lr_scheduler", name)
