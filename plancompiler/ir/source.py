"""Source lines: where in the user's program something was called."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from pathlib import Path

from plancompiler.ir.op import UNKNOWN_SOURCE, SourceLine

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_BETWEEN = frozenset((contextlib.__file__, functools.__file__))
"""They call this package back on behalf of itself."""


def user_line(shown_paths: dict[str, str] | None = None) -> SourceLine:
    """The innermost line of the call stack outside this package.

    `shown_paths` remembers how files are written, for callers that ask often.
    """
    shown_paths = {} if shown_paths is None else shown_paths
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        shown = shown_paths.get(file)
        if shown is None:
            shown = shown_paths[file] = shown_path(file)
        if shown:
            return SourceLine(shown, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN_SOURCE


def shown_path(file: str) -> str:
    """How a source file is written in a job: relative to the current directory when below it, else
    its last two parts; empty for files of this package.
    """
    if file.startswith("<"):
        return file if not file.startswith("<frozen") else ""
    path = file
    with contextlib.suppress(OSError):  # the current directory is gone
        path = os.path.abspath(file)  # noqa: PTH100  # Path.resolve would follow links
        real = os.path.realpath(path)
        if file in _BETWEEN or path.startswith(_PACKAGE) or real.startswith(_PACKAGE):
            return ""
        relative = os.path.relpath(path)
        if not relative.startswith(os.pardir):
            return Path(relative).as_posix()
    return "/".join(Path(path).parts[-2:])
