"""Parts of tensors and back, with gradients: what is silently wrong elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import join_parts, local_map, local_part, spawn
from plancompiler.errors import (
    GradientError,
    PlacementError,
    ShapeError,
    TracingError,
    UsageError,
)

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
THREE = pc.Placement("cpu", [0, 1, 2])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])


def rank_number():
    return pc.eager.current_world().rank


def test_the_gradient_of_a_broadcast_value_agrees_across_ranks():
    """Each rank uses it with data of its own: the gradient is the sum, on every rank."""

    def rank():
        number = rank_number()
        w = pc.tensor(np.ones(3), PAIR, "B", requires_grad=True)
        part = local_part(w)
        assert part.base is w
        own = pc.tensor(np.full(3, number + 1.0), part.placement)
        loss = join_parts((part * own).sum(), PAIR, "P")
        loss.backward()
        return loss.item(), w.grad.numpy().tolist(), w.grad.redistribute(sbp="B").local.tolist()

    assert spawn(rank, 2) == [(9.0, [3.0] * 3, [3.0] * 3)] * 2


@pytest.mark.parametrize("sbp", ["B", "S(0)", "S(1)"])
@pytest.mark.parametrize(("placement", "ndim"), [(ALONE, 1), (THREE, 1), (GRID, 2)])
def test_there_and_back_is_the_identity(placement, ndim, sbp):
    value = np.arange(20.0).reshape(5, 4)
    layout = [sbp] if ndim == 1 else [sbp, "B"]

    def rank():
        x = pc.tensor(value, placement, layout, requires_grad=True)
        y = join_parts(local_part(x), placement, layout)
        assert y.spec is x.spec
        (y * y).sum().backward()
        first = x.grad.numpy()
        z = join_parts(local_part(x) ** 3.0, placement, layout)
        (grad,) = pc.eager.grad(z.sum(), [x], create_graph=True)
        (second,) = pc.eager.grad((grad * x).sum(), [x])
        return y.numpy(), first, grad.numpy(), second.numpy()

    for y, first, grad, second in spawn(rank, placement.size):
        np.testing.assert_array_equal(y, value)
        np.testing.assert_allclose(first, 2 * value)
        np.testing.assert_allclose(grad, 3 * value**2)
        np.testing.assert_allclose(second, 9 * value**2)


@pytest.mark.parametrize("rows", [5, 4, 2, 1, 0])
def test_local_map_on_uneven_and_empty_parts(rows):
    value = np.arange(float(rows * 2)).reshape(rows, 2)

    def rank():
        x = pc.tensor(value, THREE, "S(0)", requires_grad=True)
        w = pc.tensor(np.array([2.0, 3.0]), THREE, "B", requires_grad=True)
        y = local_map(lambda a, b, nothing: a * b, x, w, None, sbp="S(0)")
        total = local_map(lambda a: a.sum(), y, sbp="P")
        total.backward()
        return y.numpy(), total.item(), x.grad.numpy(), w.grad.numpy()

    for y, total, by_x, by_w in spawn(rank, 3):
        np.testing.assert_allclose(y, value * [2.0, 3.0])
        assert total == y.sum()
        np.testing.assert_allclose(by_x, np.ones((rows, 1)) * [2.0, 3.0])
        np.testing.assert_allclose(by_w, value.sum(0))


def test_local_map_of_several_results():
    def rank():
        x = pc.tensor(np.arange(6.0).reshape(3, 2), PAIR, "S(0)")
        rows, nothing, most = local_map(
            lambda a: (a * 2.0, None, a.sum(0)), x, sbp=["S(0)", None, "P"]
        )
        return rows.numpy().tolist(), nothing, most.numpy().tolist()

    assert spawn(rank, 2) == [([[0, 2], [4, 6], [8, 10]], None, [6, 9])] * 2


def test_ranks_outside():
    def rank():
        x = pc.tensor(np.arange(3.0), PAIR, "S(0)")
        if rank_number() == 2:
            with pytest.raises(PlacementError, match="holds no part"):
                local_part(x)
            with pytest.raises(UsageError, match="cannot know the global shape"):
                local_map(lambda a: a, x, sbp="S(0)")
        y = local_map(lambda a: a + 1.0, x, sbp="S(0)", shape=(3,))
        return y.shape, y.local.tolist()

    assert spawn(rank, 3) == [((3,), [1, 2]), ((3,), [3]), ((3,), [])]


def test_wrong_uses():
    def rank():
        x = pc.tensor(np.ones(4), PAIR, "P", requires_grad=True)
        with pytest.raises(GradientError, match="parts of a partial value"):
            local_part(x)
        assert local_part(x.detach()).local_shape == (4,)
        whole = pc.tensor(np.ones(4), PAIR, "B")
        with pytest.raises(UsageError, match="this rank alone"):
            join_parts(whole, PAIR, "S(0)")
        with pytest.raises(UsageError, match="another number of layouts"):
            local_map(lambda a: (a, a), whole, sbp=["B"])
        with pytest.raises(UsageError, match="at least one DistTensor"):
            local_map(lambda a: a, 3)
        with pytest.raises(TracingError, match="parts of tensors are not known"):
            pc.compile(local_part)(whole)
        part = local_part(whole)
        kept = part[:1] if rank_number() == 0 else part
        with pytest.raises(ShapeError, match="another shape than its rank holds"):
            join_parts(kept, PAIR, "S(0)")

    spawn(rank, 2)


@pytest.mark.parametrize("sbp", ["B", "S(0)", "P"])
def test_second_derivatives_go_through_joined_parts(sbp):
    """Where all ranks give one value, only one of them counts, in each derivative."""
    value = np.array([-1.3, 0.7, 2.0])

    def rank():
        x = pc.tensor(value, PAIR, "S(0)" if sbp == "S(0)" else "B", requires_grad=True)
        part = pc.eager.local_part(x)
        y = pc.eager.join_parts(part * part, PAIR, sbp, x.shape)
        (first,) = pc.eager.grad((y * y).sum(), [x], create_graph=True)
        (second,) = pc.eager.grad((first * first).sum(), [x])
        return first.numpy(), second.numpy()

    times = 4.0 if sbp == "P" else 1.0  # (2 x²)² where both ranks' parts are summands
    for first, second in spawn(rank, 2):
        np.testing.assert_allclose(first, times * 4 * value**3)
        np.testing.assert_allclose(second, times**2 * 2 * 4 * value**3 * 12 * value**2)
