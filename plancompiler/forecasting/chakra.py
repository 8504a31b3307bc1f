"""A forecast's step as execution traces of MLCommons Chakra, which simulators of machines replay.

A file per rank that stands for others: a `GlobalMetadata` message, and a `Node` for each run of a
task that takes time or moves something, each after its length as a varint. Schema and attributes
are those of Chakra 0.0.4 (S. Sridharan et al., "Chakra: Advancing Performance Benchmarking and
Co-design using Standardized Execution Traces", 2023; `proto/third_party/chakra/et_def.proto`).

A node's microseconds are whole, and begin and end are rounded one by one, so that the errors do not
add up. The attributes `duration_seconds` and, for what comes from other ranks, `received_bytes`
have a forecast's own numbers, whose sums are the forecast's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from plancompiler.forecasting.job_forecast import Forecast
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.forecasting.traffic import received_of_task
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import Primitive, family_of, format_id, pack_task_id, unpack_id
from plancompiler.ir.whole_file import write_whole
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    RegisterDesc,
    Stream,
    Task,
)
from plancompiler.proto import et_def_pb2 as schema
from plancompiler.simulate.simulation import Run

VERSION = "0.0.4"
COLLECTIVES = {
    Primitive.ALL_REDUCE: schema.ALL_REDUCE,
    Primitive.ALL_GATHER: schema.ALL_GATHER,
    Primitive.ALL_TO_ALL: schema.ALL_TO_ALL,
    Primitive.REDUCE_SCATTER: schema.REDUCE_SCATTER,
}


def file_name(rank: int) -> str:
    """The name of a rank's file, as tools expect it: a common part, the rank, `et`."""
    return f"chakra_trace.{rank}.et"


def chakra_traces(forecast: Forecast) -> Iterator[tuple[int, Iterator[bytes]]]:
    """(rank, its file in pieces) for each rank that is simulated: the last simulated step."""
    last = forecast.simulation.last_step
    runs: dict[int, list[Run]] = {rank: [] for rank in forecast.simulation.plans}
    for run in forecast.simulation.runs:
        if run.step == last:
            runs[run.rank].append(run)
    start = min((run.begin for each in runs.values() for run in each), default=0.0)
    for rank in sorted(runs):
        trace = _Trace(forecast, rank, start)
        yield rank, trace.pieces(sorted(runs[rank], key=lambda run: (run.begin, run.end)))


def write_traces(forecast: Forecast, folder: Path) -> int:
    """Write the files into a folder, which is made; how many they are. An OSError where that
    fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for rank, pieces in chakra_traces(forecast):
        write_whole(folder / file_name(rank), pieces)
        count += 1
    return count


class _Trace:
    """The nodes of one rank."""

    def __init__(self, forecast: Forecast, rank: int, start: float) -> None:
        self._forecast = forecast
        self._plan = forecast.simulation.plans[rank]
        self._start = start
        self._times = TaskTimes(forecast.machine)
        self._number = 0
        self._waits: dict[tuple[int, int], tuple[int, ...]] = {}
        """(task, micro-batch) → the nodes after which what it makes is there: its own or, of a task
        without one, those of its inputs. Micro-batch -1: of its last run."""
        self._before: dict[Stream, int] = {}
        """The last node of each stream."""
        self._patterns: dict[int, schema.Node] = {}
        """What all nodes of a task have."""
        self._sends: dict[int, tuple[tuple[int, schema.Node], ...]] = {}
        """Of each task whose results other ranks read, by the tasks that read them."""

    def pieces(self, runs: Iterable[Run]) -> Iterator[bytes]:
        """The file for runs in order of their beginning."""
        yield _prefixed(self._metadata())
        for run in runs:
            for node in self._nodes(run):
                yield _prefixed(node)

    def _metadata(self) -> schema.GlobalMetadata:
        forecast, rank = self._forecast, self._plan.rank
        metadata = schema.GlobalMetadata(version=VERSION)
        classes = forecast.rank_classes.classes
        ranks = sorted(one for each in classes if each.simulated == rank for one in each.ranks)
        metadata.attr.add(name="job", string_val=self._plan.job)
        metadata.attr.add(name="machine", string_val=forecast.machine.name)
        metadata.attr.add(name="rank", uint64_val=rank)
        metadata.attr.add(
            name="ranks",
            doc_string="the ranks that do as this one does",
            uint64_list=schema.Uint64List(values=ranks),
        )
        metadata.attr.add(name="step_seconds", double_val=forecast.step_seconds)
        return metadata

    def _nodes(self, run: Run) -> Iterator[schema.Node]:
        task = run.task
        pattern = self._patterns.get(task.id)
        if pattern is None:
            pattern = self._patterns[task.id] = self._pattern(task)
        waits = self._waits_of(run)
        if run.end > run.begin or pattern.type != schema.COMP_NODE:
            node = self._node(pattern, run.begin, run.end, waits)
            node.attr.add(name="duration_seconds", double_val=run.end - run.begin)
            before = self._before.get(task.stream)
            if before is not None:
                node.ctrl_deps.append(before)
            self._before[task.stream] = node.id
            if node.type == schema.COMM_RECV_NODE:
                node.attr.add(name="comm_tag", int32_val=self._tag(task.id, run))
            waits = (node.id,)
            yield node
        self._waits[task.id, run.microbatch] = self._waits[task.id, -1] = waits
        if task.id not in self._sends:
            self._sends[task.id] = tuple(self._sends_of(task))
        for reader, send in self._sends[task.id]:
            node = self._node(send, run.end, run.end, waits)
            node.attr.add(name="comm_tag", int32_val=self._tag(reader, run))
            yield node

    def _node(
        self, pattern: schema.Node, begin: float, end: float, waits: tuple[int, ...]
    ) -> schema.Node:
        node = schema.Node()
        node.CopyFrom(pattern)
        self._number += 1
        node.id = self._number
        node.start_time_micros = _micros(begin - self._start)
        node.duration_micros = _micros(end - self._start) - node.start_time_micros
        node.data_deps.extend(waits)
        return node

    def _waits_of(self, run: Run) -> tuple[int, ...]:
        """The nodes that made what a run reads, as far as they are of this step."""
        waits: dict[int, None] = {}
        for register in run.task.inputs:
            known = self._plan.register_by_id.get(register)
            if known is not None:
                last = self._waits.get((known.producer, -1), ())
                waits.update(dict.fromkeys(self._waits.get((known.producer, run.microbatch), last)))
        return tuple(waits)

    def _tag(self, reader: int, run: Run) -> int:
        """What a message is told by: who reads it, and in which micro-batch."""
        return family_of(reader) * self._plan.microbatches + run.microbatch

    # --- what all runs of a task have -------------------------------------------------------------

    def _pattern(self, task: Task) -> schema.Node:
        plan, spec = self._plan, task.spec
        node = schema.Node(name=task.name, type=schema.COMP_NODE)
        node.attr.add(name="is_cpu_op", bool_val=False)
        kind = spec.kind if isinstance(spec, ComputeSpec) else str(task.kind)
        node.attr.add(name="kind", string_val=kind)
        if task.source.file:
            node.attr.add(name="source", string_val=str(task.source))
        _describe(node.inputs, plan, task.inputs)
        _describe(node.outputs, plan, task.outputs)
        received = sum(nbytes for _, nbytes in received_of_task(plan, task, self._forecast.machine))
        if isinstance(spec, ComputeSpec):
            work = self._times.work(plan, task, spec)
            if work is not None:
                node.attr.add(name="num_ops", int64_val=round(work[0]))
                node.attr.add(name="tensor_size", uint64_val=round(work[1]))
        elif isinstance(spec, CollectiveSpec):
            node.type = schema.COMM_COLL_NODE
            ranks = plan.communicators[spec.communicator].ranks
            nbytes = sum(_nbytes(plan.register_by_id[each]) for each in task.inputs)
            node.attr.add(name="comm_type", int64_val=COLLECTIVES[spec.primitive])
            node.attr.add(name="comm_size", int64_val=nbytes)
            node.attr.add(name="comm_ranks", uint64_list=schema.Uint64List(values=ranks))
        elif isinstance(spec, CopySpec):
            node.type = schema.COMM_RECV_NODE
            peer = unpack_id(plan.remote_register_by_id[task.inputs[0]].producer).rank
            _message(node, peer, plan.rank, round(received))
        if received:
            node.attr.add(name="received_bytes", double_val=received)
        return node

    def _sends_of(self, task: Task) -> Iterator[tuple[int, schema.Node]]:
        """(reader, node) for each task of another rank that reads what a task makes."""
        plan, classes = self._plan, self._forecast.rank_classes
        for output in task.outputs:
            known = plan.register_by_id.get(output)
            for reader in () if known is None else known.consumers:
                rank, family, lane, _ = unpack_id(reader)
                if rank == plan.rank:
                    continue
                theirs = classes.classes[classes.of_rank[rank]].plan
                counterpart = theirs.task_by_id.get(pack_task_id(theirs.rank, family, lane))
                nbytes = 0.0
                if counterpart is not None:
                    machine = self._forecast.machine
                    nbytes = sum(each for _, each in received_of_task(theirs, counterpart, machine))
                node = schema.Node(name=f"{task.name}, sent", type=schema.COMM_SEND_NODE)
                node.attr.add(name="is_cpu_op", bool_val=False)
                _message(node, plan.rank, rank, round(nbytes))
                yield reader, node


def _message(node: schema.Node, sender: int, receiver: int, nbytes: int) -> None:
    node.attr.add(name="comm_src", int32_val=sender)
    node.attr.add(name="comm_dst", int32_val=receiver)
    node.attr.add(name="comm_size", int64_val=nbytes)


def _describe(info: schema.IOInfo, plan: Plan, registers: Sequence[int]) -> None:
    """Shapes and dtypes, as JSON lists."""
    known = [
        plan.register_by_id.get(each) or plan.remote_register_by_id[each] for each in registers
    ]
    info.values = json.dumps([format_id(each) for each in registers])
    info.shapes = json.dumps([each.shape for each in known])
    info.types = json.dumps([str(each.dtype) for each in known])


def _nbytes(register: RegisterDesc) -> int:
    return element_count(register.shape) * register.dtype.itemsize


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _prefixed(message: schema.GlobalMetadata | schema.Node) -> bytes:
    """A message after its length as a varint."""
    data = message.SerializeToString()
    prefix, size = bytearray(), len(data)
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*prefix, size)) + data
