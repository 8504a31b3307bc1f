"""`rank_per_process` on one machine: worker processes that turn slices into plans.

Each process reads (rank, slice bytes) records from its standard input and writes (status, bytes)
records to its standard output: the same bytes that a worker on another host would fetch. It ends
when its input ends, so it cannot outlive whoever started it.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO

from plancompiler.boxing.serde import slice_from_bytes
from plancompiler.errors import ErrorReport, PlanCompilerError, WorkerLostError
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.profile import RANK_STAGES, timed
from plancompiler.lower.rank import compile_rank
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes, plan_to_bytes

_HEADER = struct.Struct("<QQ")
"""Request: rank, bytes that follow. Reply: nanoseconds for a plan or 0 for an error report, bytes.
"""
_STAGES = struct.Struct(f"<{len(RANK_STAGES)}d")
"""Seconds per stage, before the bytes of a plan."""


def compile_in_processes(
    slices: Mapping[int, bytes], processes: int | None = None
) -> tuple[dict[int, Plan], dict[int, float], dict[int, dict[str, float]]]:
    """Plans of the given ranks, each compiled from its slice's bytes in another process.

    Also the seconds that each rank took there, from bytes to bytes, and these by stage.
    """
    ranks: queue.SimpleQueue[int] = queue.SimpleQueue()
    for rank in slices:
        ranks.put(rank)
    count = min(processes or os.cpu_count() or 1, len(slices))
    plans: dict[int, Plan] = {}
    seconds: dict[int, float] = {}
    stages: dict[int, dict[str, float]] = {}
    failures: list[PlanCompilerError] = []
    children = [_start() for _ in range(count)]

    def serve(child: subprocess.Popen[bytes]) -> None:
        while not failures:
            try:
                rank = ranks.get_nowait()
            except queue.Empty:
                return
            try:
                plans[rank], seconds[rank], stages[rank] = _ask(child, rank, slices[rank])
            except PlanCompilerError as error:
                failures.append(error.at(rank=rank))

    threads = [threading.Thread(target=serve, args=(child,)) for child in children]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for child in children:
            child.kill()
            child.communicate()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return {rank: plans[rank] for rank in slices}, seconds, stages


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "plancompiler.lower.rank_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us; we end the children
    )


def _ask(
    child: subprocess.Popen[bytes], rank: int, data: bytes
) -> tuple[Plan, float, dict[str, float]]:
    if child.stdin is None or child.stdout is None:
        raise WorkerLostError("a compile process has no pipes", rank=rank)
    try:
        child.stdin.write(_HEADER.pack(rank, len(data)))
        child.stdin.write(data)
        child.stdin.flush()
        nanoseconds, reply = _read_record(child.stdout)
    except (OSError, EOFError):
        raise WorkerLostError(
            "a compile process ended early",
            rank=rank,
            got=f"exit code {child.poll()}",
            hint="its own message is on standard error",
        ) from None
    if not nanoseconds:
        raise PlanCompilerError.from_report(ErrorReport(**json.loads(reply)))
    spent = zip(RANK_STAGES, _STAGES.unpack_from(reply), strict=True)
    stages = {stage: seconds for stage, seconds in spent if seconds}
    return plan_from_bytes(reply[_STAGES.size :]), nanoseconds / 1e9, stages


def _read_record(stream: IO[bytes]) -> tuple[int, bytes]:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    first, size = _HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return first, data


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    while True:
        try:
            rank, data = _read_record(requests)
        except EOFError:
            return
        begin = time.perf_counter_ns()
        try:
            reply = _compiled(rank, data)
            nanoseconds = time.perf_counter_ns() - begin
        except PlanCompilerError as error:
            reply, nanoseconds = json.dumps(asdict(error.report)).encode(), 0
        replies.write(_HEADER.pack(nanoseconds, len(reply)))
        replies.write(reply)
        replies.flush()


@collector_paused()
def _compiled(rank: int, data: bytes) -> bytes:
    """The time per stage, then the plan."""
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        rank_slice = slice_from_bytes(data)
    plan = compile_rank(rank_slice, rank, seconds)
    with timed(seconds, "write"):
        written = plan_to_bytes(plan)
    return _STAGES.pack(*(seconds.get(stage, 0.0) for stage in RANK_STAGES)) + written


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
