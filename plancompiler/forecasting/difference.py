"""What differs between two sets of plans or two forecasts: by the user's lines, and in all.

Both sides are plain data of the form that `Forecast.json` gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plancompiler.costs import machine_of_job
from plancompiler.errors import UsageError
from plancompiler.forecasting.job_forecast import simulated_step, times_on
from plancompiler.forecasting.memory import rank_memory
from plancompiler.forecasting.traffic import received_in_step
from plancompiler.forecasting.user_lines import figures_by_line
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.ir.task import unpack_id
from plancompiler.plan.compiled_plans import CompiledPlans

_LINE_NUMBERS = ("tasks", "received_bytes", "memory_bytes", "seconds")
_TAKEN_NOT_TOLD = frozenset({"lines", "seconds_taken", "measured", "error"})
"""Fields that tell of the forecasting itself, or of a run: they differ each time."""


@dataclass(frozen=True, slots=True)
class Different:
    """A figure that two sides do not share."""

    name: str
    """Names of fields, joined by dots."""
    first: Any
    """None where this side lacks it."""
    second: Any

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "first": self.first, "second": self.second}


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs."""

    lines: dict[str, tuple[Different, ...]]
    """By source line; of lines with a figure that differs."""
    sums: tuple[Different, ...]
    """Of all lines, then of the plans or forecasts as wholes."""
    same_plans: bool
    """Whether both sides are plans with one digest: then only the names of lines may differ."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs but, at most, which lines made the same plans."""
        return not self.sums and (self.same_plans or not self.lines)

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "equal": self.equal,
            "lines": [
                {"source": source, "figures": [each.json() for each in figures]}
                for source, figures in self.lines.items()
            ],
            "sums": [each.json() for each in self.sums],
        }


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    """What differs between two sides of the same kind."""
    one, other = (_figures_of_lines(each) for each in (first, second))
    lines = {}
    for source in dict.fromkeys((*one, *other)):
        figures = tuple(_different(one.get(source, {}), other.get(source, {}), 0))
        if figures:
            lines[source] = figures
    sums = (
        *_different(_summed(one), _summed(other), 0),
        *_different(dict(_flat(first)), dict(_flat(second))),
    )
    return Difference(lines, sums, "digest" in first and first["digest"] == second.get("digest"))


def described_plans(compiled: CompiledPlans) -> dict[str, Any]:
    """Compiled plans with the figures of the machine that their job names."""
    machine = machine_of_job(compiled.job)
    plans = dict(compiled.plans)
    registers = {rank: plan.register_by_id for rank, plan in plans.items()}

    def slots_of(register: int) -> int:
        return registers[unpack_id(register).rank][register].register_count

    memory = [rank_memory(plan, machine, slots_of) for plan in plans.values()]
    fullest = max(memory, key=lambda each: each.total)
    traffic: dict[str, float] = {}
    for plan in plans.values():
        for received in received_in_step(plan, machine):
            traffic[received.link] = traffic.get(received.link, 0.0) + received.nbytes
    _, seconds = simulated_step(plans, machine, compiled.world_size)
    lines = figures_by_line(
        ((plan, 1) for plan in plans.values()), machine, times_on(machine, compiled.world_size)
    )
    return {
        "job": compiled.job.name,
        "machine": machine.name,
        "ranks": compiled.world_size,
        "digest": compiled.digest,
        "memory_bytes": {"max": fullest.total, "by_kind": fullest.by_kind()},
        "traffic_bytes": {"total": sum(traffic.values()), "by_link": traffic},
        "step_seconds": seconds,
        "lines": [each.json() for each in lines],
    }


def forecast_of_text(text: bytes, where: str) -> dict[str, Any]:
    """What `plancompiler forecast --json` printed; UsageError for anything else."""
    value = parse_json(text, where, error=UsageError)
    known = JsonObject(value, where, UsageError)
    known.text("job")
    known.text("machine")
    known.number("ranks", least=1)
    _check_number(known, "step_seconds")
    sources = set()
    for line in known.objects("lines"):
        source = line.text("source")
        if source in sources:
            raise UsageError(f"{where} has a source line twice", got=source)
        sources.add(source)
        for name in _LINE_NUMBERS:
            _check_number(line, name)
        counts = line.inner("collectives")
        for name in sorted(counts.names):
            counts.number(name)
    plain: dict[str, Any] = value
    return plain


def _check_number(known: JsonObject, name: str) -> None:
    value = known.get(name)
    if type(value) not in (int, float) or value < 0:
        raise known.refused(name, value, "a number of at least 0")


def _figures_of_lines(side: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Source line → figure → number, without those that are 0."""
    return {
        line["source"]: {
            name: number
            for name, number in (
                *((name, line[name]) for name in _LINE_NUMBERS),
                *line["collectives"].items(),
            )
            if number
        }
        for line in side["lines"]
    }


def _summed(lines: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for figures in lines.values():
        for name, number in figures.items():
            sums[name] = sums.get(name, 0) + number
    return {f"all lines.{name}": number for name, number in sums.items()}


def _flat(side: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of objects within objects; lists are compared as wholes."""
    for name, value in side.items():
        if not prefix and name in _TAKEN_NOT_TOLD:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _different(
    first: Mapping[str, Any], second: Mapping[str, Any], missing: Any = None
) -> Iterator[Different]:
    for name in dict.fromkeys((*first, *second)):
        one, other = first.get(name, missing), second.get(name, missing)
        if one != other:
            yield Different(name, one, other)
