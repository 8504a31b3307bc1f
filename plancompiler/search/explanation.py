"""Why a tensor has the layout that a search has chosen: what the next best would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.ir import Job, NdSbp, Op
from plancompiler.search.layout_file import name_of
from plancompiler.search.layout_search import LayoutSearch, search_layouts


@dataclass(frozen=True)
class Explanation:
    """The layout of a tensor, and its rival."""

    name: str
    layout: NdSbp
    objective_seconds: float
    tied: int
    """Tensors of repeated layers that are decided about together."""
    second: NdSbp | None
    """None where no other layout fits."""
    second_seconds: float | None
    decided_by: str
    """The user's demand, with its line; the memory limit; or the cost."""

    def lines(self) -> list[str]:
        """The explanation as text."""
        among = f", with {self.tied - 1} others like it" if self.tied > 1 else ""
        lines = [f"{self.name}: {self.layout}{among}, in a step of {self.objective_seconds:.4g} s"]
        if self.second is None or self.second_seconds is None:
            lines.append("no other layout is possible")
        else:
            more = self.second_seconds - self.objective_seconds
            lines.append(
                f"second best: {self.second}, in a step of {self.second_seconds:.4g} s "
                f"({more:+.3g} s)"
            )
        return [*lines, f"decided by {self.decided_by}"]

    def as_data(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return {
            "name": self.name,
            "layout": str(self.layout),
            "objective_seconds": self.objective_seconds,
            "tied": self.tied,
            "second": None if self.second is None else str(self.second),
            "second_seconds": self.second_seconds,
            "decided_by": self.decided_by,
        }


def explain_layout(
    result: LayoutSearch,
    name: str,
    memory_bytes: float | None,
) -> Explanation:
    """Explain the layout of an input, a parameter, or any value by its name in the job's text.

    UsageError for a name that the job does not have. A search that split large parameters kept to
    no limit of memory.
    """
    limit = None if result.split_parameters else memory_bytes
    op, value = tensor_of(result.job, name)
    layout = result.layouts()[value]
    tied = result.times.get(value, 1)
    if op.sbp is not None:
        line = f"the demand at {op.source}"
        return Explanation(name, layout, result.objective_seconds, tied, None, None, line)
    try:
        rival = search_layouts(
            result.job,
            limit,
            (value, layout),
            split_parameters=result.split_parameters,
            whole=result.whole,
        )
    except UsageError:
        return Explanation(
            name, layout, result.objective_seconds, tied, None, None, "what the ops accept"
        )
    decided = "the cost"
    if result.split_parameters:
        free = search_layouts(result.job, whole=result.whole).layouts()[value]
        if free != layout:
            decided = f"that large parameters are split: else the layout would be {free}"
    elif memory_bytes is not None:
        free = search_layouts(result.job).layouts()[value]
        if free != layout:
            decided = f"the memory limit: without it, the layout would be {free}"
    return Explanation(
        name,
        layout,
        result.objective_seconds,
        tied,
        rival.layouts()[value],
        rival.objective_seconds,
        decided,
    )


def tensor_of(job: Job, name: str) -> tuple[Op, str]:
    """The op that makes a tensor, and the value, by either name. UsageError where there is none."""
    for op in job.ops:
        for value in op.outputs:
            if name in (value.name, name_of(op)) or name == f"%{value.name}":
                return op, value.name
    known = [name_of(op) for op in job.ops if op.kind in ("input", "variable")]
    raise UsageError(
        "the job has no tensor of this name",
        got=repr(name),
        expected=", ".join(known[:8]) + ", … or a value of the job's text",
    )
