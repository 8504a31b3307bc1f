"""The content of the plan cache: the slices of a job, and the plans that ranks made of slices.

The key of slices is the job, and the key of a plan is its slice and rank. So a worker, which has
only its slice, finds its plan, and an edit of the job that does not change a rank's slice does not
change the key of its plan.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from plancompiler.cache.keys import custom_digests, job_key, slice_key
from plancompiler.cache.store import Store, open_store
from plancompiler.errors import WireFormatError
from plancompiler.ir import Job
from plancompiler.ir.strict_json import JsonObject, parse_json
from plancompiler.plan.plan import ComputeSpec, Plan
from plancompiler.plan.serde import plan_from_bytes, plan_to_bytes

SLICES = "slices"
_INDEX_BYTES = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class JobSlices:
    """The slices of all ranks in their wire form; ranks with equal slices share one."""

    distinct: tuple[bytes, ...]
    of_rank: tuple[int, ...]
    """Per rank the index of its slice."""

    @classmethod
    def of(cls, slices: Mapping[int, bytes]) -> JobSlices:
        """Of the slices by rank, where equal slices are one object."""
        numbers: dict[int, int] = {}
        distinct: list[bytes] = []
        of_rank = []
        for _, data in sorted(slices.items()):
            if id(data) not in numbers:
                numbers[id(data)] = len(distinct)
                distinct.append(data)
            of_rank.append(numbers[id(data)])
        return cls(tuple(distinct), tuple(of_rank))


class PlanCache:
    """Slices and plans in a store. A damaged entry counts as missing."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def key(self, job: Job, world_size: int) -> str | None:
        """The key of a job; None where its plans cannot be kept."""
        return job_key(job, world_size)

    def slices(self, key: str, world_size: int) -> JobSlices | None:
        """The slices of a job."""
        entry = self.store.read(key, SLICES)
        if entry is None:
            return None
        try:
            return slices_from_bytes(entry.data, world_size)
        except WireFormatError as error:
            self.store.reject(key, SLICES, error.report.what)
            return None

    def keep_slices(self, key: str, job: str, slices: JobSlices) -> None:
        """Keep the slices of a job of this name."""
        facts = {"job": job, "world_size": len(slices.of_rank)}
        self.store.write(key, SLICES, facts, slices_to_bytes(slices))

    def plan(self, data: bytes, rank: int) -> Plan | None:
        """The plan that a rank made of a slice, whose wire form is `data`."""
        key = slice_key(data)
        return None if key is None else self.plan_by_key(key, rank)

    def plan_by_key(self, key: str, rank: int) -> Plan | None:
        """The plan by the key of its slice."""
        name = _plan_name(rank)
        entry = self.store.read(key, name)
        if entry is None:
            return None
        try:
            plan = plan_from_bytes(entry.data)
        except WireFormatError as error:
            self.store.reject(key, name, error.report.what)
            return None
        if (plan.rank, plan.world_size) != (rank, entry.facts.get("world_size")):
            self.store.reject(key, name, f"it is the plan of rank {plan.rank}")
            return None
        # The slice names its custom ops; their code may have changed since.
        if entry.facts.get("custom_ops") != custom_digests(_kinds(plan)):
            return None
        return plan

    def keep_plan(self, data: bytes, plan: Plan) -> None:
        """Keep the plan that a rank made of a slice."""
        key = slice_key(data)
        if key is not None:
            self.keep_plan_by_key(key, plan)

    def keep_plan_by_key(self, key: str, plan: Plan) -> None:
        """Keep a plan by the key of its slice."""
        custom = custom_digests(_kinds(plan))
        if custom is None:
            return
        facts: dict[str, Any] = {
            "job": plan.job,
            "world_size": plan.world_size,
            "custom_ops": custom,
        }
        self.store.write(key, _plan_name(plan.rank), facts, plan_to_bytes(plan))


def open_cache() -> PlanCache | None:
    """The cache that the environment names (`plancompiler.cache.store.open_store`)."""
    store = open_store()
    return None if store is None else PlanCache(store)


def _plan_name(rank: int) -> str:
    return f"rank_{rank}"


def _kinds(plan: Plan) -> set[str]:
    return {task.spec.kind for task in plan.tasks if isinstance(task.spec, ComputeSpec)}


# --- the bytes of slices --------------------------------------------------------------------------


def slices_to_bytes(slices: JobSlices) -> bytes:
    """An index as JSON (sizes of the slices, and the ranks of each as runs), then the slices."""
    ranks: list[list[int]] = [[] for _ in slices.distinct]
    for rank, number in enumerate(slices.of_rank):
        ranks[number].append(rank)
    index = json.dumps(
        {"bytes": [len(data) for data in slices.distinct], "ranks": [runs(each) for each in ranks]}
    ).encode()
    return b"".join((_INDEX_BYTES.pack(len(index)), index, *slices.distinct))


def slices_from_bytes(data: bytes, world_size: int) -> JobSlices:
    """The slices of so many ranks; anything else is a WireFormatError."""
    if len(data) < _INDEX_BYTES.size:
        raise WireFormatError("the slices have no index")
    (index_bytes,) = _INDEX_BYTES.unpack_from(data)
    begin = _INDEX_BYTES.size + index_bytes
    what = "the index of the slices"
    index = JsonObject(parse_json(data[_INDEX_BYTES.size : begin], what), what)
    sizes, ranks = index.numbers("bytes"), index.items("ranks")
    if len(sizes) != len(ranks) or begin + sum(sizes) != len(data):
        raise WireFormatError("the index of the slices does not fit them")
    of_rank = [-1] * world_size
    for number, run_list in enumerate(ranks):
        for start, length, stride in _run_list(run_list):
            last = start + (length - 1) * stride
            if not 0 <= start <= last < world_size:
                raise WireFormatError("a slice is for ranks that do not exist")
            if any(taken != -1 for taken in of_rank[start : last + 1 : stride]):
                raise WireFormatError("a rank has two slices")
            of_rank[start : last + 1 : stride] = [number] * length
    if -1 in of_rank:
        raise WireFormatError("a rank has no slice")
    bounds = pairwise(accumulate(sizes, initial=begin))
    return JobSlices(tuple(data[first:last] for first, last in bounds), tuple(of_rank))


def _run_list(run_list: Any) -> Iterator[tuple[int, int, int]]:
    if type(run_list) is not list:
        raise WireFormatError("the ranks of a slice are no list")
    for run in run_list:
        if (
            type(run) is not list
            or len(run) != 3
            or any(type(each) is not int for each in run)
            or min(run[1:]) < 1
        ):
            raise WireFormatError("the ranks of a slice are no runs of ranks")
        yield run[0], run[1], run[2]


def runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending ranks as (start, length, stride): few, where they lie in a mesh."""
    merged: list[tuple[int, int, int]] = []
    for rank in ranks:
        if merged:
            start, length, stride = merged[-1]
            if length == 1:
                merged[-1] = (start, 2, rank - start)
                continue
            if rank == start + length * stride:
                merged[-1] = (start, length + 1, stride)
                continue
        merged.append((rank, 1, 1))
    return merged
