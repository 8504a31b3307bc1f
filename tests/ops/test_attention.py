"""Attention with masks, dropout and caches, tile by tile: the formula, in memory for tiles."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from plancompiler.errors import AttributeValueError, DTypeError, ExecutionError, ShapeError
from plancompiler.ir import DType, TensorType
from plancompiler.ops import KernelContext, attention_tiles, infer_types, op_def
from tests.ops.dense import SEED, STEP, gradients_of
from tests.ops.sharding import run_dense

RANDOM = np.random.default_rng(8)
DROPOUT = {"dropout": 0.4, "key": 3}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention_tiles, "_TILE_KEYS", 3)
    monkeypatch.setattr(attention_tiles.blocking, "BLOCK_BYTES", 100)


def factors(shape, attrs):
    """What dropout multiplies weights of this shape with."""
    if "dropout" not in attrs:
        return 1.0
    kept = {"rate": attrs["dropout"], "key": attrs["key"]}
    return run_dense("dropout", [np.ones(shape)], kept, seed=SEED, step=STEP)[0]


def plain(query, key, value, mask, attrs):
    """The formula; a query that sees no key gets 0."""
    heads = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array, heads, axis=1) for array in (key, value))
    scores = attrs["scale"] * query @ key.swapaxes(2, 3) + mask
    if attrs.get("causal"):
        length, keys = scores.shape[2:]
        diagonal = keys - length if attrs["causal"] == "lower_right" else 0
        scores = np.where(np.tri(length, keys, diagonal, dtype=bool), scores, -np.inf)
    top = scores.max(3, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(3, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    return weights * factors(weights.shape, attrs) @ value


MASKS = [(2, "h", "t", "s"), (1, 1, "t", "s"), (2, 1, 1, "s"), (1, "h", "t", 1), (1, 1, 1, 1)]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"causal": True},
        DROPOUT,
        {"causal": True, **DROPOUT},
        {"causal": "lower_right", **DROPOUT},
    ],
)
@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("length", "keys"), [(7, 7), (4, 8)])
def test_masks_and_dropout_in_tiles(length, keys, heads, shared, extra, small_tiles):
    inputs = [
        RANDOM.normal(size=(2, heads, length, 4)),
        RANDOM.normal(size=(2, shared, keys, 4)),
        RANDOM.normal(size=(2, shared, keys, 3)),
    ]
    extents = {"h": heads, "t": length, "s": keys}
    attrs = {"scale": 0.5, **extra}
    weight = RANDOM.normal(size=(2, heads, length, 3))
    for shape in MASKS:
        mask = RANDOM.normal(size=[extents.get(extent, extent) for extent in shape])
        given = [*inputs, mask]
        outputs = run_dense("attention", given, attrs, seed=SEED, step=STEP)[0]
        np.testing.assert_allclose(outputs, plain(*given, attrs), 1e-10, 1e-12)
        grads = gradients_of("attention", given, attrs, [weight, None])
        for position, grad in enumerate(grads):
            assert grad.shape == given[position].shape
            turn, moved = RANDOM.normal(size=grad.shape), []
            for step in (1e-6, -1e-6):
                changed = list(given)
                changed[position] = given[position] + step * turn
                moved.append((weight * plain(*changed, attrs)).sum())
            slope = (moved[0] - moved[1]) / 2e-6
            np.testing.assert_allclose((grad * turn).sum(), slope, 1e-5, 1e-6)


def test_queries_that_see_no_key_get_nothing(small_tiles):
    query, key, value = RANDOM.normal(size=(3, 1, 2, 7, 4))
    mask = np.zeros((1, 1, 7, 7))
    mask[..., 2, :] = -np.inf  # sees none
    mask[..., 4, :5] = -np.inf  # sees none of the first tile
    given, attrs = [query, key, value, mask], {"scale": 0.5}
    outputs = run_dense("attention", given, attrs)[0]
    np.testing.assert_allclose(outputs, plain(*given, attrs), 1e-10, 1e-12)
    np.testing.assert_array_equal(outputs[:, :, 2], 0)
    grads = gradients_of("attention", given, attrs, [np.ones_like(outputs), None])
    assert all(np.isfinite(grad).all() for grad in grads)
    np.testing.assert_array_equal(grads[0][:, :, 2], 0)
    np.testing.assert_array_equal(grads[3][:, :, 2], 0)


def context_for(kind, inputs, attrs):
    types = infer_types(kind, tuple(map(type_of, inputs)), attrs)
    shapes = [array.shape for array in inputs], [tensor.shape for tensor in types]
    regions = [tuple(tuple((0, n) for n in shape) for shape in some) for some in shapes]
    complete = op_def(kind).complete(attrs)
    context = KernelContext(complete, *map(tuple, shapes), *regions, seed=SEED, step=STEP)
    return context, [np.empty(tensor.shape, tensor.dtype.numpy) for tensor in types]


def type_of(array):
    return TensorType(array.shape, DType.parse(array.dtype))


def work_of(length):
    """Peak bytes of forward and backward beside what they take and make."""
    query, key, value, dy = RANDOM.normal(size=(4, 1, 2, length, 8)).astype(np.float32)
    mask = np.zeros((1, 1, 1, length), np.float32)
    attrs = {"scale": 0.3, "causal": True, **DROPOUT}
    inputs, peaks, buffers = [query, key, value, mask], [], 0
    for kind in ("attention", "attention_grad"):
        context, outputs = context_for(kind, inputs, attrs)
        tracemalloc.start()
        op_def(kind).kernel(context, inputs, outputs)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        buffers += sum(each.nbytes for each in context.work.values())
        inputs = [query, key, value, *outputs, dy, mask]
    return max(peaks), buffers


def test_memory_does_not_grow_with_the_square_of_the_length():
    (short, short_buffers), (long, long_buffers) = work_of(1024), work_of(4096)
    assert long_buffers == short_buffers
    assert long < 1.5 * short
    assert long < 4096 * 4096 * 4 / 8


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (4, 2)])
def test_tokens_in_any_portions_see_all_before_them(heads, shared, small_tiles):
    query = RANDOM.normal(size=(2, heads, 9, 4))
    key, value = RANDOM.normal(size=(2, 2, shared, 9, 4))
    whole = run_dense("attention", [query, key, value], {"scale": 0.5, "causal": True})[0]
    caches, position = [np.full((2, shared, 11, 4), np.nan) for _ in range(2)], 0
    for portion in (4, 1, 1, 3):
        at, part = np.array(position), np.s_[:, :, position : position + portion]
        for number, new in enumerate((key, value)):
            (caches[number],) = run_dense("cache_update", [caches[number], new[part], at], {})
        given = [query[part], *caches, at]
        # What no token has filled yet is never read.
        (outputs,) = run_dense("cached_attention", given, {"scale": 0.5})
        np.testing.assert_allclose(outputs, whole[part], 1e-10, 1e-12)
        position += portion


def test_a_cache_is_written_in_place():
    cache, new = np.zeros((1, 1, 4, 2)), np.ones((1, 1, 1, 2))
    context, _ = context_for("cache_update", [cache, new, np.array(2)], {})
    op_def("cache_update").kernel(context, [cache, new, np.array(2)], [cache])
    np.testing.assert_array_equal(cache[0, 0, :, 0], [0, 0, 1, 0])


@pytest.mark.parametrize("position", [-1, 3])
def test_tokens_that_do_not_fit_fail_the_step(position):
    cache, new = np.zeros((1, 1, 4, 2)), np.ones((1, 1, 2, 2))
    with pytest.raises(ExecutionError, match="from position"):
        run_dense("cache_update", [cache, new, np.array(position)], {})
    with pytest.raises(ExecutionError, match="from position"):
        run_dense("cached_attention", [new, cache, cache, np.array(position)], {"scale": 1.0})


def test_rotary_positions_are_an_input():
    x = RANDOM.normal(size=(2, 3, 4))
    attrs = {"base": 100.0, "offset": 1}
    (outputs,) = run_dense("rotary_embedding", [x, np.array(4)], attrs)
    (wanted,) = run_dense("rotary_embedding", [x], {"base": 100.0, "offset": 5})
    np.testing.assert_array_equal(outputs, wanted)


# --- bad input ------------------------------------------------------------------------------------


def f32(*shape):
    return TensorType(shape, DType.FLOAT32)


HEADS, AT = f32(2, 4, 5, 8), TensorType((), DType.INT32)
WRONG = [
    ("attention", (*[HEADS] * 3, f32(2, 4, 5, 4)), {"scale": 1.0}),
    ("attention", (*[HEADS] * 3, f32(5, 5)), {"scale": 1.0}),
    ("attention", (*[HEADS] * 3, f32(3, 1, 1, 5)), {"scale": 1.0}),
    ("attention", (HEADS,) * 3, {"scale": 1.0, "dropout": 1.0, "key": 0}),
    ("attention", (HEADS,) * 5, {"scale": 1.0}),
    ("attention_mask_grad", (HEADS,) * 6, {"scale": 1.0}),
    ("cached_attention", (f32(2, 4, 6, 8), HEADS, HEADS, AT), {"scale": 1.0}),
    ("cached_attention", (HEADS, HEADS, HEADS, f32()), {"scale": 1.0}),
    ("cache_update", (HEADS, f32(2, 4, 6, 8), AT), {}),
    ("cache_update", (HEADS, f32(2, 3, 1, 8), AT), {}),
    ("cache_update", (HEADS, f32(2, 4, 1, 8), TensorType((1,), DType.INT32)), {}),
    ("rotary_embedding", (HEADS, f32()), {"base": 10.0}),
    ("split_qkv", (f32(2, 5, 4, 2, 8),), {}),
    ("split_qkv", (f32(2, 5, 4, 3, 8), f32(4, 3)), {}),
    ("join_qkv", (HEADS, f32(2, 3, 5, 8), f32(2, 3, 5, 8)), {}),
    ("join_qkv", (f32(2, 5), HEADS, HEADS), {}),
    ("bias_dropout_residual", (HEADS, f32(2, 4, 5, 1)), {}),
    ("bias_dropout_residual", (HEADS, HEADS, f32(5)), {}),
    ("bias_dropout_residual", (HEADS, HEADS), {"rate": 1.5, "key": 0}),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs"), WRONG)
def test_what_does_not_fit_is_refused(kind, inputs, attrs):
    with pytest.raises((ShapeError, DTypeError, AttributeValueError)):
        infer_types(kind, inputs, attrs)
