"""Kernels as loops over elements and rows, which numba compiles (`ops.numba_loops`).

Each computes what the NumPy kernel that calls it does, in one pass where that makes many. Their
Python is what numba takes, and runs without it too. Scalars have the arrays' dtype, so that nothing
is computed in a wider one. Where a result may lie over what it is made of, a row is made aside
first: of memory that overlaps the compiler vectorises nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Arrays of so many axes that a loop reads, and that it writes.
In1 = np.ndarray[Any, np.dtype[Any]]
In2 = np.ndarray[Any, np.dtype[Any]]
In3 = np.ndarray[Any, np.dtype[Any]]
Out1 = np.ndarray[Any, np.dtype[Any]]
Out2 = np.ndarray[Any, np.dtype[Any]]
Out3 = np.ndarray[Any, np.dtype[Any]]


def layer_norm(
    x: In2, gamma: In1, beta: In1, share: float, eps: float, y: Out2, mean: Out2, rstd: Out2
) -> None:
    """Rows of `layer_norm`; `share` is 1 / width."""
    rows, width = x.shape
    made = np.empty(width, x.dtype)
    for row in range(rows):
        total = x.dtype.type(0)
        for i in range(width):
            total += x[row, i]
        middle = total * share
        spread = x.dtype.type(0)
        for i in range(width):
            made[i] = x[row, i] - middle
            spread += made[i] * made[i]
        inverse = x.dtype.type(1) / np.sqrt(spread * share + eps)
        for i in range(width):
            made[i] = made[i] * inverse * gamma[i] + beta[i]
        y[row] = made
        mean[row, 0] = middle
        rstd[row, 0] = inverse


def layer_norm_grad(
    x: In2,
    gamma: In1,
    mean: In2,
    rstd: In2,
    dy: In2,
    share: float,
    dx: Out2,
    dgamma: Out1,
    dbeta: Out1,
) -> None:
    """A block of rows of `layer_norm_grad`; the sums over rows are added to what is there."""
    rows, width = x.shape
    made = np.empty(width, x.dtype)
    unit = np.empty(width, x.dtype)
    dgammas = np.zeros(width, x.dtype)
    dbetas = np.zeros(width, x.dtype)
    for row in range(rows):
        middle, inverse = mean[row, 0], rstd[row, 0]
        pulled = x.dtype.type(0)
        turned = x.dtype.type(0)
        for i in range(width):
            unit[i] = (x[row, i] - middle) * inverse
            product = unit[i] * dy[row, i]
            dgammas[i] += product
            dbetas[i] += dy[row, i]
            turned += product * gamma[i]
            pulled += dy[row, i] * gamma[i]
        turned *= share
        pulled *= share
        for i in range(width):
            made[i] = (dy[row, i] * gamma[i] - (pulled + unit[i] * turned)) * inverse
        dx[row] = made
    for i in range(width):
        dgamma[i] += dgammas[i]
        dbeta[i] += dbetas[i]


def softmax_grad(y: In2, dy: In2, dx: Out2) -> None:
    """Rows of `softmax_grad`."""
    rows, width = y.shape
    made = np.empty(width, y.dtype)
    for row in range(rows):
        total = y.dtype.type(0)
        for i in range(width):
            total += y[row, i] * dy[row, i]
        for i in range(width):
            made[i] = (dy[row, i] - total) * y[row, i]
        dx[row] = made


def lower(x: Out3, height: int, offset: int, level: In3) -> None:
    """Rows less their levels, in place; -inf from the position (row mod height) + offset on."""
    hidden = x.dtype.type(-np.inf)
    for block in range(x.shape[0]):
        for row in range(x.shape[1]):
            seen = min(max(row % height + offset, 0), x.shape[2])
            below = level[block, row, 0]
            for i in range(seen):
                x[block, row, i] -= below
            for i in range(seen, x.shape[2]):
                x[block, row, i] = hidden


def pull_and_weigh(slopes: Out3, pull: In3, weights: In3) -> None:
    """(slopes - pull) * weights, in place."""
    for block in range(slopes.shape[0]):
        for row in range(slopes.shape[1]):
            less = pull[block, row, 0]
            for i in range(slopes.shape[2]):
                slopes[block, row, i] = (slopes[block, row, i] - less) * weights[block, row, i]
