"""Ctrl-C and SIGTERM for the program until a command starts something that must be stopped."""

from __future__ import annotations

import os
import signal

from plancompiler.cli.interrupts import end, interrupt

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""As shells have it; 128 + SIGTERM likewise."""


def end_at_once_on_signals() -> None:
    """While nothing has been started that must be stopped, SIGINT and SIGTERM end the process.

    An exception would not do: one that is raised while modules are imported may be printed and
    lost, in a callback of the import system. SIGINT stays ignored where it is, as in a background
    job of a shell.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    signal.signal(signal.SIGTERM, _end_at_once)


def raise_on_signals() -> None:
    """From now on they raise instead, so that every `with` on the way stops what it started. Does
    nothing where `end_at_once_on_signals` was not called.
    """
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) is _end_at_once:
        signal.signal(signal.SIGTERM, end)


def _end_at_once(number: int, _frame: object) -> None:
    if number == signal.SIGINT:
        os.write(2, b"plancompiler: interrupted before it had started anything.\n")
    os._exit(128 + number)
