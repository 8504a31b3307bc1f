"""Arrays without elements have the shapes, dtypes, strides and bytes that NumPy's have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plancompiler.forecasting.dry_arrays import (
    DryArray,
    DryNamespace,
    NotDryError,
    Tally,
    given,
)

A, B = np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.ones((3, 4))
ROWS, MASK = np.array([1, 0, 1]), np.ones((2, 3), bool)
CALLS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, rows, mask: a + b,
    "weak": lambda a, b, rows, mask: a * 2.5 - 1,
    "compare": lambda a, b, rows, mask: a > b,
    "matmul": lambda a, b, rows, mask: np.matmul(a, b.T),
    "vector": lambda a, b, rows, mask: np.matmul(a, b[0]),
    "sum": lambda a, b, rows, mask: a.sum(axis=(0, 2), keepdims=True),
    "mean of counts": lambda a, b, rows, mask: mask.mean(axis=1),
    "cumsum": lambda a, b, rows, mask: np.cumsum(rows[None] + rows[:, None], axis=1),
    "einsum": lambda a, b, rows, mask: np.einsum("bij,...j->bi...", a, b[0]),
    "trace": lambda a, b, rows, mask: np.einsum("ii->i", b[:, :3]),
    "rows": lambda a, b, rows, mask: b[rows],
    "apart": lambda a, b, rows, mask: a[rows, :, rows],
    "beside": lambda a, b, rows, mask: a[:, rows, rows],
    "number and rows": lambda a, b, rows, mask: a[0, ..., rows],
    "mask": lambda a, b, rows, mask: a[mask],
    "new axis": lambda a, b, rows, mask: a[:, None, 1:, ::-2],
    "turned": lambda a, b, rows, mask: np.exp(a.transpose(2, 0, 1)),
    "copy": lambda a, b, rows, mask: a.T.copy("K"),
    "halves": lambda a, b, rows, mask: a.astype(np.float16).view(np.int16),
    "where": lambda a, b, rows, mask: np.where(mask[..., None], a, 0),
    "take": lambda a, b, rows, mask: np.take(a, rows, axis=1),
    "along": lambda a, b, rows, mask: np.take_along_axis(b, rows[:, None], 1),
    "concatenate": lambda a, b, rows, mask: np.concatenate([a, b[None]], axis=0),
    "diff": lambda a, b, rows, mask: np.diff(rows, prepend=rows[0]),
    "argsort": lambda a, b, rows, mask: np.argsort(a, axis=1, kind="stable"),
    "argmax": lambda a, b, rows, mask: a.argmax(axis=-1),
    "flat": lambda a, b, rows, mask: a.swapaxes(0, 1).reshape(-1),
    "arange": lambda a, b, rows, mask: np.arange(2, 9, 2, like=rows),
    "outer": lambda a, b, rows, mask: np.outer(rows, b[0]),
    "like": lambda a, b, rows, mask: np.zeros_like(a, np.int64),
}


def dry(tally: Tally, array: np.ndarray) -> DryArray:
    return given(tally, array.shape, array.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_results_look_like_those_of_numpy(name: str) -> None:
    tally = Tally()
    expected = CALLS[name](A, B, ROWS, MASK)
    result = CALLS[name](*(dry(tally, each) for each in (A, B, ROWS, MASK)))
    assert type(result) is DryArray
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.strides == expected.strides
    owner = expected
    while owner.base is not None:
        owner = owner.base
    is_new = owner is not A and owner is not B and not np.shares_memory(owner, A)
    assert tally.held == (owner.nbytes if is_new else 0)
    assert tally.most >= tally.held
    del result
    assert tally.held == 0


def test_reshaping_is_a_view_where_it_is_with_numpy() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        base = np.zeros([rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))])
        order = rng.sample(range(base.ndim), base.ndim)
        cut = tuple(slice(None, None, rng.choice([1, 1, 2, -1])) for _ in order)
        shape, left = [1] * rng.randint(0, 2), base.transpose(order)[cut].size
        while left > 1:
            shape.append(rng.choice([each for each in range(2, left + 1) if left % each == 0]))
            left //= shape[-1]
        rng.shuffle(shape)
        tally = Tally()
        result = dry(tally, base).transpose(order)[cut].reshape(shape)
        expected = base.transpose(order)[cut].reshape(shape)
        assert result.shape == expected.shape
        assert (tally.held == 0) == np.may_share_memory(expected, base)


def test_no_size_is_too_large_and_nothing_is_read() -> None:
    tally = Tally()
    x = given(tally, (1 << 30, 1 << 15), np.float32)
    y = np.exp(x) * x[:, :1]
    np.copyto(y[::2].T, 0)
    assert (tally.held, tally.most) == (1 << 47, 1 << 48)
    assert float(y[5, 7]) == 0.0
    assert not (y > 0).any()
    assert np.isfinite(y).all()


def test_what_needs_elements_or_is_not_counted_is_refused() -> None:
    tally = Tally()
    x = dry(tally, A)
    for call in (
        lambda: np.asarray(x),
        lambda: np.linalg.inv(x),
        lambda: np.add(x, np.ones(4 * 6).reshape(2, 3, 4)),
        lambda: x[True],
        lambda: bool(x),
    ):
        with pytest.raises(NotDryError):
            call()


def test_a_namespace_makes_arrays_and_has_the_rest_of_numpy() -> None:
    tally = Tally()
    arrays = DryNamespace(tally)
    made = [arrays.empty((2, 3), np.float32), arrays.arange(5), arrays.full(4, 1.0)]
    assert [each.nbytes for each in made] == [24, 40, 32]
    assert tally.held == 96
    assert arrays.float32 is np.float32
    assert isinstance(made[0], np.ndarray)
