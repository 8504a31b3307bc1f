"""`plancompiler worker`: serve one rank of a cluster."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import click

from plancompiler.blas.threads import one_blas_thread
from plancompiler.cli.options import (
    allow_ops_option,
    deadline_option,
    json_option,
    log_format_option,
    tls_options,
    token_option,
)
from plancompiler.cli.output import log_as_json, print_json, print_note
from plancompiler.cli.signals import stop_on_signals
from plancompiler.cluster.channel import TlsFiles
from plancompiler.ir.user_cache import user_cache_folder
from plancompiler.limits import time_limits
from plancompiler.ops.registry import allow_custom_ops
from plancompiler.worker.agent import run_worker
from plancompiler.worker.captured_streams import captured_streams
from plancompiler.worker.job_log import JobLog
from plancompiler.worker.peers import LISTEN, TRANSPORTS


@click.command("worker")
@click.option("--master", metavar="HOST:PORT", required=True, help="Where the master listens.")
@click.option("--rank", type=click.IntRange(min=0), help="The rank to be; by default any free one.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda:I.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the master's first answer.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=LISTEN,
    show_default=True,
    help="Where workers of other hosts reach this one; port 0 takes any free one.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen beyond this machine without TLS: anyone on the way can read and change data.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="grpc",
    show_default=True,
    help="How data goes between workers: gRPC between hosts, or MPI for workers of one mpiexec.",
)
@deadline_option
@click.option(
    "--master-grace",
    type=click.FloatRange(min=0),
    default=time_limits.MASTER_GRACE,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a lost master that has a journal to be started again.",
)
@allow_ops_option
@click.option(
    "--allow-path",
    "allow_paths",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Let jobs read and write files below this folder; may be repeated. By default below the "
    "working folder and plancompiler's cache folder.",
)
@click.option(
    "--max-memory",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Refuse jobs whose variables and buffers on this rank take more.",
)
@click.option("--any-path", is_flag=True, hidden=True)
@click.option("--record", type=click.Path(path_type=Path), hidden=True)
@token_option
@tls_options
@log_format_option
@json_option
@click.pass_context
def worker_command(
    context: click.Context,
    master: str,
    rank: int | None,
    device: str,
    timeout: float,
    listen: str,
    insecure: bool,
    transport: str,
    deadline: float,
    master_grace: float,
    allow_ops: tuple[str, ...],
    allow_paths: tuple[Path, ...],
    max_memory: int | None,
    any_path: bool,
    record: Path | None,
    token_file: Path | None,
    tls: TlsFiles | None,
    log_format: str,
    as_json: bool,
) -> None:
    """Register with a master and run one rank of its jobs, until stopped by Ctrl-C or SIGTERM.

    \b
    Example:
      plancompiler worker --master 127.0.0.1:50051
      plancompiler worker --master 127.0.0.1:50051 --rank 1
      plancompiler worker --master node0:50051 --listen node1:0 \
          --tls-ca ca.pem --tls-cert node1.pem --tls-key node1.key
      plancompiler worker --master 127.0.0.1:50051 --allow-path /data --allow-path /models
      mpiexec -n 4 plancompiler worker --master 127.0.0.1:50051 --transport mpi

    With --json, what it was goes to stdout at its end.
    """
    allow_custom_ops(*allow_ops)
    begin = time.monotonic()
    log = JobLog()
    if log_format == "json":
        log_as_json().addFilter(log.name_place)
    with one_blas_thread(), stop_on_signals() as stop, captured_streams(log.add) as streams:
        log.streams = streams
        print_note(f"worker of the master at {master}; Ctrl-C stops it")
        run_worker(
            master,
            rank,
            device,
            stop=stop.event,
            tls=tls,
            token_file=token_file,
            timeout=timeout,
            listen=listen,
            insecure=insecure,
            transport=transport,
            record=record,
            deadline=deadline,
            master_grace=master_grace,
            allow_paths=None if any_path else allow_paths or default_folders(),
            log=log,
            max_memory=max_memory,
        )
    if as_json:
        seconds = time.monotonic() - begin
        print_json({"master": master, "rank": rank, "device": device, "seconds": seconds})
    context.exit(stop.exit_code)


def default_folders() -> list[Path]:
    """Where paths of jobs may lead unless the worker's user says otherwise. A service that runs in
    the root folder, or in one that is gone, did not choose it.
    """
    folders = [user_cache_folder()]
    with suppress(OSError):
        folders.insert(0, Path.cwd())
    return [each for each in folders if each is not None and each != Path(each.anchor)]
