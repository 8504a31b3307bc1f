"""Options of commands that ask a master something about its jobs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.options import Command, json_option, tls_options, token_option, with_options
from plancompiler.cluster.channel import SILENCE_SECONDS, TlsFiles
from plancompiler.running.client import Client

job_id_argument = click.argument("job", metavar="JOB", type=click.IntRange(1, (1 << 63) - 1))


master_option = click.option(
    "--master", metavar="HOST:PORT", required=True, help="Where the master listens."
)


timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=SILENCE_SECONDS,
    show_default=True,
    help="Seconds to wait for the master's first answer, and later for a sign of it (2 or more).",
)


def client_options(command: Command) -> Command:
    """--master --timeout --token-file --tls-* as one parameter `client`, and --json"""

    @functools.wraps(command)
    def with_client(
        *args: Any,
        master: str,
        timeout: float,
        token_file: Path | None,
        tls: TlsFiles | None,
        **kwargs: Any,
    ) -> Any:
        with Client(master, timeout=timeout, tls=tls, token_file=token_file) as client:
            return command(*args, client=client, **kwargs)

    decorated: Command = with_options(
        with_client, master_option, timeout_option, token_option, tls_options, json_option
    )
    return decorated
