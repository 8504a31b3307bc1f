"""`plancompiler logs`: what the ranks of a job printed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from plancompiler.cli.options import json_option, tls_options, token_option
from plancompiler.cli.output import print_json, print_result
from plancompiler.cluster.channel import SILENCE_SECONDS, TlsFiles
from plancompiler.cluster.messages import RankLine
from plancompiler.running.client import Client

_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")


@click.command("logs")
@click.argument("job", type=click.IntRange(min=1))
@click.option("--master", metavar="HOST:PORT", required=True, help="Where the master listens.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank; else all of them.")
@click.option("--follow", is_flag=True, help="Go on until the job has ended.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=SILENCE_SECONDS,
    show_default=True,
    help="Seconds to wait for the master's first answer.",
)
@token_option
@tls_options
@json_option
def logs_command(
    job: int,
    master: str,
    rank: int | None,
    follow: bool,
    timeout: float,
    token_file: Path | None,
    tls: TlsFiles | None,
    as_json: bool,
) -> None:
    """Show what the ranks of JOB printed and raised, while it runs and after its end.

    \b
    Example:
      plancompiler logs 3 --master 127.0.0.1:50051 --follow

    With --json, one object per line.
    """
    with Client(master, timeout=timeout, tls=tls, token_file=token_file) as client:
        for line in client.logs(job, rank, follow=follow):
            if as_json:
                print_json(
                    {
                        "rank": line.rank,
                        "time": line.time,
                        "stream": line.stream,
                        "text": line.text,
                        "dropped": line.dropped,
                    }
                )
            else:
                print_result(_shown(line))


def _shown(line: RankLine) -> str:
    """A line for a terminal, which obeys nothing that a rank has printed."""
    if line.dropped:
        return f"[rank {line.rank}] ({line.dropped} lines are gone)"
    clock = time.strftime("%H:%M:%S", time.localtime(line.time))
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", line.text)
    mark = "!" if line.stream == "stderr" else " "
    return f"[rank {line.rank} {clock}]{mark}{text}"
