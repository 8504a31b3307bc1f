"""Everything that the product reads, as formats to damage (`tests.damage`)."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler import nn
from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.serde import graph_from_bytes, graph_to_bytes
from plancompiler.boxing.slices import Slicer
from plancompiler.boxing.text import format_boxing_graph
from plancompiler.boxing.verify import verify_boxing_graph
from plancompiler.cache.plan_cache import JobSlices, PlanCache, slices_from_bytes, slices_to_bytes
from plancompiler.cache.store import Store
from plancompiler.cluster.chunks import Assembler, arrays_from_bytes, arrays_to_bytes, pack
from plancompiler.cluster.codec import decode
from plancompiler.cluster.messages import (
    ClusterStatus,
    Compile,
    Failed,
    Outputs,
    PeerAddress,
    Prepare,
    RankCompiled,
    RankOutputs,
    Register,
    Run,
    Save,
)
from plancompiler.cluster.serde import (
    JOB_EVENTS,
    MASTER_MESSAGES,
    WORKER_MESSAGES,
    Reader,
)
from plancompiler.errors import ExecutionError
from plancompiler.executor.checkpoint import (
    assemble,
    load_shards,
    save_shards,
    shards_to_bytes,
    write_index,
)
from plancompiler.executor.comm import host_wire, message_rendezvous, remote_wire
from plancompiler.executor.comm.link import GroupDesc, GroupKey, Publication, Read
from plancompiler.executor.comm.packed_arrays import LINE
from plancompiler.executor.comm.publication import region_of
from plancompiler.executor.stream_status import Answer, Question, State, StreamStatus, unpack_note
from plancompiler.executor.timeline import chrome_events, rank_shares, task_shares
from plancompiler.executor.trace import Recorder, recorded_bytes, timelines_from_bytes
from plancompiler.ir import Job, verify_job
from plancompiler.ir.shard import region_shape
from plancompiler.ir.wire import MessageKind, seal
from plancompiler.lower.compile import compile_plans
from plancompiler.lower.rank import plan_of_slice
from plancompiler.ops.data import StoredRows
from plancompiler.ops.stored import stored_array
from plancompiler.ops.verify_types import verify_types
from plancompiler.plan.arrays import arrays_from_bytes as shards_from_bytes
from plancompiler.plan.digest import cross_rank_facts, plan_digest
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes, plan_to_bytes
from plancompiler.plan.verify import verify_plan
from plancompiler.proto import boxing_task_graph_pb2, cluster_pb2, job_pb2, plan_pb2
from tests.damage import Format, damaged_bytes, damaged_json, damaged_message

RANKS = 2


def small_job(folder: Path, microbatches: int = 1) -> Job:
    """A job that reads its own data, with collectives, an optimizer, and random numbers."""
    path = folder / "rows.npz"
    if not path.exists():
        rows = np.random.default_rng(0)
        np.savez(
            path,
            x=rows.normal(size=(32, 4)).astype(np.float32),
            y=rows.integers(0, 3, 32),
        )
    mesh = pc.Placement("cpu", [[0], [1]], axes=("dp", "tp"))
    config = pc.Config(microbatches=microbatches)
    with pc.job("small", seed=3, config=config) as job:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
        model = model.place(mesh, {"0.weight": ["B", "S(0)"]})
        x, y = pc.data.Arrays(path, ("x", "y"), batch=8, placement=mesh, sbp=["S(0)", "B"])
        loss = pc.cross_entropy(model(x), y)
        pc.optim.Adam(lr=0.1).minimize(loss)
        pc.output("loss", loss)
        bias = (model[-1].bias.value * loss).redistribute(sbp=["S(0)", "B"])
        pc.output("bias", pc.sum(bias))
    return job


def formats(folder: Path) -> tuple[Format, ...]:
    """All of them. `folder` is for files; it is the caller's to remove."""
    jobs = [small_job(folder), small_job(folder, microbatches=2)]
    compilations = [compile_plans(job, RANKS) for job in jobs]
    plans = compilations[0].plans
    return (
        *_checkpoints(folder, plans),
        *_timelines(folder, plans),
        *_cache_entries(folder, compilations[0].slices),
        *_data_files(folder),
        _frames("job", MessageKind.JOB, job_pb2.Job, [job_to_bytes(job) for job in jobs], _use_job),
        _frames(
            "boxing graph",
            MessageKind.BOXING_TASK_GRAPH,
            boxing_task_graph_pb2.BoxingTaskGraph,
            [graph_to_bytes(each.graph) for each in compilations],
            _use_graph,
        ),
        _frames(
            "slice",
            MessageKind.RANK_SLICE,
            boxing_task_graph_pb2.RankSlice,
            [data for each in compilations for data in each.slices.values()],
            _use_slice,
        ),
        _frames(
            "plan",
            MessageKind.PLAN,
            plan_pb2.Plan,
            [plan_to_bytes(plan) for each in compilations for plan in each.plans.values()],
            _use_plan,
        ),
        *_cluster_messages(),
        *_messages_of_ranks(plans[0]),
    )


def _checkpoints(folder: Path, plans: Mapping[int, Plan]) -> Iterator[Format]:
    whole = folder / "checkpoint"
    arrays = {
        rank: {
            each.name: np.zeros(region_shape(each.region), each.dtype.numpy)
            for each in plan.variables
        }
        for rank, plan in plans.items()
    }
    for rank, plan in plans.items():
        save_shards(whole, plan, arrays[rank], 3)
    write_index(whole, RANKS, 3)
    index = whole / "index.json"
    kept = index.read_bytes()
    shard = whole / "step3-rank00000.safetensors"
    data = shard.read_bytes()

    def load(_: object) -> None:
        for plan in plans.values():
            load_shards(whole, plan)

    def with_file(path: Path, intact: bytes, read: Callable[[object], None]) -> Any:
        def reading(given: bytes) -> None:
            path.write_bytes(given)
            try:
                read(given)
            finally:
                path.write_bytes(intact)

        return reading

    def index_again(_: object) -> None:
        try:
            write_index(whole, RANKS, 3)
        finally:
            index.write_bytes(kept)

    value = json.loads(kept)
    yield Format("index", partial(damaged_bytes, kept), with_file(index, kept, load))
    yield Format("index json", partial(damaged_json, value), with_file(index, kept, load))
    yield Format("shard", partial(_damaged_head, data), with_file(shard, data, load))
    yield Format("shard header", partial(_damaged_shard, data), with_file(shard, data, index_again))
    sent = [shards_to_bytes(plan, arrays[rank], 3) for rank, plan in plans.items()]
    yield Format(
        "shards in memory",
        lambda rng: [rng.choice((_damaged_head, _damaged_shard))(each, rng) for each in sent],
        assemble,
    )
    yield Format("safetensors", partial(_damaged_head, data), arrays_from_bytes)


def _damaged_head(data: bytes, rng: random.Random) -> bytes:
    """Damage where it hurts: most of a shard is numbers, of which any is as good as another."""
    size = 8 + int.from_bytes(data[:8], "little")
    return damaged_bytes(data[:size], rng) + data[size:]


def _damaged_shard(data: bytes, rng: random.Random) -> bytes:
    """The header of a safetensors file, or the JSON text within it, damaged as JSON."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if rng.randrange(2):
        inner = header["__metadata__"]
        name = rng.choice(list(inner))
        inner[name] = damaged_json(json.loads(inner[name]), rng).decode()
        text = json.dumps(header).encode()
    else:
        text = damaged_json(header, rng)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _timelines(folder: Path, plans: Mapping[int, Plan]) -> Iterator[Format]:
    places = folder / "recorded"
    places.mkdir()
    for plan in plans.values():
        recorder = Recorder(plan, places, 0)
        for number, task in enumerate(plan.tasks):
            recorder.note(task.id, 0, 10 + number, 12 + number)
        recorder.close()
    recorded = [recorded_bytes(places, rank) for rank in plans]

    def read(given: Sequence[bytes]) -> None:
        timelines = timelines_from_bytes(given)
        for event in chrome_events(timelines):
            json.dumps(event)
        rank_shares(timelines)
        task_shares(timelines)

    def damaged(rng: random.Random) -> list[bytes]:
        return [damaged_bytes(recorded[0], rng), *recorded[1:]]

    def damaged_header(rng: random.Random) -> list[bytes]:
        arrays = dict(shards_from_bytes(recorded[0]))
        text = damaged_json(json.loads(arrays["header"].tobytes()), rng)
        arrays["header"] = np.frombuffer(text, np.uint8)
        if rng.randrange(4) == 0:
            name = rng.choice(list(arrays))
            kind = rng.choice((np.float64, np.int32, np.bool_, np.uint8))
            arrays[name] = arrays[name].astype(kind)
        if rng.randrange(4) == 0:
            name = rng.choice(list(arrays))
            arrays[name] = arrays[name].reshape(rng.choice(((-1,), (1, 1, -1))))
        if rng.randrange(8) == 0:
            del arrays[rng.choice(list(arrays))]
        return [arrays_to_bytes(arrays), *recorded[1:]]

    yield Format("timeline", damaged, read)
    yield Format("timeline json", damaged_header, read)


def _cache_entries(folder: Path, slices: Mapping[int, bytes]) -> Iterator[Format]:
    store = Store(folder / "cache")
    key = "a" * 64
    kept = JobSlices.of(slices)
    store.write(key, "slices", {"job": "small", "world_size": RANKS}, slices_to_bytes(kept))
    path = store.folder / key / "slices"
    whole = path.read_bytes()
    head = int.from_bytes(whole[6:10], "big")
    size = len(whole) - head - len(slices_to_bytes(kept))

    def read(given: bytes) -> None:
        path.write_bytes(given)
        store.kept()
        PlanCache(store).slices(key, RANKS)

    def resealed(facts: bytes, data: bytes) -> bytes:
        """An entry whose checksum is right."""
        magic, version = whole[:4], int.from_bytes(whole[4:6], "big")
        digest = hashlib.sha256(facts + data).digest()
        return (
            struct.pack(">4sHIQ32s", magic, version, len(facts), len(data), digest) + facts + data
        )

    def damaged_facts(rng: random.Random) -> bytes:
        facts = json.loads(whole[size : size + head])
        return resealed(damaged_json(facts, rng), whole[size + head :])

    def damaged_index(rng: random.Random) -> bytes:
        data = slices_to_bytes(kept)
        length = int.from_bytes(data[:4], "big")
        text = damaged_json(json.loads(data[4 : 4 + length]), rng)
        return len(text).to_bytes(4, "big") + text + data[4 + length :]

    yield Format("cache entry", partial(damaged_bytes, whole), read)
    yield Format("cache facts", damaged_facts, read)
    yield Format("cached slices", damaged_index, lambda given: slices_from_bytes(given, RANKS))


def _data_files(folder: Path) -> Iterator[Format]:
    path = folder / "damaged.npz"
    wholes = []
    for name, save in (("plain", np.savez), ("packed", np.savez_compressed)):
        save(folder / f"{name}.npz", x=np.ones((10, 4), np.float32))
        wholes.append((folder / f"{name}.npz").read_bytes())

    def read(given: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(given)
        stored = stored_array(str(path), "x")
        if stored.shape[1:] == (4,) and stored.dtype == np.float32:
            rows = StoredRows([stored])
            wanted = np.arange(min(3, len(rows)))
            rows.read(wanted, (slice(None),), np.empty((len(wanted), 4), np.float32))

    def damaged_header(rng: random.Random) -> bytes:
        """The header of the array, with the archive whole around it."""
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ones((10, 4), np.float32))
        array = buffer.getvalue()
        head = 10 + int.from_bytes(array[8:10], "little")
        text = damaged_bytes(array[rng.choice((0, 8, 10)) : head], rng)
        if rng.randrange(2):
            words = (b"(10, 4)", b"(10, 4, \n", b"(-1, 4)", b"10", b"(1e9, 4)", b"(" * 300)
            text = array[:head].replace(b"(10, 4)", rng.choice(words))
            length = len(text) - 10
            text = text[:8] + length.to_bytes(2, "little") + text[10:]
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("x.npy", text + array[head:])
        return archive.getvalue()

    yield Format("npz", lambda rng: damaged_bytes(rng.choice(wholes), rng), read)
    yield Format("npy header", damaged_header, read)


def _frames(
    name: str,
    kind: MessageKind,
    message: Any,
    samples: Sequence[bytes],
    use: Callable[[bytes], object],
) -> Format:
    """A frame of the wire whose columns are damaged and whose checksum is right."""
    bodies = [_body(data) for data in samples]

    def damaged(rng: random.Random) -> bytes:
        whole = message()
        whole.ParseFromString(rng.choice(bodies))
        if rng.randrange(6):
            return seal(kind, damaged_message(whole, rng))
        torn = message()
        try:
            torn.ParseFromString(damaged_bytes(whole.SerializeToString(), rng))
        except Exception:  # protobuf's own; what it refuses is no test of ours
            return b""
        return seal(kind, torn)

    return Format(name, damaged, use)


def _body(frame: bytes) -> bytes:
    """The protobuf message in a frame, whatever its header is: it reaches to the frame's end."""
    for start in range(8, 64):
        if int.from_bytes(frame[start - 8 : start], "big") == len(frame) - start:
            return frame[start:]
    raise ValueError("no frame")


def _use_job(data: bytes) -> None:
    job = job_from_bytes(data)
    verify_job(job)
    verify_types(job)
    str(job)
    compile_plans(job, RANKS)


def _use_graph(data: bytes) -> None:
    graph = graph_from_bytes(data)
    verify_boxing_graph(graph)
    format_boxing_graph(graph)
    boxing_costs(graph)
    slicer = Slicer(graph)
    for rank in range(RANKS):
        slicer.for_rank(rank)


def _use_slice(data: bytes) -> None:
    for rank in range(RANKS):
        plan_of_slice(data, rank)


def _use_plan(data: bytes) -> None:
    plan = plan_from_bytes(data)
    verify_plan(plan)
    plan_digest(plan)
    cross_rank_facts(plan)


def _cluster_messages() -> Iterator[Format]:
    arrays = arrays_to_bytes({"loss": np.ones(3, np.float32), "y": np.ones((2, 2), np.int64)})
    report = ExecutionError("it broke", op="matmul", rank=1, got="a", expected="b").report
    to_master = [
        part
        for message in (
            Register(0, "host", "cpu", "0.1.0", "id", "127.0.0.1:1", "net", True),
            RankCompiled(1, "digest", True, (), False),
            Outputs(1, 2, arrays),
            Failed(1, report),
        )
        for part in WORKER_MESSAGES.write(message)
    ]
    to_worker = [
        part
        for message in (
            Compile(1, "rank_per_process", 0, 2, True, b"d" * 32),
            Prepare(1, "token", "restore", (PeerAddress(1, "127.0.0.1:2"),), "save", 1.0, False),
            Run(1, 2, 3, True, arrays),
            Save(1, 2, "folder", True),
        )
        for part in MASTER_MESSAGES.write(message)
    ]
    events = list(JOB_EVENTS.write(RankOutputs(1, 0, arrays)))
    status = cluster_pb2.ClusterStatus(
        version="0.1.0",
        world_size=2,
        workers=[cluster_pb2.WorkerStatus(slot=0, host="h", device="cpu", version="0.1.0")],
        jobs=[cluster_pb2.JobStatus(job_id=1, name="small", phase="running", seconds=1.0)],
    )
    parcel = pack(bytes(range(256)) * 400, compress=True, checked=True)

    def reads(message: Any) -> object:
        match message:
            case cluster_pb2.WorkerMessage():
                return Reader(WORKER_MESSAGES).read(message)
            case cluster_pb2.MasterMessage():
                return Reader(MASTER_MESSAGES).read(message)
            case cluster_pb2.JobEvent():
                return Reader(JOB_EVENTS).read(message)
        return decode(ClusterStatus, message)

    every = [*to_master, *to_worker, *events, status]
    yield Format("cluster message", lambda rng: damaged_message(rng.choice(every), rng), reads)

    def assembled(messages: Sequence[bytes]) -> None:
        assembler = Assembler("a parcel", 1 << 20)
        for message in messages:
            assembler.add_message(message)

    yield Format(
        "chunks",
        lambda rng: [damaged_bytes(message, rng) for message in parcel.messages],
        assembled,
    )


def _messages_of_ranks(plan: Plan) -> Iterator[Format]:
    """What ranks say to each other while they run."""
    report = ExecutionError("it broke", op="matmul", rank=1, got="a", expected="b")
    status = (StreamStatus("compute", State.WAITING, 1.5, "loss", "f.py:3", 4, "step 3"),)
    notes = [Question(0, 1, (0, 1)).packed(), Answer(0, 1, (0,), 1, status).packed()]
    published = Publication(
        0,
        tuple(region_of(plan, register, 0) for register in plan.registers[:5]),
        (GroupDesc(GroupKey((0, 1), 0, "collective"), "digest"),),
        (1,),
        (Read(1, 7, 8, 9, ((0, 2), (1, 3))),),
        {"a record": "of text"},
    )
    shown = message_rendezvous._pack("all_reduce", (np.ones((2, 3)), np.arange(4)), None, 1)
    data = remote_wire.pack_data(7, 1, ((0, 2), (0, 3)), False) + bytes(24)

    def damaged_text(text: bytes) -> Callable[[random.Random], bytes]:
        value = json.loads(text)
        return lambda rng: (
            damaged_json(value, rng) if rng.randrange(3) else damaged_bytes(text, rng)
        )

    def damaged_note(rng: random.Random) -> bytes:
        return damaged_text(rng.choice(notes))(rng)

    def damaged_abort(rng: random.Random) -> bytes:
        packet = host_wire.pack_abort(1, report)
        head = packet.index(b"{")
        return packet[:head] + damaged_text(packet[head:])(rng)

    def damaged_frame(rng: random.Random) -> bytes:
        (frame,) = remote_wire.pack_directory(published, 1)
        head = frame.index(b"{")
        text = damaged_text(frame[head:])(rng)
        return frame[:8] + len(text).to_bytes(8, "little") + text

    def damaged_arrays(rng: random.Random) -> bytearray:
        if rng.randrange(2):
            return bytearray(damaged_bytes(bytes(shown), rng))
        size = int.from_bytes(shown[:4], "little")
        text = damaged_bytes(bytes(shown[8 : 8 + size]), rng)
        start = -(-(size + 8) // LINE) * LINE
        gap = bytes(-(len(text) + 8) % LINE)
        head = len(text).to_bytes(4, "little") + bytes(4)
        return bytearray(head + text + gap + shown[start:])

    def store(frame: bytes) -> None:
        slots = (np.zeros((2, 3), np.float32),) * 2
        remote_wire.store_data(frame, remote_wire.unpack_data(frame), slots)

    yield Format("note", damaged_note, unpack_note)
    yield Format("abort", damaged_abort, host_wire.unpack_abort)
    yield Format(
        "directory",
        damaged_text(host_wire.pack_directory(published, (0, 1))),
        host_wire.unpack_directory,
    )
    yield Format(
        "far directory", damaged_frame, lambda given: remote_wire.DirectoryReader(1).add(given)
    )
    yield Format("data of a rank", lambda rng: damaged_bytes(data, rng), store)
    yield Format(
        "arrays of a member", damaged_arrays, lambda given: message_rendezvous._read(given, 1)
    )
