"""`isclose`, `allclose`, `array_equal`: against NumPy, and one answer on every rank."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import eager

SPECIAL = np.array([0.0, -0.0, 1.0, 1.0 + 1e-6, 1.1, np.inf, -np.inf, np.nan])


def test_isclose_is_that_of_numpy() -> None:
    mesh = pc.Placement("cpu", [0])
    rows, columns = np.meshgrid(SPECIAL, SPECIAL)
    x, y = (pc.tensor(each, mesh) for each in (rows, columns))
    for options in ({}, {"equal_nan": True}, {"rtol": 0.2}, {"atol": 1.5, "rtol": 0.0}):
        wanted = np.isclose(rows, columns, **options)
        np.testing.assert_array_equal(pc.isclose(x, y, **options).numpy(), wanted)
        assert pc.allclose(x, y, **options) is bool(wanted.all())
        for number in SPECIAL.tolist():
            np.testing.assert_array_equal(
                pc.isclose(x, number, **options).numpy(), np.isclose(rows, number, **options)
            )
            np.testing.assert_array_equal(
                pc.isclose(number, x, **options).numpy(), np.isclose(number, rows, **options)
            )
    whole = np.array([-(2**62), 2**62, 5])
    far = pc.tensor(whole, mesh)
    np.testing.assert_array_equal(pc.isclose(far, -far).numpy(), np.isclose(whole, -whole))


def test_every_rank_learns_the_same_answer() -> None:
    numbers = np.arange(10.0)

    def program() -> list[bool]:
        two, three = pc.Placement("cpu", [0, 1]), pc.Placement("cpu", [0, 1, 2])
        x = pc.tensor(numbers, two, "S(0)")
        changed = numbers.copy()
        changed[9] = 8.5  # on rank 1 alone
        partial = pc.tensor(numbers / 2, two, "P") * 2
        return [
            pc.array_equal(x, pc.tensor(numbers, two)),
            pc.array_equal(x, partial),
            pc.array_equal(x, pc.tensor(numbers, three, "S(0)")),
            not pc.array_equal(x, pc.tensor(changed, two, "S(0)")),
            not pc.array_equal(x, pc.tensor(changed, three, "S(0)")),
            not pc.array_equal(x, pc.tensor(numbers[:9], two)),
            not pc.array_equal(x, 0),
            pc.allclose(x, pc.tensor(numbers + 1e-9, three)),
            not pc.allclose(x, pc.tensor(changed, two)),
            pc.allclose(x * 0, 0.0),
            not pc.array_equal(pc.tensor([np.nan], two), pc.tensor([np.nan], two)),
            pc.array_equal(pc.tensor([np.nan], two), pc.tensor([np.nan], two), equal_nan=True),
        ]

    for answers in eager.spawn(program, ranks=4):
        assert answers == [True] * 12


def test_an_answer_is_refused_while_a_function_is_traced() -> None:
    mesh = pc.Placement("cpu", [0])
    x = pc.tensor([1.0], mesh)
    with pytest.raises(pc.TracingError, match="not known") as caught:
        pc.compile(lambda x: pc.allclose(x, x))(x)
    assert "pc.all(pc.isclose" in str(caught.value)
    with pc.job("equal"):
        value = pc.input("x", (2,), "float32", mesh)
        pc.output("close", pc.all(pc.isclose(value, value)))
        with pytest.raises(pc.TracingError, match="array_equal"):
            pc.array_equal(value, value)  # type: ignore[arg-type]  # as a user may
