"""The program `plancompiler`: its commands, and how their errors end."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from plancompiler.cli.cache import cache_command
from plancompiler.cli.compile import compile_command
from plancompiler.cli.doctor import doctor_command
from plancompiler.cli.inspect import inspect_command
from plancompiler.cli.launch import launch_command
from plancompiler.cli.master import master_command
from plancompiler.cli.ops import ops_command
from plancompiler.cli.output import configure_logging, print_note
from plancompiler.cli.run import run_command
from plancompiler.cli.submit import submit_command
from plancompiler.cli.worker import worker_command
from plancompiler.errors import PlanCompilerError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_TERMINATED = 143  # 128 + SIGTERM


class Program(click.Group):
    """A group whose every failure is one paragraph on stderr and an exit code."""

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
            result = super().main(args, prog_name, standalone_mode=False, **extra)
        except PlanCompilerError as error:
            _explain(error, str(error))
            sys.exit(error.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
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


@click.group("plancompiler", cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    package_name="plancompiler", prog_name="plancompiler", message="%(prog)s %(version)s"
)
def cli() -> None:
    """Turn a Python program with device placements into one static plan per rank, and run it.

    \b
    Example:
      plancompiler run examples/mlp.py --ranks 2

    Logs go to stderr at the level of PLANCOMPILER_LOG: debug, info, warning or error.
    """
    configure_logging()


for _command in (
    run_command,
    compile_command,
    inspect_command,
    master_command,
    worker_command,
    submit_command,
    launch_command,
    ops_command,
    cache_command,
    doctor_command,
):
    cli.add_command(_command)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Leave as an exception does, so that every `with` on the way stops what it started."""
    sys.exit(EXIT_TERMINATED)


def main() -> None:
    """Entry point of the console script and of `python -m plancompiler`."""
    signal.signal(signal.SIGTERM, _terminate)
    cli(prog_name="plancompiler")
