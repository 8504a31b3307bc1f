"""`Machine`: what devices compute with, how much they hold, and how they are linked.

Files of machines are read in `machine_file`, and chosen by `choice`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any
from urllib.parse import quote

from plancompiler.costs.measured_tasks import KernelCost, MeasuredTasks, TaskModels
from plancompiler.errors import UsageError
from plancompiler.ir.dtype import DType

FIGURES = "figures:"
"""How the text of a machine begins that is not shipped."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device: what a rank computes with."""

    type: str
    """`cpu`, `cuda`, `rocm` or `tpu`."""
    memory_bytes: float
    memory_bytes_per_second: float
    copy_bytes_per_second: float
    """Of a copy within its memory."""
    launch_seconds: float
    """What starting a kernel takes."""
    flops_per_second: tuple[tuple[str, float], ...]
    """Peak of matrix products, by dtype."""
    matrix_efficiency: float
    """The part of the peak that large products reach: above 0, at most 1."""
    memory_efficiency: float
    """The part of the memory's bandwidth that kernels reach."""

    def peak_flops(self, dtype: DType) -> float:
        """Of a dtype without a figure that of float32."""
        rates = dict(self.flops_per_second)
        return rates.get(str(dtype), rates["float32"])


@dataclass(frozen=True, slots=True)
class Node:
    """Devices that are linked without a network."""

    devices: int | None
    """None for any number."""
    latency_seconds: float
    bytes_per_second: float
    """That a device sends to others, and receives, at the same time."""


@dataclass(frozen=True, slots=True)
class Network:
    """The links between nodes."""

    nodes: int | None
    """None for any number."""
    latency_seconds: float
    bytes_per_second: float
    """Per device, each way."""
    oversubscription: float
    """Bandwidth of all devices over that of the network's core: 1 where nothing is shared."""


@dataclass(frozen=True, slots=True)
class Host:
    """What ranks of one host take beside their kernels, as it was measured."""

    slowdown: float = 1.0
    """A kernel with another rank at work over one alone."""
    task_seconds: float = 0.0
    """What the actors and a call take for each task, beside its kernel."""
    step_seconds: float = 0.0
    """What a step takes beside its tasks: feeds, outputs, the caller."""
    wake_seconds: float = 0.0
    """Until a stream goes on that waited for another, or for other ranks."""
    cores: int | None = None
    """That the streams of all ranks of a node share; None where each has a core of its own."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from."""

    field: str
    """Such as `device.memory_bytes`."""
    value: float
    source: str
    measured: bool
    """False for what a data sheet or a rule of thumb says."""


# Equal by identity, so that what is kept by machine is looked up fast: `choice.machine_of` makes
# one object for each text.
@dataclass(frozen=True, eq=False)
class Machine:
    """A machine as its file describes it. See `docs/forecast.md` for the file's fields."""

    name: str
    device: Device
    node: Node
    network: Network | None
    """None where all devices are of one node."""
    host: Host = Host()
    tasks: tuple[MeasuredTasks, ...] = ()
    """Measured times."""
    kernels: Mapping[tuple[str, str], KernelCost] = field(default_factory=dict)
    """By kind and dtype, what the measured times come to, roughly: what jobs carry of them."""
    sources: tuple[Source, ...] = ()
    """Of every figure; empty for a machine of a compact text."""

    @property
    def devices(self) -> int | None:
        """How many there are; None for any number."""
        if self.node.devices is None or self.network is None:
            return self.node.devices
        return None if self.network.nodes is None else self.network.nodes * self.node.devices

    @cached_property
    def models(self) -> TaskModels:
        """Times of tasks by the measured ones."""
        return TaskModels(self.tasks)

    @property
    def measured(self) -> tuple[str, ...]:
        """The fields whose figures were measured."""
        return tuple(each.field for each in self.sources if each.measured)

    @cached_property
    def text(self) -> str:
        """The figures that compiling goes by in one word, which `choice.machine_of` reads: all but
        measured times of tasks, of which only forecasts are made, and of these what kernels cost.
        """
        return FIGURES + ",".join(
            f"{field}={quote(value) if isinstance(value, str) else repr(value)}"
            for field, value in _figures(self)
        )

    @cached_property
    def digest(self) -> str:
        """A hash over these figures and the measured times."""
        return hashlib.sha256(f"{self.text}\n{self.tasks!r}".encode()).hexdigest()

    def check_devices(self, ranks: int) -> None:
        """A UsageError for more ranks than the machine has devices."""
        if self.devices is not None and ranks > self.devices:
            raise UsageError(
                f"machine {self.name!r} has fewer devices than the job has ranks",
                got=f"{ranks} ranks",
                expected=f"at most {self.devices}",
                hint="give fewer ranks, or another machine; its file's `node.devices`, times "
                "`network.nodes`, says how many there are, one for each core where it was "
                "calibrated",
            )


def _figures(machine: Machine) -> Iterator[tuple[str, Any]]:
    """(field, value) of all but measured times and sources, in a fixed order."""
    yield "name", machine.name
    for part in ("device", "node", "network", "host"):
        figures = getattr(machine, part)
        for each in () if figures is None else fields(figures):
            value = getattr(figures, each.name)
            if each.name == "flops_per_second":
                for dtype, rate in value:
                    yield f"{part}.{each.name}.{dtype}", rate
            elif value is not None:
                yield f"{part}.{each.name}", value
    for (kind, dtype), cost in machine.kernels.items():
        for each in fields(cost):
            yield f"kernel.{kind}.{dtype}.{each.name}", getattr(cost, each.name)
