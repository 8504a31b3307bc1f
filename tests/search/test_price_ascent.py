"""Prices of layouts: what they prove, and what they leave to the linear program."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.passes import run_passes
from plancompiler.search.certificate import lower_bound
from plancompiler.search.layout_search import objective_seconds, search_layouts
from plancompiler.search.linear_program import LayoutProblem, column_count, layout_problem
from plancompiler.search.narrowed_problem import affordable, narrowed_problem
from plancompiler.search.price_ascent import PriceAscent
from plancompiler.search.tied_ops import tie_ops
from tests.search.open_jobs import mlp, transformer

pytest.importorskip("highspy")


def problem_of(hierarchy: tuple[int, ...], layers: int = 1) -> LayoutProblem:
    return layout_problem(tie_ops(run_passes(transformer(hierarchy, layers))[0], 2))


def test_no_sweep_lowers_the_bound():
    ascent = PriceAscent(problem_of((2, 2)))
    bounds = []
    for _ in range(8):
        bounds.append(ascent.bound())
        ascent.climb(1)
    rises = np.diff(bounds)
    assert rises.min() >= -1e-12 * bounds[-1]
    assert bounds[-1] > 1.01 * bounds[0]
    # What is computed anew from the prices alone is the same.
    assert lower_bound(ascent.problem, ascent.prices) == pytest.approx(ascent.bound())


def test_whatever_the_prices_the_bound_is_one():
    job = run_passes(mlp((2, 2)))[0]
    best, problem = search_layouts(job), layout_problem(tie_ops(job, 2))
    ascent, rng = PriceAscent(problem), np.random.default_rng(3)
    ascent.climb()
    assert best.bound_seconds <= best.objective_seconds
    limit, dear = 0.9 * best.held_bytes, best.objective_seconds / best.held_bytes
    tight = search_layouts(job, limit)
    for scale in (0.0, 0.1, 1.0, 100.0):
        prices = [
            [price + scale * rng.normal(size=price.shape) * price.std() for price in each]
            for each in ascent.prices
        ]
        assert lower_bound(problem, prices) <= best.objective_seconds
        assert lower_bound(problem, prices, scale * dear, limit) <= tight.objective_seconds


def test_what_is_left_out_is_in_no_better_layouts():
    ascent = PriceAscent(problem_of((4,)))
    ascent.climb(3)
    whole = search_layouts(ascent.problem.tied.job)
    margin = whole.objective_seconds - ascent.bound()
    small = narrowed_problem(ascent, margin)
    assert column_count(small) < column_count(ascent.problem)
    assert objective_seconds(small, whole.signatures) == pytest.approx(whole.objective_seconds)
    assert affordable(ascent, 10**9) == np.inf
    assert narrowed_problem(ascent, np.inf) is ascent.problem


@pytest.mark.slow
def test_three_axes_have_a_small_gap():
    result = search_layouts(run_passes(transformer((2, 2, 2), 3))[0])
    assert result.gap <= 0.01
