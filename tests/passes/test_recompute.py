"""Recomputation: the same numbers from less memory, and refusals of what cannot be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import UsageError
from plancompiler.ir import Job, Phase
from plancompiler.lower import compile as compile_module
from plancompiler.lower.compile import MODES, compile_plans, with_chosen_regions
from plancompiler.lower.recompute import RankMemory
from plancompiler.ops.registry import apply
from plancompiler.passes import run_passes
from plancompiler.passes.recompute import AGAIN, regions_of, with_checkpoints
from tests.dense import run_dense
from tests.examples import gpt
from tests.passes.worlds import (
    STEPS,
    Tower,
    arena,
    collectives,
    compiled,
    configured,
    losses,
    mesh,
    record_of,
    refused,
)

LAYERS = 6


def dense(job: Job, steps: int) -> list[float]:
    return [float(each["loss"]) for each in run_dense(job, steps)]


@pytest.fixture(scope="module")
def one_rank() -> list[float]:
    return dense(gpt(dropout=0.1), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
def test_losses_are_those_of_one_rank(
    layout: dict[str, int], zero: int, one_rank: list[float]
) -> None:
    actual = losses(gpt(dropout=0.1, **layout), STEPS, recompute="auto", zero=zero)
    np.testing.assert_allclose(actual, one_rank, rtol=1e-4)


def test_copies_give_the_same_bits() -> None:
    job = gpt(dropout=0.1)
    marked = with_checkpoints(job, set(regions_of(job)))
    rewritten, _ = run_passes(configured(marked))
    assert any(op.name.endswith(AGAIN) for op in rewritten.ops)
    assert dense(rewritten, 3) == dense(job, 3)


@pytest.mark.slow
def test_the_arena_holds_one_block_instead_of_all() -> None:
    def job(layers: int) -> Job:
        return gpt(layers=layers, length=32)

    kept = [arena(compiled(job(layers))) for layers in (LAYERS, 2 * LAYERS)]
    again = [arena(compiled(job(layers), recompute="auto")) for layers in (LAYERS, 2 * LAYERS)]
    assert again[0] < kept[0] / 3
    # A layer more costs its input and its gradients, no longer its activations.
    hidden = 8 * 32 * 32 * 4
    gradients = (12 * 32 * 32 + 13 * 32) * 4
    assert again[1] - again[0] <= LAYERS * (hidden + gradients) * 1.02
    assert kept[1] - kept[0] >= LAYERS * 10 * hidden


def test_a_block_of_tensor_parallelism_repeats_one_reduction() -> None:
    job = gpt(tp=2)
    before, after = collectives(compiled(job)), collectives(compiled(job, recompute="auto"))
    # That of the attention's projection; nothing reads the result of the second product again.
    assert after["all_reduce"] == before["all_reduce"] + 2
    assert set(after) == set(before)


@pytest.mark.processes
def test_all_modes_give_the_same_plans() -> None:
    job = configured(gpt(dp=2, pp=2), recompute="auto", zero=2)
    assert len({compile_plans(job, 4, mode).digest for mode in MODES}) == 1


def test_other_passes_leave_the_copies_alone() -> None:
    job = gpt()
    passes = ("fold", "cse", "recompute", "fuse_elementwise", "dce")
    before = arena(compiled(job, passes=passes))
    after = compiled(job, passes=passes, recompute="auto")
    assert arena(after) < before
    with_copies, _ = run_passes(configured(with_checkpoints(job, set(regions_of(job)))))
    copies = [op for op in with_copies.ops if op.name.endswith(AGAIN)]
    assert {op.origin.phase for op in copies} == {Phase.BACKWARD}
    assert all(op.kind != "variable" for op in copies)


def checkpointed_job(wrap: Callable[[object], object]) -> Job:
    """Two calls of one tower, one after another, and a function of two results."""
    place = mesh(2)
    with pc.job("calls") as job:
        tower = wrap(Tower(2, 8).place(place))

        def mix(x: pc.Value, y: pc.Value) -> tuple[pc.Value, pc.Value]:
            both = pc.dropout(x * y, 0.5).sigmoid()
            return both.exp(), both.tanh()

        x = pc.normal((4, 8), placement=place).redistribute(sbp="S(0)")
        once = tower(x)  # type: ignore[operator]
        first, second = wrap(mix)(once, tower(once))  # type: ignore[operator]
        loss = (first * second).mean()
        pc.optim.AdamW(1e-2).minimize(loss)
        pc.output("loss", loss)
    return job


def test_modules_and_functions_can_be_checkpointed() -> None:
    plain, marked = checkpointed_job(lambda each: each), checkpointed_job(pc.checkpoint)
    assert list(regions_of(plain)) == []
    assert list(regions_of(marked)) == ["tower", "tower (call 2)", "mix"]
    record = record_of(marked, "recompute")
    assert "3 regions" in record.summary
    assert record.ops_after > record.ops_before
    np.testing.assert_allclose(losses(marked, 5), dense(plain, 5), rtol=1e-5)


def test_results_that_forward_reads_are_kept() -> None:
    job = checkpointed_job(pc.checkpoint)
    rewritten, _ = run_passes(configured(job))
    last = regions_of(job)["tower"].ops[-1]
    assert last.outputs[0].name + AGAIN not in {
        value.name for op in rewritten.ops for value in op.outputs
    }


def test_a_marked_part_of_a_candidate_is_a_region_of_its_own() -> None:
    place = mesh(1)
    with pc.job("parts") as job:
        block = pc.nn.TransformerBlock(8, 2).place(place)
        pc.checkpoint(block.mlp)
        loss = pc.square(block(pc.normal((2, 4, 8), placement=place))).mean()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    regions = regions_of(job)
    assert {name: region.checkpoint for name, region in regions.items()} == {
        "transformer_block": False,
        "mlp": True,
    }
    np.testing.assert_allclose(losses(job, 3, recompute="auto"), dense(job, 3), rtol=1e-5)


@pytest.mark.slow
def test_auto_fits_a_budget() -> None:
    job = gpt(layers=LAYERS, length=32)

    def taken(**settings: object) -> tuple[int, int]:
        compilation = compiled(job, **settings)
        copies = sum(placed.op.name.endswith(AGAIN) for placed in compilation.graph.ops)
        return sum(block.nbytes for block in compilation.plans[0].blocks), copies

    most, none = taken()
    least, every = taken(recompute="auto")
    assert none == 0
    budget = (most + least) // 2
    actual, copies = taken(recompute="auto", memory_bytes=budget)
    assert actual <= budget
    assert 0 < copies < every
    tighter, more = taken(recompute="auto", memory_bytes=(least + actual) // 2)
    assert tighter <= (least + actual) // 2
    assert more > copies
    assert taken(recompute="auto", memory_bytes=most) == (most, 0)


@pytest.mark.parametrize("config", [{}, pytest.param({"pp": 2}, marks=pytest.mark.slow)])
def test_a_budget_is_met_by_as_few_regions_as_can_be_in_three_lowerings(
    config: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many layers there are; halving the choices of twelve would take five."""
    lowered: list[int] = []
    measure = compile_module._memory_of

    def counted(world_size: int, job: Job) -> dict[int, RankMemory]:
        memory = measure(world_size, job)
        lowered.append(max(each.nbytes for each in memory.values()))
        return memory

    job = gpt(layers=12, length=16, **config)
    whole = measure(job.world_size, job)
    least = measure(job.world_size, with_checkpoints(job, set(regions_of(job))))
    rank = max(whole, key=lambda each: whole[each].nbytes)
    budget = (whole[rank].nbytes + least[rank].nbytes) // 2
    monkeypatch.setattr(compile_module, "_memory_of", counted)
    with_chosen_regions(configured(job, recompute="auto", memory_bytes=budget), job.world_size)
    fits = [nbytes <= budget for nbytes in lowered]
    assert fits == [False, True, False]


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    text = refused(gpt(), recompute="auto", memory_bytes=1000)
    assert "bytes with all 2 regions computed again" in text
    assert "memory_bytes=1000" in text


def read_input(x: pc.Value) -> pc.Value:
    return x * pc.input("more", (4,), "float32", x.placement)


def report(x: pc.Value) -> pc.Value:
    pc.output("x", x)
    return x.exp()


def count_calls(x: pc.Value) -> pc.Value:
    mean = pc.nn.Parameter((4,), name="mean", trainable=False).place(x.placement)
    apply("moving_average_update", mean.value, x, decay=0.9)
    return x.exp()


def read_file(x: pc.Value) -> pc.Value:
    digits = Path(__file__).resolve().parents[2] / "examples" / "data" / "digits.npz"
    (labels,) = pc.data.Arrays(digits, ["labels"], batch=4, placement=x.placement)
    return x * labels.cast("float32")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (read_input, "input"),
        (report, "output"),
        (count_calls, "moving_average_update"),
        (read_file, "arrays_batch"),
    ],
)
def test_side_effects_are_refused(function: Callable[[pc.Value], pc.Value], kind: str) -> None:
    with pc.job("effect") as job:
        weight = pc.nn.Parameter((4,), init="ones", name="w").place(mesh(1))
        loss = pc.checkpoint(function)(weight.value).sum()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    text = refused(job)
    assert f"{function.__name__} cannot be computed again" in text
    assert kind in text
    assert "test_recompute.py" in text


def test_only_modules_and_functions_can_be_checkpointed() -> None:
    with pytest.raises(UsageError, match="only a module or a function"):
        pc.checkpoint(3)  # type: ignore[type-var]


def test_a_budget_without_auto_is_refused() -> None:
    with pytest.raises(UsageError, match="Expected: recompute=auto"):
        configured(gpt(), memory_bytes=1000)
