"""The options that choose what starts the ranks of a command."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.options import Command, with_options
from plancompiler.cluster.token import read_token_file
from plancompiler.engines.choice import ENGINES, LOCAL, open_launcher, output_to
from plancompiler.engines.hosted import LOOPBACK
from plancompiler.engines.launch_variables import TOKEN
from plancompiler.engines.launcher import Launcher
from plancompiler.engines.nodes import Nodes, leading_launcher, parse_nodes
from plancompiler.errors import UsageError


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user asks for."""

    name: str | None
    words: tuple[str, ...]
    address: str

    def launcher(self, default: str, *, output_to_error: bool = False) -> Launcher:
        """A launcher of the engine, or of the one that is used by default."""
        return open_launcher(
            self.name or default,
            say,
            words=self.words,
            address=self.address,
            output_to_error=output_to_error,
        )


def say(line: str) -> None:
    """Pass on a line that a rank or an engine has said."""
    click.echo(line, err=True, nl=False)


def engine_options(command: Command) -> Command:
    """--engine --engine-arg --address as one parameter `engine`"""

    @functools.wraps(command)
    def with_engine(
        *args: Any, engine: str | None, engine_args: tuple[str, ...], address: str, **kwargs: Any
    ) -> Any:
        return command(*args, engine=EngineOptions(engine, engine_args, address), **kwargs)

    decorated: Command = with_options(
        with_engine,
        click.option(
            "--engine",
            type=click.Choice(list(ENGINES)),
            help="What starts the ranks, by default this process; see docs/engines.md.",
        ),
        click.option(
            "--engine-arg",
            "engine_args",
            multiple=True,
            metavar="WORD",
            help="A word for the engine's own command, such as mpiexec; may be repeated.",
        ),
        click.option(
            "--address",
            metavar="HOST:PORT",
            default=LOOPBACK,
            show_default=True,
            help="Where the ranks that an engine starts reach this process; port 0 takes any "
            "free one.",
        ),
    )
    return decorated


def max_restarts_option(help_text: str) -> Callable[[Command], Command]:
    """--max-restarts"""
    return click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=0,
        metavar="R",
        help=help_text,
    )


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where processes meet that were started one by one, and the secret by which they know each
    other, as far as the user says.
    """

    endpoint: str | None
    secret: str | None


def rendezvous_options(command: Command) -> Command:
    """--rdzv-endpoint --token-file as one parameter `rendezvous`"""

    @functools.wraps(command)
    def with_rendezvous(
        *args: Any, rdzv_endpoint: str | None, token_file: Path | None, **kwargs: Any
    ) -> Any:
        secret = os.environ.get(TOKEN)
        if token_file is not None:
            secret = read_token_file(token_file)[0].secret
        return command(*args, rendezvous=Rendezvous(rdzv_endpoint, secret), **kwargs)

    decorated: Command = with_options(
        with_rendezvous,
        click.option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where the hosts of the run meet: an address of the one that leads.",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            help="File with the secret of all hosts of the run; else PLANCOMPILER_WORLD_TOKEN.",
        ),
    )
    return decorated


def nodes_options(command: Command) -> Command:
    """--nnodes --rdzv-endpoint --node-rank --token-file as one parameter `nodes`; None for one
    host.
    """

    @functools.wraps(command)
    def with_nodes(
        *args: Any, nnodes: str, node_rank: int | None, rendezvous: Rendezvous, **kwargs: Any
    ) -> Any:
        nodes = parse_nodes(nnodes, rendezvous.endpoint, rendezvous.secret, node_rank)
        return command(*args, nodes=nodes, **kwargs)

    decorated: Command = with_options(
        with_nodes,
        click.option(
            "--nnodes",
            default="1",
            show_default=True,
            metavar="MIN[:MAX]",
            help="How many hosts run this command, each with the same SCRIPT.",
        ),
        click.option(
            "--node-rank",
            type=click.IntRange(min=0),
            metavar="I",
            help="This host's number; 0 leads. By default the first on the endpoint's host leads.",
        ),
        rendezvous_options,
    )
    return decorated


def nodes_launcher(
    nodes: Nodes,
    engine: EngineOptions,
    ranks: int,
    as_json: bool,
    on_signal: Callable[[int], None],
) -> Launcher:
    """The launcher of the host that leads; to `on_signal` go the signals that other hosts got."""
    if engine.name not in (None, LOCAL):
        raise UsageError(
            "other engines know the hosts of their clusters themselves",
            got=f"--engine {engine.name} with --nnodes",
            expected="one of the two",
        )
    return leading_launcher(nodes, ranks, say, output_to(error=as_json), on_signal)
