"""Registers that cross ranks: every rank knows one by the same id, from its own slice alone."""

from __future__ import annotations

import pytest

import plancompiler as pc
from plancompiler.ir.task import rank_of
from plancompiler.lower.compile import compile_plans
from plancompiler.lower.rebuild import CANDIDATE_SLOT

READERS = {
    "one": ("B", pc.Placement("cpu", [1])),
    "some": ("S(0)", pc.Placement("cpu", [2, 4])),
    "others": ("S(1)", pc.Placement("cpu", [3, 1])),
    "mesh": (["S(0)", "S(1)"], pc.Placement("cpu", [[5, 0], [4, 1]])),
    "last": ("B", pc.Placement("cpu", [5])),
}
RANKS = 6


def fan(source: pc.Placement, sbp: str) -> pc.Job:
    """One value, read by ranks of which none sees all the others that read it."""
    with pc.job("fan") as job:
        x = pc.relu(pc.input("x", (5, 7), "float32", source, sbp))
        for name, (layout, placement) in READERS.items():
            pc.output(name, x.redistribute(placement, layout) * 2.0)
    return job


@pytest.mark.parametrize("mode", ["naive", "rank_per_iter"])
@pytest.mark.parametrize(("ranks", "sbp"), [([0], "B"), ([2, 0, 3], "S(0)")])
def test_the_greatest_candidate_is_loaded_the_readers_on_all_ranks(mode, ranks, sbp):
    job = fan(pc.Placement("cpu", ranks), sbp)
    # Each rank is compiled by itself.
    plans = [
        compile_plans(job, RANKS, mode, only_ranks=[rank]).plans[rank] for rank in range(RANKS)
    ]
    readers: dict[int, set[int]] = {}
    for rank, plan in enumerate(plans):
        for task in plan.tasks:
            for register in task.inputs:
                if rank_of(register) != rank:
                    readers.setdefault(register, set()).add(task.id)
    known: dict[int, dict[int, int]] = {}
    for rank, plan in enumerate(plans):
        for register in (*plan.registers, *plan.remote_registers):
            if register.sync_id != -1:
                known.setdefault(register.id, {})[rank] = register.sync_id
    assert set(known) == set(readers)
    seen_by_part = 0
    for register, ids in known.items():
        assert set(ids) == {rank_of(register), *map(rank_of, readers[register])}
        assert set(ids.values()) == {max(readers[register]) + CANDIDATE_SLOT}
        # A rank that took the greatest of the readers of its own would differ.
        for rank in map(rank_of, readers[register]):
            own = {task for task in readers[register] if rank_of(task) == rank}
            seen_by_part += max(own) != max(readers[register])
    assert seen_by_part >= 4
