"""Wrong input of eager programs: an error of ours, with op, got and expected, and no hang."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import LossScale, spawn
from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    GradientError,
    InplaceError,
    NonFiniteError,
    PlacementMismatchError,
    PlanCompilerError,
    SbpSyntaxError,
    ShapeError,
    TransportError,
    UsageError,
)

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
BACK = pc.Placement("cpu", [1, 0])


def rank_number():
    return pc.eager.current_world().rank


def report_of(raised):
    """An error's parts; every one names the user's line."""
    report = raised.value.report
    assert "test_bad_input.py" in str(report.source)
    return report


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x + y,
        pc.matmul,
        lambda x, y: pc.concat([x, y], 0),
        lambda x, y: pc.where(x > 0.0, x, y),
        lambda x, y: x.copy_(y),
    ],
)
@pytest.mark.parametrize("wrap", [lambda function: function, pc.compile])
def test_meshes_are_not_mixed(use, wrap):
    def rank():
        x, y = pc.tensor(np.ones((2, 2)), PAIR), pc.tensor(np.ones((2, 2)), BACK)
        with pytest.raises((PlacementMismatchError, InplaceError)) as raised:
            wrap(use)(x, y)
        report = report_of(raised)
        assert "cpu:0..1" in str(report)
        assert "cpu:1,0" in str(report) or "1..0" in str(report) or "[1, 0]" in str(report)
        return use(x, y.redistribute(PAIR, "B")).shape

    spawn(rank, 2)


def test_plain_arrays_beside_tensors():
    x = pc.tensor(np.ones(3), ALONE)
    for use in (lambda: x + np.ones(3), lambda: x * [1, 2, 3], lambda: pc.add(x, np.ones(1))):
        with pytest.raises(UsageError, match="cannot combine a DistTensor") as raised:
            use()
        report = report_of(raised)
        assert report.got in ("ndarray", "list")
        assert report.expected == "a DistTensor or a plain number"
    with pytest.raises(PlanCompilerError):
        pc.concat([x, np.ones(3)], 0)


def test_changes_in_place_that_would_change_shape_or_dtype():
    def rank():
        x = pc.tensor(np.ones((4, 4)), PAIR, "S(0)")
        column = pc.tensor(np.ones((4, 4)), PAIR, "S(1)")
        whole = pc.tensor(np.ones((4, 4)), PAIR, "B")
        for change in (
            lambda: pc.eager.into(whole, pc.greater, x, x),
            lambda: x.__iadd__(pc.tensor(np.ones((2, 4, 4)), PAIR)),
            x.sum_,
            lambda: x.cast_("float32"),
        ):
            before = whole.numpy(), x.numpy()
            with pytest.raises(InplaceError) as raised:
                change()
            report = report_of(raised)
            assert "on cpu:0..1" in str(report.got)
            assert "on cpu:0..1" in str(report.expected)
            np.testing.assert_array_equal(whole.numpy(), before[0])
            np.testing.assert_array_equal(x.numpy(), before[1])
        x += column  # what comes in another layout is brought into that of x
        whole += x
        return str(x.sbp), str(whole.sbp), whole.numpy().tolist()

    assert spawn(rank, 2) == [("[S(0)]", "[B]", [[3.0] * 4] * 4)] * 2


def test_backward_from_what_is_no_scalar():
    x = pc.tensor(np.ones((2, 3)), ALONE, requires_grad=True)
    with pytest.raises(GradientError, match="no scalar needs a gradient") as raised:
        (x * 2.0).backward()
    report = report_of(raised)
    assert "(2, 3)" in str(report.got)
    assert "backward(grad)" in str(report.hint)
    (x * 2.0).backward(pc.tensor(np.full((2, 3), 5.0), ALONE))
    assert (x.grad.numpy() == 10).all()


@pytest.mark.parametrize("check", [True, False])
def test_parts_whose_shapes_disagree(check):
    def rank():
        part = np.ones((2, 3 + rank_number()))
        x = pc.from_local(part, PAIR, "S(0)", check=check)
        return (x + 1.0).numpy()

    with pytest.raises(ShapeError) as raised:
        spawn(rank, 2)
    assert raised.value.report.got is not None


def test_parts_of_too_different_sizes():
    def rank():
        pc.from_local(np.ones(1 if rank_number() else 4), PAIR, "S(0)", check=True)

    with pytest.raises(ShapeError, match="another shape than its rank holds") as raised:
        spawn(rank, 2)
    report = report_of(raised)
    assert "balanced" in str(report.hint)


# --- loss scaling ---------------------------------------------------------------------------------


def test_a_loss_that_is_no_number():
    def rank():
        x = pc.tensor(np.array([1.0, np.nan]), PAIR, "S(0)", requires_grad=True)
        with pytest.raises(NonFiniteError, match="before it is scaled") as raised:
            LossScale().backward(x.sum())
        report = report_of(raised)
        assert (str(report.op), str(report.got)) == ("loss scaling", "nan")
        return x.grad

    assert spawn(rank, 2) == [None, None]


def test_steps_with_gradients_that_overflow_on_one_rank_are_left_out_on_all():
    def rank():
        value = np.array([1.0, 100.0], np.float16)
        w = pc.tensor(value, PAIR, "S(0)", requires_grad=True)
        scale, sgd = LossScale(1024.0, growth_steps=2), pc.optim.SGD(lr=0.5)
        taken = []
        for _ in range(8):
            scale.backward((w * w * 0.5).cast("float32").sum())
            taken.append(scale.step(sgd, [w]))
        return taken, scale.scale, scale.state(), w.numpy().tolist()

    (first, scale, state, values), second = spawn(rank, 2)
    assert (first, scale, state, values) == second
    assert first[0] is False
    assert first[-1] is True
    assert sum(first) >= 4
    assert scale == state["scale"]
    np.testing.assert_allclose(values, np.array([1.0, 100.0]) * 0.5 ** sum(first), 2e-2)


def test_one_collective_tells_whether_any_gradient_overflows():
    def rank(sbp):
        weights = [
            pc.tensor(np.ones((2, size), np.float16), PAIR, sbp, requires_grad=True)
            for size in (1, 2, 3)
        ]
        scale = LossScale(16.0)
        total = sum((w * w).cast("float32").sum() for w in weights)
        scale.backward(total)
        with pc.comm_trace() as trace:
            assert scale.step(pc.optim.SGD(lr=0.5), weights)
        return trace.counts()

    assert spawn(rank, 2, "S(0)") == [{"all_reduce": 1}] * 2
    assert spawn(rank, 2, "B") == [{}] * 2


def test_a_scale_that_cannot_help():
    w = pc.tensor(np.zeros(2, np.float32), ALONE, requires_grad=True)
    scale, sgd = LossScale(2.0**-13), pc.optim.SGD(lr=0.1)
    scale.backward(pc.sqrt(w).sum())
    assert not scale.step(sgd, [w])
    scale.backward(pc.sqrt(w).sum())
    with pytest.raises(NonFiniteError, match="at any loss scale"):
        scale.step(sgd, [w])
    assert w.numpy().tolist() == [0.0, 0.0]
    with pytest.raises(UsageError, match="no parameter has a gradient"):
        scale.step(sgd, [w])
    for wrong in (0.0, -1.0, float("inf"), float("nan"), True, "big"):
        with pytest.raises(UsageError, match="a loss scale is a finite number"):
            LossScale(wrong)
    with pytest.raises(UsageError, match="number of steps"):
        LossScale(growth_steps=0)
    other = LossScale()
    other.load_state({"scale": 8.0, "good_steps": 1})
    assert other.state() == {"scale": 8.0, "good_steps": 1}
    with pytest.raises(UsageError, match="not the state"):
        other.load_state({"scale": 1.0})


# --- reductions -----------------------------------------------------------------------------------


def test_unknown_reductions():
    x = pc.tensor(np.ones(3), ALONE)
    for use in (
        lambda: pc.tensor([1.0], ALONE, "P(mean)"),
        lambda: x.redistribute(sbp="P(median)"),
        lambda: pc.from_local(np.ones(2), ALONE, "P(total)"),
    ):
        with pytest.raises(SbpSyntaxError, match="unknown reduction") as raised:
            use()
        assert "max" in str(raised.value)

    def collective():
        pc.eager.current_world().comm.context((0, 1)).all_reduce(np.ones(2), "mean")

    with pytest.raises(PlanCompilerError, match="reduction"):
        spawn(collective, 2)


@pytest.mark.parametrize("reduction", ["max", "min", "prod", "sum"])
def test_a_whole_value_becomes_partial_and_whole_again(reduction):
    """Zeros for the ranks that hold none of it would be wrong for all but sums."""

    def rank():
        x = pc.tensor(np.array([-3.0, 2.0, -1.0]), PAIR, "B")
        partial = x.redistribute(sbp=f"P({reduction})")
        return partial.numpy().tolist(), partial.redistribute(sbp="S(0)").numpy().tolist()

    assert spawn(rank, 2) == [([-3.0, 2.0, -1.0], [-3.0, 2.0, -1.0])] * 2


def test_empty_parts_crash_no_rank():
    def rank():
        x = pc.tensor(np.arange(2.0).reshape(1, 2), PAIR, "S(0)", requires_grad=True)
        pc.manual_seed(0)
        net = nn.Linear(2, 3).place(PAIR)
        y = net(x.cast("float32")).relu().sum() + x.cast("float32").max()
        y.backward()
        none = pc.tensor(np.zeros((0, 2)), PAIR, "S(0)")
        return x.local_shape, x.grad.numpy().shape, none.sum().item(), (none * 2.0).numpy().shape

    assert spawn(rank, 2) == [
        ((1, 2), (1, 2), 0.0, (0, 2)),
        ((0, 2), (1, 2), 0.0, (0, 2)),
    ]


# --- ranks that do not do the same ----------------------------------------------------------------


def errors_by_rank(function):
    """What each rank of three raises, by rank; the ranks that raise nothing are left out."""
    errors = {}

    def rank():
        x = pc.tensor(np.arange(12.0).reshape(4, 3), pc.Placement("cpu", [0, 1, 2]), "S(0)")
        x.numpy()
        try:
            function(x)
        except PlanCompilerError as error:
            errors[rank_number()] = error
            raise

    with pytest.raises(PlanCompilerError):
        spawn(rank, 3, deadline=60.0)
    return errors


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_rank_that_asks_for_another_layout(check, monkeypatch):
    monkeypatch.setenv("PLANCOMPILER_COMM_CHECK", check)

    def run(x):
        x.redistribute(sbp="S(1)" if rank_number() == 1 else "B")

    lines = r"rank 0: all_gather axis 0; rank 1: all_to_all axes 1 and 0; rank 2: all_gather axis 0"
    if check == "1":
        at = r".* at .*test_bad_input.py:\d+"
        lines = rf"rank 0: float64.* as \[B\]{at}; rank 1: float64.* as \[S\(1\)\]{at}"
    errors = errors_by_rank(run)
    assert set(errors) == {0, 1, 2}
    for error in errors.values():
        with pytest.raises(TransportError, match=lines):
            raise error


def test_a_rank_that_leaves_before_a_reduction():
    def run(x):
        if rank_number() != 1:
            x.sum().item()

    errors = errors_by_rank(run)
    assert set(errors) == {0, 2}
    for error in errors.values():
        assert isinstance(error, (TransportError, AbortedError))
        assert "rank 1 has closed its run" in str(error)
        assert "all_reduce sum of 8 bytes (operation 1 of ranks [0, 1, 2])" in str(error)


def test_a_rank_that_sleeps_before_a_reduction():
    called, over = threading.Event(), threading.Event()

    def run(x):
        comm = pc.eager.current_world().comm
        if rank_number() == 0:
            called.wait(60)
            comm.deadline = 0.3
        elif rank_number() == 1:
            comm.observers.append(lambda record: called.set())
        else:
            over.wait(60)
        try:
            x.sum().item()
        finally:
            over.set()

    errors = errors_by_rank(run)
    assert isinstance(errors[0], DeadlineError)
    for error in errors.values():
        assert "entered: [0, 1]; not entered: [2]" in str(error)
        assert "all_reduce sum of 8 bytes (operation 1 of ranks [0, 1, 2])" in str(error)
    assert "test_bad_input.py" in str(errors[0].report.source)


# --- arguments of wrong types ---------------------------------------------------------------------

X = pc.tensor(np.ones((2, 3)), ALONE)
HEADS = pc.tensor(np.ones((1, 2, 3, 0)), ALONE)
WRONG = {
    "no tensor": lambda: pc.exp(np.ones(2)),
    "list with a hole": lambda: pc.concat([X, None]),
    "axis as text": lambda: X.sum("rows"),
    "axis as tensor": lambda: pc.sum(X, X),
    "broken axis": lambda: pc.mean(X, 1.5),
    "same axis twice": lambda: pc.sum(X, (0, -2)),
    "no axis": lambda: X.softmax([]),
    "index array": lambda: X[np.array([0, 1])],
    "shape as text": lambda: X.reshape("2,3"),
    "no shape": lambda: pc.reshape(X, None),
    "window as text": lambda: pc.max_pool1d(X.reshape(1, 2, 3), "two"),
    "complex number": lambda: X + 1j,
    "complex array": lambda: pc.tensor(np.ones(2, complex), ALONE),
    "long float": lambda: pc.tensor(np.ones(2, np.longdouble), ALONE),
    "ragged list": lambda: pc.tensor([[1.0, 2.0], [3.0]], ALONE),
    "texts": lambda: pc.tensor(["a"], ALONE, dtype="float32"),
    "placement as text": lambda: pc.tensor([1.0], "cpu"),
    "layout as number": lambda: pc.tensor([1.0], ALONE, 5),
    "layout for placement": lambda: X.redistribute("S(0)"),
    "dtype as tensor": lambda: X.cast(X),
    "axes beyond count": lambda: pc.tensordot(X, X, 10**30),
    "huge extent": lambda: pc.one_hot(pc.tensor([1], ALONE), 10**30),
    "gradient as array": lambda: (pc.tensor(np.ones(2), ALONE, requires_grad=True) * 2.0).backward(
        np.ones(2)
    ),
    "value as array": lambda: (X * 1.0).copy_(np.ones((2, 3))),
    "by no tensor": lambda: pc.eager.grad(X, [None]),
    "part of an array": lambda: pc.eager.local_part(np.ones(2)),
    "no function": lambda: pc.eager.into(X, None, X),
    "state as list": lambda: nn.Linear(2, 2).place(ALONE).load_state_dict([1]),
    "parameters as one": lambda: pc.optim.SGD(lr=0.1).step(X),
    "loss as number": lambda: LossScale().backward(1.0),
    "folder as number": lambda: pc.eager.save(5, {}),
    "kept axes as array": lambda: X.sum(0, keepdims=np.array([True, False])),
    "kept axes as empty array": lambda: pc.sum(X, 0, np.zeros(0)),
    "filled with an array": lambda: (X * 1.0).fill_(np.ones((2, 3))),
    "gradient wanted by array": lambda: setattr(X, "requires_grad", np.ones(2)),
    "gradient wanted by array at once": lambda: pc.tensor([1.0], ALONE, requires_grad=np.ones(2)),
    "ranks of no function": lambda: spawn(None, 2),
    "date beside a tensor": lambda: X + np.datetime64("2020-01-01"),
    "time modulo a tensor": lambda: np.timedelta64(5) % X,
    "date as index": lambda: X[np.datetime64("2020-01-01")],
    "text as number": lambda: X * np.str_("2"),
    "heads without features": lambda: pc.scaled_dot_product_attention(HEADS, HEADS, HEADS),
    "long number beside a tensor": lambda: X + 10**400,
    "long number modulo a tensor": lambda: 10**400 % X,
    "filled with a long number": lambda: (X * 1.0).fill_(10**400),
    "endless pieces": lambda: pc.chunk(X, 10**30),
    "more pieces than there is use for": lambda: pc.chunk(X, (1 << 16) + 1, 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_wrong_types(name):
    with pytest.raises(PlanCompilerError) as raised:
        WRONG[name]()
    report = raised.value.report
    assert report.got is not None
    assert report.expected is not None or report.hint is not None or report.op is not None


@pytest.mark.parametrize(
    ("part", "sbp", "named", "message"),
    [
        (lambda rank: np.ones(2 + rank), "S(0)", {}, r"rank 0: \[2\] of \[4\]; rank 1: \[3\] of"),
        (lambda rank: np.ones((2, 2 + rank)), "S(0)", {}, r"rank 1: \[2, 3\] of \[4, 3\]"),
        (lambda rank: np.ones(2 + rank), "B", {}, "different global shapes"),
        (lambda rank: np.ones((2, rank)), "S(0)", {"check": True}, "parts make different global"),
        (lambda rank: np.ones(2 + rank), "P", {"check": True}, "different global shapes"),
        (lambda rank: np.ones(2), "B", {"shape": True}, "that the ranks give make different"),
        (lambda rank: np.ones((2,) * (1 + rank)), "S(0)", {}, "numbers of axes"),
        (
            lambda rank: np.ones(2, [np.float32, np.int8][rank]),
            "S(0)",
            {},
            "rank 1: int8 of 1 axes",
        ),
    ],
)
def test_parts_are_compared_where_all_calls_are(part, sbp, named, message, monkeypatch):
    monkeypatch.setenv("PLANCOMPILER_COMM_CHECK", "1")

    def rank():
        number = rank_number()
        good = pc.from_local(np.ones(2), PAIR, "S(0)")
        good = pc.from_local(np.ones(2), PAIR, "S(0)")  # one that is known already
        options = {**named, "shape": (2 + number,)} if "shape" in named else named
        with pytest.raises(ShapeError, match=message) as raised:
            pc.from_local(part(number), PAIR, sbp, **options)
        report = report_of(raised)
        assert report.expected is not None
        with pytest.raises(ShapeError, match="different global shapes"):
            pc.from_local(np.ones(2 + number), PAIR, "S(0)")  # of a kind known on one rank
        return good.numpy().tolist()

    assert spawn(rank, 2) == [[1.0] * 4] * 2


def test_numbers_of_numpy_are_numbers():
    two = np.int64(2)
    assert X.sum(np.int64(1)).shape == (2,)
    assert X.reshape(np.int32(6)).shape == (6,)
    assert pc.split(X, np.int64(1))[1].shape == (1, 3)
    assert pc.unsqueeze(X, np.int64(0)).shape == (1, 2, 3)
    assert pc.roll(X, two, np.int8(1)).shape == (2, 3)
    assert pc.uniform(two, placement=ALONE).shape == (2,)
    assert pc.lerp(X, X * 3.0, np.float32(0.5)).numpy().tolist() == [[2.0] * 3] * 2


def test_arrays_in_any_memory_order():
    value = np.arange(6.0).reshape(2, 3)
    frozen = value.copy()
    frozen.flags.writeable = False
    for array in (value.astype(">f8"), np.asfortranarray(value), frozen, value[::1, ::1]):
        for _ in range(2):  # the second time a part of a known kind takes the short way
            for x in (pc.tensor(array, ALONE), pc.from_local(array, ALONE)):
                assert x.local.dtype.isnative
                assert x.local.flags.c_contiguous
                x += 1.0
                np.testing.assert_array_equal(x.numpy(), value + 1.0)


@pytest.mark.parametrize("given", [2.0, np.ones(3), "grad", pc.tensor(np.ones(2), ALONE)])
def test_hooks_that_give_no_gradient(given):
    w = pc.tensor(np.ones(3), ALONE, requires_grad=True)
    w.register_hook(lambda grad: given)
    with pytest.raises(GradientError, match="cannot take the place of the gradient"):
        (w * 2.0).sum().backward()


def test_scalars_of_no_axes_in_every_reduction():
    for use in (pc.logsumexp, pc.var, pc.std, pc.flip, pc.sum, pc.max, pc.prod):
        x = pc.tensor(np.float64(2.0), ALONE, requires_grad=True)
        if use is not pc.std:  # whose slope is infinite there
            use(x).backward()
            assert np.isfinite(x.grad.item())
        assert np.isfinite(use(x).item())
    truths = pc.tensor(np.ones((2, 2), bool), ALONE)
    assert pc.tril(truths).numpy().tolist() == [[True, False], [True, True]]
    assert truths.equal(True).numpy().all()


def test_loss_scaling_of_parameters_that_no_rank_holds_all_of():
    """Ranks decide alike, also where the gradient that overflows lies on one of them."""

    def rank(size):
        first, second = pc.Placement("cpu", [0]), pc.Placement("cpu", [1])
        a = pc.tensor(np.ones(2, np.float16), first, requires_grad=True)
        b = pc.tensor(np.full(2, size, np.float16), second, requires_grad=True)
        scale = LossScale(1024.0)
        loss = ((a * 2.0).redistribute(second) * b).cast("float32").sum()
        scale.backward(loss)
        return scale.step(pc.optim.SGD(lr=0.5), [a, b]), scale.scale

    assert spawn(rank, 2, 1.0) == [(True, 1024.0)] * 2
    assert spawn(rank, 2, 100.0) == [(False, 512.0)] * 2
