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
    "equal pieces": lambda x: np.split(x, 2),
    "pieces between places": lambda x: np.split(x, [1, 3], 0),
    "balanced pieces": lambda x: np.array_split(x, 3, axis=0),
    "columns": lambda x: np.hsplit(x, 3),
    "rows": lambda x: np.vsplit(x, 2),
    "an axis in its place": lambda x: [
        *(np.sum(x, 0), np.mean(x, 1), np.max(x, 0), np.argmin(x, 1), np.prod(x, 0)),
        *(np.cumsum(x), np.cumsum(x, 1), np.cumprod(x, 0), np.sort(x, 0), np.argsort(x, 0)),
        *(np.concatenate([x, x], 1), np.expand_dims(x, 0), np.any(x > 1, 0), np.nansum(x, 0)),
    ],
    "a dtype behind the axis": lambda x: np.cumsum(x > 0, 0, np.float64),
    "a sample's variance": lambda x: [np.var(x, ddof=1), np.std(x, 0, ddof=1)],
    "places in the order": lambda x: [
        *(np.median(x), np.median(x, 0), np.quantile(x, 0.3, axis=1), np.percentile(x, 30)),
        *(np.percentile(x, [25, 50], axis=0), np.quantile(x, 0.4, method="lower")),
    ],
    "without NaN": lambda x: [
        function(np.where(x > 1, np.nan, x), 0)
        for function in (np.nansum, np.nanmean, np.nanmax, np.nanmin, np.nanmedian)
    ],
    "decimals": lambda x: [np.round(x, 2), np.around(x, -1), np.rint(x)],
    "places of a mask": lambda x: [*np.where(x > 0), np.count_nonzero(x > 0, 0)],
    "distinct ones": lambda x: [
        *(np.unique(np.round(x)), *np.unique(np.round(x), return_counts=True)),
        np.unique(np.round(x[:, :1]), axis=0),
    ],
    "products": lambda x: [
        *(np.dot(x, x.T), np.dot(x[0], x[1]), np.dot(x, x[0]), np.inner(x, x), np.kron(x[0], x[1])),
        *(np.outer(x[0], x[1]), np.tensordot(x, x, axes=([0], [0])), np.trace(x)),
        *(np.einsum("ij,kj->ik", x, x), np.einsum("ij,kj", x, x, optimize=True)),
    ],
    "other shapes": lambda x: [
        *(np.swapaxes(x, 0, 1), np.ravel(x), np.fliplr(x), np.rot90(x, 3), np.roll(x, 2, 1)),
        *(np.roll(x, 1), np.tile(x, 2), np.repeat(x, 2, 1), np.diag(x, 1), np.diagonal(x)),
        *(np.hstack([x, x]), np.vstack([x, x]), np.column_stack([x[0], x[1]]), np.tril(x, -1)),
    ],
    "statistics": lambda x: [
        *(np.ptp(x, 0), np.average(x), np.average(x, axis=1, weights=x[0]), np.cov(x)),
        *(
            np.corrcoef(x),
            np.diff(x, 1, 0),
            np.trapezoid(x, dx=2.0),
            np.bincount((x > 0).ravel() * 1),
        ),
        *(np.clip(x, -0.5, 0.5), np.isclose(x, x + 1e-3, 1e-9), np.isclose(x, x, atol=1.0)),
    ],
    "comparisons": lambda x: [np.allclose(x, x + 1e-9), np.array_equal(x, x)],
    "more functions of elements": lambda x: [
        *(np.exp2(x), np.deg2rad(x), np.degrees(x), np.fabs(x), np.fmod(x, 0.7), np.fmax(x, 0.0)),
        *(np.heaviside(x, 0.5), np.logaddexp2(x, x)),
    ],
    "norms": lambda x: [
        *(np.linalg.norm(x), np.linalg.norm(x, axis=1), np.linalg.norm(x, 2), np.linalg.cond(x)),
        *(np.linalg.norm(x, 1, 0), np.linalg.multi_dot([x, x.T, x])),
    ],
}


def results(x: Any) -> dict[str, Any]:
    return {name: whole(call(x)) for name, call in CALLS.items()}


def whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [whole(each) for each in value]
    return value.numpy() if isinstance(value, pc.DistTensor) else value


def test_calls_of_numpy_are_those_of_the_array_api() -> None:
    expected = results(NUMBERS)

    def program() -> list[dict[str, Any]]:
        return [results(pc.tensor(NUMBERS, PAIR, sbp)) for sbp in ("S(0)", "S(1)", "B", "P")]

    for layouts in spawn(program, ranks=2):
        for got in layouts:
            for name, value in expected.items():
                several = isinstance(value, list)
                for number, pair in enumerate(
                    zip(got[name], value, strict=True) if several else [(got[name], value)]
                ):
                    label = f"{name} {number}"
                    np.testing.assert_allclose(*pair, rtol=1e-12, atol=1e-12, err_msg=label)


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
        (lambda x: np.histogram2d(x, x), "numpy.histogram2d does not take tensors.*pc.histogram2d"),
        (
            lambda x: np.linalg.lstsq(x, x),
            "numpy.linalg.lstsq does not take tensors.*pc.linalg.lstsq",
        ),
        (lambda x: np.sum(x, where=x > 0), "unexpected keyword argument 'where'.*keepdims"),
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
