"""Where a command's words go: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import click

from plancompiler.errors import UsageError

LOG_VARIABLE = "PLANCOMPILER_LOG"
UNFOLDED_WIDTH = 1000
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
LOG_LEVELS = ("debug", "info", "warning", "error")


def configure_logging() -> None:
    """Send the package's log lines to stderr at the level of `PLANCOMPILER_LOG` (else warning)."""
    name = os.environ.get(LOG_VARIABLE, "").strip().lower() or "warning"
    if name not in LOG_LEVELS:
        raise UsageError(
            f"{LOG_VARIABLE} is not a log level", got=repr(name), expected=" or ".join(LOG_LEVELS)
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("plancompiler")
    logger.handlers[:] = [handler]
    logger.setLevel(name.upper())
    logger.propagate = False


def log_as_json() -> logging.Handler:
    """From now on log lines and notes are JSON objects, one a line; what writes log lines."""
    global _notes_as_json
    _notes_as_json = True
    (handler,) = logging.getLogger("plancompiler").handlers
    handler.setFormatter(_JsonFormatter())
    logging.getLogger().addHandler(handler)  # those of other packages, too
    return handler


_notes_as_json = False
_PLACES = ("job", "rank", "peer")
"""What a log line may say of where it belongs, as attributes of its record."""


def plain(text: str) -> str:
    """Text for a terminal, which obeys nothing that somebody else has put into it."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _PlainFormatter(logging.Formatter):
    """A record as it is shown on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _JsonFormatter(logging.Formatter):
    """A record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {place: getattr(record, place) for place in _PLACES if hasattr(record, place)}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, on one line."""
    print_result(json.dumps(value, allow_nan=True))


def print_result(text: str = "", end: str = "\n") -> None:
    """Text on stdout; OutputError where it cannot be written there."""
    with _writing_results():
        click.echo(text + end, nl=False)


def end_results() -> None:
    """Write out what stdout still holds back; OutputError where that cannot be."""
    if sys.stdout is not None:
        with _writing_results():
            sys.stdout.flush()


@contextmanager
def _writing_results() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Else the interpreter tries again at its end, and complains in words of its own.
        with Path(os.devnull).open("wb") as nowhere, suppress(OSError):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            sys.exit(1)
        # It brings NumPy, which a command that only shows its help does without.
        from plancompiler.ir.whole_file import output_error  # noqa: PLC0415  # see above

        raise output_error("the result", "standard output", error) from error


def print_note(line: str, job: int | None = None) -> None:
    """A plain line on stderr, of a `job` where one is named."""
    print_notes([(line, job)])


def print_notes(notes: Iterable[tuple[str, int | None]]) -> None:
    """Lines and their jobs, written at once."""
    click.echo("\n".join(_note(line, job) for line, job in notes), err=True)


def _note(line: str, job: int | None) -> str:
    if not _notes_as_json:
        return plain(line if job is None else f"job {job}: {line}")
    record = logging.LogRecord("plancompiler", logging.INFO, "", 0, line, (), None)
    if job is not None:
        record.job = job
    return _JsonFormatter().format(record)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table on stdout; columns whose head starts with `>` are aligned right."""
    # Only tables and bars need it, and it takes longer to import than most commands to answer.
    from rich.console import Console  # noqa: PLC0415  # see above
    from rich.table import Table  # noqa: PLC0415  # see above

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(plain(str(cell)) for cell in row))
    # Into a file or pipe nothing is folded, so that programs can read the lines.
    width = None if sys.stdout.isatty() else UNFOLDED_WIDTH
    with _writing_results():
        Console(file=sys.stdout, highlight=False, markup=False, width=width).print(table)


def format_bytes(count: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class Advance(Protocol):
    """Reports that one more unit of work is done, and what there is to say about it."""

    def __call__(self, text: str) -> None: ...


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere about ten plain lines. Both on stderr."""
    if sys.stderr.isatty():
        # See `print_table`.
        from rich.console import Console  # noqa: PLC0415  # see above
        from rich.progress import (  # noqa: PLC0415  # see above
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(title, total=total, text="")
            yield lambda text: bar.update(task, advance=1, text=plain(text))
        return
    done = 0
    every = max(1, total // 10)

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        if done == 1 or done == total or done % every == 0:
            print_note(f"{title} {done}/{total} {text}".rstrip())

    yield advance
