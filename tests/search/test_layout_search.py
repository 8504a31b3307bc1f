"""The best layouts: against all others where they can be counted, against random ones elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.costs import links_of, machine_of
from plancompiler.costs.measured_tasks import KernelCost
from plancompiler.errors import UsageError
from plancompiler.ir import Phase
from plancompiler.ir.sbp import PARTIAL_SUM
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import MODES, build_graph, compile_plans
from plancompiler.passes import config_of, run_passes
from plancompiler.search import highs_solver, layout_search
from plancompiler.search.highs_solver import Relaxation, solve
from plancompiler.search.layout_arcs import layout_arcs
from plancompiler.search.layout_search import (
    LayoutSearch,
    least_bytes,
    objective_seconds,
    search_layouts,
)
from plancompiler.search.linear_program import layout_problem, linear_program
from plancompiler.search.mesh_search import collectives, collectives_per_block
from plancompiler.search.price_ascent import PriceAscent
from plancompiler.search.tied_ops import tie_ops
from plancompiler.search.whole_choices import least_of_whole_choices
from tests.search.least_cost import combinations_of, least_by_elimination, least_of_all
from tests.search.many_layouts import neighbours, random_choices, seconds_of_many
from tests.search.open_jobs import AUTO, mlp, transformer, whole_problem
from tests.search.random_jobs import outputs_of, random_job

pytest.importorskip("highspy")


def searched(job: pc.Job, memory_bytes: float | None = None) -> LayoutSearch:
    return search_layouts(run_passes(job)[0], memory_bytes)


@pytest.mark.parametrize(
    "hierarchy", [pytest.param((2,), marks=pytest.mark.slow), (3,), (2, 2)], ids=str
)
def test_random_jobs_get_the_best_of_all_layouts(hierarchy):
    """As `python -m benchmarks.search_proof` has it for hundreds of jobs."""
    compared = 0
    for seed in range(12):
        job = random_job(seed, hierarchy, 1 + seed % 2)
        problem = whole_problem(job)
        least = least_by_elimination(problem)
        if combinations_of(problem) <= 20_000:
            assert least_of_all(problem) == pytest.approx(least, rel=1e-9)
            compared += 1
        if least is None:
            continue
        result = searched(job)
        assert result.objective_seconds == pytest.approx(least, rel=1e-6)
        assert result.bound_seconds <= least * (1 + 1e-9)
        if seed < 3:
            alone = outputs_of(job, seed, alone=True)
            for name, value in outputs_of(job, seed).items():
                np.testing.assert_allclose(value, alone[name], rtol=1e-4, atol=1e-5)
    assert compared


@pytest.mark.parametrize(
    ("build", "hierarchy", "layers"),
    [(mlp, (2, 2), ()), (mlp, (3,), ()), (transformer, (2, 2), (1,)), (transformer, (4,), (2,))],
)
def test_no_legal_layouts_cost_less_than_the_bound(build, hierarchy, layers):
    job = build(hierarchy, *layers)
    result, problem, rng = searched(job), whole_problem(job), np.random.default_rng(7)
    assert result.gap <= 0.01
    assert objective_seconds(problem, result.signatures) == pytest.approx(result.objective_seconds)
    for choices in (
        random_choices(problem, 100, rng),
        neighbours(problem, result.signatures, 100, rng),
    ):
        seconds = seconds_of_many(problem, choices)
        assert np.isfinite(seconds).sum() >= 50
        assert seconds.min() >= result.bound_seconds * (1 - 1e-9)
    best = neighbours(problem, result.signatures, 1, rng, changed=0)
    assert seconds_of_many(problem, best) == pytest.approx(result.objective_seconds)


def losses(job: pc.Job, **feeds: np.ndarray) -> list[float]:
    with pc.run(job) as session:
        return [float(session.step(**feeds)["loss"]) for _ in range(3)]


@pytest.mark.parametrize("hierarchy", [(2,), (2, 2)], ids=str)
def test_searched_layouts_compute_what_one_rank_does(hierarchy):
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.normal(size=(16, 64)).astype(np.float32),
        "y": rng.integers(0, 8, 16),
    }
    alone = losses(mlp((1,), pc.Config()), **feeds)
    np.testing.assert_allclose(losses(mlp(hierarchy), **feeds), alone, rtol=1e-5)
    tokens = {"tokens": rng.integers(0, 64, (8, 16))}
    alone = losses(transformer((1,), 1, pc.Config()), **tokens)
    np.testing.assert_allclose(losses(transformer(hierarchy, 1), **tokens), alone, rtol=1e-5)


@pytest.mark.processes
def test_all_modes_make_one_plan_of_searched_layouts():
    job = mlp((2, 2))
    assert len({compile_plans(job, 4, mode).digest for mode in MODES}) == 1


def test_a_config_that_is_given_later_opens_what_nobody_has_placed():
    late = mlp((2, 2), pc.Config())
    with pc.run(late, config=AUTO) as session:
        shares = session.step(x=np.ones((16, 64), np.float32), y=np.zeros(16, np.int64))
    assert np.isfinite(shares["loss"])


def test_what_the_user_places_stays():
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("pinned", config=AUTO) as job:
        x = pc.input("x", (4096, 4096), "float32", mesh, "B")
        weight = pc.nn.Parameter((4096, 4096)).place(mesh, "S(1)").value
        pc.output("out", (x @ weight).redistribute(sbp="S(0)").sum())
    layouts = {placed.op.kind: placed.signature for placed in build_graph(job, 2).ops}
    assert str(layouts["input"].outputs[0]) == "[B]"
    assert str(layouts["variable"].outputs[0]) == "[S(1)]"
    assert str(layouts["redistribute"].outputs[0]) == "[S(0)]"


def test_ops_of_other_rules_are_not_tied():
    """Padding with zeros is linear, padding with ones is not: they may not share a signature."""
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("pads", config=AUTO) as job:
        x = pc.input("x", (4, 4), "float32", mesh)
        for value in (0.0, 1.0):
            pc.output(f"out{value}", pc.pad(x, (1, 1), (1, 1), value=value).sum())
    classes = {
        number
        for op, number in zip(job.ops, tie_ops(job, 0).class_of, strict=True)
        if op.kind == "pad"
    }
    assert len(classes) == 2


def test_gathers_of_gradients_start_one_by_one():
    """Only reductions are joined in buckets."""
    links = links_of(machine_of("cpu-generic"), pc.Placement("cpu", [0, 1]))
    arcs = layout_arcs((4, 4), pc.DType.FLOAT32, (2,), (PARTIAL_SUM,), (), 0.0, links)
    seconds = {
        (before, after): cost
        for before, after, cost in zip(arcs.tails, arcs.heads, arcs.seconds, strict=True)
    }
    whole, split, partial = (arcs.number_of[pc.NdSbp.of(each)] for each in ("B", "S(0)", "P"))
    assert seconds[partial, whole] < links.along((0,)).per_message < seconds[split, whole]


def test_many_candidates_that_are_as_cheap_do_not_make_a_large_program(monkeypatch):
    """Of layers that normalise whole batches half of all candidates cost no more than the bound."""
    mesh = pc.Placement("cpu", [[0, 1], [2, 3]])
    with pc.job("normed", config=replace(AUTO, machine="h100-sxm")) as job:
        x, y = pc.input("x", (16, 3, 8, 8), "float32", mesh), pc.input("y", (16,), "int64", mesh)
        first, second = (pc.nn.Conv2d(of, 16, 3, padding=1) for of in (3, 16))
        net = pc.nn.Sequential(first, pc.nn.BatchNorm2d(16), pc.nn.ReLU(), second)
        model = pc.nn.ModuleDict({"net": net, "head": pc.nn.Linear(16, 10)}).place(mesh)
        loss = pc.cross_entropy(model["head"](pc.mean(model["net"](x), (2, 3))), y)
        pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    columns = []

    def recorded(program, wanted):
        columns.append(len(program.costs))
        return solve(program, wanted)

    monkeypatch.setattr(layout_search, "solve", recorded)
    result = searched(job)
    assert result.gap <= 1e-3
    assert max(columns) < result.variables / 3


def test_small_jobs_get_the_best_layouts_although_some_ops_are_tied():
    """Two layers have biases of one size, of which one is best split and the other is not."""
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("small", config=replace(AUTO, machine="h100-sxm")) as job:
        x, y = pc.input("x", (256, 64), "float32", mesh), pc.input("y", (256,), "int64", mesh)
        layers = [pc.nn.Linear(64, 1024), pc.nn.ReLU(), pc.nn.Linear(1024, 1024)]
        net = pc.nn.Sequential(*layers, pc.nn.Linear(1024, 16)).place(mesh)
        loss = pc.cross_entropy(net(x), y, ignore_index=None)
        pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    assert searched(job).gap <= 1e-3


def test_what_leaves_a_training_job_is_reduced_with_its_gradients():
    """Its reduction waits in their bucket, where it has no start of its own."""
    trained = run_passes(mlp((2,)))[0]
    kept = tuple(op for op in trained.ops if op.origin.phase is Phase.FORWARD)
    for job, joined in ((trained, True), (replace(trained, ops=kept), False)):
        problem = layout_problem(tie_ops(job, None))
        (place,) = (
            place
            for place, group in enumerate(problem.tied.groups)
            if {problem.tied.classes[each.ops][0].kind for each in group.readers} == {"output"}
        )
        arcs = problem.groups[place].arcs
        partial, whole = (arcs.number_of[pc.NdSbp.of(each)] for each in ("P", "B"))
        (step,) = np.flatnonzero((arcs.tails == partial) & (arcs.heads == whole))
        start = links_of(machine_of("cpu-generic"), pc.Placement("cpu", [0, 1])).along((0,))
        assert (arcs.seconds[step] < start.per_message) == joined


def test_a_demand_may_be_partial():
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("partial", config=AUTO) as job:
        x = pc.input("x", (4, 4), "float32", mesh)
        pc.output("out", x.redistribute(sbp="P").sum())
    with pc.run(job) as session:
        assert session.step(x=np.ones((4, 4), np.float32))["out"] == 16.0


def test_a_transformer_block_is_cut_as_people_cut_it():
    """Two reductions forward and two backward per block, or as much in halves."""

    def weights(layers: int) -> dict[Primitive, int]:
        config = replace(AUTO, machine="a100-sxm")
        job = transformer((4,), layers, config, dim=4096)
        counts: dict[Primitive, int] = {}
        for family in build_graph(job, 4).families:
            if family.transfer is not None and not family.name.startswith("variable"):
                kind = family.transfer.primitive
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    more, less = weights(3), weights(2)
    per_block = {kind: more[kind] - less.get(kind, 0) for kind in more}
    whole = per_block.get(Primitive.ALL_REDUCE, 0)
    halves = sum(
        per_block.get(kind, 0) for kind in (Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER)
    )
    assert whole + halves / 2 == 4, per_block


@pytest.mark.parametrize("dim", [256, 4096])
def test_the_collectives_of_a_block_are_those_that_one_more_adds(dim):
    """Also of its weights, of which several are alike, and where blocks near an end differ."""
    config = replace(AUTO, machine="a100-sxm")
    more, less = (searched(transformer((4,), layers, config, dim)) for layers in (8, 7))
    added = sum(collectives(more).values(), Counter()) - sum(collectives(less).values(), Counter())
    assert added
    assert collectives_per_block(more).counts == added


def test_memory_is_kept_to_by_splitting_what_is_held():
    free = searched(mlp((4,)))
    held = _held(free)
    tight = searched(mlp((4,)), held / 2)
    assert _held(tight) <= held / 2
    assert tight.objective_seconds >= tight.bound_seconds
    with pytest.raises(UsageError, match="no layouts fit"):
        searched(mlp((4,)), 1000.0)


def test_limits_leave_small_jobs_no_gap():
    """Prices change with that of memory, and with them what was left out."""
    job = mlp((4,), replace(AUTO, machine="h100-sxm"), 512)
    limit = 0.6 * _held(searched(job))
    assert searched(job, limit).gap <= 1e-3


def test_no_whole_choices_cost_less_than_rows_and_cases_prove():
    """Beside the mixed-integer program, which is solved to the end."""
    job = run_passes(mlp((4,), replace(AUTO, machine="h100-sxm"), 1024))[0]
    problem = layout_problem(tie_ops(job, None))
    least, most = least_bytes(problem), search_layouts(job).held_bytes
    raised = []
    for part in (0.2, 0.4, 0.6, 0.8):
        program = linear_program(problem, least + part * (most - least))
        columns = solve(program).columns
        assert columns is not None
        best = float(program.costs @ columns)
        relaxed, _ = Relaxation(program).least(np.zeros(program.choices, bool))
        proven = least_of_whole_choices(program, 1.01 * best)
        assert relaxed * (1 - 1e-9) <= proven <= best * (1 + 1e-6)
        raised.append((proven - relaxed) / (best - relaxed))
    assert max(raised) > 0.5, raised


def test_what_is_not_wanted_is_not_proved():
    """Beside the program that is solved to the end."""
    job = run_passes(mlp((4,), replace(AUTO, machine="h100-sxm"), 1024))[0]
    free = search_layouts(job)
    problem = layout_problem(tie_ops(job, None))
    least = least_bytes(problem)
    program = linear_program(problem, least + 0.4 * (free.held_bytes - least))
    best = solve(program)
    least_one = solve(program, 1.001 * best.bound)
    assert least_one.columns is not None
    assert program.costs @ least_one.columns == pytest.approx(best.bound)
    assert least_one.bound == pytest.approx(best.bound)
    for part in (0.999, 0.9):
        other = solve(program, part * best.bound)
        assert other.bound <= part * best.bound
        assert other.columns is None or program.costs @ other.columns >= best.bound * (1 - 1e-6)


def test_a_second_search_for_the_price_of_memory_proves_more():
    job = run_passes(transformer((4,), 2, replace(AUTO, machine="h100-sxm")))[0]
    free = search_layouts(job)
    problem = layout_problem(tie_ops(job, 2))
    ascent, least = PriceAscent(problem), least_bytes(problem)
    ascent.climb()
    limit = least + 0.5 * (free.held_bytes - least)
    layout_search._price_memory(ascent, limit)
    first = layout_search._bound(ascent, limit)
    assert layout_search._price_memory_again(ascent, limit, 1.01 * first)
    assert not layout_search._price_memory_again(ascent, limit, first)
    assert layout_search._bound(ascent, limit) > 1.01 * first


def test_large_programs_with_a_limit_are_solved_at_its_price(monkeypatch):
    monkeypatch.setattr(highs_solver, "MOST_MIXED", 0)
    job = mlp((4,), replace(AUTO, machine="h100-sxm"), 512)
    free = searched(job)
    tight = searched(job, 0.6 * free.held_bytes)
    assert tight.held_bytes <= 0.6 * free.held_bytes
    assert tight.bound_seconds <= tight.objective_seconds
    assert tight.gap <= 0.01


def test_parts_along_inner_axes_cost_what_packing_them_takes():
    """Parts along an inner axis are packed to be sent, and put in their places where they come."""
    links = links_of(machine_of("h100-sxm"), pc.Placement("cpu", [0, 1]))
    arcs = layout_arcs((64, 64), pc.DType.FLOAT32, (2,), (PARTIAL_SUM,), (), 1.0, links)
    seconds = {
        (before, after): cost
        for before, after, cost in zip(arcs.tails, arcs.heads, arcs.seconds, strict=True)
    }
    whole, outer, inner, partial = (
        arcs.number_of[pc.NdSbp.of(each)] for each in ("B", "S(0)", "S(1)", "P")
    )
    packing = 64 * 64 * 4 * links.along((0,)).per_copied_byte
    for step, apart in (((partial, outer), (partial, inner)), ((outer, whole), (inner, whole))):
        assert seconds[apart] - seconds[step] == pytest.approx(packing)
    assert seconds[inner, outer] == pytest.approx(seconds[outer, inner])


def _held(result: LayoutSearch) -> float:
    problem = whole_problem(result.job)
    places = zip(problem.candidates, result.signatures, strict=True)
    return sum(
        float(each.held_bytes[each.signatures.index(signature)]) for each, signature in places
    )


def waiting_machine():
    """One whose streams take a millisecond to go on."""
    generic = machine_of("cpu-generic")
    return replace(generic, host=replace(generic.host, wake_seconds=1e-3))


def test_collectives_wait_for_streams_twice():
    """Theirs waits for what it is given, and others for what it makes."""
    placement = pc.Placement("cpu", [0, 1])
    arguments = (4, 4), pc.DType.FLOAT32, (2,), (PARTIAL_SUM,), ()
    for starting in (1.0, 0.5, 0.0):
        plain, waits = (
            layout_arcs(*arguments, starting, links_of(each, placement))
            for each in (machine_of("cpu-generic"), waiting_machine())
        )
        more = dict(
            zip(
                zip(plain.tails, plain.heads, strict=True),
                waits.seconds - plain.seconds,
                strict=True,
            )
        )
        whole, split, partial = (plain.number_of[pc.NdSbp.of(each)] for each in ("B", "S(0)", "P"))
        assert more[partial, whole] == pytest.approx(2e-3 * starting)
        assert more[split, whole] == pytest.approx(2e-3)
        assert more[whole, split] == 0.0  # cut where it is


def test_of_all_gradients_only_the_last_starts_a_reduction_of_its_own():
    config = pc.Config(layout="auto", machine=waiting_machine().text)
    with pc.job("net", config=config) as job:
        placement = pc.Placement("cpu", [0, 1])
        x = pc.input("x", (64, 48), "float32", placement)
        layers = pc.nn.Linear(48, 32), pc.nn.ReLU(), pc.nn.Linear(32, 16, bias=False)
        loss = pc.nn.Sequential(*layers).place(placement)(x).sum()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    problem = layout_problem(tie_ops(job, 8))
    read = {value.name for op in job.ops if op.origin.phase is Phase.UPDATE for value in op.inputs}
    starting = {}
    for group, arcs in zip(problem.tied.groups, problem.groups, strict=True):
        maker = problem.tied.classes[group.maker][0]
        if maker.origin.phase is Phase.BACKWARD and read & set(group.names):
            number = arcs.arcs.number_of
            reduced = (arcs.arcs.tails == number[pc.NdSbp.of("P")]) & (
                arcs.arcs.heads == number[pc.NdSbp.of("B")]
            )
            shape = maker.outputs[group.slot].shape
            starting[shape] = bool(arcs.arcs.seconds[reduced].min() > 1e-3)
    assert sorted(starting) == [(16, 32), (32,), (32, 48)]
    assert sum(starting.values()) == 1
    assert not starting[16, 32]  # the first that backward computation makes


def test_kernels_cost_what_was_measured_of_their_kind():
    """Updates are split where these are dear, whatever the rate of memory says."""
    placement = pc.Placement("cpu", [0, 1])
    with pc.job("net", config=AUTO) as job:
        x = pc.input("x", (64, 32), "float32", placement, "B")
        loss = pc.nn.Linear(32, 32, bias=False).place(placement)(x).sum()
        pc.optim.AdamW(0.1).minimize(loss)
        pc.output("loss", loss)
    passed = run_passes(job)[0]
    (weight,) = (op.outputs[0].name for op in passed.ops if op.attr("name") == "weight")
    free = {(op.kind, "float32"): KernelCost(0.0, 0.0, 0.0) for op in passed.ops}
    for split in (False, True):
        kernels = free | {("adam_update", "float32"): KernelCost(0.0, 0.0, 1e-7 * split)}
        machine = replace(machine_of("cpu-generic"), kernels=kernels).text
        config = replace(config_of(passed), machine=machine)
        layout = search_layouts(replace(passed, config=config)).layouts()[weight]
        assert str(layout).startswith("[S(") == split
