"""One rank's run of a compiled function: its plan, and the runtime that it shares with others."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from plancompiler.cache.plan_cache import open_cache
from plancompiler.eager import World
from plancompiler.eager.tracing import DRAWN
from plancompiler.errors import PlanCompilerError, TracingError
from plancompiler.executor.comm.choice import open_link
from plancompiler.executor.comm.context import CommContext
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.host_identity import HOST_VARIABLE, host_id
from plancompiler.executor.runtime import Runtime
from plancompiler.ir import Job
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.lower.cached import slices_of_job
from plancompiler.lower.compile import is_mode_chosen
from plancompiler.lower.rank import plan_of_slice
from plancompiler.ops.registry import Array, Kernel, KernelContext, op_def
from plancompiler.plan.plan import ComputeSpec


@dataclass(slots=True)
class Draws:
    """The state of the world that eager ops would read in one call."""

    seed: int = 0
    """The generator's seed, step, and the number of its next draw."""
    step: int = 0
    number: int = 0
    counts: tuple[int, ...] = (0,)
    """The steps that optimizers have made, by the `counter` of the ops that go by them."""
    rates: tuple[float, ...] = ()
    """The learning rates of the optimizers that step in the function, in their order."""


class CompiledRun:
    """The plan of one rank for a job, ready to step. All ranks of the job make it together.

    `given` are the variables that are written between runs.
    """

    def __init__(self, world: World, job: Job, given: Collection[str]) -> None:
        self._world = world
        self._draws = Draws()
        self._runtime: Runtime | None = None
        self._group: CommContext | None = None
        self._failure: PlanCompilerError | None = None
        """Why a rank of the world has failed."""
        self._meets = False
        """Whether ranks read each other's variables, which may be written between runs."""
        self.shards: Mapping[str, Array] = {}
        """Arrays of the plan's own memory, by variable; empty on a rank that the job does not need.
        What is there holds until the next run."""
        ranks = tuple(sorted({rank for op in job.ops for rank in op.placement.rank_list}))
        if world.rank not in ranks:
            return
        link: Link
        deadline = DEADLINE
        if len(ranks) == 1:
            link = LocalHub().link(world.rank)
        else:
            deadline = world.comm.deadline
            self._group = world.comm.context(ranks)
            world.comm.aborters.append(self._abort)
            link = _meet(world, self._group, job)
        cache = None if is_mode_chosen() else open_cache()
        slices, _ = slices_of_job(job, ranks[-1] + 1, cache)
        plan, _ = plan_of_slice(slices.distinct[slices.of_rank[world.rank]], world.rank, cache)
        device = None if plan.device == "cpu" else world.spaces.device().device
        self._runtime = Runtime(
            plan,
            link,
            deadline=deadline,
            device=device,
            adapt=self._adapted,
            anomaly=world.anomaly or None,
            record=world.mode.record(self.close),
        )
        world.closed_with[self] = None
        _open_runs.add(self)
        if self._failure is not None:
            self._runtime.abort(self._failure)
        try:
            self._runtime.prepare()
            self.shards = self._runtime.shards()
            if self._group is not None:
                fixed = any(
                    self.shards[name].size and name not in self.movable
                    for name in self.shards.keys() & given
                )
                self._meets = bool(self._group.all_gather(np.array([fixed])).any())
        except BaseException:
            self.close()
            raise

    @property
    def movable(self) -> Collection[str]:
        """Names of the variables that `place` can give other memory."""
        return () if self._runtime is None else self._runtime.movable

    def place(self, arrays: Mapping[str, Array | None]) -> None:
        """Use these arrays as the memory of variables from now on; see `Runtime.place`."""
        if self._runtime is not None:
            self._runtime.place(arrays)

    def step(self, draws: Draws) -> None:
        """Run one step on the values of the variables; on a rank without work, do nothing."""
        runtime = self._runtime
        if runtime is None:
            return
        self._draws = draws
        runtime.run(1)
        if self._meets and self._group is not None:
            # Only then has everybody read what this rank holds.
            self._group.barrier()

    def close(self) -> None:
        """Free the memory and leave the other ranks. May be called again."""
        _open_runs.discard(self)
        world = self._world
        if self._group is not None and self._abort in world.comm.aborters:
            world.comm.aborters.remove(self._abort)
        world.closed_with.pop(self, None)
        runtime, self._runtime = self._runtime, None
        self.shards = {}
        if runtime is not None:
            runtime.close()

    def _abort(self, error: PlanCompilerError) -> None:
        """A rank has failed, here or elsewhere."""
        self._failure = error
        runtime = self._runtime
        if runtime is not None:
            runtime.abort(error)

    def _adapted(self, spec: ComputeSpec, kernel: Kernel) -> Kernel:
        """A kernel that reads seed, step and draws of the call, where it reads any."""
        definition, attrs = op_def(spec.kind), dict(spec.attrs)
        key = attrs.get("key")
        if key.__class__ is int:
            return self._drawn(kernel, attrs, key)
        of_optimizer = bool(definition.mutates) or definition.counts_steps
        if not of_optimizer and not definition.source:
            return kernel
        counter = attrs.get("counter", 0)
        assert isinstance(counter, int)

        def stepped(context: KernelContext, inputs: Any, outputs: Any) -> None:
            draws = self._draws
            context.step = draws.counts[counter] if of_optimizer else draws.step
            context.seed = draws.seed
            context.rates = self._rate
            kernel(context, inputs, outputs)

        return stepped

    def _rate(self, optimizer: int, step: int) -> float | None:
        """As `KernelContext.rates`."""
        rates = self._draws.rates
        return rates[optimizer] if optimizer < len(rates) else None

    def _drawn(self, kernel: Kernel, attrs: Mapping[str, Any], key: int) -> Kernel:
        def drawn(context: KernelContext, inputs: Any, outputs: Any) -> None:
            draws = self._draws
            number = key - DRAWN + draws.number if key >= DRAWN else key
            context.seed, context.step = draws.seed, draws.step
            if context.attrs["key"] != number:
                context.attrs = {**context.attrs, "key": number}
            kernel(context, inputs, outputs)

        return drawn


_hubs: WeakValueDictionary[bytes, LocalHub] = WeakValueDictionary()
_hubs_lock = threading.Lock()
_TOKEN = 16
_process = os.urandom(_TOKEN)
"""A text that distinguishes this process from other processes with the same number."""


def _meet(world: World, group: CommContext, job: Job) -> Link:
    """This rank's link to the others, which must have made the same job."""
    rank = world.rank
    host = host_id(os.environ.get(HOST_VARIABLE, ""))
    parts = (str(job).encode(), _process + str(os.getpid()).encode(), host.encode())
    digests = b"".join(hashlib.blake2b(part, digest_size=_TOKEN).digest() for part in parts)
    own = np.frombuffer(digests + os.urandom(_TOKEN), np.uint8).reshape(1, 4 * _TOKEN)
    every = group.all_gather(own)
    jobs, processes, hosts, tokens = (
        every[:, at : at + _TOKEN] for at in range(0, 4 * _TOKEN, _TOKEN)
    )
    unlike = [
        other
        for other, digest in zip(group.ranks, jobs, strict=True)
        if digest.tobytes() != jobs[0].tobytes()
    ]
    if unlike:
        raise TracingError(
            "ranks have traced different jobs of one compiled function",
            rank=rank,
            got=f"ranks {unlike} differ from rank {group.ranks[0]} in job {job.name!r}",
            hint="all ranks must call it with like arguments and take the same branches in it",
        )
    token = tokens[0].tobytes()
    hub = None
    if (processes == processes[0]).all():
        with _hubs_lock:
            hub = _hubs.setdefault(token, LocalHub())
    here = hosts[group.ranks.index(rank)].tobytes()
    elsewhere = [
        other for other, host in zip(group.ranks, hosts, strict=True) if host.tobytes() != here
    ]
    size, remote = len(group.ranks), world.comm.remote
    return open_link(token.hex(), rank, size, far=elsewhere, remote=remote, hub=hub)


_open_runs: set[CompiledRun] = set()


def _close_open_runs() -> None:
    """Let a program end: streams are threads that Python would wait for."""
    for run in list(_open_runs):
        run.close()


# As in `session`: Python joins all threads before it calls `atexit`.
threading._register_atexit(_close_open_runs)  # type: ignore[attr-defined]  # noqa: SLF001
