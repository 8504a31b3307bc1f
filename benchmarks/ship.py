"""Shipping bytes from a master to a worker over loopback: our fetch beside plain gRPC.

    python benchmarks/ship.py [--seconds 6]

A process serves, this one fetches. Ways to fetch the same random bytes take turns of three fetches
each, of which the first is not counted: it finds the memory as another way has left it.

    fetch          our transfer: 1 MiB chunks, serialised once for all workers
    checked        the same with its SHA-256 verified, as slices and plans are
    chunk loop     a gRPC method that yields messages of 1 MiB, with gRPC's own defaults
    one message    a gRPC method that returns one message
    fill           no transfer: as many bytes, 1 MiB at a time, into a buffer as `fetch` fills it

Prints one JSON line per size: GiB/s at the median and the best time of each way, and the ratio of
`fetch` to the others at the median. Two more lines say what zstd costs and saves on the wire forms
of a GPT-3 175B job and of one rank's slice of it: bytes, ms to pack, and ms of a fetch, over
loopback, packed and plain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from plancompiler.boxing.serde import slice_to_bytes
from plancompiler.boxing.slices import slice_for_rank
from plancompiler.cli.job_file import load_job
from plancompiler.cluster.channel import SERVER_OPTIONS
from plancompiler.cluster.chunks import CHUNK_BYTES, MAX_JOB_BYTES, Parcel, pack
from plancompiler.lower.compile import build_graph
from plancompiler.master.transfers import Gate, TransferService
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.proto.cluster_pb2 import Chunk, FetchRequest
from plancompiler.worker.transfer import Interruption, Transfers

SIZES_MIB = (16, 256)
TURN = 3
"""Fetches."""
GPT = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
RANKS = 1024
SETTINGS = {"preset": "gpt3-175b", "tp": 8, "pp": 16, "dp": RANKS // 128}
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
PLAIN, CHECKED = 1, 2
"""Tickets under which the benchmark's server offers its parcels."""


def chunks(data: bytes) -> Iterator[Chunk]:
    """What anyone would write first."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield Chunk(data=data[start : start + CHUNK_BYTES])


def fill(data: bytes) -> bytes:
    """What the memory alone costs: above 32 MiB it is fresh each time."""
    buffer = BytesIO(bytes(min(len(data), 32 << 20)))
    for start in range(0, len(data), CHUNK_BYTES):
        buffer.write(memoryview(data)[start : start + CHUNK_BYTES])
    return buffer.getvalue()


def serve(parcels: dict[int, Parcel], data: bytes, connection: Connection) -> None:
    """The serving process: our service, and the plain ones on a server of their own."""
    asyncio.run(serve_both(parcels, data, connection))


async def serve_both(parcels: dict[int, Parcel], data: bytes, connection: Connection) -> None:
    """In the event loop, as a master serves."""
    ours = grpc.aio.server(options=SERVER_OPTIONS)

    def find(request: FetchRequest) -> Parcel:
        return parcels[request.ticket]

    TransferService(find, lambda request, count: None, Gate(4)).add_to(ours)
    plain = grpc.server(ThreadPoolExecutor(4), options=UNLIMITED)
    methods = {
        "Chunks": grpc.unary_stream_rpc_method_handler(
            lambda request, context: chunks(data), response_serializer=Chunk.SerializeToString
        ),
        "Whole": grpc.unary_unary_rpc_method_handler(
            lambda request, context: Chunk(data=data), response_serializer=Chunk.SerializeToString
        ),
    }
    plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Plain", methods),))
    connection.send([server.add_insecure_port("127.0.0.1:0") for server in (ours, plain)])
    await ours.start()
    plain.start()
    await asyncio.to_thread(connection.recv)
    await ours.stop(0)
    plain.stop(0).wait()


def compare(
    parcels: dict[int, Parcel], data: bytes, seconds: float, ways: tuple[str, ...]
) -> dict[str, list[float]]:
    """Seconds of each counted fetch, by way."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(parcels, data, there))
    process.start()
    ours, plain = here.recv()
    transfers = Transfers(f"127.0.0.1:{ours}", None, Interruption())
    times: dict[str, list[float]] = {way: [] for way in ways}
    with grpc.insecure_channel(f"127.0.0.1:{plain}", options=UNLIMITED) as channel:
        loop = channel.unary_stream("/Plain/Chunks", None, Chunk.FromString)
        whole = channel.unary_unary("/Plain/Whole", None, Chunk.FromString)

        def fetch(ticket: int) -> bytes:
            return transfers.fetch(FetchRequest(ticket=ticket), "it", MAX_JOB_BYTES)

        known: dict[str, Callable[[], bytes]] = {
            "fetch": lambda: fetch(PLAIN),
            "checked": lambda: fetch(CHECKED),
            "chunk_loop": lambda: b"".join([chunk.data for chunk in loop(b"")]),
            "one_message": lambda: whole(b"").data,
            "fill": lambda: fill(data),
        }
        for way in ways:
            if known[way]() != data:
                raise SystemExit(f"{way} does not give the bytes that were sent")
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(times[ways[0]]) < 5:
            for way in ways:
                for turn in range(TURN):
                    begin = time.perf_counter()
                    known[way]()
                    if turn:
                        times[way].append(time.perf_counter() - begin)
    transfers.close()
    here.send(None)
    process.join()
    return times


def stream(mib: int, seconds: float) -> dict[str, object]:
    """GiB/s of random bytes."""
    data = os.urandom(mib << 20)
    parcels = {PLAIN: pack(data), CHECKED: pack(data, checked=True)}
    ways = ("fetch", "checked", "chunk_loop", "one_message", "fill")
    times = compare(parcels, data, seconds, ways)
    middle = {way: statistics.median(times[way]) for way in ways}
    return {
        "benchmark": "ship",
        "mib": mib,
        "fetches": len(times["fetch"]),
        **{f"{way}_gib_per_s": round(mib / 1024 / middle[way], 2) for way in ways},
        **{f"{way}_best_gib_per_s": round(mib / 1024 / min(times[way]), 2) for way in ways},
        "ratio_to_chunk_loop": round(middle["chunk_loop"] / middle["fetch"], 2),
        "ratio_to_one_message": round(middle["one_message"] / middle["fetch"], 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def compressed(name: str, data: bytes, seconds: float) -> dict[str, object]:
    """What zstd makes of real bytes."""
    packing = []
    for _ in range(20):
        begin = time.perf_counter()
        packed = pack(data, compress=True)
        packing.append(time.perf_counter() - begin)
    # The second ticket holds the packed bytes here; digests play no part.
    times = compare({PLAIN: pack(data), CHECKED: packed}, data, seconds, ("fetch", "checked"))
    return {
        "benchmark": "ship, zstd",
        "what": name,
        "raw_bytes": len(data),
        "wire_bytes": packed.wire_bytes,
        "pack_ms": round(statistics.median(packing) * 1e3, 3),
        "fetch_packed_ms": round(statistics.median(times["checked"]) * 1e3, 3),
        "fetch_plain_ms": round(statistics.median(times["fetch"]) * 1e3, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each size")
    seconds = parser.parse_args().seconds
    for mib in SIZES_MIB:
        print(json.dumps(stream(mib, seconds)), flush=True)
    job = load_job(str(GPT), SETTINGS, RANKS)
    rank_slice = slice_to_bytes(slice_for_rank(build_graph(job, RANKS), 0))
    for name, data in (("job, gpt3-175b", job_to_bytes(job)), ("slice of a rank", rank_slice)):
        print(json.dumps(compressed(name, data, seconds / 4)), flush=True)


if __name__ == "__main__":
    main()
