"""Operators on eager tensors and traced values: tensors and numbers on either side, in place."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import (
    DTypeError,
    ExecutionError,
    InplaceError,
    PlanCompilerError,
    TracingError,
    UsageError,
)
from tests.dense import DenseRun

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
WHOLE = (np.array([[7, -5, 3], [2, 9, -8], [1, 4, 6]]), np.array([3, -2, 5]), 3)
TRUTHS = (np.array([[True, False], [False, True], [True, True]]), np.array([True, False]), True)
REALS = (np.array([[7.5, -5.0, 3.25]]), np.array([2.0, -1.5, 0.5]), 2)
PLACES = (np.array([[7, 5, 3], [2, 9, 8]]), np.array([1, 2, 0]), 2)
OPERATORS = {
    "%": (operator.mod, operator.imod, (WHOLE, REALS)),
    "//": (operator.floordiv, operator.ifloordiv, (WHOLE, REALS)),
    "&": (operator.and_, operator.iand, (WHOLE, TRUTHS)),
    "|": (operator.or_, operator.ior, (WHOLE, TRUTHS)),
    "^": (operator.xor, operator.ixor, (WHOLE, TRUTHS)),
    "<<": (operator.lshift, operator.ilshift, (PLACES,)),
    ">>": (operator.rshift, operator.irshift, (PLACES,)),
}


def results(use, x, y, number):
    """Every pairing of two tensors and a number."""
    return [use(x, y), use(x, number), use(number, y), use(number, x * x)]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", ["B", "S(0)", "S(1)"])
def test_operators_are_those_of_numpy(name, layout):
    use, in_place, cases = OPERATORS[name]

    def rank():
        for left, right, number in cases:
            if left.dtype == bool:
                x, y = pc.tensor(left, PAIR, layout), pc.tensor(right, PAIR)
                collected = [use(x, y), use(x, number), use(number, y), use(np.bool_(number), x)]
                wanted = [
                    use(left, right),
                    use(left, number),
                    use(number, right),
                    use(number, left),
                ]
            else:
                x, y = pc.tensor(left, PAIR, layout), pc.tensor(right, PAIR)
                collected, wanted = results(use, x, y, number), results(use, left, right, number)
            for got, expected in zip(collected, wanted, strict=True):
                assert got.dtype.numpy == expected.dtype
                np.testing.assert_array_equal(got.numpy(), expected)
            for other in (y, number):
                changed, before = x + 0 if left.dtype != bool else pc.bitwise_not(~x), x.sbp
                kept = changed
                changed = in_place(changed, other)
                assert changed is kept
                assert changed.sbp == before
                np.testing.assert_array_equal(
                    changed.numpy(), use(left, right if other is y else number)
                )

    spawn(rank, 2)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_jobs_and_compiled_functions(name):
    use, in_place, cases = OPERATORS[name]
    left, right, number = cases[0]
    wanted = results(use, left, right, number)
    with pc.job(name) as job:
        x = pc.input("x", left.shape, "int64", ALONE)
        y = pc.input("y", right.shape, "int64", ALONE)
        for place, value in enumerate(results(use, x, y, number)):
            pc.output(f"out{place}", value)
        z = x
        z = in_place(z, y)
        assert z is not x
        pc.output("changed", z)
    outputs = DenseRun(job).step(x=left, y=right)
    for place, expected in enumerate(wanted):
        np.testing.assert_array_equal(outputs[f"out{place}"], expected)
    np.testing.assert_array_equal(outputs["changed"], wanted[0])

    @pc.compile
    def function(x, y):
        made = results(use, x, y, number)
        changed = x * 1
        changed = in_place(changed, number)
        return [*made, changed]

    for got, expected in zip(
        function(pc.tensor(left, ALONE), pc.tensor(right, ALONE)), [*wanted, wanted[1]], strict=True
    ):
        np.testing.assert_array_equal(got.numpy(), expected)


def test_not():
    for value in (WHOLE[0], TRUTHS[0]):
        x = pc.tensor(value, ALONE)
        np.testing.assert_array_equal((~x).numpy(), ~value)
        with pc.job("not") as job:
            pc.output("out", ~pc.input("x", value.shape, str(value.dtype), ALONE))
        np.testing.assert_array_equal(DenseRun(job).step(x=value)["out"], ~value)


def test_powers_in_place():
    x = pc.tensor(np.array([2.0, 3.0]), ALONE)
    kept = x
    x **= 2
    assert x is kept
    x **= pc.tensor(np.array([2.0, 1.0]), ALONE)
    assert kept.numpy().tolist() == [16.0, 9.0]


def test_gradients_of_remainders():
    value, other = np.array([7.5, -5.0, 3.25]), np.array([2.0, 3.5, -1.5])
    x = pc.tensor(value, ALONE, requires_grad=True)
    y = pc.tensor(other, ALONE, requires_grad=True)
    (x % y + 10.0 % y + x % 2.0 + x // y).sum().backward()
    assert x.grad.numpy().tolist() == [2.0, 2.0, 2.0]
    np.testing.assert_array_equal(y.grad.numpy(), -(value // other) - 10.0 // other)
    z = x * 1.0
    z %= 2.0
    (grad,) = pc.eager.grad(z.sum(), [x])
    assert grad.numpy().tolist() == [1.0, 1.0, 1.0]


def test_numbers_of_another_kind():
    whole, truths, reals = (pc.tensor(each[0], ALONE) for each in (WHOLE, TRUTHS, REALS))
    for use in (
        lambda: whole % 2.0,
        lambda: whole & True,
        lambda: truths & 1,
        lambda: 1.5 // whole,
        lambda: reals % True,
        lambda: reals & 1.0,
        lambda: truths << 1,
        lambda: operator.imod(whole, 2.0),
    ):
        with pc.strict_dtypes(), pytest.raises(DTypeError) as raised:
            use()
        assert raised.value.report.got is not None
        assert "test_operators.py" in str(raised.value.report.source)
    for use in (lambda: reals & 1.0, lambda: ~reals, lambda: reals & True):
        with pytest.raises(DTypeError) as raised:
            use()
        assert raised.value.report.got is not None
        assert "test_operators.py" in str(raised.value.report.source)
    small = pc.tensor(np.ones(2, np.uint8), ALONE)
    with pytest.raises(PlanCompilerError, match="outside its dtype"):
        small & 256
    with pytest.raises(ExecutionError, match="divided by zero"):
        whole % 0
    for use in (lambda: reals @ 2, lambda: 2 @ reals):
        with pytest.raises(UsageError, match="matmul takes two tensors"):
            use()
    with pytest.raises(InplaceError):
        operator.imod(pc.tensor(WHOLE[1], ALONE), whole)


IDS = np.array([1, 2, 0, 0])
FEATURES = np.array([1.5, -2.0, 3.0, 4.0], np.float32)
MASKS = {
    "==": lambda i, f: i == 0,
    "== tensor": lambda i, f: i == i * i,
    "number == ": lambda i, f: 0 == i,  # noqa: SIM300
    "NumPy's number ==": lambda i, f: np.int64(0) == i,
    "!=": lambda i, f: i != 0,
    "!= tensor": lambda i, f: i != i * i,
    "added": lambda i, f: (i == 0) * -1e9,
    "number *": lambda i, f: 1.0 * (i == 0),
    "scores": lambda i, f: f + (i == 0) * -1e9,
    "tensor * mask": lambda i, f: f * (i != 0),
    "mask * tensor": lambda i, f: (i != 0) * f,
    "1 - mask": lambda i, f: 1 - (i == 0),
    "whole": lambda i, f: i * (i != 1),
    "counted": lambda i, f: (i == 0) * 2,
    "of two": lambda i, f: (i == 0) * (i != 1),
    "either": lambda i, f: (i == 0) + (i == 1),
    "compared": lambda i, f: (i == 0) == 0,
    "two compared": lambda i, f: (i == 0) != (f > 0),
    "divided": lambda i, f: f / (i == i),
    "halved": lambda i, f: (i == 0) / 2,
    "remainder": lambda i, f: (i == 0) % 2,
    "mean": lambda i, f: (i == 0).mean(0, keepdims=True),
    "both equal": lambda i, f: (f == f).mean(0, keepdims=True),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_count_as_zeros_and_ones_in_all_three_ways(name):
    use = MASKS[name]
    wanted = np.asarray(use(IDS, FEATURES))
    if wanted.dtype == np.float64:  # numbers are of single precision here
        wanted = wanted.astype(np.float32)
    ids, features = pc.tensor(IDS, ALONE), pc.tensor(FEATURES, ALONE)
    with pc.job("masks") as job:
        i, f = pc.input("i", (4,), "int64", ALONE), pc.input("f", (4,), "float32", ALONE)
        pc.output("out", use(i, f))
    ways = [
        use(ids, features).numpy(),
        pc.compile(use)(ids, features).numpy(),
        DenseRun(job).step(i=IDS, f=FEATURES)["out"],
    ]
    for result in ways:
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result, wanted)


def test_a_mask_chooses_and_passes_gradients():
    ids, x = pc.tensor(IDS, ALONE), pc.tensor(FEATURES, ALONE, requires_grad=True)
    assert pc.where(ids == 0, x, 0.0).numpy().tolist() == [0.0, 0.0, 3.0, 4.0]
    (x * (ids != 0)).sum().backward()
    assert x.grad.numpy().tolist() == [1.0, 1.0, 0.0, 0.0]
    x = pc.tensor(FEATURES, ALONE)
    x *= ids != 0
    assert x.numpy().tolist() == [1.5, -2.0, 0.0, 0.0]
    scores = pc.tensor(np.zeros((1, 4), np.float32), ALONE)
    actual = pc.softmax(scores + (ids == 0) * -1e9, -1)
    assert actual.numpy().tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_what_equals_no_tensor():
    x, same = pc.tensor(IDS, ALONE), pc.tensor(IDS, ALONE)
    assert (x == None) is False  # noqa: E711
    assert (x != None) is True  # noqa: E711
    assert (x == "text") is False
    assert {x: 1, same: 2}[x] == 1  # told apart by identity
    assert len({x, same}) == 2
    for ask in (lambda: bool(x == same), lambda: x in [same]):
        with pytest.raises(PlanCompilerError, match="no truth value") as raised:
            ask()
        assert "pc.all" in str(raised.value)
    assert x in [same, x][1:]
    assert bool(pc.all(x == same))
    assert (x == 0.5).numpy().tolist() == [False] * 4
    for other in (IDS, [1, 2, 0, 0], pc.nn.Parameter((4,), "int64"), 1j):
        with pytest.raises(UsageError, match="equal cannot combine"):
            x == other  # noqa: B015
    assert x != object()
    with pc.job("equal"):
        value = pc.input("x", (4,), "int64", ALONE)
        pc.output("x", value)
        assert (value == None) is False  # noqa: E711
        assert (value == "text") is False
        assert {value: 1}[value] == 1
        with pytest.raises(TracingError, match="no truth value"):
            bool(value == 0)
        with pytest.raises(TracingError, match="equal cannot combine"):
            value == IDS  # noqa: B015


LEFT = {
    "==": operator.eq, "!=": operator.ne,
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "**": operator.pow, "@": operator.matmul, "%": operator.mod, "//": operator.floordiv,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift,
    ">>": operator.rshift, "<": operator.lt, ">=": operator.ge,
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_plain_arrays_on_the_left(name):
    array = np.arange(1, 5).reshape(2, 2)
    x = pc.tensor(array, ALONE)
    with pytest.raises(UsageError, match="cannot combine a DistTensor with this") as raised:
        LEFT[name](array, x)
    assert raised.value.report.got == "ndarray"
    with pc.job("left"):
        value = pc.input("x", (2, 2), "int64", ALONE)
        pc.output("x", value)
        with pytest.raises(TracingError, match="cannot combine a Value"):
            LEFT[name](array, value)
    if name not in ("/", "**"):  # of floating numbers only
        with pc.eager.implicit_broadcast():
            np.testing.assert_array_equal(
                LEFT[name](array, x + 1).numpy(), LEFT[name](array, array + 1)
            )
