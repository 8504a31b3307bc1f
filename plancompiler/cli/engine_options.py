"""The options that choose what starts the ranks of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from plancompiler.engines.choice import ENGINES, open_launcher
from plancompiler.engines.hosted import LOOPBACK
from plancompiler.engines.launcher import Launcher

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user asks for."""

    name: str | None
    words: tuple[str, ...]
    address: str

    def launcher(self, *, output_to_error: bool = False) -> Launcher | None:
        """A launcher of the engine; None where none was named."""
        if self.name is None:
            return None
        return open_launcher(
            self.name,
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

    decorated: Any = click.option(
        "--address",
        metavar="HOST:PORT",
        default=LOOPBACK,
        show_default=True,
        help="Where the ranks that an engine starts reach this process; port 0 takes any free one.",
    )(with_engine)
    decorated = click.option(
        "--engine-arg",
        "engine_args",
        multiple=True,
        metavar="WORD",
        help="A word for the engine's own command, such as mpiexec; may be repeated.",
    )(decorated)
    return cast(
        "Command",
        click.option(
            "--engine",
            type=click.Choice(list(ENGINES)),
            help="What starts the ranks, by default this process; see docs/engines.md.",
        )(decorated),
    )
