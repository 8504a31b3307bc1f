"""Whatever the verifiers accept runs to its end, with the losses of the plans it was made from."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from plancompiler.lower.compile import compile_plans
from tests.examples import gpt, mlp
from tests.plan.mutations import MUTATIONS, accepted, losses, mutant

SMALL = {"batch": 8, "layers": 2, "dim": 16, "heads": 2, "length": 8}
JOBS = {
    "dp_tp": lambda: mlp(layout="dp_tp", ranks=4, hidden=8, batch=8),
    "zero": lambda: gpt(dp=2, zero=3, **{**SMALL, "layers": 1}),
    "pipeline": lambda: gpt(pp=2, schedule="1f1b", microbatches=4, **SMALL),
}
ROUNDS = 4
"""Mutants of each kind and job."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_plans_that_the_verifiers_accept_run_with_the_same_losses(name: str) -> None:
    job = JOBS[name]()
    plans = compile_plans(job, job.world_size).plans
    expected = losses(plans)
    rng = Random(f"mutations of {name}")
    counts: Counter[str] = Counter()
    for kind in sorted(MUTATIONS) * ROUNDS:
        changed = mutant(plans, rng, kind)
        if changed.plans == plans:
            counts["unchanged"] += 1
        elif not accepted(changed.plans):
            counts["refused"] += 1
        else:
            counts["accepted"] += 1
            assert losses(changed.plans) == expected, (kind, changed.ranks)
    assert min(counts["refused"], counts["accepted"]) > 0, counts
