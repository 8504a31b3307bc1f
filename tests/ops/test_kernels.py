"""What every kernel must bear: in-place memory, any layout, small pieces, reuse, narrow floats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plancompiler.errors import ExecutionError, NonFiniteError, UsageError
from plancompiler.ops import KernelContext, dropout, infer_types, kernel, op_def, op_table
from plancompiler.ops.structural import learning_rate_at
from tests.ops.samples import samples
from tests.ops.sharding import run_dense, type_of


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Samples with what their kernels give on arrays of their own."""
    return [
        (sample, run_dense(sample.kind, sample.inputs, sample.attrs))
        for sample in samples(tmp_path_factory.mktemp("data"))
        if sample.inputs
    ]


def context_of(sample):
    types = infer_types(sample.kind, tuple(map(type_of, sample.inputs)), sample.attrs)
    shapes = tuple(array.shape for array in sample.inputs)
    results = tuple(tensor.shape for tensor in types)
    return KernelContext(
        attrs=op_def(sample.kind).complete(sample.attrs),
        input_shapes=shapes,
        output_shapes=results,
        input_regions=tuple(tuple((0, n) for n in shape) for shape in shapes),
        output_regions=tuple(tuple((0, n) for n in shape) for shape in results),
    )


def check(results, expected, label, bound=1e-12):
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, wanted, bound, bound, err_msg=label)


def test_kernels_may_write_over_the_inputs_they_name(calls):
    """Each `inplace` pair alone, and all `mutates` pairs together, as the plan uses them."""
    proved = set()
    for sample, expected in calls:
        definition = op_def(sample.kind)
        ways = [(pair,) for pair in (*definition.inplace, *definition.view)]
        if definition.mutates:
            ways.append(definition.mutates)
        for pairs in ways:
            if any(
                type_of(expected[output]) != type_of(sample.inputs[source])
                and (output, source) not in definition.view
                for output, source in pairs
            ):
                continue
            inputs = [array.copy() for array in sample.inputs]
            outputs = [np.empty_like(array) for array in expected]
            for output, source in pairs:
                outputs[output] = inputs[source].reshape(expected[output].shape)
            definition.kernel(context_of(sample), inputs, outputs)
            check(outputs, expected, f"{sample} with {pairs} in place")
            proved.add(sample.kind)
    wanted = {
        kind
        for kind, definition in op_table().items()
        if definition.inplace or definition.view or definition.mutates
    }
    assert proved == wanted


def test_kernels_bear_any_memory_layout(calls):
    for sample, expected in calls:
        inputs = [array.copy(order="F") for array in sample.inputs]
        outputs = [
            np.empty((*array.shape, 2), array.dtype)[..., 0] if array.ndim else array.copy()
            for array in expected
        ]
        op_def(sample.kind).kernel(context_of(sample), inputs, outputs)
        check(outputs, expected, f"{sample} on scattered memory")


def test_kernels_work_piece_by_piece(calls, monkeypatch):
    """The pieces that large arrays are cut into, on small arrays."""
    monkeypatch.setattr(kernel, "BLOCK_BYTES", 40)
    monkeypatch.setattr(dropout, "_WORDS_AT_ONCE", 3)
    for sample, expected in calls:
        outputs = run_dense(sample.kind, sample.inputs, sample.attrs)
        check(outputs, expected, f"{sample} in pieces")


def test_kernels_keep_nothing_that_changes_the_next_call(calls):
    for sample, expected in calls:
        context = context_of(sample)
        outputs = [np.empty_like(array) for array in expected]
        for _ in range(2):
            op_def(sample.kind).kernel(context, sample.inputs, outputs)
            check(outputs, expected, f"{sample} called twice", 0)


def test_kernels_leave_other_inputs_alone(calls):
    for sample, _ in calls:
        inputs = [array.copy() for array in sample.inputs]
        for array in inputs:
            array.flags.writeable = False
        run_dense(sample.kind, inputs, sample.attrs)
        check(inputs, sample.inputs, f"{sample} changed an input", 0)


STAY_WIDE = {
    ("attention", 1),
    ("segment_square_sums", 0),
    ("cross_entropy", 0),
    *(("class_sums", slot) for slot in (0, 1)),
    *(("layer_norm", slot) for slot in (1, 2)),
    *(("group_norm", slot) for slot in (1, 2)),
    ("rms_norm", 1),
    ("channel_mean", 0),
    ("channel_variance", 0),
}
"""Outputs that are float32 for float16 inputs too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 2e-5), ("float16", 2e-2), ("bfloat16", 2e-2)]
)
def test_narrow_floats_are_close_to_float64(dtype, bound, tmp_path):
    for sample in samples(tmp_path, dtype):
        if not any(array.dtype == dtype for array in sample.inputs):
            continue
        if sample.kind in ("less", "equal", "greater", "cast", "argmax"):
            continue
        wide = [
            array.astype(np.float64) if array.dtype == dtype else array for array in sample.inputs
        ]
        outputs = run_dense(sample.kind, sample.inputs, sample.attrs)
        expected = run_dense(sample.kind, wide, sample.attrs)
        for slot, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
            narrow = "float32" if (sample.kind, slot) in STAY_WIDE else dtype
            assert got.dtype == (narrow if wanted.dtype == np.float64 else wanted.dtype), sample
            got = got.astype(np.float64) if narrow == "bfloat16" else got
            np.testing.assert_allclose(got, wanted, bound, bound, err_msg=str(sample))


# --- against formulas of their own ----------------------------------------------------------------


def one(name, *inputs, **attrs):
    return run_dense(name, [np.asarray(array) for array in inputs], attrs)[0]


def test_gelu_is_its_tanh_formula():
    x = np.linspace(-6, 6, 25)
    expected = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x
    ]
    np.testing.assert_allclose(one("gelu", x), expected, 1e-12, 1e-15)


def test_stable_functions_bear_large_numbers():
    big = np.array([[1000.0, 0.0, -1000.0]])
    np.testing.assert_array_equal(one("softmax", big, axis=1), [[1, 0, 0]])
    np.testing.assert_array_equal(one("log_softmax", big, axis=1), [[0, -1000, -2000]])
    np.testing.assert_array_equal(one("sigmoid", big), [[1, 0.5, 0]])
    np.testing.assert_array_equal(one("gelu", big), [[1000, 0, 0]])
    np.testing.assert_array_equal(one("cross_entropy", big, np.array([2])), [2000])


def test_cross_entropy_is_the_log_softmax_at_the_label():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 5)), np.array([0, 4, -100, 2, 2, -100])
    expected = [
        0.0 if label < 0 else -math.log(math.exp(row[label]) / sum(map(math.exp, row)))
        for row, label in zip(logits, labels, strict=True)
    ]
    np.testing.assert_allclose(one("cross_entropy", logits, labels), expected, 1e-12)


def test_layer_norm_normalises_each_row():
    rng = np.random.default_rng(0)
    x, gamma, beta = rng.normal(3, 2, (4, 8)), rng.normal(size=8), rng.normal(size=8)
    y, mean, rstd = run_dense("layer_norm", [x, gamma, beta], {"eps": 1e-5})
    np.testing.assert_allclose(mean[:, 0], x.mean(1), 1e-12)
    np.testing.assert_allclose(rstd[:, 0], 1 / np.sqrt(x.var(1) + 1e-5), 1e-12)
    np.testing.assert_allclose(y, (x - mean) * rstd * gamma + beta, 1e-12)


@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_embedding_grad_adds_up_rows_of_equal_ids(vocabulary):
    rng = np.random.default_rng(0)
    ids, dy = rng.integers(0, vocabulary, (20, 10)), rng.normal(size=(20, 10, 4))
    expected = np.zeros((vocabulary, 4))
    np.add.at(expected, ids, dy)
    np.testing.assert_allclose(one("embedding_grad", ids, dy, vocabulary=vocabulary), expected)


def test_causal_mask_sees_itself_and_the_past():
    np.testing.assert_array_equal(one("causal_mask", size=4), np.tri(4, dtype=bool))


def test_adam_follows_its_paper():
    rng = np.random.default_rng(0)
    w = rng.normal(size=5)
    rate, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-8, 0.01
    attrs = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    for decoupled in (False, True):
        m, v, ours = np.zeros(5), np.zeros(5), [w.copy(), np.zeros(5), np.zeros(5)]
        theirs = w.copy()
        for step in range(4):
            g = rng.normal(size=5)
            inputs = [ours[0], g, ours[1], ours[2], np.array(rate)]
            ours = run_dense("adam_update", inputs, {**attrs, "decoupled": decoupled}, step=step)
            total = g if decoupled else g + decay * theirs
            m = beta1 * m + (1 - beta1) * total
            v = beta2 * v + (1 - beta2) * total**2
            first, second = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
            shrunk = theirs * (1 - rate * decay) if decoupled else theirs
            theirs = shrunk - rate * first / (np.sqrt(second) + eps)
            np.testing.assert_allclose(ours, [theirs, m, v], 1e-12)


def test_momentum_and_sgd_follow_their_formulas():
    w, g, m, rate = np.array([1.0]), np.array([0.5]), np.array([0.2]), np.array(0.1)
    assert one("sgd_update", w, g, rate, weight_decay=0.2) == pytest.approx(1 - 0.1 * 0.7)
    attrs = {"momentum": 0.9, "weight_decay": 0.2}
    w_next, m_next = run_dense("momentum_update", [w, g, m, rate], {**attrs, "nesterov": False})
    assert m_next == pytest.approx(0.18 + 0.7)
    assert w_next == pytest.approx(1 - 0.1 * 0.88)
    w_next, _ = run_dense("momentum_update", [w, g, m, rate], {**attrs, "nesterov": True})
    assert w_next == pytest.approx(1 - 0.1 * (0.7 + 0.9 * 0.88))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "states", "attrs"),
    [
        ("sgd_update", 0, {}),
        ("momentum_update", 1, {"momentum": 0.9, "nesterov": True}),
        ("adam_update", 2, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}),
        ("adam_update", 2, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True}),
    ],
)
def test_a_factor_of_an_update_is_a_factor_of_its_gradient(kind, states, attrs, decay):
    rng = np.random.default_rng(3)
    w, g, *state = rng.uniform(0.1, 1, (2 + states, 7))
    attrs = {**attrs, "weight_decay": decay}
    scaled = run_dense(kind, [w, g * 0.3, *state, np.array(0.1)], attrs)
    ours = run_dense(kind, [w, g, *state, np.array(0.1)], {**attrs, "grad_scale": 0.3})
    np.testing.assert_allclose(ours, scaled, rtol=1e-12)


def test_learning_rates_follow_their_schedules():
    linear = {"schedule": "linear", "base": 1.0, "warmup": 4, "total": 14, "final": 0.5}
    results = [learning_rate_at(step, linear) for step in (0, 3, 4, 9, 14, 99)]
    assert results == pytest.approx([0.25, 1, 1, 0.75, 0.5, 0.5])
    cosine = {**linear, "schedule": "cosine"}
    results = [learning_rate_at(step, cosine) for step in (0, 4, 9, 14, 99)]
    assert results == pytest.approx([0.25, 1, 0.75, 0.5, 0.5])
    constant = {"schedule": "constant", "base": 0.3}
    assert [learning_rate_at(step, constant) for step in (0, 50)] == [0.3, 0.3]
    listed = {"schedule": "listed", "base": 0.0, "rates": (0.5, 0.25), "first": 3}
    assert [learning_rate_at(step, listed) for step in (3, 4)] == [0.5, 0.25]
    for step in (2, 5):
        with pytest.raises(UsageError, match="no learning rate for this step"):
            learning_rate_at(step, listed)


# --- errors at run time ---------------------------------------------------------------------------


def test_an_id_outside_the_table_is_named():
    with pytest.raises(ExecutionError, match="id 7"):
        one("embedding", np.zeros((5, 2)), np.array([1, 7]))
    with pytest.raises(ExecutionError, match="id -1"):
        one("embedding_grad", np.array([-1]), np.zeros((1, 2)), vocabulary=5)


def test_a_label_that_is_no_class_is_named():
    with pytest.raises(ExecutionError, match="Got: 3"):
        one("cross_entropy", np.zeros((2, 3)), np.array([-100, 3]))


def test_an_output_that_must_be_finite_is_checked():
    run_dense("output", [np.array(np.nan)], {"name": "loss", "finite": False})
    with pytest.raises(NonFiniteError, match="'loss' is not finite"):
        run_dense("output", [np.array([1.0, np.inf])], {"name": "loss", "finite": True})


def test_an_input_without_a_value_says_so():
    with pytest.raises(ExecutionError, match="'x'"):
        run_dense("input", [], {"name": "x", "shape": (2,), "dtype": "float32"})
