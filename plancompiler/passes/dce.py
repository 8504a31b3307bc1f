"""Dead-code elimination: ops that influence no output and no variable are left out.

Tracing leaves out what the program itself does not need; this is for what other passes leave
behind. Inputs and variables stay: callers feed the former and checkpoints hold the latter.
"""

from __future__ import annotations

from plancompiler.ir import Job
from plancompiler.ops.liveness import live_ops
from plancompiler.passes.base import PassResult, counted, with_ops


def eliminate_dead_code(job: Job) -> PassResult:
    """The job without ops that nobody needs."""
    kept = live_ops(job.ops)
    return PassResult(with_ops(job, kept), f"removed {counted(len(job.ops) - len(kept), 'op')}")
