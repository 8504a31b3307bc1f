"""Where runs of reductions are cut: no other cut ends earlier, and gpt tiny overlaps unasked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from plancompiler.boxing.buckets import FIRST_BYTES, MOST_BYTES, balanced, cut
from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.step_time import placed_op_seconds
from plancompiler.cli.job_file import load_job
from plancompiler.ir.task import family_of
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec, Task
from plancompiler.simulate import simulate
from tests.examples import EXAMPLES
from tests.passes.worlds import configured


def last_end(
    ready: Sequence[float], nbytes: Sequence[int], start: float, per_byte: float, ends: list[int]
) -> float:
    """When all buckets are reduced, one after another."""
    now = 0.0
    for begin, end in pairwise([0, *ends]):
        now = max(now, ready[end - 1]) + start + per_byte * sum(nbytes[begin:end])
    return now


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_ends_earlier(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    ready = np.cumsum(rng.exponential(rng.choice([0.1, 1.0, 10.0]), count)).tolist()
    nbytes = [int(size) for size in rng.integers(0, 100, count)]
    start, per_byte = float(rng.choice([0.1, 1.0])), float(rng.choice([0.001, 0.01, 0.1]))
    ends = balanced(ready, nbytes, start, per_byte)
    assert ends[-1] == count
    assert ends == sorted(set(ends))
    inner = range(1, count)
    every = [[*some, count] for length in range(count) for some in combinations(inner, length)]
    best = min(last_end(ready, nbytes, start, per_byte, each) for each in every)
    assert last_end(ready, nbytes, start, per_byte, ends) == pytest.approx(best)


def test_where_backward_takes_longer_the_last_bucket_is_small() -> None:
    ready = [float(layer) for layer in range(64)]
    nbytes = [1 << 18] * 64
    ends = cut(ready, nbytes, 1e-3, 1e-7)
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    assert sizes[0] * (1 << 18) == FIRST_BYTES
    assert sizes[-1] == 1
    assert 3 <= len(sizes) <= 16


def test_where_communication_takes_longer_it_starts_early_and_in_few_calls() -> None:
    ready = [layer * 1e-3 for layer in range(64)]
    nbytes = [1 << 18] * 64
    ends = cut(ready, nbytes, 1e-3, 1e-6)
    assert ends[0] * (1 << 18) <= FIRST_BYTES
    assert len(ends) <= 12


def test_no_bucket_has_more_than_its_most_bytes() -> None:
    nbytes = [MOST_BYTES // 3] * 10 + [2 * MOST_BYTES]
    ends = cut([0.0] * 11, nbytes, 1.0, 1e-12)
    for begin, end in pairwise([0, *ends]):
        assert end - begin == 1 or sum(nbytes[begin:end]) <= MOST_BYTES


@pytest.mark.slow
def test_gpt_tiny_overlaps_without_being_asked() -> None:
    """By simulation with the estimated costs, and where communication is slower than these."""

    def exposed(slower: float, **settings: object) -> float:
        tiny = load_job(str(EXAMPLES / "gpt.py"), {"preset": "tiny", "dp": 2})
        job = configured(tiny, **{"fuse_bytes": "auto", **settings})
        compiled = compile_plans(job, 2, "rank_per_iter")
        ops = {placed.family: placed_op_seconds(placed) for placed in compiled.graph.ops}
        calls = {each.family: each.seconds * slower for each in boxing_costs(compiled.graph)}

        def cost(rank: int, task: Task) -> float:
            family = family_of(task.id)
            return calls.get(family, 0.0) or ops.get(family, 0.0)

        computed = sum(
            cost(0, task)
            for task in compiled.plans[0].tasks
            if not isinstance(task.spec, CollectiveSpec)
        )
        return simulate(compiled.plans, cost).makespan - computed

    for slower in (1.0, 10.0, 40.0):
        whole = exposed(slower, fuse_bytes=1 << 30)
        assert exposed(slower) < whole / 4
