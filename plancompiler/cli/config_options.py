"""The settings of the compiler as options of commands: those that its passes declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.options import Command, with_options
from plancompiler.frontend.open_layouts import with_config
from plancompiler.ir import Job
from plancompiler.ir.settings import Option
from plancompiler.passes import Config, config_of

LAYOUT_FILE = ".toml"
"""How the names of files with layouts end."""


def config_options(command: Command) -> Command:
    """--pass, and every option of `Config` with a metavar, as one parameter `config`: the settings
    that were given, to change a job's own.
    """
    offered = [each for each in Config.options() if each.metavar is not None]

    @functools.wraps(command)
    def with_settings(*args: Any, passes: tuple[str, ...], **kwargs: Any) -> Any:
        given = {each.name: kwargs.pop(each.name) for each in offered}
        given["passes"] = passes or None
        readers = {each.name: each.read for each in offered}
        config = {
            name: readers[name](value) if isinstance(value, str) else value
            for name, value in given.items()
            if value is not None
        }
        return command(*args, config=config, **kwargs)

    decorated: Command = with_options(
        with_settings,
        click.option(
            "--pass",
            "passes",
            multiple=True,
            metavar="NAME",
            help="Run only this pass; repeatable.",
        ),
        *map(_option, offered),
    )
    return decorated


def _option(setting: Option) -> Callable[[Any], Any]:
    flag = f"--{setting.name.replace('_', '-')}"
    about = setting.help.replace("`", "")
    if isinstance(setting.default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=about)
    return click.option(flag, type=type(setting.default), metavar=setting.metavar, help=about)


def configured(job: Job, config: Mapping[str, Any]) -> Job:
    """The job with these settings of its config changed. A layout may also be a file."""
    layout = str(config.get("layout", ""))
    if not layout.endswith(LAYOUT_FILE):
        return with_config(job, replace(config_of(job), **config)) if config else job
    # It brings the search, which jobs without a layout file do without.
    from plancompiler.search.layout_file import with_layout_file  # noqa: PLC0415

    changed = replace(config_of(job), **{**config, "layout": "auto"})
    return with_layout_file(with_config(job, changed), Path(layout), config)
