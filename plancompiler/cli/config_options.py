"""The settings of the compiler as options of commands: those that its passes declare."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import click

from plancompiler.cli.options import Command
from plancompiler.ir import Job
from plancompiler.passes import Config, config_of


def config_options(command: Command) -> Command:
    """--pass, and every option of `Config` with a metavar, as one parameter `config`: the settings
    that were given, to change a job's own.
    """
    offered = [each for each in Config.options() if each.metavar is not None]

    @functools.wraps(command)
    def with_settings(*args: Any, passes: tuple[str, ...], **kwargs: Any) -> Any:
        given = {each.name: kwargs.pop(each.name) for each in offered}
        given["passes"] = passes or None
        config = {name: value for name, value in given.items() if value is not None}
        return command(*args, config=config, **kwargs)

    decorated: Any = with_settings
    for each in reversed(offered):
        flag = f"--{each.name.replace('_', '-')}"
        about = each.help.replace("`", "")
        if isinstance(each.default, bool):
            names = f"{flag}/--no-{flag[2:]}"
            decorated = click.option(names, default=None, help=about)(decorated)
        else:
            decorated = click.option(
                flag, type=type(each.default), metavar=each.metavar, help=about
            )(decorated)
    about = "Run only this pass; repeatable."
    return cast(
        "Command",
        click.option("--pass", "passes", multiple=True, metavar="NAME", help=about)(decorated),
    )


def configured(job: Job, config: Mapping[str, Any]) -> Job:
    """The job with these settings of its config changed."""
    return replace(job, config=replace(config_of(job), **config)) if config else job
