"""Attention along a split sequence: as if whole, and keys and values go round instead of being
gathered."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir.shard import balanced_range
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec
from tests.examples import gpt
from tests.executor.cuda.devices import spawn_on_devices
from tests.executor.cuda.jobs import moved
from tests.executor.cuda.test_runs import devices_of

RANKS = 4
LINE = pc.Placement("cpu", list(range(RANKS)))
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "cp"))
FEATURES = (4, 3)
"""Of keys and of values."""


class Case(NamedTuple):
    heads: int
    groups: int
    length: int
    keys: int
    causal: bool | str = False
    zigzag: int = 0
    mask: tuple[int, ...] | None = None
    dtype: str = "float64"


CASES = (
    Case(2, 2, 8, 8),
    Case(4, 2, 16, 16, causal=True),
    Case(4, 2, 16, 16, causal=True, zigzag=RANKS),
    Case(2, 1, 11, 11, causal=True, zigzag=RANKS),  # uneven pieces
    Case(2, 1, 9, 13, causal="lower_right"),
    Case(2, 2, 13, 9, causal=True),
    Case(2, 1, 3, 3, causal=True),  # fewer positions than ranks
    Case(2, 2, 10, 10, mask=(1, 2, 10, 10)),
    Case(2, 2, 10, 10, causal=True, mask=(2, 1, 1, 10)),
    Case(2, 1, 8, 8, causal=True, dtype="float16"),
)


def arrays_of(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(case.length)
    wide, deep = FEATURES
    shapes = [
        (2, case.heads, case.length, wide),
        (2, case.groups, case.keys, wide),
        (2, case.groups, case.keys, deep),
    ]
    arrays = [rng.normal(size=shape).astype(case.dtype) for shape in shapes]
    if case.mask is not None:
        mask = rng.normal(size=case.mask)
        mask[..., ::3] = -np.inf
        arrays.append(mask)
    return arrays


def call(case: Case, tensors) -> Any:
    """The output, and a loss of it with a gradient that differs from element to element."""
    query, key, value, *mask = tensors
    y = pc.scaled_dot_product_attention(
        query, key, value, case.causal, 0.7, *mask, zigzag=case.zigzag
    )
    y = y.cast("float64")
    return y, (y * y * y).sum()


def sbps_of(case: Case, split: str) -> list[str]:
    mask = "B" if case.mask is None or case.mask[2] == 1 else split
    return [split, split, split, mask]


def run_eagerly(placement: pc.Placement, outer: list[str], compiled: bool) -> list[Any]:
    """Of each case: output and gradients, the layout of the output, and what was exchanged."""
    results = []
    for case in CASES:
        tensors = [
            pc.tensor(array, placement, [*outer, sbp])
            for array, sbp in zip(arrays_of(case), sbps_of(case, "S(2)"), strict=False)
        ]
        for tensor in tensors[:3]:
            tensor.requires_grad = True
        with pc.comm_trace() as trace:
            if compiled:
                y, loss = pc.compile(lambda *given, case=case: call(case, given))(*tensors)
            else:
                y, loss = call(case, tensors)
            forward = len(trace.collectives)
            loss.backward()
        layout, moved = str(y.sbp), [(each.op, each.nbytes) for each in trace.collectives]
        values = [each.numpy() for each in (y, *(tensor.grad for tensor in tensors[:3]))]
        results.append((values, layout, moved[:forward], moved[forward:]))
    return results


def alone() -> list[list[np.ndarray]]:
    """Output and gradients of each case on one rank."""
    rank = pc.Placement("cpu", [0])
    return [values for values, *_ in spawn(run_eagerly, 1, rank, [], False)[0]]


@pytest.fixture(scope="module")
def whole() -> list[list[np.ndarray]]:
    return alone()


def assert_same(got, wanted, cases=CASES) -> None:
    for case, values, each in zip(cases, got, wanted, strict=True):
        bound = 1e-9 if case.dtype == "float64" else 2e-2
        for one, other in zip(values, each, strict=True):
            np.testing.assert_allclose(one, other, rtol=bound, atol=bound, err_msg=str(case))


def test_great_scores_are_joined_as_exactly_as_those_of_one_block():
    """In float32 a normaliser of 300 is rounded to 1.5e-5, and so would be each block's share."""
    rng = np.random.default_rng(2)
    query = np.full((1, 2, 12, 8), 6.0)
    key = 6.0 + rng.integers(0, 2, size=(1, 2, 12, 8)) / 8  # scores are exact in float32
    arrays = [query, key, rng.normal(size=(1, 2, 12, 4))]

    def results(dtype: str, placement: pc.Placement, sbp: str) -> np.ndarray:
        tensors = [pc.tensor(each.astype(dtype), placement, sbp) for each in arrays]
        return pc.scaled_dot_product_attention(*tensors, scale=1.0).numpy()

    exact = results("float64", pc.Placement("cpu", [0]), "B")
    got = spawn(results, RANKS, "float32", LINE, "S(2)")[0]
    assert abs(got - exact).max() < 1e-6


def test_zigzag_is_the_same_attention_in_another_order():
    """Against a softmax written out, with the order undone by hand."""
    case = CASES[3]
    query, key, value = arrays_of(case)
    # Pieces of 3, 3, 3 and 2; the first half of each, rounded up, counts upwards.
    order = [0, 1, 10, 2, 3, 9, 4, 5, 8, 6, 7]

    def program() -> np.ndarray:
        rank = pc.Placement("cpu", [0])
        tensors = [pc.tensor(each, rank, ["B"]) for each in (query, key, value)]
        turned = [pc.zigzag(each, 2, RANKS) for each in tensors]
        for each, tensor in zip(turned, tensors, strict=True):
            assert np.array_equal(each.numpy(), tensor.numpy()[:, :, order])
            assert np.array_equal(pc.unzigzag(each, 2, RANKS).numpy(), tensor.numpy())
        y, _ = call(case, turned)
        return pc.unzigzag(y, 2, RANKS).numpy()

    (y,) = spawn(program, 1)
    scores = np.einsum("bhtd,bgsd->bhts", query, key) * 0.7
    scores = np.where(np.tri(11, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(y, np.einsum("bhts,bgse->bhte", weights, value), rtol=1e-9)


def piece(extent: int, rank: int) -> int:
    start, stop = balanced_range(extent, RANKS, rank)
    return stop - start


def test_keys_and_values_go_round_and_nothing_is_gathered(whole):
    by_rank = spawn(run_eagerly, RANKS, LINE, [], False)
    assert_same([values for values, *_ in by_rank[0]], whole)
    for number, case in enumerate(CASES):
        size = np.dtype(case.dtype).itemsize
        row = 2 * case.groups * sum(FEATURES)
        sums = max(size, 4)
        for rank, results in enumerate(by_rank):
            _, layout, forward, backward = results[number]
            assert layout == "[S(2)]"
            # A rank passes on every block but that of the next rank: all ranks together, each
            # block ranks - 1 times.
            others = sum(piece(case.keys, each) for each in range(RANKS))
            others -= piece(case.keys, (rank + 1) % RANKS)
            sent = [nbytes for op, nbytes in forward if op == "exchange"]
            assert sum(sent) == others * row * size, case
            sent = [nbytes for op, nbytes in backward if op == "exchange"]
            summed = sum(piece(case.keys, each) for each in range(RANKS)) - piece(case.keys, rank)
            assert sum(sent) == (others * size + summed * sums) * row, case
            assert {op for op, _ in forward + backward} <= {"exchange", "all_reduce"}, case


def test_beside_another_mesh_axis(whole):
    results = spawn(run_eagerly, RANKS, GRID, ["S(0)"], False)[0]
    assert_same([values for values, *_ in results], whole)


@pytest.mark.slow
def test_compiled_functions_give_the_same(whole):
    results = spawn(run_eagerly, RANKS, LINE, [], True)[0]
    assert_same([values for values, *_ in results], whole)


IN_JOBS = CASES[1::2]


def job_of_all() -> pc.Job:
    with pc.job("rings") as job:
        for number, case in enumerate(IN_JOBS):
            tensors = [
                pc.input(f"{name}{number}", array.shape, array.dtype, LINE, [sbp])
                for name, array, sbp in zip(
                    "qkvm", arrays_of(case), sbps_of(case, "S(2)"), strict=False
                )
            ]
            y, loss = call(case, tensors)
            for name, value in zip("yabc", (y, *pc.gradients(loss, tensors[:3])), strict=True):
                pc.output(f"{name}{number}", value)
    return job


def feeds_of() -> dict[str, np.ndarray]:
    return {
        f"{name}{number}": array
        for number, case in enumerate(IN_JOBS)
        for name, array in zip("qkvm", arrays_of(case), strict=False)
    }


def named(outputs) -> list[list[np.ndarray]]:
    return [[outputs[f"{name}{number}"] for name in "yabc"] for number, _ in enumerate(IN_JOBS)]


@pytest.mark.processes
def test_a_job_gives_the_same_in_all_modes(whole):
    job = job_of_all()
    compiled = {mode: compile_plans(job, RANKS, mode) for mode in MODES}
    assert len({each.digest for each in compiled.values()}) == 1
    rings = [
        task
        for task in compiled["naive"].plans[0].tasks
        if isinstance(task.spec, ComputeSpec) and task.spec.lanes
    ]
    assert len(rings) == 2 * len(IN_JOBS)
    with pc.run(job, ranks=RANKS, backend="processes") as session:
        for _ in range(2):
            outputs = session.step(**feeds_of())
    assert_same(named(outputs), whole[1::2], IN_JOBS)


def test_devices_pass_on_what_hosts_do(whole):
    job = job_of_all()
    devices = devices_of(range(RANKS))
    plans = compile_plans(moved(job), RANKS).plans
    with LocalWorld(plans, devices=devices, deadline=60) as world:
        outputs = world.step(feeds_of())
    assert_same(named(outputs), whole[1::2], IN_JOBS)
    for device in devices.values():
        device.close()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_eager_tensors_on_devices_give_the_same(whole, compiled):
    ring = pc.Placement("cuda", list(range(RANKS)))
    results = spawn_on_devices(lambda: run_eagerly(ring, [], compiled), RANKS)[0]
    assert_same([values for values, *_ in results], whole)


@pytest.mark.slow
def test_a_model_with_split_sequences_learns_as_on_one_rank():
    def losses(job: pc.Job) -> list[float]:
        with pc.run(job, ranks=job.world_size, cache=False) as session:
            return [float(outputs["loss"]) for outputs in session.run(3)]

    alone = losses(gpt(length=17))
    for layout in ({"cp": 3}, {"cp": 2, "tp": 2}):
        job = gpt(length=17, dp=1, **layout)
        np.testing.assert_allclose(losses(job), alone, rtol=1e-5)
        plan = compile_plans(job, job.world_size).plans[0]
        rings = [task.spec.kind for task in plan.tasks if getattr(task.spec, "lanes", 0)]
        assert rings == ["attention"] * 2 + ["attention_grad"] * 2
        shapes = [
            plan.register_by_id[task.outputs[0]].shape
            for task in plan.tasks
            if isinstance(task.spec, CollectiveSpec)
        ]
        assert max(map(len, shapes)) < 4  # neither keys nor values
