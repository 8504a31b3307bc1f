"""What a master's job was compiled into, on its way to a client."""

from __future__ import annotations

from typing import Any

import grpc

from plancompiler.cluster.channel import call_error
from plancompiler.cluster.checked import Received, Sent
from plancompiler.cluster.chunks import MAX_JOB_BYTES, Assembler
from plancompiler.errors import ClusterError, DigestMismatchError, WireFormatError
from plancompiler.ir import Job
from plancompiler.lower.rank import plan_of_slice
from plancompiler.plan.compiled_plans import CompiledPlans
from plancompiler.plan.job_serde import job_from_bytes
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes
from plancompiler.plan.verify import verify_plan, verify_plans
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2_grpc import ClientStub


class FetchedPlans:
    """A request for the plans of a job. The master keeps them from now on until they have come."""

    def __init__(self, stub: ClientStub, address: str, job_id: int) -> None:
        self._address = address
        self._call: Any = stub.FetchPlans(Sent()(pb.JobRequest(job_id=job_id)))

    def cancel(self) -> None:
        """Ask for them no longer."""
        self._call.cancel()

    def receive(self) -> CompiledPlans:
        """Wait for them, at most until the job ends, and verify them; raises why there are none.

        Of a job that runs, slices come, and its ranks' compiler makes the same plans of them here:
        they must have the digest that the ranks' own have.
        """
        job: Job | None = None
        graph: bytes | None = None
        plans: dict[int, Plan] = {}
        digest, world_size, kind = "", 0, ""
        ranks: tuple[int, ...] = ()
        received, assembler = Received("the master"), Assembler("compiled plans", MAX_JOB_BYTES)
        try:
            for message in self._call:
                part = received(message)
                if assembler.is_empty:
                    kind, ranks = part.kind, tuple(part.ranks)
                    digest, world_size = part.digest, part.world_size
                data = assembler.add(part.chunk)
                if data is None:
                    continue
                if kind == "job":
                    job = job_from_bytes(data)
                elif kind == "graph":
                    graph = data
                elif kind == "slice":
                    plans.update((rank, plan_of_slice(data, rank)[0]) for rank in ranks)
                elif kind == "plan" and len(ranks) == 1:
                    plans[ranks[0]] = plan_from_bytes(data)
                    verify_plan(plans[ranks[0]])
                else:
                    raise WireFormatError("the master sent an unknown part of plans", got=kind)
        except grpc.RpcError as error:
            raise call_error(error, self._address) from error
        finally:
            self._call.cancel()
        if job is None or sorted(plans) != list(range(world_size)):
            raise ClusterError("the master went away before all plans had come")
        verify_plans(plans)
        compiled = CompiledPlans(job, world_size, plans, graph)
        if compiled.digest != digest:
            raise DigestMismatchError(
                "the plans that came are not those that the ranks have made",
                got=f"digest {compiled.digest}",
                expected=f"digest {digest}",
                hint="use the same version of plancompiler on all sides",
            )
        return compiled
