"""How often the stages of the compiler run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from plancompiler.lower import cached, rank
from plancompiler.lower import compile as whole

STAGES = (
    (whole, "run_passes"),
    (whole, "infer_sbp"),
    (whole, "build_boxing_task_graph"),
    (whole, "slices_by_rank"),
    (cached, "slices_by_rank"),
    (whole, "plan_of_part"),
    (whole, "compile_in_processes"),
    (rank, "rebuild_rank_task_graph"),
    (rank, "emit_plan"),
    (rank, "verify_plan"),
)
"""All that compiling is made of, by the modules that call it."""


def count_work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts from now on how often each stage runs in this process; all of them run as ever."""
    count: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return function(*args, **kwargs)

        return call

    for module, name in STAGES:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return count
