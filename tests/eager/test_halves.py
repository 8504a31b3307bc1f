"""Numbers of 16 bits: what is added up or counted, within a rank and between ranks, is added up in
float32; only what is out of range itself overflows. Against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.ir import DType

MESH = pc.Placement("cpu", [0, 1])
MANY = 70_000  # a count that float16 cannot hold
rng = np.random.default_rng(4)
LABELS = rng.integers(0, 3, MANY)
COUNTED = np.where(np.arange(MANY) % 3 == 0, -100, LABELS)


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def cross_entropy(logits, labels):
    """Value and gradient."""
    counts = labels >= 0
    shares, rows = softmax(logits), np.arange(len(labels))
    low = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(low).sum(1)) - low[rows, np.maximum(labels, 0)]
    shares[rows, np.maximum(labels, 0)] -= 1
    return losses[counts].mean(), shares * counts[:, None] / counts.sum()


def nll(logs, labels):
    counts = labels >= 0
    grad = np.zeros(logs.shape)
    grad[np.arange(len(labels))[counts], labels[counts]] = -1 / counts.sum()
    return (logs * grad).sum(), grad


def norm(x, p):
    size = (np.abs(x) ** p).sum() ** (1 / p)
    return size, np.sign(x) * (np.abs(x) / size) ** (p - 1)


def normalised(x, axes, mean=True):
    centred = x - x.mean(axes, keepdims=True) if mean else x
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5)


def drawn(scale, *shape, offset=0.0):
    return rng.normal(size=shape) * scale + offset


# Functions, their float inputs, and the value and the gradient of its sum by the first input (None:
# not compared) in float64.
CASES = {
    "cross-entropy": (
        lambda x: pc.cross_entropy(x, pc.tensor(COUNTED, MESH)),
        [drawn(2, MANY, 3)],
        lambda x: cross_entropy(x, COUNTED),
    ),
    "cross-entropy of all rows": (
        lambda x: pc.cross_entropy(x, pc.tensor(LABELS, MESH), ignore_index=None),
        [drawn(2, MANY, 3)],
        lambda x: cross_entropy(x, LABELS),
    ),
    "cross-entropy of split classes": (
        lambda x: pc.cross_entropy(x, pc.tensor(COUNTED, MESH), split_classes=True),
        [drawn(2, MANY, 3)],
        lambda x: cross_entropy(x, COUNTED),
    ),
    "cross-entropy of many classes": (
        lambda x: pc.cross_entropy(x, pc.tensor(np.array([5, 60_000]), MESH), split_classes=True),
        [drawn(1, 2, MANY)],
        lambda x: cross_entropy(x, np.array([5, 60_000])),
    ),
    "cross-entropy out of range in one row": (
        lambda x: pc.cross_entropy(x, pc.tensor(np.zeros(8, np.int64), MESH)),
        [np.stack([np.array([-6e4] + 7 * [0.0]), np.array([6e4] + 7 * [0.0])], 1)],
        lambda x: cross_entropy(x, np.zeros(8, np.int64)),
    ),
    "nll": (
        lambda x: pc.nll_loss(x, pc.tensor(COUNTED, MESH)),
        [np.log(softmax(drawn(2, MANY, 3)))],
        lambda x: nll(x, COUNTED),
    ),
    "mean": (lambda x: x.mean(), [drawn(3, MANY, offset=100)], lambda x: (x.mean(), 1 / x.size)),
    "mean of columns": (
        lambda x: pc.mean(x, 0),
        [drawn(3, MANY, 2, offset=100)],
        lambda x: (x.mean(0), 1 / len(x)),
    ),
    "mse": (
        lambda x: pc.mse_loss(x, pc.zeros_like(x)),
        [np.array(999 * [0.0] + [300.0])],
        lambda x: ((x**2).mean(), 2 * x / x.size),
    ),
    "norm 2": (pc.norm, [drawn(200, 3000)], lambda x: norm(x, 2)),
    "norm 3": (lambda x: pc.norm(x, 3), [drawn(100, 300)], lambda x: norm(x, 3)),
    "norm 1": (lambda x: pc.norm(x, 1), [drawn(1, MANY)], lambda x: norm(x, 1)),
    "variance": (
        pc.var,
        [drawn(3, MANY, offset=100)],
        lambda x: (x.var(), 2 * (x - x.mean()) / x.size),
    ),
    "standard deviation": (
        pc.std,
        [drawn(300, MANY)],
        lambda x: (x.std(), (x - x.mean()) / x.size / x.std()),
    ),
    "ties": (pc.max, [np.ones(MANY)], lambda x: (1.0, 1 / x.size)),
    "product": (
        pc.prod,
        [np.array([300.0, 300.0, 0.0])],
        lambda x: (0.0, np.array([0.0, 0.0, 9e4])),  # more than the range of float16
    ),
    "product of parts": (
        pc.prod,
        [np.array([300.0, 300.0, 2.0**-10, 0.5])],
        lambda x: (x.prod(), x.prod() / x),
    ),
    "average pooling": (
        pc.global_avg_pool,
        [drawn(50, 2, 2, 30, 30, offset=1000)],
        lambda x: (x.mean((2, 3)), 1 / 900),
    ),
    "running sum": (
        lambda x: pc.cumsum(x, 0),
        [np.where(np.arange(MANY) % 2, 1.0, -1.0)],
        lambda x: (np.cumsum(x), None),
    ),
    "softmax": (lambda x: pc.softmax(x, 0), [drawn(1, MANY, 2)], lambda x: (softmax(x, 0), None)),
    "softmax of a split axis": (
        lambda x: pc.softmax(x, 0, split_axis=True),
        [drawn(1, MANY, 2)],
        lambda x: (softmax(x, 0), None),
    ),
    "layer norm": (
        lambda x: pc.layer_norm(x, pc.ones_like(x[0]), pc.zeros_like(x[0])),
        [drawn(400, 4, 600, offset=1000)],
        lambda x: (normalised(x, -1), None),
    ),
    "layer norm of near numbers": (
        lambda x, w: pc.layer_norm(x, pc.ones_like(x[0]), pc.zeros_like(x[0])) * w,
        [1000.0 + np.arange(-4.0, 4.0)[None].repeat(2, 0), np.array(2 * [4 * [1.0, 0.0]])],
        lambda x, w: (normalised(x, -1) * w, slope_of_layer_norm(x, w)),
    ),
    "root mean square norm": (
        lambda x: pc.rms_norm(x, pc.ones_like(x[0])),
        [drawn(400, 4, 600)],
        lambda x: (normalised(x, -1, mean=False), None),
    ),
    "group norm": (
        lambda x: pc.group_norm(x, 1),
        [drawn(400, 2, 3, 10, 10, offset=300)],
        lambda x: (normalised(x, (1, 2, 3)), None),
    ),
    "batch norm": (
        pc.batch_norm,
        [drawn(400, 4, 3, 10, 10, offset=300)],
        lambda x: (normalised(x, (0, 2, 3)), None),
    ),
    "gradient of what is broadcast": (
        lambda b, x: (b * x).mean(),
        [np.ones(2), drawn(1, MANY, 2, offset=1)],
        lambda b, x: ((b * x).mean(), x.mean(0) / 2),
    ),
}


def slope_of_layer_norm(x, pull):
    unit = normalised(x, -1)
    shared = pull.mean(-1, keepdims=True) + unit * (pull * unit).mean(-1, keepdims=True)
    return (pull - shared) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 1.6e-2)])
def test_only_what_is_out_of_range_overflows(dtype, bound):
    kind = DType.parse(dtype).numpy

    def rank():
        results = {}
        with np.errstate(all="ignore"):
            for name, (function, arrays, _) in CASES.items():
                for layout in ("B", "S(0)"):
                    tensors = [pc.tensor(each.astype(kind), MESH, layout) for each in arrays]
                    tensors[0].requires_grad = True
                    made = function(*tensors)
                    (grad,) = pc.eager.grad(made.sum(), tensors[:1])
                    assert made.dtype == grad.dtype == DType.parse(dtype), name
                    results[name, layout] = [each.cast("float64").numpy() for each in (made, grad)]
        return results

    for (name, layout), got in spawn(rank, 2)[0].items():
        _, arrays, formula = CASES[name]
        with np.errstate(all="ignore"):
            wanted = formula(*(each.astype(kind).astype(np.float64) for each in arrays))
        for one, expected in zip(got, wanted, strict=True):
            if expected is None:
                continue
            with np.errstate(over="ignore"):
                rounded = np.asarray(expected).astype(kind).astype(np.float64)
            expected = np.where(np.isfinite(rounded), expected, rounded)
            size = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
            # Spacing of the least numbers of float16: 2 ** -24.
            np.testing.assert_allclose(
                one, expected, bound, bound * size / 4 + 2**-24, err_msg=f"{name}, {layout}"
            )


def test_training_in_halves_learns_from_many_rows():
    """The whole way: logits of 70,000 rows by one weight, their loss and the weight's gradient."""
    x = rng.normal(size=(MANY, 2)).astype(np.float16)
    labels = (x[:, 0] > x[:, 1]).astype(np.int64)
    plain = x.astype(np.float64)

    def rank():
        weight = pc.tensor(np.zeros((2, 2), np.float16), MESH, requires_grad=True)
        rows = pc.tensor(x, MESH, "S(0)")
        loss = pc.cross_entropy(rows @ weight, pc.tensor(labels, MESH, "S(0)"))
        loss.backward()
        return loss.item(), weight.grad.numpy()

    loss, grad = spawn(rank, 2)[0]
    assert loss == pytest.approx(math.log(2), rel=1e-3)
    pull = (0.5 - np.eye(2)[labels]) / MANY
    np.testing.assert_allclose(grad, plain.T @ pull, 2e-3)


@pytest.mark.parametrize("size", [8, 50_000], ids=["one piece", "in chunks"])
def test_parts_of_ranks_add_up_in_float32(size):
    """2048 + 1 + 1 + 1 in float16 is 2048 step by step; rounded once, it is 2052. And 40000 + 40000
    - 40000 is in range."""
    mesh = pc.Placement("cpu", range(4))

    def rank():
        own = pc.eager.current_world().rank
        results = []
        for parts in ([2048.0, 1.0, 1.0, 1.0], [4e4, 4e4, -4e4, 0.0]):
            local = np.full(size, parts[own], np.float16)
            value = pc.eager.DistTensor.from_local(local, mesh, "P")
            targets = [value.redistribute(sbp=sbp) for sbp in ("B", "S(0)")]
            targets.append(value.redistribute(pc.Placement("cpu", [3, 1, 0, 2]), "B"))
            results += [set(each.numpy().astype(float).tolist()) for each in targets]
        return results

    assert spawn(rank, 4) == [[{2052.0}] * 3 + [{40000.0}] * 3] * 4
