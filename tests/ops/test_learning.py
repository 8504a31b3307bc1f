"""Norms, losses, attention and optimizer steps against their formulas, and what they refuse."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from plancompiler.errors import AttributeValueError, DTypeError, ExecutionError, ShapeError
from plancompiler.ir import DType, TensorType
from plancompiler.ops import (
    KernelContext,
    attention_tiles,
    axis_signatures,
    infer_types,
    op_def,
)
from plancompiler.ops.split_softmax import (
    split_cross_entropy,
    split_log_softmax,
    split_softmax,
)
from tests.ops.dense import DenseTensor, gradients_of
from tests.ops.sharding import run_dense

RANDOM = np.random.default_rng(6)


def f32(*shape):
    return TensorType(shape, DType.FLOAT32)


def i64(*shape):
    return TensorType(shape, DType.INT64)


def one(name, *inputs, **attrs):
    return run_dense(name, [np.asarray(array) for array in inputs], attrs)[0]


# --- norms ----------------------------------------------------------------------------------------


def test_rms_norm_has_root_mean_square_one():
    x = RANDOM.normal(3, 2, (4, 8))
    y = one("rms_norm", x, np.ones(8), eps=0.0)
    np.testing.assert_allclose((y**2).mean(1), 1)
    np.testing.assert_allclose(y, x / np.sqrt((x**2).mean(1, keepdims=True)))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm_normalises_each_group(groups):
    x, gamma, beta = RANDOM.normal(3, 2, (4, 6, 5, 2)), RANDOM.normal(size=6), np.arange(6.0)
    y = one("group_norm", x, gamma, beta, groups=groups, eps=1e-5)
    folded = x.reshape(4, groups, -1)
    unit = (folded - folded.mean(2, keepdims=True)) / np.sqrt(folded.var(2, keepdims=True) + 1e-5)
    expected = unit.reshape(x.shape) * gamma[:, None, None] + beta[:, None, None]
    np.testing.assert_allclose(y, expected, 1e-10, 1e-10)


def test_the_variance_of_a_channel_bears_a_large_mean():
    x = np.float32(1e4) + RANDOM.normal(size=(64, 2, 50)).astype(np.float32)
    mean = one("channel_mean", x)
    np.testing.assert_allclose(
        one("channel_variance", x, mean), x.astype(np.float64).var((0, 2)), rtol=1e-3
    )


# --- losses ---------------------------------------------------------------------------------------


def test_losses_follow_their_formulas():
    x, target = np.array([-2.0, -0.3, 0.1, 3.0]), np.array([0.0, 0.2, 0.1, 0.5])
    d = np.abs(x - target)
    np.testing.assert_allclose(one("mse_loss", x, target), d**2)
    np.testing.assert_allclose(one("l1_loss", x, target), d)
    np.testing.assert_allclose(
        one("smooth_l1_loss", x, target, beta=0.6), np.where(d < 0.6, d**2 / 1.2, d - 0.3)
    )
    np.testing.assert_allclose(
        one("huber_loss", x, target, delta=0.6), np.where(d < 0.6, d**2 / 2, 0.6 * (d - 0.3))
    )
    p = 1 / (1 + np.exp(-x))
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p))
    np.testing.assert_allclose(one("bce_loss", p, target), expected)
    np.testing.assert_allclose(one("bce_with_logits", x, target), expected)
    share = np.array([0.0, 0.5, 1.0, 0.25])
    logs = np.log(p)
    positive = share > 0
    expected = np.zeros(4)
    expected[positive] = share[positive] * (np.log(share[positive]) - logs[positive])
    np.testing.assert_allclose(one("kl_div", logs, share), expected)


def test_losses_bear_certain_errors_and_large_numbers():
    certain = np.array([0.0, 1.0, 0.0, 1.0], np.float32)
    wrong = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
    np.testing.assert_allclose(one("bce_loss", certain, wrong), [100, 100, 0, 0])
    big = np.array([1000.0, -1000.0], np.float32)
    np.testing.assert_array_equal(one("bce_with_logits", big, np.array([0, 0], "f")), [1000, 0])
    assert np.isfinite(one("bce_loss_grad", certain, wrong, np.ones(4, np.float32))).all()


def test_nll_loss_picks_the_label():
    logs, labels = RANDOM.normal(size=(4, 3)), np.array([2, -100, 0, 1])
    np.testing.assert_array_equal(
        one("nll_loss", logs, labels), [-logs[0, 2], 0, -logs[2, 0], -logs[3, 1]]
    )
    with pytest.raises(ExecutionError, match="Got: 3"):
        one("nll_loss", logs, np.array([0, 1, 2, 3]))
    with pytest.raises(ExecutionError, match="no class"):
        one("nll_loss_grad", np.array([-1]), np.ones(1), classes=3)


LABELS = np.array([[0, 4, -100], [2, 2, -100]])


def test_cross_entropy_of_split_classes_is_cross_entropy():
    logits = RANDOM.normal(size=(2, 3, 5)) * 100
    actual = split_cross_entropy(DenseTensor(logits), DenseTensor(LABELS))
    np.testing.assert_allclose(actual.array, one("cross_entropy", logits, LABELS), 1e-10, 1e-10)
    with pytest.raises(ExecutionError, match="no class"):
        split_cross_entropy(DenseTensor(logits), DenseTensor(LABELS + 1))


def test_softmax_of_a_split_axis_is_softmax():
    x = RANDOM.normal(size=(4, 5, 2)) * 100
    for axis in range(3):
        actual = split_softmax(DenseTensor(x), axis).array
        np.testing.assert_allclose(actual, one("softmax", x, axis=axis), 1e-10, 1e-15)
        actual = split_log_softmax(DenseTensor(x), axis).array
        np.testing.assert_allclose(actual, one("log_softmax", x, axis=axis), 1e-10, 1e-10)


def test_both_sums_over_classes_pass_their_gradients_back():
    logits, labels, shift = RANDOM.normal(size=(3, 4)), np.array([1, -100, 3]), np.zeros(3)
    dtotal, dtarget = RANDOM.normal(size=(2, 3))
    grads, none, back = gradients_of("class_sums", [logits, labels, shift], {}, [dtotal, dtarget])
    expected = np.exp(logits) * dtotal[:, None]
    expected[[0, 2], [1, 3]] += dtarget[[0, 2]]
    np.testing.assert_allclose(grads, expected)
    np.testing.assert_allclose(back, -np.exp(logits).sum(1) * dtotal - [1, 0, 1] * dtarget)
    assert none is None


# --- attention ------------------------------------------------------------------------------------


def plain_attention(query, key, value, scale, causal):
    heads = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array, heads, axis=1) for array in (key, value))
    scores = scale * query @ key.swapaxes(2, 3)
    if causal:
        length, keys = scores.shape[2:]
        diagonal = keys - length if causal == "lower_right" else 0
        scores = np.where(np.tri(length, keys, diagonal, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(3, keepdims=True))
    return (weights / weights.sum(3, keepdims=True)) @ value


@pytest.mark.parametrize(
    ("length", "keys", "causal"),
    [
        (length, keys, causal)
        for length, keys in ((7, 7), (1, 9), (4, 7), (7, 4))
        for causal in (False, True, "lower_right")
        if causal != "lower_right" or length <= keys
    ],
)
@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (4, 2), (3, 1)])
def test_attention_in_tiles_is_attention(length, keys, heads, shared, causal, monkeypatch):
    monkeypatch.setattr(attention_tiles, "_TILE_KEYS", 3)
    monkeypatch.setattr(attention_tiles.blocking, "BLOCK_BYTES", 100)
    query = RANDOM.normal(size=(2, heads, length, 4)) * 5
    key, value = RANDOM.normal(size=(2, shared, keys, 4)), RANDOM.normal(size=(2, shared, keys, 3))
    attrs = {"scale": 0.5, "causal": causal}
    actual = one("attention", query, key, value, **attrs)
    np.testing.assert_allclose(actual, plain_attention(query, key, value, 0.5, causal), 1e-10)
    weight = RANDOM.normal(size=actual.shape)
    grads = gradients_of("attention", [query, key, value], attrs, [weight, None])
    inputs = [query, key, value]
    for position, grad in enumerate(grads):
        turn = RANDOM.normal(size=grad.shape)
        moved = []
        for step in (1e-6, -1e-6):
            changed = [
                array + step * turn if at == position else array for at, array in enumerate(inputs)
            ]
            moved.append((weight * plain_attention(*changed, 0.5, causal)).sum())
        np.testing.assert_allclose((grad * turn).sum(), (moved[0] - moved[1]) / 2e-6, 1e-5, 1e-6)


def test_attention_needs_memory_for_tiles_only():
    query, key, value = RANDOM.normal(size=(3, 1, 1, 4096, 8)).astype(np.float32)
    tracemalloc.start()
    one("attention", query, key, value, scale=1.0, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 4096 * 4 / 16


def test_grouped_heads_split_by_heads_of_keys():
    def signatures_of_attention(heads, shared, parts):
        inputs = (f32(2, heads, 5, 4), f32(2, shared, 5, 4), f32(2, shared, 5, 4))
        outputs = infer_types("attention", inputs, {"scale": 1.0})
        signatures = axis_signatures("attention", inputs, outputs, (("scale", 1.0),), parts)
        return {str(one) for one in signatures}

    by_heads = "S(1), S(1), S(1) -> S(1), S(1)"
    assert by_heads in signatures_of_attention(8, 4, 2)
    assert by_heads not in signatures_of_attention(8, 4, 3)
    assert by_heads in signatures_of_attention(4, 4, 3)
    assert "S(2), B, B -> S(2), S(2)" in signatures_of_attention(8, 4, 2)


def test_rotary_embedding_turns_pairs():
    x = np.zeros((3, 4))
    x[:, 0] = 1
    y = one("rotary_embedding", x, base=100.0, offset=2)
    np.testing.assert_allclose(y[:, 0], np.cos([2, 3, 4]))
    np.testing.assert_allclose(y[:, 2], np.sin([2, 3, 4]))
    x = np.zeros((3, 4))
    x[:, 2] = 1
    y = one("rotary_embedding", x, base=100.0, interleaved=True)
    np.testing.assert_allclose(y[:, 2], np.cos([0, 0.1, 0.2]))
    np.testing.assert_allclose(y[:, 3], np.sin([0, 0.1, 0.2]))


def test_rotated_products_depend_on_distances():
    query, key = RANDOM.normal(size=(2, 1, 8))
    scores = []
    for offset in (0, 5):
        q = one("rotary_embedding", query, base=1e4, offset=offset + 3)
        k = one("rotary_embedding", key, base=1e4, offset=offset)
        scores.append((q * k).sum())
    np.testing.assert_allclose(scores[0], scores[1])


def test_swiglu_is_its_formula():
    gate, up = RANDOM.normal(size=(2, 5)) * 3
    np.testing.assert_allclose(one("swiglu", gate, up), gate / (1 + np.exp(-gate)) * up)
    big = np.array([1000.0, -1000.0])
    np.testing.assert_array_equal(one("swiglu", big, np.ones(2)), [1000, 0])


# --- optimizers -----------------------------------------------------------------------------------


def test_lion_steps_along_signs():
    w, g, m = np.array([1.0, 1.0]), np.array([0.5, -4.0]), np.array([-0.1, 0.2])
    attrs = {"beta1": 0.9, "beta2": 0.8, "weight_decay": 0.1}
    w_next, m_next = run_dense("lion_update", [w, g, m, np.array(0.01)], attrs)
    signs = np.sign(0.9 * m + 0.1 * g)
    np.testing.assert_allclose(w_next, w * (1 - 0.001) - 0.01 * signs)
    np.testing.assert_allclose(m_next, 0.8 * m + 0.2 * g)


def test_lamb_follows_its_paper():
    w, m, v = RANDOM.normal(size=6), np.zeros(6), np.zeros(6)
    ours = [w.copy(), m.copy(), v.copy()]
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.05}
    for step in range(3):
        g = RANDOM.normal(size=6)
        u, *ours[1:] = run_dense("lamb_direction", [ours[0], g, *ours[1:]], attrs, step=step)
        sizes = [np.array((array**2).sum()) for array in (ours[0], u)]
        (ours[0],) = run_dense("lamb_update", [ours[0], u, *sizes, np.array(0.1)], {})
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        first, second = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.99 ** (step + 1))
        turn = first / (np.sqrt(second) + 1e-6) + 0.05 * w
        w = w - 0.1 * np.linalg.norm(w) / np.linalg.norm(turn) * turn
        np.testing.assert_allclose(ours, [w, m, v], 1e-10)


@pytest.mark.parametrize("sizes", [(0.0, 4.0), (4.0, 0.0)])
def test_the_trust_ratio_of_nothing_is_one(sizes):
    w, u = np.ones(2), np.ones(2)
    actual = one("lamb_update", w, u, *map(np.array, sizes), np.array(0.5))
    np.testing.assert_array_equal(actual, 0.5)


def test_adafactor_factors_the_second_moment():
    g = RANDOM.normal(size=(3, 4))
    rows, columns = run_dense("adafactor_moments", [g], {"eps": 1e-30})
    np.testing.assert_allclose(rows, (g**2).mean(1))
    np.testing.assert_allclose(columns, (g**2).mean(0))
    u = one("adafactor_direction", g, rows, columns, np.asarray(rows.sum()))
    np.testing.assert_allclose(u, g / np.sqrt(np.outer(rows, columns) / rows.mean()))
    nothing = one("adafactor_direction", np.zeros((2, 2)), np.zeros(2), np.zeros(2), np.zeros(()))
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.parametrize(("relative", "rate"), [(True, 0.1 * 2.0), (False, 0.1)])
def test_adafactor_limits_its_step(relative, rate):
    w, u = np.full(4, 2.0), np.full(4, 3.0)
    sizes = [np.array((array**2).sum()) for array in (w, u)]
    attrs = {"clip": 1.5, "relative": relative, "eps": 1e-3, "weight_decay": 0.1}
    actual = one("adafactor_update", w, u, *sizes, np.array(0.1), **attrs)
    np.testing.assert_allclose(actual, w * (1 - 0.1 * rate) - rate * u / 2)


def test_moving_averages_decay():
    state, value = np.array([1.0]), np.array([3.0])
    assert one("moving_average_update", state, value, decay=0.75) == pytest.approx(1.5)
    outputs = run_dense("moving_average_update", [state, value], {"power": 0.5}, step=3)[0]
    assert outputs == pytest.approx(2.0)
    outputs = run_dense("moving_average_update", [state, value], {"power": 0.8}, step=0)[0]
    assert outputs == pytest.approx(3.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_found_inf_sees_what_is_not_finite(value):
    x = np.zeros((300, 500), np.float32)
    assert one("found_inf", x) == 0
    x[299, 499] = value
    assert one("found_inf", x) == 1


# --- wrong calls ----------------------------------------------------------------------------------

HEADS = f32(2, 4, 5, 8)
BETAS = {"beta1": 0.9, "beta2": 0.99}
NORM = {"groups": 2, "eps": 1e-5}
WRONG = [
    ("rms_norm", (f32(2, 3), f32(2)), {"eps": 1e-5}, ShapeError),
    ("rms_norm", (f32(2, 0), f32(0)), {"eps": 1e-5}, ShapeError),
    ("rms_norm", (f32(2, 3), f32(3)), {}, AttributeValueError),
    ("rms_norm", (i64(2, 3), i64(3)), {"eps": 1e-5}, DTypeError),
    ("group_norm", (f32(2, 3, 4), f32(3), f32(3)), NORM, ShapeError),
    ("group_norm", (f32(2, 4, 0), f32(4), f32(4)), NORM, ShapeError),
    ("group_norm", (f32(2, 4, 3), f32(3), f32(4)), NORM, ShapeError),
    ("group_norm", (f32(2, 4, 3), f32(4), f32(3)), NORM, ShapeError),
    ("group_norm", (f32(4), f32(4), f32(4)), NORM, ShapeError),
    ("channel_mean", (f32(0, 4),), {}, ShapeError),
    ("channel_variance", (f32(2, 4), f32(3)), {}, ShapeError),
    ("batch_norm", (f32(2, 4), *[f32(4)] * 3, f32(3)), {"eps": 0.1}, ShapeError),
    ("batch_norm", (f32(2, 4), *[f32(4)] * 4), {"eps": -0.1}, AttributeValueError),
    ("mse_loss", (f32(2), f32(3)), {}, ShapeError),
    ("mse_loss", (f32(2), f32(2)), {"beta": 1.0}, AttributeValueError),
    ("smooth_l1_loss", (f32(2), f32(2)), {"beta": 0.0}, AttributeValueError),
    ("huber_loss", (f32(2), f32(2)), {}, AttributeValueError),
    ("bce_loss", (f32(2), i64(2)), {}, DTypeError),
    ("nll_loss", (f32(2, 3), i64(3)), {}, ShapeError),
    ("nll_loss", (f32(2, 0), i64(2)), {}, ShapeError),
    ("nll_loss", (f32(2, 3), f32(2)), {}, DTypeError),
    ("nll_loss_grad", (i64(2), f32(2)), {}, AttributeValueError),
    ("class_sums", (f32(2, 3), i64(2), f32(3)), {}, ShapeError),
    ("class_sums", (f32(2, 3), f32(2), f32(2)), {}, DTypeError),
    ("stop_gradient", (), {}, ShapeError),
    ("attention", (HEADS, HEADS), {"scale": 1.0}, ShapeError),
    ("attention", (HEADS, HEADS, f32(2, 4, 6, 8)), {"scale": 1.0}, ShapeError),
    ("attention", (HEADS, f32(2, 3, 5, 8), f32(2, 3, 5, 8)), {"scale": 1.0}, ShapeError),
    ("attention", (HEADS, f32(2, 4, 5, 7), HEADS), {"scale": 1.0}, ShapeError),
    ("attention", (HEADS, *[f32(2, 4, 0, 8)] * 2), {"scale": 1.0}, ShapeError),
    (
        "attention",
        (HEADS, *[f32(2, 4, 4, 8)] * 2),
        {"scale": 1.0, "causal": "lower_right"},
        ShapeError,
    ),
    ("attention", (HEADS,) * 3, {"scale": 1.0, "causal": "upper_left"}, AttributeValueError),
    ("attention", (HEADS,) * 3, {"scale": 1.0, "causal": 1}, AttributeValueError),
    ("attention", (f32(4, 5, 8),) * 3, {"scale": 1.0}, ShapeError),
    ("attention", (HEADS,) * 3, {}, AttributeValueError),
    ("rotary_embedding", (f32(5, 3),), {"base": 10.0}, ShapeError),
    ("rotary_embedding", (f32(4),), {"base": 10.0}, ShapeError),
    ("rotary_embedding", (f32(5, 4),), {"base": 0.0}, AttributeValueError),
    ("swiglu", (f32(2), f32(3)), {}, ShapeError),
    ("found_inf", (i64(2),), {}, DTypeError),
    ("lion_update", (f32(2), f32(3), f32(2), f32()), BETAS, ShapeError),
    ("lion_update", (f32(2), f32(2), f32(2), f32(1)), BETAS, ShapeError),
    ("lamb_direction", (f32(2),) * 4, {**BETAS, "beta2": 1.0, "eps": 0.1}, AttributeValueError),
    ("lamb_update", (f32(2), f32(2), f32(2), f32(), f32()), {}, ShapeError),
    ("moving_average_update", (f32(2), f32(2)), {}, AttributeValueError),
    ("moving_average_update", (f32(2),) * 2, {"decay": 0.1, "power": 1.0}, AttributeValueError),
    ("adafactor_moments", (f32(3),), {"eps": 1e-30}, ShapeError),
    ("adafactor_direction", (f32(3, 2), f32(2), f32(2), f32()), {}, ShapeError),
    ("adafactor_update", (f32(2), f32(2), f32(), f32(), f32()), {"clip": 1.0}, AttributeValueError),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "error"), WRONG)
def test_wrong_calls_are_refused(kind, inputs, attrs, error):
    with pytest.raises(error) as caught:
        infer_types(kind, inputs, attrs)
    assert caught.value.report.what


def test_an_average_by_a_power_of_the_step_is_exact_after_many_steps():
    definition = op_def("moving_average_update")
    state, value = np.zeros(3, np.float32), np.ones(3, np.float32)
    boxes = (((0, 3),),)
    attrs = definition.complete({"power": 0.8})
    context = KernelContext(attrs, ((3,), (3,)), ((3,),), boxes * 2, boxes, step=999_999)
    definition.kernel(context, [state, value], [state])
    np.testing.assert_allclose(state, 1e6**-0.8, rtol=1e-6)
