"""`plancompiler master`: serve jobs to workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from plancompiler.cli.handshakes import explained_handshakes
from plancompiler.cli.options import (
    allow_mixed_kernels_option,
    allow_ops_option,
    amount_option,
    json_option,
    log_format_option,
    mode_option,
    tls_options,
    token_option,
)
from plancompiler.cli.output import format_bytes, log_as_json, print_json, print_note, print_notes
from plancompiler.cli.signals import stop_on_signals
from plancompiler.cluster.channel import TlsFiles
from plancompiler.cluster.messages import JobEvent, PhaseChanged, Shipped
from plancompiler.limits import time_limits
from plancompiler.master.admission import StreamLimits
from plancompiler.master.connections import MAX_CONNECTIONS, raise_descriptor_limit
from plancompiler.master.events import Limits
from plancompiler.master.io_shell import MAX_QUEUE
from plancompiler.master.job_channel import Retention
from plancompiler.master.server import MAX_UPLOAD_BYTES, MasterServer
from plancompiler.master.services import MAX_OPS
from plancompiler.ops.registry import allow_custom_ops

_LOOK_SECONDS = 0.5
"""Between two looks at whether the master has ended by itself."""
_NOTE_SECONDS = time_limits.NOTES
"""How long the last lines may take at the end."""
_NOTE_PAUSE = 0.05
"""Between two batches of notes: each time that their thread wakes up, the event loop has to let go
of the interpreter.
"""


@click.command("master")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:50051",
    show_default=True,
    help="Where to listen; port 0 takes any free one.",
)
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="World size.")
@mode_option
@allow_ops_option
@token_option
@tls_options
@click.option(
    "--insecure",
    is_flag=True,
    help="Serve an address beyond this machine without TLS: anyone who reaches it can run jobs.",
)
@amount_option(
    "--max-streams", StreamLimits().total, "Streams of clients that may be open at once."
)
@amount_option("--max-streams-per-peer", StreamLimits().peer, "The same for one connection.")
@amount_option(
    "--max-connections", MAX_CONNECTIONS, "Connections of clients that may be open at once."
)
@amount_option(
    "--max-upload-bytes",
    MAX_UPLOAD_BYTES,
    "Bytes of what clients upload that are held at the same time.",
)
@amount_option("--max-queue", MAX_QUEUE, "Jobs that may wait.")
@amount_option(
    "--keep-outputs-bytes",
    Retention().job_bytes,
    "Bytes of a job's outputs that are kept for those who read them late.",
    least=0,
)
@amount_option("--keep-jobs", Retention().jobs, "Ended jobs whose outputs are kept.", least=0)
@amount_option("--max-ops", MAX_OPS, "Ops that a job may have.")
@click.option(
    "--stream-silence",
    type=click.FloatRange(min=0, min_open=True),
    default=Limits().stream,
    show_default=True,
    metavar="SECONDS",
    help="A stream whose peer must say something and does not is ended after so long.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Answer over HTTP here, with a page at / and metrics for Prometheus at /metrics.",
)
@log_format_option
@allow_mixed_kernels_option
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep jobs, outputs and workers in this file, so that a master that was killed can be "
    "started again on it and its jobs run on.",
)
@json_option
@click.pass_context
def master_command(
    context: click.Context,
    listen: str,
    ranks: int,
    mode: str | None,
    allow_ops: tuple[str, ...],
    token_file: Path | None,
    tls: TlsFiles | None,
    insecure: bool,
    max_streams: int,
    max_streams_per_peer: int,
    max_connections: int,
    max_upload_bytes: int,
    max_queue: int,
    keep_outputs_bytes: int,
    keep_jobs: int,
    max_ops: int,
    stream_silence: float,
    metrics: str | None,
    log_format: str,
    allow_mixed_kernels: bool,
    journal: Path | None,
    as_json: bool,
) -> None:
    """Take jobs from clients, compile them and drive them on the workers, until stopped.

    \b
    Example:
      plancompiler master --listen 127.0.0.1:50051 --ranks 2

    With --json, the address goes to stdout as soon as the master serves. What happens to jobs, and
    how many ranks have their slices or plans, goes to stderr.
    """
    if log_format == "json":
        log_as_json()
    allow_custom_ops(*allow_ops)
    raise_descriptor_limit()
    limits = Limits(stream=stream_silence)
    begin = time.monotonic()
    with (
        stop_on_signals() as stop,
        nullcontext() if tls is None else explained_handshakes(),
        _notes() as note,
        MasterServer(
            listen,
            ranks,
            mode=mode,
            tls=tls,
            insecure=insecure,
            limits=limits,
            token_file=token_file,
            streams=StreamLimits(max_streams, max_streams_per_peer),
            max_connections=max_connections,
            max_upload_bytes=max_upload_bytes,
            max_queue=max_queue,
            observe=note,
            allow_mixed_kernels=allow_mixed_kernels or None,
            retention=Retention(keep_outputs_bytes, keep_jobs),
            journal=journal,
            metrics=metrics,
            max_ops=max_ops,
        ) as server,
    ):
        print_note(f"master of {ranks} ranks at {server.address}; Ctrl-C stops it")
        if server.metrics_address is not None:
            print_note(f"page and metrics at {server.metrics_address}")
        if as_json:
            told = {"address": server.address, "ranks": ranks}
            print_json(told | ({} if metrics is None else {"metrics": server.metrics_address}))
        while not stop.event.wait(_LOOK_SECONDS):
            server.check()
        print_note(f"stopping after {time.monotonic() - begin:.0f} s")
    context.exit(stop.exit_code)


@contextmanager
def _notes() -> Iterator[Callable[[int, JobEvent], None]]:
    """Takes events of jobs and prints them in a thread: the master must not wait for stderr."""
    lines: deque[tuple[str, int]] = deque()
    said, ending = threading.Event(), threading.Event()

    def add(text: str, job_id: int) -> None:
        lines.append((text, job_id))
        said.set()

    def note(job_id: int, event: JobEvent) -> None:
        if isinstance(event, PhaseChanged):
            reason = "" if event.error is None else f": {event.error.what}"
            add(f"{event.phase} after {event.seconds:.2f} s{reason}", job_id)
        elif isinstance(event, Shipped):
            sent = format_bytes(event.sent_bytes)
            ranks = f"{event.ranks} of {event.world_size} ranks"
            add(f"{ranks} have their slice or plan, {sent} sent", job_id)

    def write() -> None:
        is_last = False
        while not is_last:
            said.wait()
            said.clear()
            is_last = ending.wait(_NOTE_PAUSE)
            if waiting := [lines.popleft() for _ in range(len(lines))]:
                print_notes(waiting)

    writer = threading.Thread(target=write, name="plancompiler-notes", daemon=True)
    writer.start()
    try:
        yield note
    finally:
        ending.set()
        said.set()
        writer.join(_NOTE_SECONDS)
