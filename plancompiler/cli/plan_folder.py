"""Folders of compiled plans where a command takes a job file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.ir.arguments import is_file
from plancompiler.ops.registry import allow_custom_ops
from plancompiler.plan.compiled_plans import INDEX_FILE, CompiledPlans, read_plans


def is_plan_folder(target: str) -> bool:
    """Whether what a command was given is a folder of plans."""
    return is_file(Path(target) / INDEX_FILE)


def load_plans(
    target: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    allow_ops: tuple[str, ...],
) -> CompiledPlans:
    """The plans in a folder. What would change them is a UsageError: they are made already."""
    changed = [*(f"-D {name}={value}" for name, value in settings.items()), *config]
    if changed:
        raise UsageError(
            "plans that are compiled already cannot be changed",
            got=", ".join(changed),
            expected="a folder of plans without settings of the job",
            hint="compile the job again",
        )
    allow_custom_ops(*allow_ops)
    return read_plans(Path(target))
