"""Functions that people know from NumPy and PyTorch: values as NumPy has them, on split inputs too,
and slopes."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, ShapeError, TracingError

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
RNG = np.random.default_rng(5)
X = RNG.normal(size=(4, 5))
Y = RNG.normal(size=(4, 5))
HOLES = X.copy()
HOLES[[0, 1, *[2] * 5], [1, 3, *range(5)]] = np.nan
WHOLE = RNG.integers(0, 4, (4, 5))
AT = RNG.integers(0, 4, (3, 5))
"""Indices of axis 0, some of them equal."""
NEW = RNG.normal(size=(3, 5))
ROWS = np.array([3, 0, 3])
TRUTH = RNG.random((4, 5)) < 0.5


def put(x, mode, include_self=True):
    """`scatter_reduce` along axis 0 by a loop."""
    made, count = x.copy(), np.ones(x.shape) * include_self
    whole = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -np.inf, "amin": np.inf}[mode]
    if not include_self:
        np.put_along_axis(made, AT, whole, 0)
    combine = {"prod": np.multiply, "amax": np.maximum, "amin": np.minimum}.get(mode, np.add)
    for row in range(AT.shape[0]):
        for column in range(AT.shape[1]):
            place = AT[row, column], column
            made[place] = combine(made[place], NEW[row, column])
            count[place] += 1
    return made / np.maximum(count, 1) if mode == "mean" else made


def filled(value, rows=ROWS):
    made = X.copy()
    made[rows] = value
    return made


def added():
    made = X.copy()
    np.add.at(made, (ROWS, np.array([1, 1, 1])), 2.0)
    return made


def by_mask():
    made = X.copy()
    made[TRUTH] = Y.ravel()[: TRUTH.sum()]
    return made


def most_frequent(rows):
    return np.array([np.bincount(row).argmax() for row in rows])


CASES = {
    "quantile": (lambda x: pc.quantile(x, 0.3, 1), [X], np.quantile(X, 0.3, 1)),
    "quantiles": (
        lambda x: pc.quantile(x, [0.0, 0.25, 1.0], 0, True),
        [X],
        np.quantile(X, [0.0, 0.25, 1.0], 0, keepdims=True),
    ),
    "quantile by tensor": (
        lambda x, q: pc.quantile(x, q, dim=1, interpolation="lower"),
        [X, np.array([0.2, 0.9])],
        np.quantile(X, [0.2, 0.9], 1, method="lower"),
    ),
    "quantile of NaN": (lambda x: pc.quantile(x, 0.5, 1), [HOLES], np.quantile(HOLES, 0.5, 1)),
    "nanquantile": (
        lambda x: pc.nanquantile(x, 0.4, 0),
        [HOLES],
        np.nanquantile(HOLES[[0, 1, 3]], 0.4, 0),
    ),
    "median": (lambda x: x.median(), [X], np.median(X)),
    "median of rows": (lambda x: pc.median(x, 0), [X], np.median(X, 0)),
    "median of whole numbers": (lambda x: pc.median(x, 0), [WHOLE], np.median(WHOLE, 0)),
    "nanmedian": (pc.nanmedian, [HOLES], np.nanmedian(HOLES)),
    "kthvalue": (lambda x: x.kthvalue(2, dim=1)[0], [X], np.sort(X, 1)[:, 1]),
    "kthvalue's place": (lambda x: x.kthvalue(2)[1], [X], np.argsort(X, 1)[:, 1]),
    "mode": (lambda x: pc.mode(x)[0], [WHOLE], most_frequent(WHOLE)),
    "nansum": (lambda x: pc.nansum(x, 0), [HOLES], np.nansum(HOLES, 0)),
    "nanmean": (lambda x: pc.nanmean(x, 0), [HOLES], np.nanmean(HOLES, 0)),
    "nanmax": (lambda x: pc.nanmax(x, 0), [HOLES], np.nanmax(HOLES, 0)),
    "nanmin of nothing": (lambda x: pc.nanmin(x, 1)[2], [HOLES], np.float64(np.nan)),
    "var_mean": (lambda x: pc.var_mean(x, 1, correction=1)[0], [X], X.var(1, ddof=1)),
    "aminmax": (lambda x: pc.aminmax(x, 0)[1], [X], X.max(0)),
    "cov": (pc.cov, [X], np.cov(X)),
    "cov with weights": (
        lambda x, f, a: pc.cov(x, 0, f, a),
        [X, np.arange(1, 6), np.linspace(1, 2, 5)],
        np.cov(X, ddof=0, fweights=np.arange(1, 6), aweights=np.linspace(1, 2, 5)),
    ),
    "corrcoef": (pc.corrcoef, [X], np.corrcoef(X)),
    "histc": (lambda x: pc.histc(x, 4, -1, 1), [X], np.histogram(X, 4, (-1, 1))[0] * 1.0),
    "histogram": (lambda x: pc.histogram(x, 3)[0], [X], np.histogram(X, 3)[0]),
    "histogram's ends": (lambda x: pc.histogram(x, 3)[1], [X], np.histogram(X, 3)[1]),
    "histogram by ends": (
        lambda x, ends, weights: pc.histogram(x, ends, weights=weights, density=True)[0],
        [X, np.array([-1.0, 0.0, 0.5, 3.0]), Y**2],
        np.histogram(X, [-1.0, 0.0, 0.5, 3.0], weights=Y**2, density=True)[0],
    ),
    "bincount": (lambda x: pc.bincount(x.ravel(), 6), [WHOLE], np.bincount(WHOLE.ravel(), None, 6)),
    "bincount with weights": (
        lambda x, w: pc.bincount(x, 4, weights=w),
        [WHOLE, X],
        np.bincount(WHOLE.ravel(), X.ravel(), 4),
    ),
    "bucketize": (
        lambda x, e: pc.bucketize(x, e, right=True),
        [WHOLE, np.array([0, 2, 3])],
        np.searchsorted([0, 2, 3], WHOLE, "right"),
    ),
    "searchsorted in rows": (
        pc.searchsorted,
        [np.sort(X), Y],
        np.stack([np.searchsorted(np.sort(x), y) for x, y in zip(X, Y, strict=True)]),
    ),
    "logcumsumexp": (
        lambda x: pc.logcumsumexp(x * 400.0, 1),
        [X],
        np.logaddexp.accumulate(X * 400.0, 1),
    ),
    "trapezoid": (lambda x: pc.trapezoid(x, dx=0.5), [X], np.trapezoid(X, dx=0.5)),
    "trapezoid by places": (
        lambda y, x: pc.trapezoid(y, x, axis=0),
        [X, Y],
        np.trapezoid(X, Y, axis=0),
    ),
    "cumulative_trapezoid": (
        lambda y: pc.cumulative_trapezoid(y, dim=0)[-1],
        [X],
        np.trapezoid(X, axis=0),
    ),
    "addmm": (
        lambda x, a, b: pc.addmm(x[:, :4], a, b.T, beta=0.5, alpha=2),
        [X, X, Y],
        0.5 * X[:, :4] + 2 * X @ Y.T,
    ),
    "addmm without x": (
        lambda x, a, b: x[:, :4].addmm(a, b.T, beta=0),
        [HOLES, X, Y],
        X @ Y.T,
    ),
    "addmv": (lambda x, a: x[:, 0].addmv(a, a[0]), [X, Y], X[:, 0] + Y @ Y[0]),
    "addr": (lambda x, a: pc.addr(x, a[:, 0], a[0]), [X, Y], X + np.outer(Y[:, 0], Y[0])),
    "baddbmm": (
        lambda x, a: pc.baddbmm(x[None, :, :4], a[None], a.T[None]),
        [X, Y],
        (X[:, :4] + Y @ Y.T)[None],
    ),
    "addcmul": (lambda x, y: x.addcmul(y, y, value=0.5), [X, Y], X + Y * Y / 2),
    "addcdiv": (lambda x, y: pc.addcdiv(x, x, y), [X, Y], X + X / Y),
    "kron": (lambda x, y: pc.kron(x, y[0]), [X, Y], np.kron(X, Y[0])),
    "logit": (lambda x: pc.logit(x * 0.1 + 0.5), [X], np.log((X * 0.1 + 0.5) / (0.5 - X * 0.1))),
    "gather fewer": (
        lambda x, i: x.gather(0, i[:, :2]),
        [X, AT],
        np.take_along_axis(X[:, :2], AT[:, :2], 0),
    ),
    "take_along_axis": (
        lambda x, i: pc.take_along_axis(x, i[:, :1], 0),
        [X, AT],
        np.take_along_axis(X, AT[:, :1], 0),
    ),
    "scatter a number": (
        lambda x, i: x.scatter(1, i, 7.0),
        [X, np.array([[1], [0], [4], [4]])],
        np.where(np.arange(5) == np.array([[1], [0], [4], [4]]), 7.0, X),
    ),
    "scatter into a corner": (
        lambda x, i, new: x.scatter(0, i[:2, :2], new),
        [X, np.array([[3, 0], [1, 2], [0, 0]]), NEW],
        np.array(
            [
                [X[0, 0], NEW[0, 1], *X[0, 2:]],
                [NEW[1, 0], X[1, 1], *X[1, 2:]],
                [X[2, 0], NEW[1, 1], *X[2, 2:]],
                [NEW[0, 0], X[3, 1], *X[3, 2:]],
            ]
        ),
    ),
    **{
        f"scatter_reduce {mode}{'' if own else ' of updates'}": (
            lambda x, i, new, mode=mode, own=own: x.scatter_reduce(0, i, new, mode, own),
            [X, AT, NEW],
            put(X, mode, own),
        )
        for mode in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    },
    "index_copy": (
        lambda x, i, new: x.index_copy(0, i, new),
        [X, ROWS[1:], NEW[:2]],
        filled(NEW[:2], ROWS[1:]),
    ),
    "index_fill": (lambda x, i: x.index_fill(0, i, 9.0), [X, ROWS], filled(9.0)),
    "index_add": (
        lambda x, i, new: x.index_add(0, i, new, alpha=2),
        [X, ROWS[1:], NEW[:2]],
        filled(X[ROWS[1:]] + 2 * NEW[:2], ROWS[1:]),
    ),
    "index_reduce": (
        lambda x, i, new: x.index_reduce(0, i, new, "amax"),
        [X, ROWS[1:], NEW[:2]],
        filled(np.maximum(X[ROWS[1:]], NEW[:2]), ROWS[1:]),
    ),
    "index_select": (lambda x, i: x.index_select(0, i), [X, ROWS], X[ROWS]),
    "index_put added": (
        lambda x, i: pc.index_put(x, (i, i * 0 + 1), 2.0, accumulate=True),
        [X, ROWS],
        added(),
    ),
    "index_put added to a box": (
        lambda x: pc.index_put(x, (slice(1, 3), 2), 2.0, True)[1:3, 2],
        [X],
        X[1:3, 2] + 2,
    ),
    "put": (
        lambda x, i, new: x.put(i, new),
        [X, np.array([0, -1]), NEW[0, :2]],
        np.concatenate([NEW[0, :1], X.ravel()[1:-1], NEW[0, 1:2]]).reshape(4, 5),
    ),
    "masked_scatter": (
        lambda x, m, new: x.masked_scatter(m, new),
        [X, TRUTH, Y],
        by_mask(),
    ),
    "empty_like": (lambda x: pc.empty_like(x, "int64"), [X], np.zeros((4, 5), np.int64)),
    "diff of nothing": (lambda x: pc.diff(x, 0, prepend=x), [X], X),
    "clip by whole numbers": (lambda x, low: x.clip(low, 1), [X, WHOLE - 2], X.clip(WHOLE - 2, 1)),
    "diagonal": (lambda x: x.diagonal(1), [X], np.diagonal(X, 1)),
}


def compared(made, wanted):
    wanted = np.asarray(wanted)
    assert made.shape == wanted.shape
    assert made.dtype == wanted.dtype
    np.testing.assert_allclose(made, wanted, rtol=1e-9, atol=1e-12)


def test_values_on_split_inputs():
    def program():
        for name, (call, arrays, wanted) in CASES.items():
            for sbp in ("S(0)", "S(1)"):
                inputs = [pc.tensor(each, PAIR, sbp if each.ndim > 1 else "B") for each in arrays]
                try:
                    compared(call(*inputs).numpy(), wanted)
                except AssertionError as error:
                    raise AssertionError(f"{name} with {sbp}") from error

    pc.eager.spawn(program, ranks=2)


def test_values_in_a_job():
    feeds = {}
    with pc.job("by_name") as job:
        for number, (call, arrays, _) in enumerate(CASES.values()):
            inputs = []
            for each in arrays:
                feeds[f"x{len(feeds)}"] = each
                inputs.append(pc.input(f"x{len(feeds) - 1}", each.shape, str(each.dtype), ALONE))
            # Outputs are finite numbers.
            pc.output(f"y{number}", pc.nan_to_num(call(*inputs), 77.0))
    with pc.run(job) as session:
        made = session.step(**feeds)
    for number, (_, _, wanted) in enumerate(CASES.values()):
        wanted = np.nan_to_num(wanted, nan=77.0)
        compared(np.asarray(made[f"y{number}"], np.asarray(wanted).dtype), wanted)


SLOPES = [
    "quantile",
    "quantile by tensor",
    "median of rows",
    "kthvalue",
    "nanmean",
    "cov",
    "corrcoef",
    "logcumsumexp",
    "trapezoid by places",
    "addmm",
    "kron",
    "bincount with weights",
    "scatter into a corner",
    "masked_scatter",
    "index_copy",
    "index_put added",
    *(f"scatter_reduce {mode}" for mode in ("prod", "mean", "amax")),
    "scatter_reduce prod of updates",
    "scatter_reduce amin of updates",
]


@pytest.mark.parametrize("name", SLOPES)
def test_slopes_are_those_of_differences(name):
    call, arrays, wanted = CASES[name]
    weights = np.random.default_rng(1).normal(size=np.shape(wanted))
    at = [number for number, each in enumerate(arrays) if each.dtype == np.float64]
    directions = {
        number: np.random.default_rng(number).normal(size=arrays[number].shape) for number in at
    }

    def total(step):
        moved = [
            pc.tensor(each + step * directions[number] if number in at else each, ALONE)
            for number, each in enumerate(arrays)
        ]
        for number in at:
            moved[number].requires_grad = True
        return (call(*moved) * pc.tensor(weights, ALONE)).sum(), moved

    value, inputs = total(0.0)
    value.backward()
    slope = sum(
        np.nansum(inputs[number].grad.numpy() * directions[number])
        for number in at
        if inputs[number].grad is not None
    )
    step = 1e-6
    difference = (total(step)[0].item() - total(-step)[0].item()) / (2 * step)
    assert slope == pytest.approx(difference, rel=1e-5, abs=1e-6)


def test_zeros_among_the_factors_of_a_product():
    x = pc.tensor(np.array([2.0, 3.0, 5.0]), ALONE, requires_grad=True)
    new = pc.tensor(np.array([0.0, 4.0, 0.0, 0.0]), ALONE, requires_grad=True)
    at = pc.tensor(np.array([0, 0, 1, 1]), ALONE)
    made = x.scatter_reduce(0, at, new, "prod")
    made.sum().backward()
    assert made.numpy().tolist() == [0.0, 0.0, 5.0]
    assert x.grad.numpy().tolist() == [0.0, 0.0, 1.0]
    assert new.grad.numpy().tolist() == [8.0, 0.0, 0.0, 0.0]


def test_tensors_made_of_nothing():
    def made(function, *args, **named):
        return function(*args, placement=ALONE, **named).numpy()

    compared(made(pc.empty, 2, 3), np.zeros((2, 3), np.float32))
    compared(made(pc.arange, 4), np.arange(4))
    compared(made(pc.arange, 0, 1, 0.25), np.arange(0, 1, 0.25, np.float32))
    compared(made(pc.tril_indices, 3, 4, 1), np.stack(np.tril_indices(3, 1, 4)))
    compared(made(pc.triu_indices, 3), np.stack(np.triu_indices(3)))
    compared(made(pc.logspace, 0, 2, 3, dtype="float64"), np.logspace(0, 2, 3))
    assert pc.bincount(pc.tensor(WHOLE, ALONE), minlength=9).shape == (9,)


def test_indices_are_drawn_by_their_weights():
    def program():
        weights = np.array([[0.0, 1.0, 3.0, 0.0], [1.0, 1.0, 1.0, 1.0]], np.float32)
        seen = []
        for sbp in ("B", "S(0)", "S(1)"):
            pc.manual_seed(3)
            x = pc.tensor(weights, PAIR, sbp)
            seen.append(
                [pc.multinomial(x, 2000, replacement=True).numpy(), x.multinomial(2).numpy()]
            )
        return seen

    for often, once in (draws := pc.eager.spawn(program, ranks=2)[0]):
        np.testing.assert_array_equal(often, draws[0][0])
        np.testing.assert_array_equal(once, draws[0][1])
    often, once = draws[0]
    assert set(often[0]) == {1, 2}
    assert (often[0] == 2).mean() == pytest.approx(0.75, abs=0.05)
    assert np.bincount(often[1]).min() > 400
    assert set(once[0]) == {1, 2}
    assert once[1][0] != once[1][1]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: x.kthvalue(6), AttributeValueError, "an axis has no such element"),
        (lambda x: pc.quantile(x, 1.5), AttributeValueError, "quantile needs shares"),
        (lambda x: pc.quantile(x[:0], 0.5), ShapeError, "quantile needs an element"),
        (
            lambda x: pc.quantile(x, 0.5, method="best"),
            AttributeValueError,
            "no such interpolation",
        ),
        (
            lambda x: x.scatter_reduce(0, x.long(), x, "xor"),
            AttributeValueError,
            "reduced in another",
        ),
        (lambda x: pc.histc(x, 4, 2, 1), AttributeValueError, "bounds in order"),
        (lambda x: x.multinomial(9), AttributeValueError, "cannot draw this many"),
        (lambda x: pc.searchsorted(x, x[:2]), ShapeError, "a row of values for each row"),
        (lambda x: pc.cov(x[None]), ShapeError, "a row for each variable"),
    ],
)
def test_what_has_no_meaning_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(pc.tensor(X, ALONE))


def test_a_job_says_how_many_there_are():
    with pc.job("counts"):
        x = pc.input("x", (4,), "int64", ALONE)
        with pytest.raises(TracingError, match="known only when the program runs"):
            pc.bincount(x)
        pc.output("y", x)
