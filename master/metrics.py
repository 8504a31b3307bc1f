"""A master's metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from plancompiler.cluster.messages import JobPhase
from plancompiler.master.observation import LATENCY_BOUNDS
from plancompiler.master.snapshot import Snapshot, open_descriptors, resident_bytes

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Metrics are made from a picture when they are asked for: counting costs the master's jobs
    nothing but what `Observation` does.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> tuple[str, bytes]:
        """All of them in Prometheus' text format, after its content type."""
        return _CONTENT_TYPE, generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """None beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Each metric with its samples."""
        seen = self._snapshot()
        observed, status = seen.observation, seen.status
        yield _gauge("queue_length", "Jobs that wait for their turn.", seen.queue_length)
        phases = {str(phase): 0 for phase in JobPhase if not phase.is_end}
        for job in status.jobs:
            if not job.phase.is_end:
                phases[str(job.phase)] += 1
        yield _gauges("jobs", "Jobs that have not ended, by phase.", "phase", phases)
        yield _counter("jobs_submitted", "Jobs that were taken.", observed.submitted)
        ends = {str(phase): observed.ended[phase] for phase in JobPhase if phase.is_end}
        yield _counters("jobs_ended", "Jobs that have ended, by how they did.", "phase", ends)
        yield _gauges("workers", "Ranks of the cluster by state.", "state", seen.workers)
        yield _counter("steps", "Steps that all ranks of a job have done.", observed.steps)
        yield _counter(
            "sent_bytes", "Slices, plans and feeds that were sent to workers.", seen.sent_bytes
        )
        yield _counter("output_bytes", "Outputs that ranks have sent.", observed.output_bytes)
        yield _gauges("held_bytes", "What is kept in memory for clients.", "what", seen.held_bytes)
        yield _counters("refused_calls", "Calls that ended with an error.", "code", seen.refused)
        bounds = (*map(str, LATENCY_BOUNDS), "+Inf")
        yield HistogramMetricFamily(
            "plancompiler_first_step_seconds",
            "From the submission of a job to its first step.",
            buckets=list(zip(bounds, accumulate(observed.latencies), strict=True)),
            sum_value=observed.latency_sum,
        )
        yield GaugeMetricFamily(
            "process_resident_memory_bytes", "Memory of the master.", resident_bytes()
        )
        yield GaugeMetricFamily(
            "process_open_fds", "Descriptors that the master has open.", open_descriptors()
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"plancompiler_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"plancompiler_{name}", text, value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"plancompiler_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"plancompiler_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
