"""One rank's run of a compiled function: its plan, and the runtime that it shares with others."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from plancompiler.cache.plan_cache import open_cache
from plancompiler.eager import World
from plancompiler.eager.tracing import DRAWN
from plancompiler.errors import PlanCompilerError, TracingError, TransportError
from plancompiler.executor.comm.base import Transport
from plancompiler.executor.comm.context import CommContext
from plancompiler.executor.comm.host import HostTransport
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.runtime import DEADLINE, Runtime
from plancompiler.ir import Job
from plancompiler.lower.cached import slices_of_job
from plancompiler.lower.rank import plan_of_slice
from plancompiler.ops.registry import Array, Kernel, KernelContext, op_def
from plancompiler.plan.plan import ComputeSpec


@dataclass(frozen=True, slots=True)
class Draws:
    """What eager ops would read of the world's state in one call."""

    seed: int = 0
    """The generator's seed, step, and the number of its next draw."""
    step: int = 0
    number: int = 0
    optimizer_step: int = 0


class CompiledRun:
    """The plan of one rank for a job, ready to step. All ranks of the job make it together."""

    def __init__(self, world: World, job: Job) -> None:
        self._world = world
        self._draws = Draws()
        self._runtime: Runtime | None = None
        self._group: CommContext | None = None
        self._failure: PlanCompilerError | None = None
        """Why a rank of the world has failed."""
        ranks = tuple(sorted({rank for op in job.ops for rank in op.placement.rank_list}))
        if world.rank not in ranks:
            return
        transport: Transport
        deadline = DEADLINE
        if len(ranks) == 1:
            transport = LocalHub().transport(world.rank)
        else:
            deadline = world.comm.deadline
            self._group = world.comm.context(ranks)
            world.comm.aborters.append(self._abort)
            transport = _meet(self._group, world.rank, job)
        cache = open_cache()
        slices, _ = slices_of_job(job, ranks[-1] + 1, cache)
        plan, _ = plan_of_slice(slices.distinct[slices.of_rank[world.rank]], world.rank, cache)
        self._runtime = Runtime(plan, transport, deadline=deadline, adapt=self._adapted)
        world.closers.append(self.close)
        _open_runs.add(self)
        if self._failure is not None:
            self._runtime.abort(self._failure)
        try:
            self._runtime.prepare()
            self._shards = self._runtime.shards()
        except BaseException:
            self.close()
            raise

    def step(self, inputs: Mapping[str, Array], draws: Draws) -> Mapping[str, Array]:
        """Give variables these parts and run one step; afterwards the parts of all variables, which
        hold until the next step. Nothing on a rank that the job does not need.
        """
        runtime = self._runtime
        if runtime is None:
            return {}
        if self._group is not None:
            # Others may still read what this rank holds of the step before.
            self._group.barrier()
        self._draws = draws
        for name, shard in self._shards.items():
            given = inputs.get(name)
            if given is not None:
                np.copyto(shard, given)
        runtime.run(1)
        return self._shards

    def close(self) -> None:
        """Free the memory and leave the other ranks. May be called again."""
        _open_runs.discard(self)
        world = self._world
        if self._group is not None and self._abort in world.comm.aborters:
            world.comm.aborters.remove(self._abort)
        if self.close in world.closers:
            world.closers.remove(self.close)
        runtime, self._runtime = self._runtime, None
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
        of_optimizer = bool(definition.mutates) or spec.kind in _OPTIMIZER_KINDS
        if not of_optimizer and not definition.source:
            return kernel

        def stepped(context: KernelContext, inputs: Any, outputs: Any) -> None:
            draws = self._draws
            context.step = draws.optimizer_step if of_optimizer else draws.step
            context.seed = draws.seed
            kernel(context, inputs, outputs)

        return stepped

    def _drawn(self, kernel: Kernel, attrs: Mapping[str, Any], key: int) -> Kernel:
        def drawn(context: KernelContext, inputs: Any, outputs: Any) -> None:
            draws = self._draws
            number = key - DRAWN + draws.number if key >= DRAWN else key
            context.seed, context.step = draws.seed, draws.step
            if context.attrs["key"] != number:
                context.attrs = {**attrs, "key": number}
            kernel(context, inputs, outputs)

        return drawn


_OPTIMIZER_KINDS = frozenset({"learning_rate", "adafactor_moments", "lamb_direction"})
"""Kinds besides updates that count the steps of an optimizer."""

_hubs: WeakValueDictionary[bytes, LocalHub] = WeakValueDictionary()
_hubs_lock = threading.Lock()
_TOKEN = 16


def _meet(group: CommContext, rank: int, job: Job) -> Transport:
    """This rank's transport to the others, which must have made the same job."""
    process = f"{platform.node()} {os.getpid()}".encode()
    host = platform.node().encode()
    parts = (str(job).encode(), process, host)
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
    if (processes == processes[0]).all():
        with _hubs_lock:
            hub = _hubs.get(token)
            if hub is None:
                hub = _hubs[token] = LocalHub()
        return hub.transport(rank)
    if (hosts == hosts[0]).all():
        return HostTransport(token.hex(), rank)
    raise TransportError(
        "ranks of a compiled function are on several hosts",
        rank=rank,
        hint="run the job on a cluster: pc.Client",
    )


_open_runs: set[CompiledRun] = set()


def _close_open_runs() -> None:
    """Let a program end: streams are threads that Python would wait for."""
    for run in list(_open_runs):
        run.close()


# As in `session`: Python joins all threads before it calls `atexit`.
threading._register_atexit(_close_open_runs)  # type: ignore[attr-defined]  # noqa: SLF001
