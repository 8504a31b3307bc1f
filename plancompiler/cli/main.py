"""Where the program starts, with as little as can be before it hears Ctrl-C."""

from __future__ import annotations

from plancompiler.cli.early_signals import end_at_once_on_signals


def main() -> None:
    """Entry point of the console script and of `python -m plancompiler`."""
    end_at_once_on_signals()
    # Later than the handlers: imports take tenths of a second.
    from plancompiler.cli.program import cli  # noqa: PLC0415  # see above

    cli(prog_name="plancompiler")
