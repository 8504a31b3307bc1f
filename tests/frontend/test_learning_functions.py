"""Public functions of learning, on whole tensors and on ranks that hold parts of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from plancompiler.plan.plan import CollectiveSpec
from tests.dense import run_dense

RANDOM = np.random.default_rng(8)
RANKS = 3


def real(*shape):
    return RANDOM.normal(size=shape)


def job_of(function, arrays, layouts, wrt=()):
    """A job on RANKS ranks: the outputs of a function, and gradients of the first one's sum."""
    mesh = pc.Placement("cpu", range(RANKS))
    with pc.job("j") as job:
        values = [
            pc.input(f"x{n}", array.shape, str(array.dtype), mesh, layout)
            for n, (array, layout) in enumerate(zip(arrays, layouts, strict=True))
        ]
        made = function(*values)
        outputs = [made] if isinstance(made, pc.Value) else list(made)
        for n, value in enumerate(outputs):
            pc.output(f"y{n}", value, finite=False)
        if wrt:
            first = outputs[0]
            weight = pc.constant(weights(first.shape), str(first.dtype), mesh)
            for n, grad in enumerate(
                pc.gradients((first * weight).sum(), [values[n] for n in wrt])
            ):
                pc.output(f"dx{n}", grad)
    return job


def weights(shape):
    """Distinct weights, so that a gradient in a wrong place shows."""
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape)


def check(function, arrays, layouts, wrt=(), bound=1e-10):
    """The ranks compute what the dense run does; returns its outputs and the collectives used."""
    job = job_of(function, arrays, layouts, wrt)
    feeds = {f"x{n}": array for n, array in enumerate(arrays)}
    (dense,) = run_dense(job, 1, feeds)
    plans = compile_plans(job, RANKS, "rank_per_iter").plans
    with LocalWorld(plans) as world:
        outputs = world.step(feeds)
    for name, value in dense.items():
        np.testing.assert_allclose(outputs[name], value, bound, bound, err_msg=name)
    registers = {register.id: register for register in plans[0].registers}
    counts = Counter(
        (task.spec.primitive.value, registers[register].shape)
        for task in plans[0].tasks
        if isinstance(task.spec, CollectiveSpec)
        for register in task.outputs
    )
    return dense, counts


# --- convolution and pooling ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "layouts", [("S(0)", "B", "B"), ("B", "S(0)", "S(0)"), ("S(1)", "S(1)", "B")]
)
def test_conv2d_on_every_split(layouts):
    arrays = real(4, 3, 6, 5), real(7, 3, 3, 2), real(7)

    def function(x, weight, bias):
        return pc.conv2d(x, weight, bias, stride=2, padding=(1, (0, 1)))

    dense, _ = check(function, arrays, layouts, wrt=(0, 1, 2))
    assert dense["y0"].shape == (4, 7, 3, 3)


def test_padding_by_name():
    x, weight = real(1, 2, 7, 6), real(2, 2, 3, 4)
    for padding, shape in (("same", (1, 2, 7, 6)), ("valid", (1, 2, 5, 3))):
        dense, _ = check(
            lambda x, w, p=padding: pc.conv2d(x, w, padding=p), (x, weight), ("B", "B")
        )
        assert dense["y0"].shape == shape
    dense, _ = check(
        lambda x, w: pc.conv1d(x, w, padding="same", dilation=2),
        (real(1, 1, 5), real(1, 1, 3)),
        ("B", "B"),
    )
    assert dense["y0"].shape == (1, 1, 5)


@pytest.mark.parametrize(("ndim", "name"), [(1, "conv1d"), (2, "conv2d"), (3, "conv3d")])
def test_transposed_convolutions_undo_the_shape(ndim, name):
    shape = (2, 3, *(7, 4, 3)[:ndim])
    weight = real(3, 3, *(3, 2, 2)[:ndim])

    def function(x, w):
        y = getattr(pc, name)(x, w, stride=2, padding=1)
        more = [
            (size + 2 - extent) % 2
            for size, extent in zip(shape[2:], weight.shape[2:], strict=True)
        ]
        back = getattr(pc, f"conv_transpose{ndim}d")(y, w, stride=2, padding=1, output_padding=more)
        return back, y

    dense, _ = check(function, (real(*shape), weight), ("S(0)", "B"), wrt=(0, 1))
    assert dense["y0"].shape == shape


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_pooling(ndim):
    x = real(2, 4, *(6, 5, 4)[:ndim])

    def function(x):
        return (
            getattr(pc, f"max_pool{ndim}d")(x, 2, stride=1),
            getattr(pc, f"avg_pool{ndim}d")(x, 3, padding=1, count_padding=False),
            getattr(pc, f"adaptive_avg_pool{ndim}d")(x, 2),
            pc.global_avg_pool(x),
            pc.global_max_pool(x),
        )

    dense, _ = check(function, (x,), ("S(1)",), wrt=(0,))
    space = tuple(range(2, x.ndim))
    assert dense["y1"].shape == (2, 4, *(2, 2, 2)[:ndim])
    np.testing.assert_allclose(dense["y3"], x.mean(space))
    np.testing.assert_allclose(dense["y4"], x.max(space))


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "S(2)"])
def test_batch_norm_normalises_the_whole_batch_on_any_split(layout):
    x, gamma, beta = real(5, 3, 4), real(3), real(3)
    dense, _ = check(pc.batch_norm, (x, gamma, beta), (layout, "B", "B"), wrt=(0, 1, 2))
    unit = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(dense["y0"], unit * gamma[:, None] + beta[:, None], 1e-9, 1e-9)
    # The derivative of the whole, through both statistics.
    dy = weights(x.shape) * gamma[:, None]
    rstd = 1 / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
    dx = rstd * (
        dy - dy.mean((0, 2), keepdims=True) - unit * (dy * unit).mean((0, 2), keepdims=True)
    )
    np.testing.assert_allclose(dense["dx0"], dx, 1e-8, 1e-8)


def test_batch_norm_with_running_statistics():
    x, mean, variance = real(4, 3), real(3), real(3) ** 2
    dense, counts = check(
        lambda x, m, v: pc.batch_norm(x, mean=m, variance=v),
        (x, mean, variance),
        ("S(0)", "B", "B"),
    )
    np.testing.assert_allclose(dense["y0"], (x - mean) / np.sqrt(variance + 1e-5))
    assert not [shape for (name, shape) in counts if name == "all_reduce"]
    with pytest.raises(UsageError, match="both"):
        check(lambda x, m: pc.batch_norm(x, mean=m), (x, mean), ("B", "B"))


def test_group_instance_and_rms_norm():
    x = real(4, 6, 5)

    def function(x):
        return (
            pc.group_norm(x, 3),
            pc.instance_norm(x),
            pc.rms_norm(x, pc.ones(5, x.dtype, x.placement)),
        )

    dense, _ = check(function, (x,), ("S(1)",), wrt=(0,))
    folded = dense["y0"].reshape(4, 3, -1)
    np.testing.assert_allclose(folded.mean(2), 0, atol=1e-10)
    np.testing.assert_allclose(dense["y1"].var(2), 1, rtol=1e-2)
    np.testing.assert_allclose((dense["y2"] ** 2).mean(2), 1, rtol=1e-2)
    with pytest.raises(ShapeError, match="channels"):
        check(pc.instance_norm, (real(3),), ("B",))


# --- losses ---------------------------------------------------------------------------------------

PAIRS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


@pytest.mark.parametrize("name", PAIRS)
def test_losses_average_over_the_whole_batch(name):
    function = getattr(pc, name)

    def all_ways(x, target):
        return [function(x, target, reduction=each) for each in ("mean", "sum", "none")]

    dense, _ = check(all_ways, (real(5, 2), real(5, 2)), ("S(0)", "S(0)"), wrt=(0, 1))
    np.testing.assert_allclose(dense["y0"], dense["y2"].mean())
    np.testing.assert_allclose(dense["y1"], dense["y2"].sum())
    with pytest.raises(AttributeValueError, match="reduction"):
        check(lambda x, y: function(x, y, reduction="max"), (real(2), real(2)), ("B", "B"))


def test_losses_of_probabilities():
    p, target = RANDOM.uniform(0.1, 0.9, (2, 5, 2))

    def function(p, target):
        return pc.binary_cross_entropy(p, target), pc.kl_div(p.log(), target, reduction="batchmean")

    dense, _ = check(function, (p, target), ("S(0)", "S(0)"), wrt=(0, 1))
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).mean()
    np.testing.assert_allclose(dense["y0"], expected)
    np.testing.assert_allclose(dense["y1"], (target * np.log(target / p)).sum() / 5)


LABELS = np.array([6, -100, 0, 3, -100])


@pytest.mark.parametrize("split", ["S(0)", "S(1)"])
def test_nll_loss_counts_only_labels(split):
    logs = real(5, 7)
    dense, _ = check(pc.nll_loss, (logs, LABELS), (split, "B"), wrt=(0,))
    np.testing.assert_allclose(dense["y0"], -(logs[0, 6] + logs[2, 0] + logs[3, 3]) / 3)
    every = np.array([6, 1, 0, 3, 2])
    dense, _ = check(lambda x, y: pc.nll_loss(x, y, ignore_index=None), (logs, every), (split, "B"))
    np.testing.assert_allclose(dense["y0"], -logs[np.arange(5), every].mean())


@pytest.mark.parametrize("ignored", [-100, None, 3])
def test_cross_entropy_of_split_classes_gathers_nothing(ignored):
    """Uneven classes; three numbers per row are reduced, gradients stay where the logits are."""
    logits, labels = real(5, 7) * 10, LABELS if ignored == -100 else np.array([6, 1, 0, 3, 2])

    def split(x, y):
        return pc.cross_entropy(x, y, ignore_index=ignored, split_classes=True)

    def whole(x, y):
        return pc.cross_entropy(x, y, ignore_index=ignored)

    actual, counts = check(split, (logits, labels), ("S(1)", "B"), wrt=(0,))
    expected, _ = check(whole, (logits, labels), ("B", "B"), wrt=(0,))
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], 1e-10, 1e-12, err_msg=name)
    # The one gather is for the report of the gradient.
    assert counts == {("all_reduce", (5,)): 3, ("all_gather", (5, 7)): 1}


def test_softmax_of_a_split_axis_gathers_nothing():
    x = real(4, 7) * 10

    def function(x):
        return pc.softmax(x, split_axis=True), pc.log_softmax(x, 1, split_axis=True)

    dense, counts = check(function, (x,), ("S(1)",), wrt=(0,))
    powers = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(dense["y0"], powers / powers.sum(1, keepdims=True))
    np.testing.assert_allclose(dense["y1"], np.log(dense["y0"]))
    assert {shape for name, shape in counts if name == "all_reduce"} == {(4, 1)}


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["S(0)", "S(1)"])
def test_attention_equals_causal_attention(layout):
    arrays = real(3, 6, 5, 4), real(3, 6, 5, 4), real(3, 6, 5, 4)

    def tiled(q, k, v):
        return pc.scaled_dot_product_attention(q, k, v, causal=True)

    actual, counts = check(tiled, arrays, (layout,) * 3, wrt=(0, 1, 2))
    expected, _ = check(pc.causal_attention, arrays, (layout,) * 3, wrt=(0, 1, 2))
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], 1e-8, 1e-10, err_msg=name)
    assert not any(name == "all_reduce" for name, _ in counts)


@pytest.mark.parametrize(("causal", "diagonal"), [(True, 0), ("lower_right", 2)])
def test_grouped_heads_and_split_queries(causal, diagonal):
    arrays = real(1, 6, 5, 4), real(1, 3, 7, 4), real(1, 3, 7, 2)

    def function(q, k, v):
        return pc.scaled_dot_product_attention(q, k, v, causal=causal, scale=0.3)

    by_heads, _ = check(function, arrays, ("S(1)", "S(1)", "S(1)"), wrt=(0, 1, 2))
    by_queries, _ = check(function, arrays, ("S(2)", "B", "B"), wrt=(0, 1, 2))
    for name in by_heads:
        np.testing.assert_allclose(by_heads[name], by_queries[name], err_msg=name)
    query, key, value = (np.repeat(each, 6 // each.shape[1], axis=1) for each in arrays)
    weights = np.exp(0.3 * query @ key.swapaxes(2, 3)) * np.tri(5, 7, diagonal)
    weights /= weights.sum(3, keepdims=True)
    np.testing.assert_allclose(by_heads["y0"], weights @ value, 1e-7)


def test_rotary_positions_count_over_the_whole_sequence():
    def function(x, gate):
        return pc.rotary_embedding(x, offset=2), pc.swiglu(gate, x)

    dense, _ = check(function, (real(2, 5, 4), real(2, 5, 4)), ("S(1)", "S(1)"), wrt=(0,))
    assert dense["y0"].shape == (2, 5, 4)


# --- training -------------------------------------------------------------------------------------


def test_nothing_flows_through_stop_gradient():
    x = real(4)
    dense, _ = check(lambda x: pc.stop_gradient(x) * x, (x,), ("S(0)",), wrt=(0,))
    np.testing.assert_allclose(dense["dx0"], weights((4,)) * x)
    with pc.job("j"):
        value = pc.input("x", (4,), "float64", pc.Placement("cpu", [0]))
        pc.output("x", value)
        assert pc.gradients(pc.stop_gradient(value).sum(), [value]) == [None]


@pytest.mark.parametrize(("limit", "changed"), [(1.0, True), (100.0, False)])
def test_gradients_are_clipped_by_their_common_norm(limit, changed):
    arrays = real(5, 4), real(7), real(2, 3).astype(np.float32)

    def function(*grads):
        clipped, norm = pc.clip_by_global_norm(grads, limit)
        return [norm, *clipped]

    dense, counts = check(function, arrays, ("S(0)", "S(0)", "B"), bound=1e-6)
    norm = np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in arrays))
    np.testing.assert_allclose(dense["y0"], norm, 1e-6)
    total = np.sqrt(sum((dense[f"y{n}"].astype(np.float64) ** 2).sum() for n in (1, 2, 3)))
    np.testing.assert_allclose(total, limit if changed else norm, 1e-5)
    assert {shape for name, shape in counts if name == "all_reduce"} == {()}
    with pytest.raises(UsageError, match="positive"):
        check(lambda x: pc.clip_by_global_norm([x], 0)[1], (real(2),), ("B",))
    with pytest.raises(UsageError, match="at least one"):
        check(lambda x: pc.global_norm([]), (real(2),), ("B",))


def test_norms_add_up_over_placements():
    first, second = pc.Placement("cpu", [0, 1]), pc.Placement("cpu", [2])
    with pc.job("j") as job:
        x = pc.input("x", (5,), "float16", first, "S(0)")
        y = pc.input("y", (3,), "float32", second)
        (a, b), norm = pc.clip_by_global_norm([x, y], 2.0)
        for name, value in (("norm", norm), ("a", a), ("b", b), ("inf", pc.found_inf([x, y]))):
            pc.output(name, value)
    feeds = {"x": np.full(5, 300, np.float16), "y": np.full(3, 2, np.float32)}
    with LocalWorld(compile_plans(job, 3, "rank_per_iter").plans) as world:
        outputs = world.step(feeds)
    norm = np.sqrt(5 * 300.0**2 + 12)
    np.testing.assert_allclose(outputs["norm"], norm, 1e-6)
    np.testing.assert_allclose(outputs["a"], 600 / norm, 1e-3)
    np.testing.assert_allclose(outputs["b"], 4 / norm, 1e-6)
    assert (a.placement, b.placement, outputs["inf"]) == (first, second, 0)


@pytest.mark.parametrize("bad", [None, 0, 6])
def test_one_part_that_is_not_finite_is_found(bad):
    x = real(7)
    if bad is not None:
        x[bad] = np.nan

    def function(x, y):
        return pc.found_inf([x, y]), pc.is_finite_all([y, x])

    mesh = pc.Placement("cpu", range(RANKS))
    with pc.job("j") as job:
        values = [pc.input(name, (7,), "float64", mesh, "S(0)") for name in "xy"]
        for name, value in zip(("inf", "finite"), function(*values), strict=True):
            pc.output(name, value)
    with LocalWorld(compile_plans(job, RANKS, "rank_per_iter").plans) as world:
        outputs = world.step({"x": x, "y": real(7)})
    assert (float(outputs["inf"]), bool(outputs["finite"])) == (bad is not None, bad is None)


SHAPES = {"weight": (5, 4), "bias": (7,), "cube": (2, 3, 4)}


def updated(kind, layout):
    """A job that makes five steps of an update on parameters of several shapes."""
    mesh = pc.Placement("cpu", range(RANKS))

    def variable(name, shape, sbp, init="zeros", args=()):
        builder = pc.frontend.trace.current_builder()
        attrs = {"name": name, "shape": shape, "dtype": "float64", "init": init}
        attrs |= {"init_args": args, "trainable": init != "zeros"}
        return builder.add("variable", (), attrs, mesh, pc.NdSbp.of(sbp))[0]

    with pc.job(kind, seed=3) as job:
        rate = pc.full((), 0.1, "float64", mesh)
        for name, shape in SHAPES.items():
            split = layout if int(layout[2]) < len(shape) else "S(0)"
            weight = variable(name, shape, split, "normal", (0.0, 1.0))
            pc.output(name, weight)
            gradient = weight * 0.5 + weight * weight
            if kind == "adafactor" and len(shape) > 1:
                states = [
                    variable(f"{name}.rows", shape[:-1], "B"),
                    variable(f"{name}.columns", (*shape[:-2], shape[-1]), "B"),
                ]
            else:
                states = [variable(f"{name}.{n}", shape, split) for n in range(2)]
            if kind == "adafactor":
                moments = states if len(shape) > 1 else states[:1]
                pc.adafactor_update(weight, gradient, moments, rate, weight_decay=0.01)
            elif kind == "lamb":
                pc.lamb_update(weight, gradient, *states, rate)
            else:
                pc.lion_update(weight, gradient, states[0], rate, weight_decay=0.01)
    return job


@pytest.mark.parametrize("layout", ["S(0)", "S(1)"])
@pytest.mark.parametrize("kind", ["lamb", "adafactor", "lion"])
def test_updates_do_not_depend_on_the_layout(kind, layout):
    job = updated(kind, layout)
    dense = run_dense(job, 5)
    with LocalWorld(compile_plans(job, RANKS, "rank_per_iter").plans) as world:
        actual = world.run(5)
        for ours, theirs in zip(actual, dense, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(ours[name], theirs[name], 1e-9, 1e-12, err_msg=name)
    assert np.abs(dense[-1]["weight"] - dense[0]["weight"]).max() > 1e-2


def test_moving_averages_are_kept():
    mesh = pc.Placement("cpu", [0])
    with pc.job("j") as job:
        builder = pc.frontend.trace.current_builder()
        attrs = {"name": "mean", "shape": (2,), "dtype": "float64", "init": "zeros"}
        attrs |= {"init_args": (), "trainable": False}
        state = builder.add("variable", (), attrs, mesh, pc.NdSbp.of("B"))[0]
        pc.moving_average_update(state, pc.input("x", (2,), "float64", mesh), decay=0.5)
        pc.output("mean", state)
    outputs = run_dense(job, 3, {"x": np.array([1.0, 2.0])})
    np.testing.assert_allclose(outputs[2]["mean"], [0.75, 1.5])


def test_adafactor_says_which_moments_it_needs():
    with pytest.raises(UsageError, match="two moments"):
        check(lambda w: pc.adafactor_update(w, w, [w], w)[0], (real(2, 3),), ("B",))
    with pytest.raises(UsageError, match="one moment"):
        check(lambda w: pc.adafactor_update(w, w, [w, w], w)[0], (real(2),), ("B",))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x, w: pc.conv1d(x, w, padding="full"), "padding"),
        (lambda x, w: pc.conv1d(x, w, padding=[1, 2]), "padding"),
        (lambda x, w: pc.conv1d(x, w, padding=[[1, 2, 3]]), "pair"),
        (lambda x, w: pc.conv1d(x, w, stride=[1, 2]), "stride"),
        (pc.conv2d, "axes"),
        (lambda x, w: pc.max_pool1d(x, (2, 2)), "kernel"),
        (lambda x, w: pc.global_avg_pool(w[0]), "spatial"),
    ],
)
def test_wrong_sizes_are_refused(function, what):
    with pytest.raises((AttributeValueError, ShapeError), match=what) as caught:
        check(function, (real(1, 2, 5), real(2, 2, 3)), ("B", "B"))
    assert caught.value.report.source.startswith("tests/frontend/test_learning_functions.py:")
