"""The program `plancompiler`: its commands, and how their errors end.

A command is loaded when it is asked for, so `--help` needs none of the compiler.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Any, cast

import click

from plancompiler.cli.early_signals import (
    EXIT_INTERRUPTED,
    end_silently_on_signals,
    raise_on_signals,
)
from plancompiler.cli.output import configure_logging, end_results, print_note
from plancompiler.errors import PlanCompilerError
from plancompiler.lower.collector import collector_paused
from plancompiler.version import VERSION

COMMANDS = {
    "attach": "Follow a job of a master.",
    "cache": "Show or empty the plan cache.",
    "calibrate": "Measure this machine for forecasts.",
    "cancel": "Stop a job of a master.",
    "compile": "Compile a job without running it.",
    "doctor": "Report what works on this machine, and why not.",
    "fetch": "Bring here what a job made.",
    "forecast": "Tell what a job takes on a machine before it runs.",
    "import": "Make a folder of a model of another system.",
    "inspect": "Print compiled plans.",
    "jobs": "List the jobs of a master.",
    "launch": "Start a script as several ranks.",
    "logs": "Show what the ranks of a job printed.",
    "manifest": "Print what a cluster is told to start a run.",
    "master": "Take jobs, compile them and drive workers.",
    "ops": "List the op table.",
    "plan-diff": "Compare two sets of plans, or two forecasts.",
    "run": "Compile a job and run it on this machine.",
    "search": "Search for the best layouts of a job.",
    "status": "Show one job of a master.",
    "submit": "Send a job to a master and follow it.",
    "worker": "Run one rank of a master's jobs.",
}
"""Command to what the program's help says of it. Its module has its name, with `_` for `-`."""
EXIT_FAILED = 1


def load_command(name: str) -> click.Command:
    """One of `COMMANDS`, with all that it needs."""
    identifier = name.replace("-", "_")
    with collector_paused():  # modules stay: looking through them takes a tenth of the start
        module = importlib.import_module(f"plancompiler.cli.{identifier}")
    return cast("click.Command", getattr(module, f"{identifier}_command"))


class CommandLine(click.Group):
    """A group whose every failure is one paragraph on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the program's help; click would load all commands for it."""
        with formatter.section("Commands"):
            formatter.write_dl(tuple(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        resolved = super().resolve_command(ctx, args)
        raise_on_signals()  # from here on there may be something to stop
        return resolved

    def main(  # type: ignore[override]  # click overloads it by the value of standalone_mode
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; in standalone mode this always ends in SystemExit."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **extra)
        try:
            try:
                result = super().main(args, prog_name, standalone_mode=False, **extra)
                end_results()
            finally:
                end_silently_on_signals()
        except PlanCompilerError as error:
            _explain(error, str(error))
            sys.exit(error.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            print_note("plancompiler: interrupted; everything it started has been stopped.")
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:
            _explain(
                error,
                f"{type(error).__name__}: {error} (an error that plancompiler did not foresee). "
                "What to do: set PLANCOMPILER_LOG=debug to see the traceback.",
            )
            sys.exit(EXIT_FAILED)
        # Without standalone mode click returns the code of `--help`, `--version` and Context.exit.
        sys.exit(result if isinstance(result, int) else 0)


def _explain(error: BaseException, text: str) -> None:
    if logging.getLogger("plancompiler").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error, file=sys.stderr)
    print_note("plancompiler: " + " ".join(text.splitlines()))


@click.group(
    "plancompiler", cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(VERSION, prog_name="plancompiler", message="%(prog)s %(version)s")
def cli() -> None:
    """Turn a Python program with device placements into one static plan per rank, and run it.

    \b
    Example:
      plancompiler run examples/mlp.py --ranks 2

    Logs go to stderr at the level of PLANCOMPILER_LOG: debug, info, warning or error.
    """
    configure_logging()
