"""Which machine a setting of the compiler means.

The setting is one word: the name of a file that is shipped, or the figures of a user's file. So a
job carries its machine with it, and gives one plan wherever it is compiled. Only who gives a path
has a file read; a setting that came with a job never leads to one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import cast
from urllib.parse import unquote

from plancompiler.costs.machine import FIGURES, Machine
from plancompiler.costs.machine_file import machine_of_figures, read_machine
from plancompiler.errors import UsageError
from plancompiler.ir import Job
from plancompiler.ir.settings import Settings, Word, option

GENERIC = "cpu-generic"
"""The machine of jobs that name none."""
FOLDER = Path(__file__).parent / "machines"


@cache
def machine_names() -> tuple[str, ...]:
    """The machines whose files are shipped."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@lru_cache(maxsize=64)
def machine_of(setting: str) -> Machine:
    """The machine of a setting; a UsageError for what is none, such as a path."""
    if setting.startswith(FIGURES):
        return machine_of_figures(_figures_of(setting))
    if setting not in machine_names():
        raise UsageError(
            "there is no such machine",
            got=repr(setting),
            expected=f"one of {', '.join(machine_names())}, or a machine file",
        )
    return read_machine(FOLDER / f"{setting}.toml")


def _figures_of(setting: str) -> dict[str, str]:
    figures: dict[str, str] = {}
    for part in setting.removeprefix(FIGURES).split(","):
        field, equals, value = part.partition("=")
        if not equals or field in figures:
            raise UsageError("the figures of a machine do not parse", got=repr(part[:80]))
        figures[field] = unquote(value)
    return figures


def chosen_machine(machine: Machine | str | os.PathLike[str]) -> Machine:
    """The machine that a user means: itself, a setting or a path of a machine file, which is read.

    Raises UsageError for anything else, and for files that do not describe a machine.
    """
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, os.PathLike):
        return read_machine(Path(machine))
    if not isinstance(machine, str):
        raise UsageError(
            "a machine is given by its name or its file",
            got=repr(machine),
            expected=f"one of {', '.join(machine_names())}, a path, or what was read of one",
        )
    if not machine.startswith(FIGURES) and (machine.endswith(".toml") or os.sep in machine):
        return read_machine(Path(machine))
    return machine_of(machine)


@cache
def generic_machine() -> Machine:
    """The machine of jobs that name none."""
    return machine_of(GENERIC)


def machine_of_job(job: Job) -> Machine:
    """The machine that a job's config names."""
    return machine_of(cast("MachineOptions", job.config).machine)


def _setting_of(machine: object) -> str:
    """The setting for what a user gives."""
    if isinstance(machine, str) and machine in machine_names():
        return machine
    return chosen_machine(machine).text  # type: ignore[arg-type]  # which checks it


def _check(setting: str) -> None:
    if setting not in machine_names():
        machine_of(setting)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Settings):
    """What all costs are computed for."""

    machine: str = option(
        GENERIC,
        "The machine by whose figures layouts, buckets and recomputation are chosen: a name or a "
        "file.",
        metavar="MACHINE",
        word=Word(_setting_of, _check),
    )
