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


def user_line() -> SourceLine:
    """The innermost line of the call stack outside this package."""
    folder = _current_folder()
    frame = inspect.currentframe()
    while frame is not None:
        if shown := _path_seen_from(folder, frame.f_code.co_filename):
            return SourceLine(shown, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN_SOURCE


def shown_path(file: str) -> str:
    """How a source file is written in a job: relative to the current directory when below it, else
    its last two parts; empty for files of this package.
    """
    return _path_seen_from(_current_folder(), file)


def _current_folder() -> str:
    """Empty where it is gone."""
    try:
        return os.getcwd()  # noqa: PTH109  # a string
    except OSError:
        return ""


@functools.lru_cache(maxsize=1 << 16)
def _path_seen_from(folder: str, file: str) -> str:
    """`shown_path` where `folder` is the current directory. It is remembered: to follow links, the
    file system is asked about every part of the path.
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
