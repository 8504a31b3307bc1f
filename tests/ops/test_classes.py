"""Samples of classes, margins and groups of rows: what they promise, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.errors import AttributeValueError, DTypeError, ExecutionError, ShapeError
from plancompiler.ops import axis_signatures, infer_types, mesh_signatures
from plancompiler.ops.margin import NEAR_ONE
from plancompiler.ops.shards import balanced_sizes, starts_of
from tests.ops.dense import gradients_of
from tests.ops.sharding import run_dense, type_of
from tests.ops.test_errors import f32, i64

RANGES = {"counts": (4, 3), "sizes": (3, 3)}
DRAWN = {**RANGES, "key": 1}
ARC = {"margin1": 1.0, "margin2": 0.5, "margin3": 0.0, "scale": 64.0}


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 6, 100])
def test_a_sample_holds_the_labels_and_others_once(shards, size):
    rng = np.random.default_rng(size)
    counts = balanced_sizes(23, shards)
    sizes = tuple(min(size, count) for count in counts)
    held, starts = [], starts_of(counts)
    for shard, limit in enumerate(sizes):
        chosen = rng.choice(counts[shard], min(limit, 3), replace=False)
        held.append(starts[shard] + chosen)
    labels = rng.permutation(np.concatenate([*held, *held, [-1]]))
    attrs = {"counts": counts, "sizes": sizes, "key": 3, "ignore_index": -1}
    sampled, places = run_dense("class_center_sample", [labels], attrs, seed=1)
    ends = starts_of(sizes)
    classes = []
    for shard, first in enumerate(starts):
        if shard == len(counts):
            break
        part = sampled[ends[shard] : ends[shard + 1]]
        own = np.sort(held[shard]) - first
        assert part[: len(own)].tolist() == own.tolist()
        others = part[len(own) :].tolist()
        assert others == sorted(set(others) - set(own.tolist()))
        assert all(0 <= each < counts[shard] for each in others)
        classes.extend((part + first).tolist())
    for label, place in zip(labels.tolist(), places.tolist(), strict=True):
        assert place == -1 if label == -1 else classes[place] == label


def test_samples_differ_by_seed_step_and_key_and_reach_every_class():
    labels = np.array([5])
    attrs = {"counts": (50,), "sizes": (10,), "key": 0}

    def drawn(seed=0, step=0, key=0):
        drawn = run_dense(
            "class_center_sample", [labels], {**attrs, "key": key}, seed=seed, step=step
        )
        return tuple(drawn[0].tolist())

    assert drawn() == drawn()
    assert len({drawn(), drawn(seed=1), drawn(step=1), drawn(key=1)}) == 4
    counts = np.bincount(np.concatenate([drawn(step=step) for step in range(400)]), minlength=50)
    assert counts[5] == 400
    # 9 of the 49 others each time: 73 times each, with a deviation of 7.7.
    others = np.delete(counts, 5)
    assert 40 < others.min() <= others.max() < 110


def test_what_a_range_owns_must_fit_in_its_sample():
    with pytest.raises(ExecutionError, match="4 labels in range 0") as caught:
        run_dense("class_center_sample", [np.array([0, 1, 2, 3, 6])], DRAWN)
    assert caught.value.report.expected == "at most 3"
    assert "num_samples" in caught.value.report.hint
    for label in (7, -1):
        with pytest.raises(
            ExecutionError, match=r"label of class_center_sample.*Got: " + str(label)
        ):
            run_dense("class_center_sample", [np.array([0, label])], DRAWN)
    for wrong in (4, -1):
        with pytest.raises(ExecutionError, match=f"Got: {wrong} in range 0"):
            run_dense("class_center_rows", [np.ones(7), np.array([0, wrong, 2, 0, 1, 2])], RANGES)


def signatures(kind, inputs, attrs, parts):
    outputs = infer_types(kind, inputs, attrs)
    return {str(one) for one in axis_signatures(kind, inputs, outputs, tuple(attrs.items()), parts)}


def test_rows_stay_where_ranges_are_what_a_split_gives():
    inputs = (f32(7, 3), i64(6))
    own = "S(0), S(0) -> S(0)"
    assert own in signatures("class_center_rows", inputs, RANGES, 2)
    assert own not in signatures("class_center_rows", inputs, RANGES, 3)
    uneven = {"counts": (3, 4), "sizes": (3, 3)}
    assert own not in signatures("class_center_rows", inputs, uneven, 2)
    grown = {"counts": (4, 3), "sizes": (2, 3)}
    assert own not in signatures("class_center_rows", (f32(7, 3), i64(5)), grown, 2)
    outputs = infer_types("class_center_rows", inputs, RANGES)
    nested = {
        str(one)
        for one in mesh_signatures(
            "class_center_rows", inputs, outputs, tuple(RANGES.items()), (2, 2)
        )
    }
    assert "[S(0), S(1)], [S(0), B] -> [S(0), S(1)]" in nested
    assert "[S(0), S(0)], [S(0), B] -> [S(0), P]" in nested
    assert not [one for one in nested if one.startswith("[S(0), S(0)], [S(0), S(0)]")]
    assert not [one for one in nested if one.startswith("[B, S(0)], [S(0), S(0)]")]


# --- margins --------------------------------------------------------------------------------------


def test_margins_are_their_formulas():
    x = np.linspace(-0.99, 0.99, 12).reshape(3, 4)
    labels = np.array([1, -100, 3])
    attrs = {"margin1": 1.2, "margin2": 0.3, "margin3": 0.1, "scale": 5.0}
    (outputs,) = run_dense("margin_logits", [x, labels], attrs)
    wanted = 5 * x
    for row, label in ((0, 1), (2, 3)):
        wanted[row, label] = 5 * (np.cos(1.2 * np.arccos(x[row, label]) + 0.3) - 0.1)
    np.testing.assert_allclose(outputs, wanted, 1e-14)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cosines_at_and_beyond_one_are_clamped(dtype):
    x = np.array([[1.0], [1.001], [-1.0], [-1.001], [0.5]], dtype)
    labels = np.zeros(5, np.int64)
    (outputs,) = run_dense("margin_logits", [x, labels], ARC)
    assert np.isfinite(outputs).all()
    np.testing.assert_allclose(outputs[0], 64 * np.cos(np.arccos(NEAR_ONE) + 0.5), 1e-2)
    dx, none = gradients_of("margin_logits", [x, labels], ARC, [np.ones((5, 1), dtype)])
    assert none is None
    assert dx.dtype == x.dtype
    assert dx[:4].tolist() == [[0]] * 4
    assert dx[4] > 0
    # Without an angle there is nothing to clamp.
    plain = {**ARC, "margin2": 0.0, "margin3": 0.35}
    (outputs,) = run_dense("margin_logits", [x, labels], plain)
    np.testing.assert_allclose(outputs, (x - np.asarray(0.35, dtype)) * 64, 2e-3)
    (dx, _) = gradients_of("margin_logits", [x, labels], plain, [np.ones((5, 1), dtype)])
    np.testing.assert_array_equal(dx, np.full((5, 1), 64))


@pytest.mark.parametrize("margins", [(1.0, 0.5, 0.0), (1.0, 0.0, 0.35), (2.0, 0.1, 0.05)])
def test_gradients_of_margins_near_one_match_finite_differences(margins):
    attrs = dict(zip(("margin1", "margin2", "margin3"), margins, strict=True), scale=2.0)
    # Up to the clamp from inside, and beyond it; steps do not cross it.
    near = np.array([1 - 2e-6, 1 - 1e-5, 1 - 1e-4, 1 - 1e-3, 1 - 3e-7, 1.0, 1 + 1e-5])
    x = np.concatenate([near, -near])[:, None]
    labels = np.zeros(len(x), np.int64)
    (dx, _) = gradients_of("margin_logits", [x, labels], attrs, [np.ones(x.shape)])
    step = 1e-8
    high, low = (run_dense("margin_logits", [x + s, labels], attrs)[0] for s in (step, -step))
    np.testing.assert_allclose(dx, (high - low) / (2 * step), 1e-3, 1e-5)
    clamped = np.abs(x) >= NEAR_ONE
    if margins[:2] != (1.0, 0.0):
        assert not dx[clamped].any()
        assert np.abs(dx[~clamped]).max() > 100


# --- groups of rows, sums that decay --------------------------------------------------------------


def test_groups_are_what_splits_cut():
    x = np.arange(14.0).reshape(7, 2)
    pieces = np.array_split(x, 3)
    (sums,) = run_dense("group_sums", [x], {"groups": 3, "mean": False})
    (means,) = run_dense("group_sums", [x], {"groups": 3, "mean": True})
    np.testing.assert_array_equal(sums, [piece.sum(0) for piece in pieces])
    np.testing.assert_allclose(means, [piece.mean(0) for piece in pieces])
    (rows,) = run_dense("group_rows", [means], {"rows": 7, "mean": False})
    np.testing.assert_array_equal(rows, np.repeat(means, [3, 2, 2], 0))
    inputs = (type_of(x),)
    attrs = {"groups": 3, "mean": True}
    assert "S(0) -> S(0)" in signatures("group_sums", inputs, attrs, 3)
    assert "S(0) -> S(0)" not in signatures("group_sums", inputs, attrs, 2)


def test_a_decay_close_to_one_is_kept_in_float32():
    state, value = np.full(1, 1e4, np.float32), np.full(1, 1e-3, np.float32)
    (outputs,) = run_dense("decayed_sum_update", [state, value], {"decay": 0.9999999})
    # Decay and value cancel; 0.9999999 rounded to float32 first would lose a fifth.
    assert outputs[0] == state[0]
    (outputs,) = run_dense("decayed_sum_update", [state, value + 1], {"decay": 0.5})
    assert outputs[0] == pytest.approx(5001.001)


WRONG = [
    ("class_center_sample", (f32(2),), DRAWN, DTypeError),
    ("class_center_sample", (i64(2),), RANGES, AttributeValueError),
    ("class_center_sample", (i64(2),), {**DRAWN, "sizes": (5, 3)}, AttributeValueError),
    ("class_center_sample", (i64(2),), {**DRAWN, "sizes": (3,)}, AttributeValueError),
    ("class_center_sample", (i64(2),), {**DRAWN, "counts": (0, 0)}, AttributeValueError),
    ("class_center_sample", (i64(2),), {**DRAWN, "counts": (4.0, 3)}, AttributeValueError),
    ("class_center_rows", (f32(8, 3), i64(6)), RANGES, ShapeError),
    ("class_center_rows", (f32(7, 3), i64(5)), RANGES, ShapeError),
    ("class_center_rows", (f32(7, 3), f32(6)), RANGES, DTypeError),
    ("class_center_rows", (i64(7, 3), i64(6)), RANGES, DTypeError),
    ("class_center_rows_grad", (i64(6), f32(5, 3)), RANGES, ShapeError),
    ("margin_logits", (f32(2, 3), i64(3)), ARC, ShapeError),
    ("margin_logits", (f32(2, 3), f32(2)), ARC, DTypeError),
    ("margin_logits", (i64(2, 3), i64(2)), ARC, DTypeError),
    ("margin_logits", (f32(2, 0), i64(2)), ARC, ShapeError),
    ("margin_logits", (f32(2, 3), i64(2)), {**ARC, "scale": "64"}, AttributeValueError),
    ("margin_logits", (f32(2, 3), i64(2)), {**ARC, "margin2": float("nan")}, AttributeValueError),
    ("group_sums", (f32(2, 3),), {"groups": 3, "mean": True}, ShapeError),
    ("group_sums", (f32(2, 3),), {"groups": 0, "mean": True}, AttributeValueError),
    ("group_rows", (f32(3, 3),), {"rows": 2, "mean": True}, ShapeError),
    ("group_rows", (f32(0, 3),), {"rows": 2, "mean": True}, ShapeError),
    ("decayed_sum_update", (f32(2), f32(3)), {"decay": 0.5}, ShapeError),
    ("decayed_sum_update", (f32(2), f32(2)), {"decay": 1.5}, AttributeValueError),
    ("decayed_sum_update", (f32(2), f32(2)), {}, AttributeValueError),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "error"), WRONG)
def test_wrong_calls_are_refused(kind, inputs, attrs, error):
    with pytest.raises(error) as caught:
        infer_types(kind, inputs, attrs)
    assert caught.value.report.what
    assert caught.value.report.got is not None or "missing" in caught.value.report.what
