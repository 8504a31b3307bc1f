"""Ctrl-C and SIGTERM for the program while there is nothing that must be stopped: until a command
starts something, and once it has ended.
"""

from __future__ import annotations

import os
import signal

from plancompiler.cli.interrupts import end, interrupt, raise_once

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
        raise_once()


def end_silently_on_signals() -> None:
    """From now on they end the process again: the command has stopped what it had started, and an
    exception would be printed. Does nothing where `raise_on_signals` did nothing.
    """
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, _end_silently)
    if signal.getsignal(signal.SIGTERM) is end:
        signal.signal(signal.SIGTERM, _end_silently)


def _end_at_once(number: int, _frame: object) -> None:
    if number == signal.SIGINT:
        os.write(2, b"plancompiler: interrupted before it had started anything.\n")
    os._exit(128 + number)


def _end_silently(number: int, _frame: object) -> None:
    os._exit(128 + number)
