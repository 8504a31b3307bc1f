"""Files of the plan cache: whole or absent, checked when read, bounded in total.

A folder per key, an entry per file. An entry is a header (magic, version, sizes, sha256), a few
facts about it as JSON, and its bytes. Processes share a store without locks: a file is written
under another name and renamed, so that a reader sees all of it or nothing. Whatever goes wrong here
costs a compilation, never a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plancompiler.errors import UsageError, WireFormatError
from plancompiler.ir.arguments import absolute_path
from plancompiler.ir.strict_json import parse_json
from plancompiler.ir.user_cache import user_cache_folder
from plancompiler.ir.whole_file import UNFINISHED, write_whole
from plancompiler.limits import time_limits

FOLDER_VARIABLE = "PLANCOMPILER_CACHE"
BYTES_VARIABLE = "PLANCOMPILER_CACHE_BYTES"
DEFAULT_BYTES = 1 << 30
FORMAT_VERSION = 1
_OFF = "0"
_MAGIC = b"PCCE"
_HEADER = struct.Struct(">4sHIQ32s")
"""Magic, format version, bytes of the facts, bytes of the entry, sha256 of both."""
_MAX_FACTS_BYTES = 1 << 20
_KEPT_SHARE = 0.9
"""Where the store is too large, the least recently used entries go until this share is left."""
_CHECK_SHARE = 1 / 64
"""A process measures the store anew after writing this share of the limit."""
_STALE_SECONDS = time_limits.STALE
"""A file being written for so long was left by a process that was killed."""
_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"slices|rank_\d+")
_ATTEMPTS = 16
"""At putting an entry in place while others clear the store."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the store."""

    facts: Mapping[str, Any]
    data: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """What the store holds under one key."""

    key: str
    facts: Mapping[str, Any]
    """Of one of its entries."""
    names: tuple[str, ...]
    nbytes: int
    last_used: float
    """Seconds since the epoch."""


class _DamagedError(Exception):
    """A file is no entry of this store; the text says why."""


class Store:
    """Entries by key and name, in a folder. All methods may be called from any thread."""

    def __init__(self, folder: Path, limit: int = DEFAULT_BYTES) -> None:
        self.folder = folder
        self.limit = limit
        """Bytes of all entries together. While several processes write, it can be passed by a
        sixty-fourth part for each of them."""
        self._unmeasured = limit
        """Bytes written since the store was measured: at first, unknown."""
        self._failed = False

    def read(self, key: str, name: str) -> Entry | None:
        """The entry, from now on the most recently used; None where there is none that is whole."""
        path = self.folder / key / name
        try:
            entry = _read(path, key, name, self.limit)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("an entry of the plan cache cannot be read: %s", error)
            return None
        except _DamagedError as error:
            self.reject(key, name, error)
            return None
        with suppress(OSError):
            os.utime(path)
        return entry

    def reject(self, key: str, name: str, why: object) -> None:
        """Say that an entry is of no use; what is written in its place replaces it."""
        _log.warning(
            "entry %s of the plan cache is damaged (%s): compiling again",
            self.folder / key / name,
            why,
        )

    def write(self, key: str, name: str, facts: Mapping[str, Any], data: bytes) -> None:
        """Put an entry in place of what was there. What cannot be written is logged."""
        head = json.dumps({**facts, "key": key, "name": name}).encode()
        nbytes = _HEADER.size + len(head) + len(data)
        if nbytes > self.limit:
            _log.debug("an entry of %d bytes is larger than the whole plan cache", nbytes)
            return
        digest = hashlib.sha256(head)
        digest.update(data)
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, len(head), len(data), digest.digest())
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    self._place(key, name, (header, head, data))
                    break
                except (FileNotFoundError, FileExistsError):
                    # Another process has just removed the empty folder, or removes it right now.
                    if attempt == _ATTEMPTS - 1:
                        raise
            self._unmeasured += nbytes
            if self._unmeasured >= self.limit * _CHECK_SHARE:
                self._unmeasured = 0
                self._trim()
        except OSError as error:
            if not self._failed:
                self._failed = True
                _log.warning(
                    "plans are not kept: the plan cache %s cannot be written: %s",
                    self.folder,
                    error.strerror or error,
                )

    def _place(self, key: str, name: str, parts: tuple[bytes, ...]) -> None:
        folder = self.folder / key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / name, parts, mode=0o600)

    def kept(self) -> list[Kept]:
        """What the store holds, most recently used first."""
        entries = []
        for key, files in self._files().items():
            named = {path: status for path, status in files.items() if _is_entry(path)}
            if not named:
                continue
            facts: Mapping[str, Any] = {}
            for path in named:
                with suppress(OSError, _DamagedError):
                    facts = _facts(path, key)
                    break
            entries.append(
                Kept(
                    key,
                    facts,
                    tuple(sorted(path.name for path in named)),
                    sum(status.st_size for status in named.values()),
                    max(status.st_mtime for status in named.values()),
                )
            )
        return sorted(entries, key=lambda each: (-each.last_used, each.key))

    def clear(self) -> tuple[int, int]:
        """Remove all entries, and nothing else that lies in the folder; how many, and bytes."""
        count = nbytes = 0
        for key, files in self._files().items():
            for path, status in files.items():
                path.unlink(missing_ok=True)
                if _is_entry(path):
                    count += 1
                    nbytes += status.st_size
            with suppress(OSError):
                (self.folder / key).rmdir()
        return count, nbytes

    def _trim(self) -> None:
        """Remove the least recently used entries where the store is too large."""
        oldest = []
        for files in self._files().values():
            for path, status in files.items():
                if _is_entry(path):
                    oldest.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in oldest)
        if total <= self.limit:
            return
        for _, size, path in sorted(oldest):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # unless something else is left in it
                path.parent.rmdir()
            total -= size
            if total <= self.limit * _KEPT_SHARE:
                return

    def _files(self) -> dict[str, dict[Path, os.stat_result]]:
        """Key → its files, unfinished ones too. What others put into the folder is not seen."""
        return {
            folder.name: dict(_statuses(folder))
            for folder in _children(self.folder)
            if _KEY.fullmatch(folder.name) and folder.is_dir()
        }


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _statuses(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in _children(folder):
        if _is_entry(path) or path.name.endswith(UNFINISHED):
            with suppress(OSError):  # another process may have removed it
                yield path, path.stat()


def _is_entry(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _read(path: Path, key: str, name: str, limit: int) -> Entry:
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        head_bytes, data_bytes, checksum = _read_header(file)
        if data_bytes > limit:
            raise _DamagedError(f"it claims to hold {data_bytes} bytes")
        if nbytes != _HEADER.size + head_bytes + data_bytes:
            raise _DamagedError(f"it has {nbytes} bytes")
        head, data = file.read(head_bytes), file.read(data_bytes)
    digest = hashlib.sha256(head)
    digest.update(data)
    if digest.digest() != checksum:
        raise _DamagedError("its checksum does not match its bytes")
    return Entry(_parse(head, key, name), data)


def _facts(path: Path, key: str) -> Mapping[str, Any]:
    """The facts alone, for a list: the rest is neither read nor checked."""
    with path.open("rb") as file:
        head_bytes, _, _ = _read_header(file)
        return _parse(file.read(head_bytes), key, path.name)


def _read_header(file: IO[bytes]) -> tuple[int, int, bytes]:
    """Bytes of the facts, bytes of the entry, checksum."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise _DamagedError(f"{len(header)} bytes are too few")
    magic, version, head_bytes, data_bytes, checksum = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _DamagedError(f"it starts with {magic!r}")
    if version != FORMAT_VERSION:
        raise _DamagedError(f"it is of version {version}, not {FORMAT_VERSION}")
    if head_bytes > _MAX_FACTS_BYTES:
        raise _DamagedError(f"it claims to hold {head_bytes} bytes of facts")
    return head_bytes, data_bytes, checksum


def _parse(head: bytes, key: str, name: str) -> Mapping[str, Any]:
    try:
        facts: Mapping[str, Any] = parse_json(
            head, "the facts of an entry", max_bytes=_MAX_FACTS_BYTES
        )
    except WireFormatError as error:
        raise _DamagedError("it does not say what it is") from error
    if type(facts) is not dict or (facts.get("key"), facts.get("name")) != (key, name):
        raise _DamagedError("it belongs elsewhere")
    return facts


def open_store() -> Store | None:
    """The store that the environment names; None where PLANCOMPILER_CACHE=0 switches it off.

    PLANCOMPILER_CACHE is its folder, by default `plancompiler/plans` below $XDG_CACHE_HOME or
    ~/.cache. PLANCOMPILER_CACHE_BYTES bounds it, by default to 1 GiB. UsageError for anything else
    than a whole number, and for a folder that is relative to a current directory that is gone.
    """
    chosen = os.environ.get(FOLDER_VARIABLE, "").strip()
    if chosen == _OFF:
        return None
    folder = absolute_path(FOLDER_VARIABLE, chosen) if chosen else _default_folder()
    return None if folder is None else Store(folder, _limit())


def _default_folder() -> Path | None:
    folder = user_cache_folder()
    return None if folder is None else folder / "plans"


def _limit() -> int:
    text = os.environ.get(BYTES_VARIABLE, "").strip()
    if not text:
        return DEFAULT_BYTES
    if not text.isdecimal():
        raise UsageError(
            f"{BYTES_VARIABLE} is no number of bytes",
            got=repr(text),
            expected=f"a whole number; by default it is {DEFAULT_BYTES}",
            hint=f"{FOLDER_VARIABLE}={_OFF} switches the plan cache off",
        )
    return int(text)
