"""Views, changes in place and `into`: who shares memory, and what the tape makes of it."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import GradientError, InplaceError, TracingError, UsageError

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])

VALUE = np.arange(30.0).reshape(5, 6)
VIEWS = {
    "transpose": (lambda x: x.T, lambda a: a.T),
    "rows": (lambda x: x[1:4], lambda a: a[1:4]),
    "columns": (lambda x: x[:, 2:5], lambda a: a[:, 2:5]),
    "row": (lambda x: x[2], lambda a: a[2]),
    "steps": (lambda x: x[::2, 1::3], lambda a: a[::2, 1::3]),
    "last step": (lambda x: x[..., ::4], lambda a: a[..., ::4]),
    "detach": (lambda x: x.detach(), lambda a: a),
    "diagonal": (lambda x: x.diagonal(1), lambda a: np.einsum("ii->i", a[:, 1:])),
    "two": (lambda x: x.T[1:5], lambda a: a.T[1:5]),
}
LAYOUTS = [(ALONE, "B"), (PAIR, "B"), (PAIR, "S(0)"), (PAIR, "S(1)"), (GRID, ["S(0)", "S(1)"])]


@pytest.mark.parametrize(("placement", "sbp"), LAYOUTS)
@pytest.mark.parametrize("name", VIEWS)
def test_a_change_of_a_view_is_seen_in_its_base_and_of_the_base_in_the_view(name, placement, sbp):
    make, dense = VIEWS[name]

    def rank():
        x = pc.tensor(VALUE, placement, sbp)
        view = make(x)
        other = make(x)
        np.testing.assert_array_equal(view.numpy(), dense(VALUE))
        assert view.base is x
        view *= -1.0
        expected = VALUE.copy()
        dense(expected)[...] *= -1.0
        for each in (view, other):
            np.testing.assert_array_equal(each.numpy(), dense(expected))
        np.testing.assert_array_equal(x.numpy(), expected)
        x += 1.0
        np.testing.assert_array_equal(view.numpy(), dense(expected + 1.0))
        return bool(view.local.size and np.may_share_memory(view.local, x.local))

    shared = spawn(rank, placement.size)
    split = "S(0)" in sbp or "S(1)" in sbp
    assert all(shared) or (split and name not in ("transpose", "detach"))


@pytest.mark.parametrize("name", [*VIEWS, "expand"])
def test_a_view_is_one_each_time_it_is_made(name):
    """What runs again takes the short way through dispatch."""
    make = VIEWS[name][0] if name in VIEWS else lambda x: pc.expand(x[:1], (5, 6))

    def rank():
        sbp = "B" if name == "expand" else "P"  # a partial value is reduced before it grows
        x = pc.tensor(VALUE, PAIR, sbp, requires_grad=True)
        views = [make(x) for _ in range(3)]
        made = [make(x.detach()) for _ in range(2)]
        grads = [pc.eager.grad(view.sum(), [x])[0].numpy() for view in views if name != "detach"]
        return [each.is_view for each in (*views, *made)], grads

    for shared, grads in spawn(rank, 2):
        assert all(shared)
        for grad in grads:
            np.testing.assert_array_equal(grad, grads[0])
            assert grad.sum() == (30 if name == "expand" else VIEWS[name][1](VALUE).size)


@pytest.mark.parametrize("sbp", [["B", "P"], ["P", "B"]])
def test_a_slice_that_splits_what_all_ranks_have(sbp):
    """A partial value may be cut into parts; a change of these reaches all copies."""

    def rank():
        x = pc.tensor(VALUE, GRID, sbp)
        view = x[1::3]
        before = view.numpy()
        view *= -1.0
        return view.is_view, before, view.numpy(), x.numpy()

    by_rank = spawn(rank, 4)
    assert len({shared for shared, *_ in by_rank}) == 1
    for shared, before, after, base in by_rank:
        assert shared
        np.testing.assert_array_equal(before, VALUE[1::3])
        np.testing.assert_array_equal(after, -VALUE[1::3])
        expected = VALUE.copy()
        expected[1::3] *= -1.0
        np.testing.assert_array_equal(base, expected)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_what_is_a_view_is_a_fact_of_the_whole_tensor(sbp):
    """As in NumPy: a reshape is one where strides allow it, whatever the layout."""

    def rank():
        x = pc.tensor(VALUE, PAIR, sbp)
        rows, columns = x[1:3], x[:, 2:5]
        return [
            each.is_view
            for each in (
                rows, columns, rows.reshape(-1), columns.reshape(5, 1, 3), x.T.reshape(2, 3, 5),
                x.reshape(30), x[::2].reshape(3, 2, 3), pc.stop_gradient(x), x.T.T.reshape(30),
                x.T.reshape(30), columns.reshape(15), x[::2].reshape(18), x * 1.0,
            )
        ]  # fmt: skip

    assert spawn(rank, 2) == [[True] * 9 + [False] * 4] * 2


def test_an_expanded_tensor_is_read_only():
    x = pc.tensor(np.ones((3, 1)), ALONE)
    wide = pc.expand(x, (3, 4))
    assert wide.base is x
    with pytest.raises(InplaceError, match="elements share memory"):
        wide += 1.0
    x += 1.0
    assert (wide.numpy() == 2).all()


def test_a_reduced_value_does_not_share_with_what_it_came_from():
    def rank():
        x = pc.tensor(np.arange(4.0), PAIR, "P")
        first, second = x.redistribute(sbp="B"), x.redistribute(sbp="B")
        first += 10.0
        flat = second.reshape(2, 2)
        flat.fill_(0.0)
        assert flat.base is second
        x2 = x.reshape(2, 2)
        before = x2.numpy()
        with pc.no_grad():
            x.copy_(x * 2.0)
        return [each.numpy().tolist() for each in (x, first, second)] + [
            before.tolist(),
            x2.numpy().tolist(),
        ]

    expected = [
        [0, 2, 4, 6],
        [10, 11, 12, 13],
        [0, 0, 0, 0],
        [[0, 1], [2, 3]],
        [[0, 2], [4, 6]],
    ]
    assert spawn(rank, 2) == [expected] * 2


# --- the tape -------------------------------------------------------------------------------------


def gradient(function):
    x = pc.tensor([1.0, 2.0, 3.0], ALONE, requires_grad=True)
    function(x).sum().backward()
    return None if x.grad is None else x.grad.numpy().tolist()


def test_changes_in_place_are_recorded():
    def scaled(x):
        y = x * 2.0
        same = y
        y *= x
        y += 1.0
        assert y is same
        return y * 3.0

    assert gradient(scaled) == [12.0, 24.0, 36.0]

    def into_plain(x):
        y = pc.tensor(np.ones(3), ALONE, dtype="float32")
        y *= x
        return y * y

    assert gradient(into_plain) == [2.0, 4.0, 6.0]

    def replaced(x):
        y = x * 5.0
        y.copy_(x)
        return y

    assert gradient(replaced) == [1.0, 1.0, 1.0]

    def named(x):
        y = x - 2.0
        y.relu_()
        return y

    assert gradient(named) == [0.0, 0.0, 1.0]

    def forgotten(x):
        y = x * 2.0
        y.zero_()
        return y + x

    assert gradient(forgotten) == [1.0, 1.0, 1.0]


def test_what_would_give_a_wrong_gradient_is_refused():
    w = pc.tensor(np.ones(4), ALONE, requires_grad=True)
    base = pc.tensor(np.ones(4), ALONE)
    view = base.reshape(2, 2)
    other = base.reshape(4, 1)
    with pytest.raises(InplaceError, match="would not be part of the gradient"):
        view += w.reshape(2, 2)
    with pytest.raises(InplaceError, match="would not be part of the gradient"):
        base += w
    assert other.numpy().sum() == 4.0
    for change in (lambda: w.T.base.fill_(0.0), lambda: w[1:].fill_(0.0)):
        with pytest.raises(InplaceError, match="on the tape cannot be changed"):
            change()
    y = w * 2.0
    used = y * y
    y += 1.0
    with pytest.raises(GradientError, match="changed in place"):
        used.sum().backward()
    y = w * 2.0
    flat = y.reshape(2, 2)
    used = flat * 1.0
    y *= 2.0
    with pytest.raises(GradientError, match="changed in place"):
        used.sum().backward()
    (flat * 1.0).sum().backward()  # it sees the change, and so does its gradient
    assert w.grad.numpy().tolist() == [4.0] * 4
    with pytest.raises(AttributeError, match="has no 'nothing_'"):
        w.nothing_()


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_changes_through_views_are_recorded(sbp):
    """As PyTorch does: the base goes on as what the change made of it."""

    def rank():
        w = pc.tensor(VALUE, PAIR, sbp, requires_grad=True)
        y = pc.tensor(VALUE[0], PAIR, requires_grad=True)
        x = w * 2.0
        x[1:3] *= 3.0
        x[4, 1:] = y[1:] * 5.0
        column = x.T[0]
        column *= column
        (x * 1.0).sum().backward()
        plain = pc.tensor(np.zeros((5, 6)), PAIR, sbp)
        for row in range(5):
            plain[row] = y * float(row)
        (of_y,) = pc.eager.grad((plain * plain).sum(), [y])
        return w.grad.numpy(), y.grad.numpy(), of_y.numpy(), plain.numpy()

    of_w = np.full((5, 6), 2.0)
    of_w[1:3] = 6.0
    of_w[4, 1:] = 0.0
    of_w[:, 0] *= 2.0 * (VALUE * of_w)[:, 0]
    for got in spawn(rank, 2):
        np.testing.assert_allclose(got[0], of_w)
        np.testing.assert_allclose(got[1], [0.0, *[5.0] * 5])
        np.testing.assert_allclose(got[2], 2.0 * VALUE[0] * sum(n * n for n in range(5)))
        np.testing.assert_allclose(got[3], np.outer(range(5), VALUE[0]))


@pytest.mark.parametrize("sbp", ["S(0)", "B"])
def test_leaves_change_through_views_where_nothing_is_recorded(sbp):
    def rank():
        w = pc.tensor(VALUE, PAIR, sbp, requires_grad=True)
        for part in (w[1:3], w.reshape(30)[:4], w.detach()[4]):
            if part.requires_grad:
                with pytest.raises(InplaceError, match="on the tape cannot be changed"):
                    part.zero_()
            with pc.no_grad():
                part.zero_()
        w.sum().backward()
        return w.numpy(), w.grad.numpy()

    expected = VALUE.copy()
    expected[1:3] = expected[4] = 0.0
    expected[0, :4] = 0.0
    for value, grad in spawn(rank, 2):
        np.testing.assert_array_equal(value, expected)
        assert (grad == 1.0).all()


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_views_as_arguments_of_compiled_functions(sbp):
    double = pc.compile(lambda part: part.__imul__(2.0))
    both = pc.compile(lambda whole, part: part.__iadd__(whole[:2]))

    def rank():
        x = pc.tensor(VALUE, PAIR, sbp)
        part, other = x[1:3], x[2:4]
        double(part)
        double(part.T[1])
        x += 1.0
        read = pc.compile(lambda value: value * 1.0)(other)
        with pytest.raises(TracingError, match="whose memory it also reads"):
            both(x, part)
        return x.numpy(), part.numpy(), read.numpy()

    expected = VALUE.copy()
    expected[1:3] *= 2.0
    expected[1:3, 1] *= 2.0
    expected += 1.0
    for got in spawn(rank, 2):
        for one, wanted in zip(got, (expected, expected[1:3], expected[2:4]), strict=True):
            np.testing.assert_array_equal(one, wanted)


def test_one_rank_alone_may_print_a_view():
    def rank():
        x = pc.tensor(VALUE, PAIR, "S(0)")
        part = x[1:3]
        x += 1.0
        texts = repr(part) if pc.eager.current_world().rank == 0 else ""
        assert "changed" not in repr(x[1:3])
        return texts, part.numpy()

    for text, value in spawn(rank, 2):
        assert text == "" or text.endswith("from before its base was changed)")
        np.testing.assert_array_equal(value, VALUE[1:3] + 1.0)


@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
@pytest.mark.parametrize("wrap", [lambda function: function, pc.compile], ids=["eager", "compiled"])
def test_an_expanded_view_is_read_only_in_every_layout(sbp, wrap):
    def rank():
        x = pc.tensor(VALUE[:, :1], PAIR, sbp)
        for change in (
            lambda x: pc.expand(x, (5, 4)).fill_(1.0),
            lambda x: pc.expand(x, (5, 4))[1:2].fill_(1.0),
        ):
            with pytest.raises(InplaceError, match="elements share memory"):
                wrap(change)(x)
        np.testing.assert_array_equal(x.numpy(), VALUE[:, :1])

    spawn(rank, 2)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ((slice(1, 3),), 7.0),
        ((2,), VALUE[0] * 3.0),
        ((slice(None, None, 2), slice(1, 4)), VALUE[0, :3]),
        ((..., -1), 1),
        ((slice(None),), VALUE * 2.0),
        ((3, 4), 9.0),
    ],
)
def test_elements_are_assigned(index, value):
    expected = VALUE.copy()
    expected[index] = value

    def rank():
        results = []
        for sbp in ("S(0)", "S(1)", "B", "P"):
            for wrap in (lambda function: function, pc.compile):
                x = pc.tensor(VALUE, PAIR, sbp)

                def assign(x):
                    given = isinstance(value, np.ndarray)
                    x[index] = pc.tensor(value, PAIR) if given else value

                wrap(assign)(x)
                results.append(x.numpy())
        return results

    for of_rank in spawn(rank, 2):
        for got in of_rank:
            np.testing.assert_array_equal(got, expected)


def test_elements_of_values_of_a_job_are_not_assigned():
    with pc.job("none"):
        x = pc.input("x", (2,), "float32", ALONE)
        pc.output("x", x)
        with pytest.raises(TracingError, match="cannot be changed in place"):
            x[0] = 1.0


# --- into -----------------------------------------------------------------------------------------


def test_results_go_into_existing_tensors():
    def rank():
        x = pc.tensor(VALUE, PAIR, "S(0)")
        out = pc.tensor(np.zeros((5, 6)), PAIR, "S(0)")
        assert pc.eager.into(out, pc.maximum, x, 7.0) is out
        halves = [pc.tensor(np.zeros((5, 3)), PAIR, "S(0)"), None]
        pc.eager.into(halves, pc.split, x, 3, axis=1)
        with pytest.raises(InplaceError, match="shape, dtype or placement"):
            pc.eager.into(out, pc.matmul, x, x.T)
        with pytest.raises(UsageError, match="do not pair up"):
            pc.eager.into([out], pc.split, x, 3, axis=1)
        return out.numpy(), halves[0].numpy()

    for out, half in spawn(rank, 2):
        np.testing.assert_array_equal(out, np.maximum(VALUE, 7.0))
        np.testing.assert_array_equal(half, VALUE[:, :3])


def test_into_is_recorded():
    def function(x):
        y = pc.tensor(np.zeros(3, np.float32), ALONE)
        pc.eager.into(y, pc.mul, x, x)
        return y * 2.0

    assert gradient(function) == [4.0, 8.0, 12.0]


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transpose", "detach"])
def test_views_are_the_same_in_compiled_functions(name):
    def function(x):
        view = VIEWS[name][0](x)
        again = view.reshape(30)
        view *= 2.0
        x += 1.0
        return view * 1.0, again * 1.0

    results = []
    for run in (function, pc.compile(function)):
        x = pc.tensor(VALUE, ALONE)
        results.append([each.numpy() for each in (*run(x), x)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_of_changes_are_the_same_in_compiled_functions():
    def function(x):
        y = x * 2.0
        y *= x
        y.relu_()
        plain = pc.tensor(np.ones(3, np.float32), ALONE)
        plain += y
        plain.sum().backward()

    def run(wrap):
        x = pc.tensor([1.0, -2.0, 3.0], ALONE, requires_grad=True)
        wrap(function)(x)
        return x.grad.numpy().tolist()

    assert run(lambda function: function) == run(pc.compile) == [4.0, -8.0, 12.0]


# --- what all ranks must see alike ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (1, 4)])
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B"])
def test_ranks_agree_on_which_reshapes_are_views(shape, sbp):
    """A part of extent one lies in order where the others do not."""
    value = np.arange(12.0)[: shape[0] * shape[1]].reshape(shape)

    def rank():
        x = pc.tensor(value, PAIR, sbp)
        made = [x[:, 1], x.T.reshape(-1), (x.T * 1.0).reshape(-1), (x.T * 1.0).T.reshape(-1)]
        seen = [each.is_view for each in made]
        before = [each.numpy() for each in made]
        made[0].zero_()
        return seen, before, x.numpy()

    first, second = spawn(rank, 2)
    assert first[0] == second[0]
    for seen, before, after in (first, second):
        for got, want in zip(
            before, (value[:, 1], value.T.ravel(), value.T.ravel(), value.ravel()), strict=True
        ):
            np.testing.assert_array_equal(got, want)
        expected = value.copy()
        if seen[0]:
            expected[:, 1] = 0.0
        np.testing.assert_array_equal(after, expected)
    assert seen[0]


def test_a_slice_of_what_nobody_holds_any_more():
    def rank():
        row = pc.tensor(VALUE, PAIR, "S(0)")[2]
        row += pc.tensor(VALUE[0], PAIR, requires_grad=True).redistribute(sbp=row.sbp)
        return row.is_view, row.requires_grad, row.numpy().tolist()

    assert spawn(rank, 2) == [(True, True, (VALUE[2] + VALUE[0]).tolist())] * 2


# --- gradients of values that a change reads ------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "power"),
    [
        (lambda x: x.copy_(x), 1),
        (lambda x: x.copy_(x * x), 2),
        (lambda x: x.__imul__(x), 2),
        (lambda x: x.copy_(x.redistribute(sbp="B") * x), 2),
        (lambda x: pc.eager.into(x, pc.mul, x, x), 2),
    ],
)
@pytest.mark.parametrize(("placement", "sbp"), [(ALONE, "B"), (PAIR, "S(0)")])
def test_a_tensor_takes_a_value_made_of_itself(change, power, placement, sbp):
    def rank():
        w = pc.tensor(np.array([1.0, 2.0, 3.0]), placement, sbp, requires_grad=True)
        x = w * 2.0
        change(x)
        return x.numpy(), pc.eager.grad(x.sum(), [w])[0].numpy()

    for value, grad in spawn(rank, placement.size):
        w = np.array([1.0, 2.0, 3.0])
        np.testing.assert_allclose(value, (2.0 * w) ** power)
        np.testing.assert_allclose(grad, power * 2.0 * (2.0 * w) ** (power - 1))


@pytest.mark.parametrize("take", [lambda x: x.fill_(0.5), lambda x: x[:2].zero_()])
def test_a_gradient_is_refused_and_not_left_out(take):
    """`grad` walks only where it finds what it wants; a changed tensor has hidden the way."""
    w = pc.tensor(np.array([1.0, 2.0, 3.0]), ALONE, requires_grad=True)
    x = w * 2.0
    y = x * x
    take(x)
    with pytest.raises(GradientError, match="changed in place after it was used"):
        pc.eager.grad((y + w).sum(), [w])


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "S(2)"])
def test_a_change_keeps_the_layout_of_thin_tensors(sbp):
    """A reshape to the same shape may split another axis."""

    def rank():
        w = pc.tensor(np.array([[[3.0], [4.0]]]), PAIR, sbp, requires_grad=True)
        x = pc.tensor(np.zeros((1, 2, 1)), PAIR, sbp)
        y = pc.tensor(np.zeros((1, 2, 1)), PAIR, sbp)
        pc.eager.into(x, lambda value: (value * 2.0).redistribute(sbp=sbp), w)
        y.copy_(w)
        loss = (x + y).sum()
        loss.backward()
        shapes = x.local.shape == x.local_shape and y.local.shape == y.local_shape
        return shapes, x.numpy().ravel().tolist(), w.grad.numpy().ravel().tolist()

    assert spawn(rank, 2) == [(True, [6.0, 8.0], [3.0, 3.0])] * 2
