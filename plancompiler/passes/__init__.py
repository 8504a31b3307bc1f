"""Rewrites of the job before layouts are chosen: one visible list, run in order.

Which of them run is the job's own config (`pc.job(..., config=pc.Config(...))`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from plancompiler.boxing.fuse import FuseOptions
from plancompiler.boxing.layout_options import LayoutOptions
from plancompiler.boxing.streams import StreamOptions
from plancompiler.costs.choice import MachineOptions
from plancompiler.errors import UsageError
from plancompiler.ir import Job, verify_job
from plancompiler.ir.settings import option
from plancompiler.passes.base import Pass, PassRecord, PassResult
from plancompiler.passes.cse import eliminate_common_subexpressions
from plancompiler.passes.dce import eliminate_dead_code
from plancompiler.passes.fold import fold_constants
from plancompiler.passes.fuse_elementwise import fuse_elementwise
from plancompiler.passes.microbatch import MicrobatchOptions, split_into_microbatches
from plancompiler.passes.mixed_precision import PrecisionOptions, lower_precision
from plancompiler.passes.prune_scaling import prune_gradient_scaling
from plancompiler.passes.recompute import RecomputeOptions, recompute_regions
from plancompiler.passes.sequence_parallel import SequenceOptions, split_sequences
from plancompiler.passes.zero import ZeroOptions, split_training_state

__all__ = [
    "PASSES",
    "Config",
    "Pass",
    "PassRecord",
    "PassResult",
    "chosen",
    "config_of",
    "each_pass",
    "run_passes",
]

PASSES: tuple[Pass, ...] = (
    Pass("mixed_precision", lower_precision, PrecisionOptions),
    Pass("fold", fold_constants),
    Pass("cse", eliminate_common_subexpressions),
    Pass("prune_scaling", prune_gradient_scaling),
    Pass("recompute", recompute_regions),
    Pass("zero", split_training_state, ZeroOptions),
    Pass("sequence_parallel", split_sequences, SequenceOptions),
    Pass("fuse_elementwise", fuse_elementwise, default=False),
    Pass("dce", eliminate_dead_code),
    Pass("microbatch", split_into_microbatches, MicrobatchOptions),
)
"""All passes in the order in which they run. Common subexpressions come before recomputation, whose
copies they would merge again. Micro-batches come last: no other pass knows of them."""


@dataclass(frozen=True, kw_only=True)
class Config(
    MicrobatchOptions,
    ZeroOptions,
    FuseOptions,
    LayoutOptions,
    StreamOptions,
    RecomputeOptions,
    PrecisionOptions,
    SequenceOptions,
    MachineOptions,
):
    """How a job is compiled: the options of all passes and of boxing."""

    passes: tuple[str, ...] | None = option(
        None, "Names of the passes to run, in any order; none given: those that run by default."
    )

    def check(self) -> None:
        if self.passes is None:
            return
        known = [each.name for each in PASSES]
        for name in self.passes:
            if name not in known:
                raise UsageError(
                    "there is no such pass", got=repr(name), expected=f"some of {', '.join(known)}"
                )
        changes = self.changes()
        for each in self.options():
            if each.asks and each.name in changes and each.owner not in self.passes:
                raise UsageError(
                    f"{each.name}={changes[each.name]} is the work of a pass that is not chosen",
                    got=f"passes={','.join(self.passes)}",
                    expected=f"{each.owner} among the passes",
                )


def config_of(job: Job) -> Config:
    """What a job asks of the compiler."""
    return cast("Config", job.config)


def chosen(config: Config) -> tuple[Pass, ...]:
    """The passes that a config asks for, in order."""
    if config.passes is None:
        return tuple(each for each in PASSES if each.default)
    return tuple(each for each in PASSES if each.name in config.passes)


def each_pass(job: Job) -> Iterator[tuple[PassRecord, Job]]:
    """Each pass of the job's config: what it did, and the job after it, verified."""
    verify_job(job)
    for each in chosen(config_of(job)):
        before, begin = len(job.ops), time.perf_counter()
        result = each.run(job)
        if result.job is not job:
            verify_job(result.job)
        job = result.job
        record = PassRecord(
            each.name,
            result.summary,
            result.notes,
            before,
            len(job.ops),
            result.changes,
            time.perf_counter() - begin,
        )
        yield record, job


def run_passes(job: Job) -> tuple[Job, tuple[PassRecord, ...]]:
    """The job after all passes of its config, and what each did."""
    steps = list(each_pass(job))
    return (steps[-1][1] if steps else job), tuple(record for record, _ in steps)
