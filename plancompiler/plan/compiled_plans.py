"""What a job is compiled into, for all its ranks, and the folder that holds it.

`plans.json` names the files of the folder with their SHA-256; equal plans give equal files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

from plancompiler.errors import (
    PlanCompilerError,
    RankError,
    UsageError,
    VersionError,
    WireFormatError,
)
from plancompiler.ir import Job, verify_job
from plancompiler.ir.arguments import folder_path, is_file
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.ir.whole_file import naming_output, write_whole
from plancompiler.plan.digest import digest_of_plans
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes, plan_to_bytes
from plancompiler.plan.text import format_plan
from plancompiler.plan.verify import verify_plan, verify_plans
from plancompiler.version import VERSION

INDEX_FILE = "plans.json"
GRAPH_FILE = "boxing_task_graph.bin"
MODEL_FILE = "model.json"
"""Instead of `INDEX_FILE` in folders of imported models."""
SUMMARY_FILE = "summary.json"
"""What `plancompiler compile` says of the run that wrote the folder."""
_JOB_FILE = "job.bin"
_FORMAT = 1
_MAX_FILE = 1 << 30
_WRITTEN = re.compile(r"rank_\d+\.(plan|txt)")


@dataclass(frozen=True)
class CompiledPlans:
    """A job and the verified plans of its ranks."""

    job: Job
    """As it was traced."""
    world_size: int
    plans: Mapping[int, Plan]
    """By rank; of a job that was compiled for some ranks only, those of these."""
    graph: bytes | None = None
    """The boxing task graph in its wire form, where it came along."""

    @cached_property
    def digest(self) -> str:
        """One hash over the text form of all plans."""
        return digest_of_plans(self.plans)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write them, in place of what was compiled into the folder before; OutputError where that
        cannot be done.
        """
        folder = folder_path("the folder of plans", folder)
        with naming_output("a folder of plans", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.iterdir():
                old = (INDEX_FILE, GRAPH_FILE, SUMMARY_FILE, _JOB_FILE)
                if file.name in old or _WRITTEN.fullmatch(file.name):
                    file.unlink()
        files = {_JOB_FILE: job_to_bytes(self.job)}
        if self.graph is not None:
            files[GRAPH_FILE] = self.graph
        for rank, plan in sorted(self.plans.items()):
            files[_plan_file(rank)] = plan_to_bytes(plan)
            files[f"rank_{rank}.txt"] = format_plan(plan).encode()
        index = {
            "format": _FORMAT,
            "version": VERSION,
            "job": self.job.name,
            "ranks": self.world_size,
            "digest": self.digest,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        # The index last: a folder with one is whole.
        files[INDEX_FILE] = (json.dumps(index, indent=2) + "\n").encode()
        for name, data in files.items():
            with naming_output("a compiled file", folder / name):
                write_whole(folder / name, (data,))


def read_plans(folder: str | PathLike[str]) -> CompiledPlans:
    """What `CompiledPlans.save` wrote, verified again.

    UsageError for a folder that holds no plans, VersionError for plans of another version,
    RankError where those of some ranks are missing, WireFormatError for damaged files, each naming
    the file.
    """
    folder = folder_path("the folder of plans", folder)
    file = folder / INDEX_FILE
    if not is_file(file):
        is_model = is_file(folder / MODEL_FILE)
        held = f"with {MODEL_FILE}" if is_model else f"without {INDEX_FILE}"
        raise UsageError(
            "this version runs no imported models" if is_model else "the folder holds no plans",
            got=f"{folder}, a folder {held}",
            expected=f"a folder with {INDEX_FILE}",
            hint="write plans with `plancompiler compile FILE --ranks N --out DIR`",
        )
    try:
        index = JsonObject(parse_json(_read(file), "the index of plans"), "the index of plans")
        _check_version(index)
        world_size = index.number("ranks", least=1)
        sums = index.inner("files")
        missing = [rank for rank in range(world_size) if _plan_file(rank) not in sums.names]
    except PlanCompilerError as error:
        raise error.at(source=file) from None
    if missing:
        raise RankError(
            "the folder does not hold the plans of all ranks",
            source=file,
            rank=missing[0],
            got=f"plans of {world_size - len(missing)} ranks",
            expected=f"plans of ranks 0 to {world_size - 1}",
            hint="compile without --rank",
        )
    try:
        job = job_from_bytes(_checked(folder, _JOB_FILE, sums))
        verify_job(job)
    except PlanCompilerError as error:
        raise error.at(source=folder / _JOB_FILE) from None
    plans = {rank: _plan(folder, rank, world_size, sums) for rank in range(world_size)}
    verify_plans(plans)
    graph = _checked(folder, GRAPH_FILE, sums) if GRAPH_FILE in sums.names else None
    compiled = CompiledPlans(job, world_size, plans, graph)
    if compiled.digest != index.text("digest"):
        raise WireFormatError(
            "the plans of the folder are not those that its index names",
            source=file,
            got=f"digest {compiled.digest}",
            expected=f"digest {index.text('digest')}",
        )
    return compiled


def _plan_file(rank: int) -> str:
    return f"rank_{rank}.plan"


def _check_version(index: JsonObject) -> None:
    own, written = VERSION, index.text("version")
    if index.get("format") != _FORMAT or written.split(".")[:2] != own.split(".")[:2]:
        raise VersionError(
            "the plans were written by another version of plancompiler",
            got=f"version {written}",
            expected=f"the major and minor version of this one, {own}",
            hint="compile the job again",
        )


def _plan(folder: Path, rank: int, world_size: int, sums: JsonObject) -> Plan:
    name = _plan_file(rank)
    data = _checked(folder, name, sums)
    try:
        plan = plan_from_bytes(data)
        if (plan.rank, plan.world_size) != (rank, world_size):
            raise RankError(
                "a plan is of another rank or another number of ranks than its folder says",
                got=f"rank {plan.rank} of {plan.world_size}",
                expected=f"rank {rank} of {world_size}",
            )
        verify_plan(plan)
    except PlanCompilerError as error:
        raise error.at(source=folder / name) from None
    return plan


def _checked(folder: Path, name: str, sums: JsonObject) -> bytes:
    """A file of the folder whose bytes are those that the index names."""
    data = _read(folder / name)
    actual = hashlib.sha256(data).hexdigest()
    if actual != sums.text(name):
        raise WireFormatError(
            "a file of compiled plans was changed or damaged since it was written",
            source=folder / name,
            got=f"SHA-256 {actual}",
            expected=f"SHA-256 {sums.text(name)}, as {INDEX_FILE} has it",
            hint="compile the job again",
        )
    return data


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > _MAX_FILE:
            raise WireFormatError(
                "a file of compiled plans is too large", source=file, expected=f"{_MAX_FILE} bytes"
            )
        return file.read_bytes()
    except OSError as error:
        raise WireFormatError(
            "a file of compiled plans cannot be read",
            source=file,
            got=error.strerror or str(error),
            hint="compile the job again",
        ) from None
