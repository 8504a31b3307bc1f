"""Files that are whole or absent, written where others may have write access too.

A file is written under an unpredictable name that must not exist, in the folder of its target, and
then renamed. So a reader sees all of it or nothing, and a link that somebody planted is never
written through: one under the temporary name makes creation fail, one under the target's name is
replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from plancompiler.errors import OutputError, PlanCompilerError, UsageError

UNFINISHED = ".partial"
"""How the temporary names end: the target's name, a random number and this."""
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def create_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file, open for reading and writing.

    FileExistsError where anything is there under this name, a dangling link too.
    """
    return os.fdopen(os.open(path, os.O_RDWR | _CREATE, mode), "w+b")


def regular_file(path: str | Path) -> BinaryIO:
    """A file, open for reading. OSError for what is none: a folder, or a pipe or a device, which
    could be waited for without end.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise OSError(errno.EINVAL, f"it is a {_KINDS.get(kind, 'special file')}, not a file")
    return file


def read_file(
    what: str,
    path: Path,
    error: type[PlanCompilerError] = UsageError,
    source: object | None = None,
    *,
    pipes: bool = False,
) -> bytes:
    """The content of a file, or of a pipe where `pipes` allows one, as shells make them of
    `<(command)`. Where it cannot be read, an error that names `what` and the file.
    """
    try:
        with path.open("rb") if pipes else regular_file(path) as file:
            return file.read()
    except OSError as cause:
        raise error(
            f"{what} cannot be read", source=source, got=f"{path}: {cause.strerror or cause}"
        ) from None


def replace_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file in place of what had this name: for files that are written where they lie."""
    path.unlink(missing_ok=True)
    return create_file(path, mode)


@contextlib.contextmanager
def whole_file(path: Path, *, lasting: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when the block ends and nothing when it fails.

    `lasting` makes it survive a power failure right after. Raises the OSErrors of writing.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    file = create_file(temporary, mode)
    try:
        with file:
            yield file
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if lasting:
        _sync_folder(path.parent)


def write_whole(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    *,
    lasting: bool = False,
    mode: int = 0o666,
    keep_going: Callable[[], None] | None = None,
) -> None:
    """Write a file of these pieces; what `keep_going` raises between two of them ends it."""
    with whole_file(path, lasting=lasting, mode=mode) as file:
        for piece in pieces:
            if keep_going is not None:
                keep_going()
            file.write(piece)


def make_writable_folder(path: Path) -> None:
    """Make a folder where there is none, and show that files can be made in it."""
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f"{secrets.token_hex(8)}{UNFINISHED}"
    create_file(probe).close()
    probe.unlink()


@contextlib.contextmanager
def named_file(path: Path) -> Iterator[BinaryIO]:
    """`whole_file` for a path that the user wrote down, which may be a device or a pipe: what is
    none of the disk's files is written in place.
    """
    if not is_stream(path):
        with whole_file(path) as file:
            yield file
        return
    with path.open("wb") as file:
        yield file


def check_writable(path: Path | None, what: str, *, folder: bool = False) -> None:
    """Make sure, before the work for it is done, that a file can be written, where one is wanted;
    else a UsageError that says `what` it is. A `folder` may have to be made first, and is not yet.
    """
    if path is None:
        return
    try:
        if not folder and path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not folder and is_stream(path):
            path.open("wb").close()
            return
        place = path if folder else path.parent
        while folder and not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UsageError(
            f"{what} cannot be written",
            got=f"{str(path)!r}: {error.strerror or error}",
            expected="a folder in which files may be made"
            if folder
            else "a file in a folder that exists and is writable",
        ) from None


def is_stream(path: Path) -> bool:
    """Whether a path is a terminal, a pipe, `/dev/null`, `/dev/stdout` or the like.

    Links are followed in the system's own folders only: elsewhere anybody may have put them.
    """
    try:
        folder = str(path.parent.absolute())
    except OSError:  # it is relative, and the current directory is gone
        return False
    if folder in ("/dev", "/dev/fd") or folder.startswith("/proc/"):
        return path.exists()
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
    return False


@contextlib.contextmanager
def naming_output(what: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of writing `what` to a path into an OutputError that names both."""
    try:
        yield
    except OSError as error:
        raise output_error(what, path, error) from error


def output_error(what: str, path: Path | str, error: OSError) -> OutputError:
    """The error that says that `what` could not be written, where to, and why."""
    return OutputError(
        f"{what} cannot be written",
        got=f"{path}: {error.strerror or error}",
        expected="a place with room, in which files may be made",
    )


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder as lasting as the files, where its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
