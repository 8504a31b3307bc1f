"""NumPy's functions on tensors give what they give on arrays, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import UsageError

PAIR = pc.Placement("cpu", [0, 1])
NUMBERS = np.linspace(-1.5, 2.0, 12).reshape(4, 3)

CALLS: dict[str, Callable[[Any], Any]] = {
    "a function of elements": np.sin,
    "an older name": lambda x: np.arctan2(np.absolute(x), 2.0),
    "an operator's function": lambda x: np.add(x, 1.0),
    "a difference": lambda x: np.subtract(1.0, x),
    "NumPy's number on the left": lambda x: np.float64(2.0) / (x + 5.0),
    "NumPy's number compared": lambda x: np.float64(0.5) < x,
    "NumPy's number equal": lambda x: np.float64(2.0) == x,
    "a power": lambda x: np.power(2.0, x),
    "the greater one": lambda x: np.maximum(x, 0.0),
    "a choice": lambda x: np.where(x > 0, x, 0.0),
    "a sum over an axis": lambda x: np.sum(x, axis=0),
    "a variance of the population": np.var,
    "an extreme": lambda x: np.max(x, axis=1, keepdims=True),
    "tensors in a list": lambda x: np.concatenate([x, x], axis=1),
    "a stack": lambda x: np.stack([x, x]),
    "sorted": lambda x: np.sort(x, axis=0),
    "another shape": lambda x: np.reshape(x, (3, 4)),
    "transposed": np.transpose,
    "axes in order": lambda x: np.transpose(x, (1, 0)),
    "linear algebra": lambda x: np.linalg.vector_norm(x, axis=0),
}


def results(x: Any) -> dict[str, np.ndarray]:
    values = {name: call(x) for name, call in CALLS.items()}
    return {name: v.numpy() if isinstance(v, pc.DistTensor) else v for name, v in values.items()}


def test_calls_of_numpy_are_those_of_the_array_api() -> None:
    expected = results(NUMBERS)

    def program() -> list[dict[str, np.ndarray]]:
        return [results(pc.tensor(NUMBERS, PAIR, sbp)) for sbp in ("S(0)", "S(1)", "B", "P")]

    for layouts in spawn(program, ranks=2):
        for got in layouts:
            for name, value in expected.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-12, err_msg=name)


def test_shapes_need_no_call() -> None:
    x = pc.tensor(NUMBERS, pc.Placement("cpu", [0]), "B")
    assert (np.shape(x), np.ndim(x), np.size(x)) == ((4, 3), 2, 12)


def test_jobs_and_compiled_functions_take_them() -> None:
    @pc.compile
    def total(x: pc.DistTensor) -> Any:
        return np.sum(np.tanh(x) * np.float64(2.0))

    one = pc.Placement("cpu", [0])
    assert total(pc.tensor(NUMBERS, one, "B")).item() == pytest.approx(2 * np.tanh(NUMBERS).sum())
    with pc.job("tanh") as job:
        pc.output("y", np.tanh(pc.input("x", NUMBERS.shape, "float64", one)))
    with pc.run(job) as session:
        np.testing.assert_allclose(session.step(x=NUMBERS)["y"], np.tanh(NUMBERS))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: np.split(x, 2), "numpy.split does not take tensors.*pc.split is there"),
        (np.linalg.norm, "numpy.linalg.norm does not take tensors.*pc.linalg.norm"),
        (lambda x: np.var(x, ddof=1), "unexpected keyword argument 'ddof'.*correction"),
        (np.add.reduce, "np.add takes tensors only as plain operands. .*Got: .reduce"),
        (lambda x: np.exp(x, out=np.ones((4, 3))), "Got: out="),
        (lambda x: np.ones((4, 3)) + x, "add cannot combine a DistTensor with this"),
        (lambda x: np.ones((4, 3)) < x, "greater cannot combine"),
        (np.asarray, "not converted to an array implicitly"),
    ],
)
def test_other_calls_say_what_there_is(call: Callable[[Any], Any], says: str) -> None:
    x = pc.tensor(NUMBERS, pc.Placement("cpu", [0]), "B")
    with pytest.raises(UsageError, match=says):
        call(x)
