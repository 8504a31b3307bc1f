"""Rows sent to the ranks of their experts, and back: numbers that are known only at run time."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import current_world, global_gather, global_scatter, spawn
from plancompiler.errors import AttributeValueError, PlacementError, ShapeError, UsageError
from plancompiler.executor.comm import rows

WIDTH = 3


def counts_of(ranks: int, experts: int, seed: int) -> np.ndarray:
    """Counts [from rank, expert], many of them zero, and one rank that has no rows at all."""
    counts = np.random.default_rng(seed).integers(0, 4, (ranks, ranks * experts))
    counts[counts == 1] = 0
    counts[seed % ranks] = 0
    return counts


def rows_of(rank: int, count: int) -> np.ndarray:
    return (1000 * rank + np.arange(count * WIDTH)).reshape(count, WIDTH).astype(np.float64)


def dense(counts: np.ndarray, rank: int, experts: int) -> np.ndarray:
    """What a rank gets, by plain NumPy: for each of its experts, the rows of all ranks in turn."""
    parts = []
    for expert in range(rank * experts, (rank + 1) * experts):
        for source, of_source in enumerate(counts):
            first = of_source[:expert].sum()
            all_rows = rows_of(source, of_source.sum())
            parts.append(all_rows[first : first + of_source[expert]])
    return np.concatenate(parts)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("experts", [1, 2])
def test_rows_reach_their_experts_and_return(ranks, experts):
    def run():
        comm = current_world().comm
        context = comm.context(range(ranks))
        for seed in range(5):
            counts = counts_of(ranks, experts, seed)
            own = counts[comm.rank]
            given = rows_of(comm.rank, own.sum())
            actual, received = rows.global_scatter(context, given, own)
            np.testing.assert_array_equal(actual, dense(counts, comm.rank, experts))
            held = slice(comm.rank * experts, (comm.rank + 1) * experts)
            np.testing.assert_array_equal(received, counts[:, held].T)
            back = rows.global_gather(context, actual, own, received)
            np.testing.assert_array_equal(back, given)

    spawn(run, ranks)


def check_gradients() -> dict[str, int]:
    """Each rank's rows times a factor of its expert's rank: the gradient is that factor."""
    ranks, experts = 3, 2
    counts = counts_of(ranks, experts, 1)
    world = current_world()
    own = counts[world.rank]
    alone = pc.Placement("cpu", [world.rank])
    x = pc.tensor(rows_of(world.rank, own.sum()), alone, requires_grad=True)
    with pc.comm_trace() as trace:
        at_experts, received = global_scatter(x, own)
        back = global_gather(at_experts * (world.rank + 2.0), own, received)
        (back * back).sum().backward()
    owners = np.repeat(np.arange(ranks * experts) // experts, own)
    factor = (owners + 2.0)[:, None]
    np.testing.assert_allclose(back.numpy(), x.numpy() * factor)
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy() * factor**2)
    return trace.counts()


def test_gradients_are_each_others_inverse():
    # Counts and rows there, rows back; and the same for the gradient, in the other order.
    assert spawn(check_gradients, 3) == [{"exchange": 6}] * 3


def test_second_gradients():
    def run():
        world = current_world()
        alone = pc.Placement("cpu", [world.rank])
        own = np.array([1, 1])
        x = pc.tensor(rows_of(world.rank, 2) + 1, alone, requires_grad=True)
        y, _ = global_scatter(x, own)
        (first,) = pc.eager.grad((y * y * y).sum(), [x], create_graph=True)
        (second,) = pc.eager.grad(first.sum(), [x])
        np.testing.assert_allclose(second.numpy(), 6 * x.numpy())

    spawn(run, 2)


def test_bad_input():
    def run():
        world = current_world()
        context = world.comm.context((0, 1))
        given = rows_of(world.rank, 4)
        for counts, error in (
            ([1, 2, 1], ShapeError),
            (np.zeros(0, np.int64), ShapeError),
            ([1, 2], AttributeValueError),
            ([5, -1], AttributeValueError),
            ([2.0, 2.0], AttributeValueError),
        ):
            with pytest.raises(error):
                rows.global_scatter(context, given, np.array(counts))
        with pytest.raises(ShapeError, match="that global_scatter found"):
            rows.global_gather(context, given, np.array([2, 2]), np.array([[1, 1]]))
        with pytest.raises(UsageError, match="tensor of this rank"):
            global_scatter(given, np.array([2, 2]))
        everywhere = pc.tensor(given, pc.Placement("cpu", [0, 1]))
        with pytest.raises(PlacementError, match="on this rank alone"):
            global_scatter(everywhere, np.array([2, 2]))
        with pytest.raises(ShapeError, match="different numbers of experts"):
            rows.global_scatter(context, given, np.full(2 + 2 * world.rank, 2 - world.rank))
        context.barrier()

    spawn(run, 2)
