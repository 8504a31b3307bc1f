"""Experts split over ranks: as if all were on one, and only rows that leave are moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.ir.shard import balanced_range
from plancompiler.lower.compile import MODES, compile_plans

RANKS = 4
LINE = pc.Placement("cpu", list(range(RANKS)))
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("tp", "ep"))
TOKENS, DIM, HIDDEN, EXPERTS, CHOICES = 13, 3, 5, 8, 2
RNG = np.random.default_rng(4)
X = RNG.normal(size=(TOKENS, DIM))
UP, DOWN = RNG.normal(size=(EXPERTS, DIM, HIDDEN)), RNG.normal(size=(EXPERTS, HIDDEN, DIM))
CHOSEN = RNG.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :CHOICES]
CHOSEN[:4] = [3, 2]  # a busy piece
CHOSEN[5, 1] = -1
SHARES = RNG.uniform(size=(TOKENS, CHOICES))
# Of rows per piece: each of four pieces has two experts.
WANTED = np.bincount(CHOSEN[CHOSEN >= 0] // 2, minlength=4)


def mixture(x, up, down, shares, chosen, pieces: int, bound: int, overflow: str = "error") -> Any:
    """Tokens through their experts, and a loss with a gradient that differs from place to place."""
    places, counts = pc.expert_places(chosen, EXPERTS, bound, pieces, overflow)
    rows = pc.scatter_rows(x.reshape(TOKENS, 1, DIM), places, pieces, bound)
    up, down = (each.reshape(pieces, EXPERTS // pieces, *each.shape[1:]) for each in (up, down))
    made = pc.grouped_matmul(pc.grouped_matmul(rows, counts, up).tanh(), counts, down)
    y = (pc.gather_rows(made, places) * shares.reshape(TOKENS, CHOICES, 1)).sum(1)
    return y, (y * y * y).sum()


def dense(kept: np.ndarray) -> np.ndarray:
    """Every token through every expert, weighed by its share; `kept` says which choices count."""
    made = np.tanh(np.einsum("td,edh->teh", X, UP))
    made = np.einsum("teh,ehd->ted", made, DOWN)
    shares = np.zeros((TOKENS, EXPERTS))
    for token, choice in np.argwhere(kept):
        shares[token, CHOSEN[token, choice]] += SHARES[token, choice]
    return np.einsum("te,ted->td", shares, made)


def run_eagerly(placement: pc.Placement, split: list[str], bound: int, pieces: int) -> Any:
    whole = ["B"] * placement.ndim
    layouts = (split, split, split, split, whole)
    tensors = [
        pc.tensor(array, placement, layout)
        for array, layout in zip((X, UP, DOWN, SHARES, CHOSEN), layouts, strict=True)
    ]
    for tensor in tensors[:4]:
        tensor.requires_grad = True
    with pc.comm_trace() as trace:
        y, loss = mixture(*tensors, pieces, bound)
        loss.backward()
    moved = [each.nbytes for each in trace.collectives if each.op == "exchange"]
    return [y.numpy(), *(tensor.grad.numpy() for tensor in tensors[:4])], moved


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    """Output and gradients on one rank, where one piece has room for all."""
    values, _ = spawn(run_eagerly, 1, pc.Placement("cpu", [0]), ["B"], TOKENS * CHOICES, 1)[0]
    np.testing.assert_allclose(values[0], dense(CHOSEN >= 0), rtol=1e-12)
    return values


def assert_same(got, wanted) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_finite_differences(alone):
    def loss() -> float:
        return float((dense(CHOSEN >= 0) ** 3).sum())

    for array, gradient in zip((X, UP, DOWN, SHARES), alone[1:], strict=True):
        at = np.unravel_index(np.argmax(np.abs(gradient)), array.shape)
        before, step = array[at], 1e-6
        array[at] = before + step
        above = loss()
        array[at] = before - step
        below = loss()
        array[at] = before
        np.testing.assert_allclose((above - below) / (2 * step), gradient[at], rtol=1e-6)


def rows_that_leave() -> int:
    """Choices whose expert is on another rank than their token."""
    home = np.empty(TOKENS, int)
    for rank in range(RANKS):
        home[slice(*balanced_range(TOKENS, RANKS, rank))] = rank
    there = CHOSEN // (EXPERTS // RANKS)
    return int(((there != home[:, None]) & (CHOSEN >= 0)).sum())


def test_only_rows_that_leave_their_rank_are_moved(alone):
    by_rank = spawn(run_eagerly, RANKS, LINE, ["S(0)"], int(WANTED.max()), 4)
    for values, _ in by_rank:
        assert_same(values, alone)
    # To the experts, back, and both once more in backward.
    moved = np.array([moved for _, moved in by_rank])
    assert moved.shape == (RANKS, 4)
    assert (moved.sum(axis=0) == rows_that_leave() * DIM * 8).all()


def test_beside_another_mesh_axis(alone):
    for split in (["B", "S(0)"], ["S(0)", "B"]):
        values, moved = spawn(run_eagerly, RANKS, GRID, split, int(WANTED.max()), 4)[0]
        assert_same(values, alone)
        assert len(moved) == 4


def job_of(bound: int, overflow: str = "error") -> pc.Job:
    with pc.job("experts") as job:
        x, up, down, shares = (
            pc.input(name, array.shape, "float64", LINE, ["S(0)"])
            for name, array in (("x", X), ("up", UP), ("down", DOWN), ("shares", SHARES))
        )
        chosen = pc.input("chosen", CHOSEN.shape, "int64", LINE)
        y, loss = mixture(x, up, down, shares, chosen, RANKS, bound, overflow)
        pc.output("y", y)
        for name, value in zip("abcd", pc.gradients(loss, [x, up, down, shares]), strict=True):
            pc.output(name, value)
    return job


FEEDS = {"x": X, "up": UP, "down": DOWN, "shares": SHARES, "chosen": CHOSEN}


@pytest.mark.processes
def test_a_job_gives_the_same_in_all_modes(alone):
    job = job_of(int(WANTED.max()))
    compiled = {mode: compile_plans(job, RANKS, mode) for mode in MODES}
    assert len({each.digest for each in compiled.values()}) == 1
    exchanges = [
        task for task in compiled["naive"].plans[0].tasks if getattr(task.spec, "lanes", 0)
    ]
    assert len(exchanges) == 4
    with pc.run(job, ranks=RANKS, backend="processes") as session:
        for _ in range(2):
            outputs = session.step(**FEEDS)
    assert_same([outputs[name] for name in "yabcd"], alone)


def test_more_rows_than_places_fail_the_step():
    bound = int(WANTED.max()) - 1
    with (
        pc.run(job_of(bound), ranks=RANKS, cache=False) as session,
        pytest.raises(pc.PlanCompilerError) as caught,
    ):
        session.step(**FEEDS)
    error = str(caught.value)
    piece = int(WANTED.argmax())
    assert f"{bound + 1} rows for experts {2 * piece} to {2 * piece + 1}" in error
    assert f"at most the bound of {bound}" in error
    assert "rank" in error
    assert "expert_places" in error


def test_more_rows_than_places_can_be_dropped():
    bound = int(WANTED.max()) - 2
    kept = CHOSEN >= 0
    for piece in range(4):
        late = np.argwhere(kept & (piece == CHOSEN // 2))[bound:]
        kept[tuple(late.T)] = False
    with pc.run(job_of(bound, "drop"), ranks=RANKS, cache=False) as session:
        np.testing.assert_allclose(session.step(**FEEDS)["y"], dense(kept), rtol=1e-9)


def test_the_layer_learns_the_same_on_one_rank_and_on_four():
    def losses(ranks: int, factor: float | None) -> list[float]:
        mesh = pc.Placement("cpu", list(range(ranks)))
        with pc.job("mixture", seed=3) as job:
            x = pc.input("x", (4, 6, DIM), "float32", mesh, ["S(0)"])
            layer = pc.nn.MixtureOfExperts(DIM, 8, EXPERTS, 2, ranks, factor)
            layer.place(mesh, {"up": ["S(0)"], "down": ["S(0)"]})
            loss = ((layer(x) - x) ** 2).mean()
            pc.optim.Adam(0.05).minimize(loss)
            pc.output("loss", loss)
        feed = np.random.default_rng(0).normal(size=(4, 6, DIM))
        with pc.run(job, ranks=ranks, cache=False) as session:
            return [float(session.step(x=feed)["loss"]) for _ in range(5)]

    one = losses(1, None)
    assert one[-1] < one[0]
    np.testing.assert_allclose(losses(4, None), one, rtol=1e-5)
    np.testing.assert_allclose(losses(4, 4.0), one, rtol=1e-5)


def test_wrong_experts_are_refused():
    with pytest.raises(pc.PlanCompilerError, match="8 experts, 3 pieces"):
        pc.nn.MixtureOfExperts(4, 8, 8, pieces=3)
