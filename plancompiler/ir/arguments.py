"""Numbers and paths that users give to public functions, checked where they are given."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import SupportsFloat, SupportsIndex

from plancompiler.errors import UsageError


def whole_number(name: str, value: object) -> int:
    """A whole number of any integer type (NumPy's too); else a UsageError."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:  # NumPy's arrays claim to be one.
            pass
    raise UsageError(f"{name} must be a whole number", got=repr(value), expected="an int")


def step_count(value: object) -> int:
    """A number of steps, 0 or more; else a UsageError."""
    steps = whole_number("the number of steps", value)
    if steps < 0:
        raise UsageError("the number of steps is negative", got=steps, expected="0 or more")
    return steps


def save_interval(every: object, folder: object | None) -> int:
    """Steps between checkpoints, 0 for none; else a UsageError. It needs a folder to save in."""
    steps = whole_number("save_every", every)
    if steps < 0 or (steps and folder is None):
        raise UsageError(
            "save_every is a number of steps between checkpoints, and goes with a folder",
            got=f"save_every={steps}{' without save' if folder is None else ''}",
            expected="save=FOLDER, and save_every of at least 0",
        )
    return steps


def real_number(name: str, value: object) -> float:
    """A finite number of any real type, but no text; else a UsageError."""
    if isinstance(value, SupportsFloat) and not isinstance(value, (bool, str)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise UsageError(f"{name} must be a finite number", got=repr(value), expected="a float")


def positive_number(name: str, value: object) -> float:
    """A finite number above zero; else a UsageError."""
    number = real_number(name, value)
    if number <= 0:
        raise UsageError(f"{name} must be above zero", got=repr(value), expected="more than 0")
    return number


def number_pair(name: str, value: object) -> tuple[float, float]:
    """Two finite numbers; else a UsageError."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise UsageError(f"{name} must be two numbers", got=repr(value))
    first, second = value
    return real_number(name, first), real_number(name, second)


def folder_path(name: str, value: object) -> Path:
    """A path of text or of pathlib; else a UsageError."""
    return Path(path_text(name, value))


def job_name(value: object) -> str:
    """What a user calls a job: a line of characters that can be shown; else a UsageError."""
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(
            "the name of a job must be a line of printable characters", got=repr(value)[:100]
        )
    return value


def path_text(name: str, value: object) -> str:
    """The same as it was written."""
    path = fspath(value) if isinstance(value, (str, PathLike)) else None
    if path == "":
        raise UsageError(f"{name} must be a path", got="an empty path")
    if not isinstance(path, str):
        raise UsageError(
            f"{name} must be a path", got=repr(value), expected="a text or a pathlib.Path"
        )
    if "\0" in path:
        raise UsageError(
            f"{name} must be a path", got=repr(path), expected="a path without zero characters"
        )
    return path


def absolute_path(name: str, value: object) -> Path:
    """A path of text or of pathlib from the root on, links as they are; else a UsageError, also
    where it is relative and the current directory is gone.
    """
    path = folder_path(name, value)
    try:
        return path.absolute()
    except OSError as error:
        raise UsageError(
            f"{name} is given relative to the current directory, which is gone",
            got=f"{str(path)!r}: {error.strerror}",
            expected="an absolute path, or a current directory that exists",
            hint="change into a folder that exists",
        ) from error


def is_file(path: Path) -> bool:
    """Whether there is a file at a path. UsageError where the system does not let that be seen:
    the name is too long, or a folder on the way is closed to this user.
    """
    return _looked_at(path, Path.is_file)


def is_folder(path: Path) -> bool:
    """The same for a folder."""
    return _looked_at(path, Path.is_dir)


def _looked_at(path: Path, look: Callable[[Path], bool]) -> bool:
    try:
        return look(path)
    except OSError as error:
        raise UsageError(
            "a path cannot be looked at", got=f"{str(path)[:200]!r}: {error.strerror}"
        ) from error
