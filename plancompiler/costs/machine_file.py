"""Machine files: TOML, each figure with its source beside it, read with errors that name the line.

    name = "example"
    [device]
    type = "cpu"
    memory_bytes = { value = 8e9, source = "the vendor's data sheet" }

A figure is a table of `value` and `source`, and `measured = true` where it was measured.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from plancompiler.costs.machine import Device, Host, Machine, Network, Node, Source
from plancompiler.costs.measured_tasks import (
    WORLDS,
    KernelCost,
    MeasuredTasks,
    Sizes,
    kernel_costs,
)
from plancompiler.errors import MachineFileError
from plancompiler.ir.dtype import DType

TYPES = ("cpu", "cuda", "rocm", "tpu")
MOST_BYTES = 16 << 20
"""A longer file is none of a machine."""


@dataclass(frozen=True, slots=True)
class _Number:
    """What a figure may be."""

    least: float = 0.0
    above: bool = True
    """Whether it must be above `least`."""
    most: float = math.inf
    whole: bool = False
    default: float | None = None
    """Of a figure that may be left out; nan where its absence says something."""

    def __str__(self) -> str:
        what = "a whole number" if self.whole else "a number"
        least = f"above {self.least:g}" if self.above else f"of at least {self.least:g}"
        return f"{what} {least}" + ("" if math.isinf(self.most) else f", at most {self.most:g}")

    def admits(self, value: float) -> bool:
        if self.whole and value != int(value):
            return False
        return (value > self.least if self.above else value >= self.least) and value <= self.most


_RATE = _Number()
_SECONDS = _Number(above=False)
_PART = _Number(most=1.0)
_COUNT = _Number(least=1, above=False, whole=True, default=math.nan)
_FACTOR = _Number(least=1, above=False)

_FIELDS: dict[str, dict[str, _Number]] = {
    "device": {
        "memory_bytes": _Number(whole=True),
        "memory_bytes_per_second": _RATE,
        "copy_bytes_per_second": _RATE,
        "launch_seconds": _SECONDS,
        "matrix_efficiency": _PART,
        "memory_efficiency": _PART,
    },
    "node": {"devices": _COUNT, "latency_seconds": _SECONDS, "bytes_per_second": _RATE},
    "network": {
        "nodes": _COUNT,
        "latency_seconds": _SECONDS,
        "bytes_per_second": _RATE,
        "oversubscription": _FACTOR,
    },
    "host": {
        "slowdown": _Number(default=1.0),
        "task_seconds": _Number(above=False, default=0.0),
        "step_seconds": _Number(above=False, default=0.0),
        "wake_seconds": _Number(above=False, default=0.0),
        "cores": _COUNT,
    },
}
"""Table → its figures."""
_RATES = "flops_per_second"
_OPTIONAL = ("network", "host")
_TASK = ("kind", "dtype", "form", "world", "points")
_DTYPES = tuple(str(dtype) for dtype in DType)


def read_machine(path: Path) -> Machine:
    """The machine of a file. MachineFileError names the file, the line and the field of what is
    missing, unknown, of another type, out of its range, or at odds with another figure.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MachineFileError("a machine file is too long", got=f"more than {MOST_BYTES} B")
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise MachineFileError(
            "a machine file cannot be read", got=f"{path}: {error.strerror}"
        ) from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise MachineFileError(f"{path} is no machine file", got=str(error)) from None
    return _Reader(str(path), text, tables).machine()


def machine_of_figures(figures: Mapping[str, str]) -> Machine:
    """The machine of (field, value) as texts, as `Machine.text` has them; errors as in files."""
    tables: dict[str, Any] = {}
    for field, value in figures.items():
        *parts, name = field.split(".")
        table = tables
        for part in parts:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise MachineFileError("a field is inside of another", got=field)
        table[name] = value
        if field not in ("name", "device.type"):
            try:
                table[name] = {"value": float(value), "source": "a job's setting"}
            except ValueError:
                raise MachineFileError("a figure is no number", got=f"{field}={value}") from None
    return _Reader("the machine of a job", "", tables, sources=False).machine()


class _Reader:
    """One file on its way to a machine."""

    def __init__(
        self, path: str, text: str, tables: Mapping[str, Any], sources: bool = True
    ) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._tables = tables
        self._keeps = sources
        self._sources: list[Source] = []

    def machine(self) -> Machine:
        known = ("name", "task" if self._keeps else "kernel", *_FIELDS)
        for name in self._tables:
            if name not in known:
                raise self._error("unknown field", name, expected=f"some of {', '.join(known)}")
        name = self._word(self._tables, "name", "name")
        tables = {part: self._table(part) for part in _FIELDS}
        figures = {part: self._figures(part, tables[part]) for part in _FIELDS}
        device = figures["device"]
        tasks = tuple(self._tasks())
        machine = Machine(
            name=name,
            device=Device(
                type=self._type(tables["device"]),
                flops_per_second=self._rates(tables["device"]),
                **device,
            ),
            node=Node(devices=_count(figures["node"].pop("devices")), **figures["node"]),
            network=None
            if "network" not in self._tables
            else Network(nodes=_count(figures["network"].pop("nodes")), **figures["network"]),
            host=Host(cores=_count(figures["host"].pop("cores")), **figures["host"]),
            tasks=tasks,
            kernels=kernel_costs(tasks) or dict(self._kernels()),
            sources=tuple(self._sources) if self._keeps else (),
        )
        self._check_together(machine)
        return machine

    # --- parts ------------------------------------------------------------------------------------

    def _table(self, part: str) -> Mapping[str, Any]:
        table = self._tables.get(part, {} if part in _OPTIONAL else None)
        if table is None:
            raise self._error("missing table", part, expected=f"[{part}]")
        if not isinstance(table, dict):
            raise self._error("a table is expected", part, got=repr(table))
        extra = ("type", _RATES) if part == "device" else ()
        for name in table:
            if name not in _FIELDS[part] and name not in extra:
                raise self._error(
                    "unknown field",
                    f"{part}.{name}",
                    expected=f"some of {', '.join((*extra, *_FIELDS[part]))}",
                )
        return table

    def _figures(self, part: str, table: Mapping[str, Any]) -> dict[str, float]:
        if part in _OPTIONAL and part not in self._tables:
            return {
                name: number.default
                for name, number in _FIELDS[part].items()
                if number.default is not None
            }
        return {
            name: self._figure(f"{part}.{name}", table.get(name), number)
            for name, number in _FIELDS[part].items()
        }

    def _figure(self, field: str, figure: Any, number: _Number) -> float:
        if figure is None:
            if number.default is not None:
                return number.default
            raise self._error("missing field", field, expected=f"{number}, and its source")
        if not isinstance(figure, dict) or not figure.keys() >= {"value", "source"}:
            raise self._error(
                "a figure stands without its source",
                field,
                got=repr(figure),
                expected='{ value = NUMBER, source = "WHERE IT IS FROM" }',
            )
        for name in figure:
            if name not in ("value", "source", "measured"):
                raise self._error("unknown field", f"{field}.{name}")
        value, source = figure["value"], figure["source"]
        measured = figure.get("measured", False)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._error("a figure is no number", field, got=repr(value), expected=number)
        if not math.isfinite(value) or not number.admits(value):
            raise self._error("a figure is out of its range", field, got=value, expected=number)
        if not isinstance(source, str) or not source.strip() or not isinstance(measured, bool):
            raise self._error("a figure stands without its source", field, got=repr(figure))
        self._sources.append(Source(field, float(value), source, measured))
        return float(value)

    def _type(self, table: Mapping[str, Any]) -> str:
        kind = self._word(table, "type", "device.type")
        if kind not in TYPES:
            raise self._error(
                "unknown type of device", "device.type", got=repr(kind), expected=", ".join(TYPES)
            )
        return kind

    def _word(self, table: Mapping[str, Any], name: str, field: str) -> str:
        word = table.get(name)
        if not isinstance(word, str) or not word or not word.isprintable():
            what = "missing field" if word is None else "a text is expected"
            raise self._error(what, field, got=None if word is None else repr(word))
        return word

    def _rates(self, table: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
        rates = table.get(_RATES)
        field = f"device.{_RATES}"
        if not isinstance(rates, dict) or "float32" not in rates:
            raise self._error("missing field", f"{field}.float32", expected=str(_RATE))
        for dtype in rates:
            if dtype not in _DTYPES:
                raise self._error("unknown dtype", f"{field}.{dtype}", expected=", ".join(_DTYPES))
        return tuple(
            (dtype, self._figure(f"{field}.{dtype}", rate, _RATE))
            for dtype, rate in sorted(rates.items())
        )

    def _tasks(self) -> Iterator[MeasuredTasks]:
        tasks = self._tables.get("task", [])
        if not isinstance(tasks, list):
            raise self._error("a list is expected", "task", expected="[[task]]")
        seen: set[tuple[str, str, str, str]] = set()
        for number, task in enumerate(tasks):
            field = f"task[{number}]"
            if not isinstance(task, dict) or task.keys() != set(_TASK):
                raise self._error(
                    "measured tasks have other fields", field, expected=", ".join(_TASK)
                )
            kind, dtype, form, world = (task[name] for name in _TASK[:-1])
            if (
                not isinstance(kind, str)
                or not isinstance(form, str)
                or dtype not in ("", *_DTYPES)
                or world not in WORLDS
            ):
                raise self._error(
                    "measured tasks are of a kind, a dtype, a form and a world",
                    field,
                    got=f"{kind!r}, {dtype!r}, {form!r}, {world!r}",
                    expected=f"a world of {', '.join(WORLDS)}",
                )
            if (kind, dtype, form, world) in seen:
                raise self._error(
                    "measured tasks of one kind, dtype, form and world are there twice",
                    field,
                    got=f"{kind!r}, {dtype!r}, {form!r}, {world!r}",
                    expected="one list of all their points",
                )
            seen.add((kind, dtype, form, world))
            yield MeasuredTasks(
                kind, dtype, form, world, tuple(self._points(field, task["points"]))
            )

    def _kernels(self) -> Iterator[tuple[tuple[str, str], KernelCost]]:
        names = [each.name for each in fields(KernelCost)]
        for kind, dtypes in self._tables.get("kernel", {}).items():
            for dtype, costs in dtypes.items() if isinstance(dtypes, dict) else (("", {}),):
                field = f"kernel.{kind}.{dtype}"
                if dtype not in _DTYPES or costs.keys() != set(names):
                    raise self._error("kernels have other fields", field, expected=", ".join(names))
                numbers = (self._figure(f"{field}.{name}", costs[name], _SECONDS) for name in names)
                yield (kind, dtype), KernelCost(*numbers)

    def _points(self, field: str, points: Any) -> Iterator[tuple[Sizes, float]]:
        if not isinstance(points, list) or not points:
            raise self._error("measured tasks have no points", field)
        for point in points:
            if (
                not isinstance(point, list)
                or len(point) != len(Sizes._fields) + 1
                or not all(type(each) in (int, float) and each >= 0 for each in point)
                or not point[-1] > 0
                or not all(map(math.isfinite, point))
            ):
                raise self._error(
                    "a measured point does not parse",
                    field,
                    got=repr(point),
                    expected=f"[{', '.join(Sizes._fields)}, seconds], seconds above 0",
                )
            *sizes, seconds = map(float, point)
            yield Sizes(*sizes), seconds

    def _check_together(self, machine: Machine) -> None:
        device, node, network = machine.device, machine.node, machine.network
        if network is not None and node.devices is None:
            raise self._error(
                "a network needs nodes of so many devices", "node.devices", expected=_COUNT
            )
        if network is not None and network.bytes_per_second > node.bytes_per_second:
            raise self._error(
                "the network is faster than the links within a node",
                "network.bytes_per_second",
                got=f"{network.bytes_per_second:g}",
                expected=f"at most node.bytes_per_second, {node.bytes_per_second:g}",
            )
        if machine.host.cores is not None and device.type != "cpu":
            raise self._error(
                "only ranks on CPUs share the cores of their host",
                "host.cores",
                got=f"a device of type {device.type!r}",
                expected="device.type = 'cpu'",
            )
        wide = dict(device.flops_per_second)
        if wide.get("float64", 0.0) > wide["float32"]:
            raise self._error(
                "products of float64 are faster than those of float32",
                f"device.{_RATES}.float64",
                got=f"{wide['float64']:g}",
                expected=f"at most {wide['float32']:g}",
            )

    # --- errors -----------------------------------------------------------------------------------

    def _error(
        self, what: str, field: str, *, got: object = None, expected: object = None
    ) -> MachineFileError:
        line = self._line_of(field)
        return MachineFileError(
            f"{what}: {field}",
            source=self._path if line is None else f"{self._path}:{line}",
            got=got,
            expected=expected,
        )

    def _line_of(self, field: str) -> int | None:
        """Where a field stands, or else the table that should have it."""
        task = re.fullmatch(r"task\[(\d+)\]", field)
        seen, table, nearest = -1, "", None
        for number, line in enumerate(self._lines, start=1):
            header = re.match(r"\s*\[+\s*([\w.\"-]+)\s*\]", line)
            if header is not None:
                table = header[1]
                seen += table == "task"
                if task is not None and table == "task" and seen == int(task[1]):
                    return number
                if field == table:
                    return number
                if field.startswith(f"{table}."):
                    nearest = number
                continue
            key = re.match(r"\s*([\w.\"-]+)\s*=", line)
            path = "" if key is None else f"{table}.{key[1]}".lstrip(".")
            if path and (field == path or field.startswith(f"{path}.")):
                return number
        return nearest


def _count(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
