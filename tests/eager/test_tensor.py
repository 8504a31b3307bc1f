"""What eager tensors are: gradients and the tape, changes in place, views, and bad input."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import (
    AttributeValueError,
    GradientError,
    InplaceError,
    PlacementError,
    PlacementMismatchError,
    RankError,
    SbpSyntaxError,
    ShapeError,
    UsageError,
)

PAIR = pc.Placement("cpu", [0, 1])
ALONE = pc.Placement("cpu", [0])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])


def on_pair(function):
    return spawn(function, 2)


# --- answers that are silently wrong elsewhere ----------------------------------------------------


def test_item_of_a_partial_value_is_the_whole_value():
    def rank():
        x = pc.tensor(np.arange(5.0), PAIR, "S(0)").sum()
        return str(x.sbp), x.item(), bool(x)

    assert on_pair(rank) == [("[P]", 10.0, True)] * 2


def test_a_number_added_to_a_partial_value_counts_once():
    def rank():
        x = pc.tensor(np.arange(4.0), PAIR, "P")
        return [(x + 1.0).numpy().tolist(), (3.0 - x).numpy().tolist(), (2.0 * x).sbp]

    for plus, minus, doubled in on_pair(rank):
        assert plus == [1, 2, 3, 4]
        assert minus == [3, 2, 1, 0]
        assert str(doubled) == "[P]"


@pytest.mark.parametrize(("placement", "sbp"), [(PAIR, "S(0)"), (GRID, ["S(1)", "S(0)"])])
def test_random_numbers_do_not_depend_on_the_layout(placement, sbp):
    def rank(where, layout):
        pc.manual_seed(11)
        x = pc.tensor(np.ones((7, 5)), where, layout, requires_grad=True)
        y = pc.dropout(x, 0.4)
        z = pc.dropout(x, 0.4)
        (y + z * 10.0).sum().backward()
        drawn = [
            pc.normal((5, 3), placement=where, sbp=layout),
            pc.uniform((5, 3), placement=where, sbp=layout),
            pc.bernoulli((5, 3), placement=where, sbp=layout),
            pc.randint((5, 3), 0, 9, placement=where, sbp=layout),
        ]
        return [each.numpy() for each in (y, z, x.grad, *drawn)]

    (one,) = spawn(rank, 1, ALONE, "B")
    assert not np.array_equal(one[0], one[1])
    np.testing.assert_array_equal(one[2], one[0] + 10 * one[1])
    for of_rank in spawn(rank, placement.size, placement, sbp):
        for got, wanted in zip(of_rank, one, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_saved_generator_continues():
    def rank():
        generator = pc.manual_seed(3)
        pc.normal((4,), placement=ALONE)
        state = generator.state()
        first = pc.normal((4,), placement=ALONE).numpy()
        other = pc.Generator()
        other.load_state(state)
        with pc.using_generator(other):
            second = pc.normal((4,), placement=ALONE).numpy()
        return first, second

    ((first, second),) = spawn(rank, 1)
    np.testing.assert_array_equal(first, second)
    with pytest.raises(UsageError, match="state of a generator"):
        pc.Generator().load_state({"seed": 1})


def test_uneven_parts_with_an_explicit_shape():
    whole = np.arange(15.0).reshape(5, 3)

    def rank():
        number = pc.eager.current_world().rank
        part = whole[:3] if number == 0 else whole[3:]
        first = pc.from_local(part, PAIR, "S(0)", shape=(5, 3))
        second = pc.DistTensor.from_local(part, PAIR, "S(0)", check=True)
        with pytest.raises(ShapeError, match="another shape than its rank holds"):
            pc.from_local(whole[:2] if number == 0 else whole[2:], PAIR, "S(0)", shape=(5, 3))
        return first.numpy(), second.numpy(), second.shape

    for first, second, shape in on_pair(rank):
        np.testing.assert_array_equal(first, whole)
        np.testing.assert_array_equal(second, whole)
        assert shape == (5, 3)


def test_parts_that_disagree_are_found():
    def unlike():
        number = pc.eager.current_world().rank
        dtype = np.float32 if number else np.float64
        pc.from_local(np.ones(2, dtype), PAIR, "S(0)", check=True)

    with pytest.raises(ShapeError, match="different dtypes"):
        on_pair(unlike)

    def uneven():
        number = pc.eager.current_world().rank
        pc.from_local(np.ones(3 + number), PAIR, "S(0)").numpy()

    with pytest.raises(ShapeError, match="do not match its global shape"):
        on_pair(uneven)


def test_convolution_on_a_spatial_split():
    rng = np.random.default_rng(0)
    image, kernel = rng.normal(size=(1, 2, 7, 6)), rng.normal(size=(3, 2, 3, 3))

    def rank(where, layout):
        x = pc.tensor(image, where, layout, requires_grad=True)
        y = pc.conv2d(x, pc.tensor(kernel, where), padding=1)
        (y * y).sum().backward()
        return y.numpy(), x.grad.numpy()

    (one,) = spawn(rank, 1, ALONE, "B")
    for of_rank in spawn(rank, 2, PAIR, "S(2)"):
        for got, wanted in zip(of_rank, one, strict=True):
            np.testing.assert_allclose(got, wanted, 1e-10)


def test_reduce_scatter_and_all_to_all_run_on_cpus():
    """Uneven parts, whole numbers, and the gradient of each."""
    value = np.arange(15.0).reshape(5, 3)

    def rank():
        results = []
        for before, after in (("P", "S(0)"), ("S(1)", "S(0)")):
            x = pc.tensor(value, PAIR, before, requires_grad=True)
            with pc.comm_trace() as trace:
                y = x.redistribute(sbp=after)
            (y * y).sum().backward()
            whole = pc.tensor(value.astype(np.int64), PAIR, before).redistribute(sbp=after)
            results.append((trace.counts(), y.local, whole.local, x.grad.numpy()))
        return results

    for number, actual in enumerate(on_pair(rank)):
        rows = value[:3] if number == 0 else value[3:]
        for (counts, local, whole, grad), name in zip(
            actual, ("reduce_scatter", "all_to_all"), strict=True
        ):
            assert counts == {name: 1}
            np.testing.assert_array_equal(local, rows)
            np.testing.assert_array_equal(whole, rows)
            np.testing.assert_array_equal(grad, 2 * value)


def test_ranks_outside_a_placement_do_nothing_and_do_not_hang():
    first = pc.Placement("cpu", [0, 1])

    def rank():
        x = pc.tensor(np.ones((4, 3)), first, "S(0)", requires_grad=True)
        y = (x * 2.0).relu().sum()
        y.backward()
        if pc.eager.current_world().rank == 2:
            with pytest.raises(PlacementError, match="holds no part"):
                y.item()
            return y.shape, x.local.size, x.grad.local.size
        return y.item()

    assert spawn(rank, 3) == [24.0, 24.0, ((), 0, 0)]


# --- the tape -------------------------------------------------------------------------------------


def test_gradients_of_split_data_are_reduced_once():
    def rank():
        x = pc.tensor(np.ones((4, 3)), PAIR, "S(0)")
        w = pc.tensor(np.ones((3, 2)), PAIR, "B", requires_grad=True)
        with pc.comm_trace() as backward:
            (x @ w).sum().backward()
        partial = str(w.grad.sbp)
        with pc.comm_trace() as reading:
            values = [w.grad.numpy(), (w.grad + 1.0).numpy() - 1.0, w.grad.numpy()]
        return backward.counts(), partial, reading.counts(), [v.tolist() for v in values]

    for backward, partial, reading, values in on_pair(rank):
        assert backward == {}
        assert partial == "[P]"
        assert reading == {"all_reduce": 1}
        assert values == [[[4.0, 4.0]] * 3] * 3


def test_tensor_parallel_layers_reduce_once_each_way():
    def rank():
        x = pc.tensor(np.ones((4, 6)), PAIR, "B", requires_grad=True)
        column = pc.tensor(np.ones((6, 8)), PAIR, "S(1)", requires_grad=True)
        row = pc.tensor(np.ones((8, 6)), PAIR, "S(0)", requires_grad=True)
        with pc.comm_trace() as forward:
            y = ((x @ column).relu() @ row).relu()
        with pc.comm_trace() as backward:
            y.sum().backward()
            x.grad.redistribute(sbp="B")
        return forward.counts(), backward.counts()

    assert on_pair(rank) == [({"all_reduce": 1}, {"all_reduce": 1})] * 2


def test_higher_derivatives():
    x = pc.tensor(np.array([1.0, 2.0, 3.0]), ALONE, requires_grad=True)
    y = (x * x * x).sum()
    (first,) = pc.eager.grad(y, [x], create_graph=True)
    (second,) = pc.eager.grad(first.sum(), [x], create_graph=True)
    (third,) = pc.eager.grad(second.sum(), [x])
    assert first.numpy().tolist() == [3, 12, 27]
    assert second.numpy().tolist() == [6, 12, 18]
    assert third.numpy().tolist() == [6, 6, 6]


def test_gradients_add_up_and_can_be_forgotten():
    x = pc.tensor([1.0, 2.0], ALONE, requires_grad=True)
    for _ in range(2):
        (x * x).sum().backward()
    assert x.grad.numpy().tolist() == [4, 8]
    x.grad = None
    assert x.grad is None


def test_hooks_see_and_replace_gradients():
    x = pc.tensor([1.0, 2.0], ALONE, requires_grad=True)
    y = x * 3.0
    seen = []
    remove = y.register_hook(lambda grad: seen.append(grad.numpy().tolist()))
    x.register_hook(lambda grad: grad * 10.0)
    y.sum().backward()
    assert seen == [[1, 1]]
    assert x.grad.numpy().tolist() == [30, 30]
    remove()
    (x * 3.0).sum().backward()
    assert len(seen) == 1


def test_what_is_not_recorded():
    x = pc.tensor([1.0], ALONE, requires_grad=True)
    with pc.no_grad():
        assert not (x * 2.0).requires_grad
    assert not x.detach().requires_grad
    assert not x.argmax(0).requires_grad
    assert (x * 2.0).requires_grad


def test_a_tensor_of_one_element_is_walked_back_from_as_a_scalar():
    for wrap in (lambda function: function, pc.compile):

        def slopes(x):
            x = x.detach()
            x.requires_grad = True
            (x * x).sum(0, keepdims=True).sum(1, keepdims=True).backward()
            return x.grad

        x = pc.tensor(np.arange(6.0).reshape(2, 3), ALONE)
        np.testing.assert_array_equal(wrap(slopes)(x).numpy(), 2 * x.numpy())


def test_gradients_of_several_outputs_are_added():
    x = pc.tensor([1.0, 2.0], ALONE, requires_grad=True)
    y, z = x * x, (x * 3.0).sum()
    seeds = [pc.tensor([10.0, 100.0], ALONE), None]
    (made,) = pc.eager.grad([y, z], x, seeds)
    np.testing.assert_array_equal(made.numpy(), [23.0, 403.0])
    (made,) = pc.eager.grad(x * x, [x], grad_outputs=seeds[0])
    np.testing.assert_array_equal(made.numpy(), [20.0, 400.0])
    with pytest.raises(UsageError, match="2 for 1 outputs"):
        pc.eager.grad(z, [x], seeds)


def test_wrong_uses_of_the_tape():
    x = pc.tensor(np.ones((2, 2)), ALONE, requires_grad=True)
    y = x * 2.0
    with pytest.raises(GradientError, match="no scalar needs a gradient"):
        y.backward()
    with pytest.raises(GradientError, match="does not fit"):
        y.backward(pc.tensor(np.ones(2), ALONE))
    z = y.sum()
    z.backward()
    with pytest.raises(GradientError, match="walked back already"):
        z.backward()
    # By one of two ways to x a gradient would be wrong, not missing.
    w = pc.tensor(np.full((2, 2), 3.0), ALONE, requires_grad=True)
    with pytest.raises(GradientError, match="walked back already"):
        pc.eager.grad((y * w * x).sum(), [x])
    assert pc.eager.grad((y * w).sum(), [w])[0].numpy().tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(GradientError, match="made of nothing"):
        pc.tensor(1.0, ALONE).backward()
    with pytest.raises(GradientError, match="only a floating tensor"):
        pc.tensor([1], ALONE, requires_grad=True)
    kept = (x * x).sum()
    with pc.no_grad():
        x += 1.0
    with pytest.raises(GradientError, match="changed in place"):
        kept.backward()


# --- changes in place, and views ------------------------------------------------------------------


def test_changes_in_place_keep_identity_and_layout():
    def rank():
        x = y = pc.tensor(np.arange(4.0), PAIR, "S(0)")
        x += pc.tensor(np.ones(4), PAIR, "S(0)")
        x *= 2.0
        assert x is y
        view = x.reshape(2, 2)
        assert view.base is x
        assert x.base is None
        view.fill_(7.0)
        z = pc.tensor(np.zeros(4), PAIR, "B")
        z += pc.tensor(np.ones(4), PAIR, "S(0)")
        assert str(z.sbp) == "[B]"
        assert z.numpy().tolist() == [1.0] * 4
        with pytest.raises(InplaceError, match="shape, dtype or placement"):
            z += pc.tensor(np.ones((3, 4)), PAIR, "B")
        return x.numpy().tolist()

    assert on_pair(rank) == [[7.0] * 4] * 2
    w = pc.tensor([1.0], ALONE, requires_grad=True)
    with pytest.raises(InplaceError, match="on the tape"):
        w += 1.0


# --- bad input ------------------------------------------------------------------------------------


def test_operands_that_do_not_belong_together():
    x = pc.tensor(np.ones(3), ALONE)
    with pytest.raises(UsageError, match="cannot combine a DistTensor") as raised:
        x + np.ones(3)
    assert "test_tensor.py" in str(raised.value)
    with pytest.raises(UsageError, match="cannot combine"):
        pc.maximum(np.ones(3), x)
    with pc.implicit_broadcast():
        assert (x + np.ones(3)).numpy().tolist() == [2, 2, 2]
        assert (np.ones(3) - x).numpy().tolist() == [0, 0, 0]
    assert (x + np.float64(1.0)).numpy().tolist() == [2, 2, 2]

    def meshes():
        left = pc.tensor(np.ones(3), PAIR)
        right = pc.tensor(np.ones(3), pc.Placement("cpu", [1, 0]))
        left + right

    with pytest.raises(PlacementMismatchError, match="redistribute"):
        on_pair(meshes)


def test_wrong_layouts_and_ranks():
    with pytest.raises(SbpSyntaxError, match="unknown reduction"):
        pc.tensor([1.0], ALONE, "P(mean)")
    with pytest.raises(RankError, match="outside the world"):
        pc.tensor([1.0], PAIR)
    with pytest.raises(AttributeValueError):
        pc.tensor(np.ones((2, 2)), ALONE).sum(axis=5)
    with pytest.raises(ShapeError):
        pc.tensor(np.ones((2, 3)), ALONE) @ pc.tensor(np.ones((2, 3)), ALONE)
    with pytest.raises(ShapeError, match="one element"):
        pc.tensor([1.0, 2.0], ALONE).item()


def test_equal_numbers_of_other_kinds_are_not_confused():
    x = pc.tensor([0.0, -1.0], ALONE)
    assert np.signbit((x * 0.0).numpy()).tolist() == [False, True]
    assert np.signbit((x * -0.0).numpy()).tolist() == [True, False]
    whole = pc.tensor([1, 2], ALONE)
    assert (whole + 1).dtype is pc.DType.INT64
    assert (whole + 1.0).dtype is pc.DType.FLOAT64
    with pc.strict_dtypes(), pytest.raises(pc.DTypeError):
        whole + 1.0


def test_tensors_and_modules_are_copied():
    def rank():
        x = pc.tensor(np.arange(6.0), PAIR, "S(0)", requires_grad=True)
        again, shared = copy.deepcopy([x, x])[0], copy.copy(x)
        assert again.requires_grad
        assert shared.is_view
        with pc.no_grad():
            x += 1.0
        assert again.numpy().tolist() == list(range(6))
        assert shared.numpy().tolist() == list(range(1, 7))
        with pytest.raises(GradientError, match="with its past"):
            copy.deepcopy(x * 2.0)
        with pytest.raises(UsageError, match="cannot be pickled"):
            pickle.dumps(x)
        net = pc.nn.Sequential(pc.nn.Linear(6, 4), pc.nn.Linear(4, 2))
        net.place(PAIR, {"0.weight": "S(0)"})
        rows = pc.tensor(np.ones((2, 6), np.float32), PAIR, "B")
        before = net(rows).numpy()
        slow = copy.deepcopy(net)
        net(rows).sum().backward()
        pc.optim.SGD(lr=0.5).step(list(net.parameters()))
        assert not np.allclose(net(rows).numpy(), before)
        np.testing.assert_array_equal(slow(rows).numpy(), before)
        with pc.no_grad():
            for mean, each in zip(slow.parameters(), net.parameters(), strict=True):
                mean.value.copy_(mean.value * 0.9 + each.value * 0.1)
        return sorted(slow.state_dict()) == sorted(net.state_dict())

    assert spawn(rank, 2) == [True, True]


def test_gradients_share_no_memory():
    """Also where the gradient of an op is that of its result."""
    a, b = (pc.tensor(np.ones(2, np.float32), ALONE, requires_grad=True) for _ in range(2))
    given = pc.tensor(np.full(2, 3.0, np.float32), ALONE)
    (a + b).backward(given)
    a.grad.zero_()
    np.testing.assert_array_equal(b.grad.numpy(), [3.0, 3.0])
    given.zero_()
    np.testing.assert_array_equal(b.grad.numpy(), [3.0, 3.0])
    c = pc.tensor(np.ones(2, np.float32), ALONE, requires_grad=True)
    other = pc.tensor(np.full(2, 4.0, np.float32), ALONE)
    c.backward(other)
    other.zero_()
    np.testing.assert_array_equal(c.grad.numpy(), [4.0, 4.0])
