"""Keys of the plan cache: digests of everything that a plan depends on.

A plan is a function of the job, the number of ranks, this package, the versions of the libraries
that it computes with, and the code of custom ops. If any of these cannot be determined, the plan is
not cached.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plancompiler.errors import UnknownOpError, WireFormatError
from plancompiler.ir import Job
from plancompiler.ops.registry import is_import_path, op_def
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.version import VERSION

PACKAGE = Path(__file__).resolve().parent.parent
COMPILER_PACKAGES = (
    "boxing",
    "cache",
    "costs",
    "ir",
    "lower",
    "ops",
    "passes",
    "plan",
    "proto",
    "search",
)
"""The packages whose code makes plans: `lower`, all that it may import, and the serialisation."""
DISTRIBUTIONS = ("networkx", "numpy")
"""Libraries whose versions are part of the key: NetworkX finds the paths between layouts, and NumPy
computes constants."""
LOADED = time.time()
"""Sources that changed later may not be what this process runs."""

_log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def software_digest() -> str | None:
    """One hash over the code that makes plans; None where it cannot be known."""
    sources = sources_digest(PACKAGE, COMPILER_PACKAGES)
    if sources is None:
        return None
    versions = [f"{name} {_version(name)}" for name in DISTRIBUTIONS]
    python = ".".join(map(str, sys.version_info[:3]))
    lines = [sources, VERSION, *versions, f"python {python}", platform.machine(), sys.byteorder]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on the import path, not installed
        return "unknown"


def sources_digest(package: Path, packages: Iterable[str]) -> str | None:
    """One hash over the names and texts of all Python and machine files in folders of a package.

    None where a folder holds none, or where a file changed after this process started.
    """
    digest = hashlib.sha256()
    for name in packages:
        files = sorted(file for kind in ("*.py", "*.toml") for file in (package / name).rglob(kind))
        if not files:
            return None
        for file in files:
            text = _source(file)
            if text is None:
                return None
            digest.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()


def _source(file: Path) -> bytes | None:
    try:
        if file.stat().st_mtime <= LOADED:
            return file.read_bytes()
    except OSError as error:
        _log.info("plans are not cached: a source cannot be read: %s", error)
    else:
        _log.info("plans are not cached: %s changed after this process started", file)
    return None


def job_key(job: Job, world_size: int) -> str | None:
    """The key of a job on so many ranks; None where its plans cannot be kept.

    Source lines count, as they are part of plans; so does the config, which the job carries.
    """
    software = software_digest()
    custom = custom_digests(op.kind for op in job.ops)
    if software is None or custom is None:
        return None
    try:
        data = job_to_bytes(job)
    except WireFormatError:
        return None
    lines = [software, f"{world_size} ranks", *(f"{kind} {one}" for kind, one in custom.items())]
    digest = hashlib.sha256("\n".join([*lines, ""]).encode())
    digest.update(data)
    return digest.hexdigest()


def slice_key(data: bytes) -> str | None:
    """The key of a slice in its wire form, for the plans that are made of it."""
    software = software_digest()
    if software is None:
        return None
    digest = hashlib.sha256(f"{software}\nslice\n".encode())
    digest.update(data)
    return digest.hexdigest()


def custom_digests(kinds: Iterable[str]) -> dict[str, str] | None:
    """Custom op → a hash over its definition and over the file that defines it, by kind.

    None where there is no such op here, or no file that it must come from: an op made inside a
    function, or typed into an interpreter.
    """
    digests = {}
    for kind in sorted({kind for kind in kinds if ":" in kind}):
        if not is_import_path(kind):
            return None
        try:
            definition = op_def(kind)
        except UnknownOpError:
            return None
        module = sys.modules.get(kind.partition(":")[0])
        file = getattr(module, "__file__", None)
        text = None if file is None else _source(Path(file))
        if text is None:
            return None
        rule = repr((definition.rule, definition.linear, definition.reduction))
        digests[kind] = hashlib.sha256(rule.encode() + b"\n" + text).hexdigest()
    return digests
