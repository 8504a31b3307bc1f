"""Rewrites of the job before layouts are chosen: one visible list, run in order.

There is none yet; `run_passes` is the one place where they will be called.
"""

from __future__ import annotations

from collections.abc import Callable

from plancompiler.ir import Job, verify_job

PASSES: tuple[Callable[[Job], Job], ...] = ()
"""Each takes a job and gives a job that computes the same outputs."""


def run_passes(job: Job) -> Job:
    """The job after all passes, verified after each."""
    verify_job(job)
    for rewrite in PASSES:
        job = rewrite(job)
        verify_job(job)
    return job
