"""Layers for images, normalisation and gates: what they compute, and a network on every layout."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, JobError, ShapeError
from tests.dense import DenseRun, run_dense
from tests.examples import EXAMPLES

nn = pc.nn
MESH = pc.Placement("cpu", [0, 1])
RANDOM = np.random.default_rng(5)


def traced(model, shape, dtype="float32"):
    with pc.job("j") as job:
        pc.output("y", model(pc.input("x", shape, dtype, MESH)))
    return job


def run_layer(model, x):
    """A layer's output, and its variables before the step."""
    run = DenseRun(traced(model, x.shape, str(x.dtype)))
    variables = {name: array.copy() for name, array in run.variables.items()}
    return run.step(x=x)["y"], variables


def real(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


# --- the layers -----------------------------------------------------------------------------------


def convolved(x, weight, bias, stride, padding):
    """A convolution without groups, window by window."""
    space = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *[(padding, padding)] * space])
    windows = np.lib.stride_tricks.sliding_window_view(
        x, weight.shape[2:], axis=tuple(range(2, x.ndim))
    )
    windows = windows[(slice(None), slice(None), *[slice(None, None, stride)] * space)]
    axes = [1, *range(2 + space, 2 + 2 * space)]
    convolved = np.tensordot(windows, weight, (axes, [1, *range(2, 2 + space)]))
    return np.moveaxis(convolved, -1, 1) + bias.reshape(-1, *[1] * space)


@pytest.mark.parametrize(("layer", "ndim"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)])
def test_convolutions(layer, ndim):
    x = real(2, 3, *(6, 5, 4)[:ndim])
    y, variables = run_layer(layer(3, 5, (3, 2, 2)[:ndim], stride=2, padding=1), x)
    weight, bias = variables["weight"], variables["bias"]
    assert weight.shape == (5, 3, *(3, 2, 2)[:ndim])
    bound = 1 / np.sqrt(weight[0].size)
    assert 0.5 * bound < np.abs(weight).max() <= bound
    np.testing.assert_allclose(y, convolved(x, weight, bias, 2, 1), rtol=1e-4, atol=1e-5)


def test_groups_and_no_bias():
    x = real(2, 4, 5, 5)
    y, variables = run_layer(nn.Conv2d(4, 6, 3, groups=2, bias=False), x)
    weight = variables.pop("weight")
    assert variables == {}
    halves = [
        convolved(x[:, 2 * g : 2 * g + 2], weight[3 * g : 3 * g + 3], np.zeros(3), 1, 0)
        for g in range(2)
    ]
    np.testing.assert_allclose(y, np.concatenate(halves, 1), rtol=1e-4, atol=1e-5)


def test_transposed_convolution():
    x = real(2, 4, 3, 3)
    y, variables = run_layer(nn.ConvTranspose2d(4, 6, 2, stride=2), x)
    # With windows that do not overlap, each element of x makes a patch of its own.
    patches = np.einsum("nchw,cokl->nohkwl", x, variables["weight"])
    expected = patches.reshape(2, 6, 6, 6) + variables["bias"].reshape(-1, 1, 1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_pooling_and_flattening():
    x = real(2, 3, 4, 6)
    blocks = x.reshape(2, 3, 2, 2, 3, 2)
    np.testing.assert_array_equal(run_layer(nn.MaxPool2d(2), x)[0], blocks.max((3, 5)))
    for layer in (nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((2, 3))):
        np.testing.assert_allclose(run_layer(layer, x)[0], blocks.mean((3, 5)), rtol=1e-5)
    assert run_layer(nn.MaxPool2d(3, stride=1, padding=1), x)[0].shape == x.shape
    np.testing.assert_array_equal(run_layer(nn.Flatten(), x)[0], x.reshape(2, -1))
    np.testing.assert_array_equal(run_layer(nn.Flatten(2), x)[0], x.reshape(2, 3, -1))


def test_norms_without_state():
    x = real(2, 4, 3, 3)
    groups = x.reshape(2, 2, -1)
    expected = (groups - groups.mean(-1, keepdims=True)) / groups.std(-1, keepdims=True)
    np.testing.assert_allclose(
        run_layer(nn.GroupNorm(2, 4), x)[0], expected.reshape(x.shape), rtol=1e-3, atol=1e-4
    )
    x = real(5, 6)
    np.testing.assert_allclose(
        run_layer(nn.RMSNorm(6), x)[0], x / np.sqrt((x * x).mean(-1, keepdims=True)), rtol=1e-3
    )


def test_activations_and_the_gated_perceptron():
    x = real(3, 4)
    np.testing.assert_allclose(run_layer(nn.SiLU(), x)[0], x / (1 + np.exp(-x)), rtol=1e-5)
    for axis in (0, -1):
        powers = np.exp(x)
        expected = powers / powers.sum(axis, keepdims=True)
        for split in (False, True):
            actual = run_layer(nn.Softmax(axis, split_axis=split), x)[0]
            np.testing.assert_allclose(actual, expected, rtol=1e-5)
    y, w = run_layer(nn.SwiGLU(4, 7), x)
    assert sorted(w) == ["down.weight", "gate.weight", "up.weight"]
    gate = x @ w["gate.weight"].T
    hidden = gate / (1 + np.exp(-gate)) * (x @ w["up.weight"].T)
    np.testing.assert_allclose(y, hidden @ w["down.weight"].T, rtol=1e-4, atol=1e-6)


# --- batch normalisation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm1d, (6, 3, 4)), (nn.BatchNorm2d, (6, 3, 2, 2))],
)
def test_batch_norm_keeps_running_statistics(layer, shape):
    model = layer(3, momentum=0.25)
    run = DenseRun(traced(model, shape))
    mean, variance = np.zeros(3), np.ones(3)
    axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    across = (3, *[1] * (len(shape) - 2))
    for _ in range(3):
        x = real(*shape) * 2 + 1
        outputs = run.step(x=x)["y"]
        expected = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
        np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)
        mean = 0.75 * mean + 0.25 * x.mean(axes)
        variance = 0.75 * variance + 0.25 * x.var(axes, ddof=1)
        np.testing.assert_allclose(run.variables["running_mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(run.variables["running_var"], variance, rtol=1e-4)
    later = DenseRun(traced(model.eval(), shape), run.variables)
    expected = (x - mean.reshape(across)) / np.sqrt(variance.reshape(across) + 1e-5)
    np.testing.assert_allclose(later.step(x=x)["y"], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(later.variables["running_mean"], run.variables["running_mean"])


def test_running_statistics_are_never_trained():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).freeze().freeze(False)
    with pc.job("j") as job:
        loss = model(pc.input("x", (5, 4), "float32", MESH)).relu().sum()
        pc.optim.SGD(0.1).minimize(loss, model.parameters())
        pc.output("loss", loss)
    updated = {op.inputs[0].name for op in job.ops if op.kind == "sgd_update"}
    names = {op.outputs[0].name: op.attr("name") for op in job.ops if op.kind == "variable"}
    assert {names[each] for each in updated} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_one_job_updates_running_statistics_once():
    model = nn.BatchNorm1d(3)
    with pytest.raises(JobError, match=r"'running_mean' .* twice.*test_nn_images"):
        traced(lambda x: model(model(x)), (5, 3))
    with pc.job("j") as job:
        x = pc.input("x", (5, 3), "float32", MESH)
        pc.output("y", model(x))
        pc.output("z", model.eval()(x))
    run = DenseRun(job)
    x = real(5, 3)
    np.testing.assert_allclose(run.step(x=x)["z"], x, rtol=1e-4)
    assert (run.variables["running_mean"] != 0).all()


# --- a network ------------------------------------------------------------------------------------


def digits(ranks, training=True):
    """A small convolutional network on the digits."""
    mesh = pc.Placement("cpu", range(ranks))
    with pc.job("digits") as job:
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            # A bias would only be taken away again; its gradient is rounding noise.
            nn.Linear(64, 32, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 10),
        ).train(training)
        images, labels = pc.data.Arrays(
            EXAMPLES / "data" / "digits.npz",
            ("images", "labels"),
            batch=50,
            placement=mesh,
            sbp="S(0)",
        )
        pixels = images.reshape(50, 1, 8, 8).cast("float32") * (1 / 16)
        logits = model(pixels)
        loss = pc.cross_entropy(logits, labels, ignore_index=None)
        pc.output("loss", loss)
        if training:
            pc.optim.AdamW(0.01).minimize(loss, clip_norm=1.0)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_learns_digits_on_every_layout(ranks, tmp_path):
    steps, dense = 20, {}
    expected = [result["loss"] for result in run_dense(digits(1), steps, variables=dense)]
    with pc.run(digits(ranks), ranks=ranks) as session:
        losses = [result["loss"] for result in session.run(steps)]
        variables = session.variables()
        session.save(tmp_path)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert np.mean(losses[-4:]) < 0.4 * losses[0]
    for name in ("1.running_mean", "1.running_var", "10.running_mean"):
        np.testing.assert_allclose(variables[name], dense[name], rtol=1e-3, atol=1e-5)
    # Evaluation goes by the running statistics, which the checkpoint holds.
    with pc.run(
        digits(ranks, training=False), ranks=ranks, restore=tmp_path, strict_restore=False
    ) as session:
        evaluated = next(session.run(1))["loss"]
    reference = DenseRun(digits(1, training=False), dense)
    reference.steps_done = steps
    np.testing.assert_allclose(evaluated, reference.step()["loss"], rtol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 4, 3, groups=2),
        lambda: nn.Conv2d(3, 4, (3, 3, 3)),
        lambda: nn.ConvTranspose2d(4, 3, 3, groups=2),
        lambda: nn.GroupNorm(3, 4),
        lambda: nn.BatchNorm1d(3, momentum=0.0),
    ],
)
def test_wrong_sizes_are_refused(make):
    with pytest.raises(AttributeValueError):
        make()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.BatchNorm2d(3), (2, 3)),
        (nn.BatchNorm1d(3), (2, 3, 4, 4)),
        (nn.BatchNorm1d(3), (2, 4)),
        (nn.Flatten(2), (2, 3)),
        (nn.Conv2d(3, 4, 3), (2, 3, 8)),
        (nn.RMSNorm(3), (2, 4)),
    ],
)
def test_inputs_that_do_not_fit_are_refused(model, shape):
    with pytest.raises(ShapeError, match="test_nn_images"):
        traced(model, shape)


# --- padding and sampling of split axes -----------------------------------------------------------

F = nn.functional
IMAGES = np.random.default_rng(6).normal(size=(2, 4, 5, 6))
PLACES = np.random.default_rng(7).uniform(-1.4, 1.4, (2, 3, 4, 2))
KERNEL = np.random.default_rng(8).normal(size=(3, 4, 3, 2))


def _convolved(mode):
    return lambda x, weight, places: F.conv2d(F.pad(x, (1, 2, 2, 1), mode), weight, stride=2)


SPLIT = {
    **{f"conv {mode}": _convolved(mode) for mode in ("reflect", "replicate", "circular")},
    **{
        f"sampled {mode} {padding}": lambda x, weight, places, mode=mode, padding=padding: (
            F.grid_sample(x, places, mode, padding)
        )
        for mode, padding in (
            *(("bilinear", "zeros"), ("bilinear", "reflection"), ("nearest", "border")),
            ("bicubic", "border"),
        )
    },
}


def _with_gradients(call, *given):
    """What a call makes, and the gradients of its sum of squares."""
    made = call(*given)
    (made * made).sum().backward()
    return [made.detach(), *(each.grad for each in given if each.grad is not None)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "sampled bicubic border"))
        for name in SPLIT
    ],
)
def test_split_images_are_padded_and_sampled_as_whole_ones(name):
    def given(mesh, sbp):
        arrays = ((IMAGES, sbp), (KERNEL, "B"), (PLACES, "B"))
        return [pc.tensor(each, mesh, layout, requires_grad=True) for each, layout in arrays]

    whole = [
        each.numpy() for each in _with_gradients(SPLIT[name], *given(pc.Placement("cpu", [0]), "B"))
    ]

    def rank():
        return [
            [each.numpy() for each in _with_gradients(run, *given(MESH, sbp))]
            for sbp in ("S(2)", "S(3)")
            for run in (SPLIT[name], pc.compile(SPLIT[name]))
        ]

    for results in pc.eager.spawn(rank, 2):
        for result in results:
            for got, wanted in zip(result, whole, strict=True):
                np.testing.assert_allclose(got, wanted, 1e-9, 1e-9)
