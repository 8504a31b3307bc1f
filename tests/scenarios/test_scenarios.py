"""The scenarios of other systems' tests, run in one world per mesh, eagerly and as jobs.

Values and gradients are compared with NumPy's, and put together from the ranks' own parts.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import PlanCompilerError
from tests.ops.sharding import assemble, split
from tests.scenarios.scenario import MESHES, WORLDS, Scenario
from tests.scenarios.tables import TABLES


def scenarios_of(table: str, mesh: str) -> list[Scenario]:
    return [each for each in TABLES[table] if each.mesh == mesh]


MANY = 40
"""Tables with more scenarios of a mesh take half a second of a processor or more."""
RUNS = [
    pytest.param(table, mesh, marks=[pytest.mark.slow] * (len(scenarios_of(table, mesh)) > MANY))
    for table, scenarios in TABLES.items()
    for mesh, _ in groupby(sorted(each.mesh for each in scenarios))
]


def results_of(made):
    return list(made) if isinstance(made, (tuple, list)) else [made]


def run_eagerly(scenario, shards):
    """This rank's parts of the results and gradients, with their placements and layouts."""
    mesh, rank = MESHES[scenario.mesh], pc.eager.current_world().rank
    tensors = []
    for number, (value, sbp) in enumerate(zip(scenario.inputs, scenario.layouts, strict=True)):
        local = np.empty((0,) * value.ndim, value.dtype)
        if rank in mesh:
            local = shards[number][mesh.coordinates(mesh.parallel_id(rank))]
        x = pc.from_local(local, mesh, sbp, shape=value.shape)
        x.requires_grad = number in scenario.differentiated
        tensors.append(x)
    made = results_of(scenario.program(*tensors))
    gradients = []
    if scenario.differentiated:
        terms = [(y * pc.tensor(w, y.placement)).sum() for y, w in weighted(scenario, made)]
        loss = terms[0]
        for term in terms[1:]:
            loss = loss + term
        loss.backward()
        gradients = [tensors[number].grad for number in scenario.differentiated]
    return [part_of(y) for y in made], [part_of(each) for each in gradients]


def weighted(scenario, made):
    return zip(made, scenario.slopes, strict=True)


def part_of(x):
    return None if x is None else (x.placement, x.sbp, x.spec.space.get(x.local))


def run_all(scenarios, shards):
    """Per scenario what `run_eagerly` returns, or the error, which is the same on all ranks."""
    outcomes = []
    for number, scenario in enumerate(scenarios):
        try:
            outcomes.append(run_eagerly(scenario, shards[number]))
        except PlanCompilerError as error:
            outcomes.append(error)
    return outcomes


def whole(parts):
    """A tensor's value, from the parts of all ranks."""
    placement, sbp, _ = parts[0]
    shards = {
        placement.coordinates(placement.parallel_id(rank)): parts[rank][2]
        for rank in placement.rank_list
    }
    return assemble(shards, sbp, placement.hierarchy)


def compare(actual, wanted, what):
    assert actual.shape == wanted.shape, what
    assert actual.dtype == wanted.dtype, f"{what}: {actual.dtype} is not {wanted.dtype}"
    np.testing.assert_allclose(actual, wanted, 1e-9, 1e-9, err_msg=what)


def compare_gradient(actual, wanted, what):
    """No gradient is a gradient of zeros; differences are exact to 1e-8 or so."""
    actual = np.zeros_like(wanted) if actual is None else actual
    assert actual.shape == wanted.shape, what
    np.testing.assert_allclose(actual, wanted, 1e-6, 1e-6, err_msg=what)


def check_eagerly(scenario, outcomes):
    """The outcomes of all ranks."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failed:
        raise failed[0]
    for number, wanted in enumerate(scenario.results):
        parts = [results[number] for results, _ in outcomes]
        compare(whole(parts), wanted, f"result {number}")
        if scenario.out is not None:
            assert parts[0][1] == scenario.out, f"{parts[0][1]} is not {scenario.out}"
    for number, wanted in enumerate(scenario.slopes_of_inputs):
        parts = [gradients[number] for _, gradients in outcomes]
        value = None if parts[0] is None else whole(parts)
        compare_gradient(value, wanted, f"gradient {number}")


def failures(scenarios, check):
    """Lines about the scenarios whose check fails."""
    lines = []
    for number, scenario in enumerate(scenarios):
        try:
            check(number, scenario)
        except (PlanCompilerError, AssertionError) as error:
            lines.append(f"{scenario.label}: {type(error).__name__} {error}")
    return lines


@pytest.mark.parametrize(("table", "mesh"), RUNS)
def test_eager_scenarios_equal_numpy(table, mesh):
    scenarios = scenarios_of(table, mesh)
    rng = np.random.default_rng(1)
    hierarchy = MESHES[mesh].hierarchy
    shards = [
        [
            split(value, sbp, hierarchy, rng)
            for value, sbp in zip(scenario.inputs, scenario.layouts, strict=True)
        ]
        for scenario in scenarios
    ]
    ranks = spawn(run_all, WORLDS[mesh], scenarios, shards)

    def check(number, scenario):
        check_eagerly(scenario, [outcomes[number] for outcomes in ranks])

    lines = failures(scenarios, check)
    assert not lines, "\n".join(lines)


def traced(scenario, number, feeds):
    """Put a scenario into the job, with outputs under names with its number. Returns the terms of
    its loss, and the inputs whose gradients are compared, with the names of these.
    """
    mesh = MESHES[scenario.mesh]

    def given(name, value, sbp):
        feeds[name] = value
        return pc.input(name, value.shape, str(value.dtype), mesh, sbp, batched=False)

    tensors = [
        given(f"x{number}_{n}", value, sbp)
        for n, (value, sbp) in enumerate(zip(scenario.inputs, scenario.layouts, strict=True))
    ]
    made = results_of(scenario.program(*tensors))
    for n, y in enumerate(made):
        pc.output(f"y{number}_{n}", y)
    terms = []
    if scenario.differentiated:
        terms = [
            (y * given(f"w{number}_{n}", w, None).redistribute(y.placement)).sum()
            for n, (y, w) in enumerate(weighted(scenario, made))
        ]
    wanted = enumerate(scenario.differentiated)
    return terms, {f"g{number}_{n}": tensors[place] for n, place in wanted}


def job_of(table, mesh, scenarios):
    """All scenarios of a mesh as one job, which differentiates the sum of all losses once."""
    feeds, terms, wrt = {}, [], {}
    with pc.job(table, seed=3) as job:
        for number, scenario in enumerate(scenarios):
            more, inputs = traced(scenario, number, feeds)
            terms += [term.redistribute(MESHES[mesh]) for term in more]
            wrt |= inputs
        gradients = pc.gradients(pc.stack(terms).sum(), list(wrt.values()))
        for name, gradient in zip(wrt, gradients, strict=True):
            if gradient is not None:
                pc.output(name, gradient)
    return job, feeds


@pytest.mark.parametrize(("table", "mesh"), RUNS)
def test_scenarios_as_a_job_equal_numpy(table, mesh):
    scenarios = [each for each in scenarios_of(table, mesh) if not each.eager_only]
    job, feeds = job_of(table, mesh, scenarios)
    with pc.run(job, WORLDS[mesh], cache=False) as session:
        outputs = session.step(**feeds)

    def check(number, scenario):
        for n, wanted in enumerate(scenario.results):
            compare(np.asarray(outputs[f"y{number}_{n}"], wanted.dtype), wanted, f"result {n}")
        for n, wanted in enumerate(scenario.slopes_of_inputs):
            compare_gradient(outputs.get(f"g{number}_{n}"), wanted, f"gradient {n}")

    lines = failures(scenarios, check)
    assert not lines, "\n".join(lines)
