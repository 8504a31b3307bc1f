"""Scenarios after the tests of OneFlow's global tensors (python/oneflow/test/modules)."""

from __future__ import annotations

import numpy as np

import plancompiler as pc
from tests.scenarios import formulas as f
from tests.scenarios.scenario import MESHES, OTHER_PAIR, OVERLAPPING, flags, ids, positive, rows

F = pc.nn.functional
PAIR, GRID, THREE = MESHES["pair"], MESHES["grid"], MESHES["three"]
MATRIX, PACKED = (4, 6), (4, 6, 2)

BOXING = [
    *rows("to ranks apart", "test_eager_boxing.py", "pair", "P | B | S0 | S1", [(4, 4)],
          lambda x: x.redistribute(OTHER_PAIR, "S(1)"), lambda x: x, "S1"),
    *rows("to ranks apart, partial", "test_eager_boxing.py", "pair", "S0 | S1 | B", [(4, 4)],
          lambda x: x.redistribute(OTHER_PAIR, "P"), lambda x: x, "P"),
    *rows("to overlapping ranks", "test_eager_boxing.py", "pair", "P | S0 | S1 | B", [(5, 4)],
          lambda x: x.redistribute(OVERLAPPING, "S(0)"), lambda x: x, "S0"),
    *rows("to overlapping ranks, whole", "test_eager_boxing.py", "pair", "P | S1", [(5, 4)],
          lambda x: x.redistribute(OVERLAPPING, "B"), lambda x: x, "B"),
    *rows("from two axes to one", "test_comb2to2d.py", "grid", "S0 S1 | P S0", [(4, 8)],
          lambda x: x.redistribute(pc.Placement("cpu", [0, 1, 2, 3]), "S(0)"), lambda x: x, "S0"),
    *rows("from a grid to a pair", "test_asymmetric_eager_boxing.py", "grid", "S0 S1 | P B",
          [(4, 8)],
          lambda x: x.redistribute(OTHER_PAIR, "S(1)"), lambda x: x, "S1"),
]  # fmt: skip

OPS = [
    *rows("another dtype", "test_consistent_cast.py", "pair", "S0 | B | P", [ids(9, 4, 6)],
          lambda x: pc.cast(x, "float64"), lambda x: x.astype("float64"), "S0 | B | "),
    *rows("product with broadcasting", "test_global_broadcast_matmul.py", "grid",
          "S0 S1, B B | S2 B, S0 B | P B, B S1", [(2, 4, 6), (6, 4)],
          lambda x, y: x @ y, lambda x, y: x @ y),
    *rows("tensors broadcast to each other", "test_global_broadcast_ops.py", "pair",
          "S0, S1 | B, S2 | P, S0", [(2, 2), (2, 2, 2)],
          pc.broadcast_tensors,
          lambda x, y: (np.broadcast_to(x, (2, 2, 2)), y)),
    *rows("reshaped", "test_global_reshape.py", "grid", "S0 S1 | B S2 | P S0", [(4, 2, 6)],
          lambda x: x.reshape(8, 6), lambda x: x.reshape(8, 6)),
    *rows("concatenated", "test_global_concat.py", "grid", "S0 S1, S0 S1 | P B, S1 S0",
          [MATRIX, MATRIX], lambda x, y: pc.cat([x, y], 1), lambda x, y: np.concatenate([x, y], 1)),
    *rows("place of the greatest", "test_global_argmax.py", "grid", "S0 S1 | S1 B | P S0", [MATRIX],
          lambda x: pc.argmax(x, 1, keepdims=True), lambda x: x.argmax(1, keepdims=True),
          gradients=False),
    *rows("average pooling", "test_global_avgpool.py", "pair", "S0 | S1 | S2", [(2, 2, 4, 4)],
          lambda x: pc.avg_pool2d(x, 2), lambda x: f.pool(x, 2, np.mean)),
    *rows("maximum pooling", "test_global_maxpool.py", "pair", "S0 | S1 | S3", [(2, 2, 4, 4)],
          lambda x: pc.max_pool2d(x, 2), lambda x: f.pool(x, 2, np.max)),
    *rows("flipped", "test_global_flip.py", "grid", "S0 S1 | S1 S0", [MATRIX],
          lambda x: pc.flip(x, (0, 1)), lambda x: x[::-1, ::-1]),
    *rows("selected rows", "test_index_select.py", "pair", "S0, B | S1, S0", [MATRIX, ids(4, 6)],
          lambda x, i: pc.index_select(x, i, 0), lambda x, i: x[i]),
    *rows("masked", "test_global_masked_fill.py", "grid", "S0 S1, S0 B | P S0, B S1",
          [MATRIX, flags(4, 6)], lambda x, m: pc.masked_fill(x, m, 2.5),
          lambda x, m: np.where(m, 2.5, x)),
    *rows("one tile for each", "test_global_tile.py", "pair", "S0 | S1 | P", [MATRIX],
          lambda x: pc.tile(x, (2, 2)), lambda x: np.tile(x, (2, 2))),
    *rows("sorted backwards", "test_global_sort.py", "pair", "S0 | S1", [MATRIX],
          lambda x: pc.sort(x, 1, descending=True)[0], lambda x: -np.sort(-x, 1)),
    *rows("triangle", "test_global_tril.py", "grid", "S0 S1 | P B", [MATRIX],
          lambda x: pc.tril(x, 1), lambda x: np.tril(x, 1)),
    *rows("gathered", "test_gather.py", "pair", "S0, S0 | S1, B", [MATRIX, ids(6, 4, 3)],
          lambda x, i: pc.gather(x, 1, i), lambda x, i: np.take_along_axis(x, i, 1)),
    *rows("diagonal", "test_global_diag.py", "pair", "S0 | S1 | B", [(4, 4)],
          lambda x: (pc.diag(x), pc.diag(x, 1)), lambda x: (np.diag(x), np.diag(x, 1))),
    *rows("cumulative products", "test_global_cumprod.py", "pair", "S0 | S1", [positive(4, 6)],
          lambda x: pc.cumprod(x, 0), lambda x: np.cumprod(x, 0)),
    *rows("greater", "test_global_greater.py", "pair", "S0, S1 | P, B", [MATRIX, MATRIX],
          lambda x, y: x > y, lambda x, y: x > y, gradients=False),
    *rows("absolute values of a partial value", "test_global_abs.py", "pair", "P | S0", [MATRIX],
          pc.abs, np.abs),
    *rows("maximum and minimum", "test_global_max.py", "grid", "S0 S1 | P P", [MATRIX],
          lambda x: (pc.max(x, 1), pc.min(x)), lambda x: (x.max(1), x.min())),
    *rows("permuted", "test_global_permute.py", "grid", "S0 S2 | S1 P", [PACKED],
          lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1), "S1 S0 | S2 P"),
    *rows("stacked", "test_global_stack.py", "pair", "S0, P | S1, S1", [MATRIX, MATRIX],
          lambda x, y: pc.stack([x, y], 2), lambda x, y: np.stack([x, y], 2)),
    *rows("squeezed", "test_global_squeeze.py", "pair", "S0 | S2", [(4, 1, 6, 1)],
          lambda x: x.squeeze(), lambda x: x.squeeze(), "S0 | S1"),
    *rows("zeros on a placement", "test_global_constant.py", "three", "S0", [(5, 2)],
          lambda x: x + pc.zeros((5, 2), "float64", THREE, "S(1)"), lambda x: x),
    *rows("sum over axes", "test_global_sum.py", "three", "S0 | S1 | P", [(5, 4, 2)],
          lambda x: (x.sum((0, 2)), x.sum()), lambda x: (x.sum((0, 2)), x.sum())),
    *rows("pointwise loss", "test_mseloss.py", "grid", "S0 S1, B S0 | P B, S0 B",
          [MATRIX, MATRIX], pc.mse_loss, lambda x, y: ((x - y) ** 2).mean()),
    *rows("divergence", "test_kldivloss.py", "pair", "S0, S0 | P, B", [MATRIX, positive(4, 6)],
          lambda x, y: F.kl_div(x, y, reduction="sum"), lambda x, y: (y * (np.log(y) - x)).sum()),
]  # fmt: skip

SCENARIOS = [*BOXING, *OPS]
