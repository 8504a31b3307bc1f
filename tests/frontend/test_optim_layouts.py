"""Every optimizer, with and without clipping, trains on every layout as NumPy does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.errors import UsageError

optim = pc.optim
STEPS = 4
PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias")
RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(8, 6)), RANDOM.normal(size=(8, 3))


def placed(layout):
    """Two layers on a layout: (model, mesh of the first, mesh of the second, SBP of the data)."""
    model = pc.nn.Sequential(
        pc.nn.Linear(6, 5, dtype="float64"), pc.nn.Linear(5, 3, dtype="float64")
    )
    mesh = pc.Placement("cpu", [0, 1], axes=("dp",))
    if layout == "pp":
        first, second = pc.Placement("cpu", [0]), pc.Placement("cpu", [1])
        model[0].place(first)
        model[1].place(second)
        return model, first, second, "B"
    if layout == "tp":
        model.place(mesh, {"0.weight": "S(0)", "0.bias": "S(0)", "1.weight": "S(1)"})
        return model, mesh, mesh, "B"
    model.place(mesh)
    return model, mesh, mesh, "S(0)"


def job_of(layout, optimizer, clip_norm=None):
    """Trains tanh(x) between two layers; `dp zero` is dp with the training state split."""
    model, first, second, sbp = placed(layout.split()[0])
    config = pc.Config(zero=2, dp_axes=("dp",)) if layout == "dp zero" else None
    with pc.job("clipped", config=config) as job:
        x = pc.input("x", X.shape, "float64", first, sbp)
        y = pc.input("y", Y.shape, "float64", second, sbp)
        hidden = model[0](x).tanh()
        if second != first:
            hidden = hidden.redistribute(second)
        error = model[1](hidden) - y
        loss = (error * error).sum()
        optimizer.minimize(loss, clip_norm=clip_norm)
        pc.output("loss", loss)
    return job


def gradients(w):
    """Of the loss with these weights, by hand."""
    h = np.tanh(X @ w["0.weight"].T + w["0.bias"])
    error = 2 * (h @ w["1.weight"].T + w["1.bias"] - Y)
    dh = (error @ w["1.weight"]) * (1 - h * h)
    return {
        "0.weight": dh.T @ X,
        "0.bias": dh.sum(0),
        "1.weight": error.T @ h,
        "1.bias": error.sum(0),
    }


def clipped(grads, limit):
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    assert norm > 2 * limit, "the limit must do something"
    return {name: grad * limit / (norm + 1e-6) for name, grad in grads.items()}


def momentum(w, g, state, step):
    state["m"] = 0.9 * state.get("m", 0) + g
    return w - 0.01 * state["m"]


def adamw(w, g, state, step):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
    update = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.99**step)) + 1e-6)
    return w - 0.01 * (update + 0.1 * w)


def lion(w, g, state, step):
    m = state.get("m", np.zeros_like(w))
    state["m"] = 0.99 * m + 0.01 * g
    return w - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * w)


def lamb(w, g, state, step):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
    u = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.99**step)) + 1e-6) + 0.1 * w
    return w - 0.01 * np.linalg.norm(w) / np.linalg.norm(u) * u


def adafactor(w, g, state, step):
    kept = 1 - step**-0.8
    square = g * g + 1e-30
    if w.ndim == 2:
        r = state["r"] = kept * state.get("r", 0) + (1 - kept) * square.mean(1)
        c = state["c"] = kept * state.get("c", 0) + (1 - kept) * square.mean(0)
        v = np.outer(r, c) / r.mean()
    else:
        v = state["v"] = kept * state.get("v", 0) + (1 - kept) * square
    u = g / np.sqrt(v)
    u = u / max(1.0, np.sqrt((u * u).mean()) / 0.5)
    return w - 0.01 * max(1e-3, np.sqrt((w * w).mean())) * (u + 0.1 * w)


OPTIMIZERS = {
    "momentum": (lambda: optim.SGD(0.01, momentum=0.9), momentum, 1),
    "adamw": (lambda: optim.AdamW(0.01, (0.9, 0.99), 1e-6, weight_decay=0.1), adamw, 2),
    "lion": (lambda: optim.Lion(0.01, weight_decay=0.1), lion, 1),
    "lamb": (lambda: optim.LAMB(0.01, (0.9, 0.99), weight_decay=0.1), lamb, 2),
    "adafactor": (lambda: optim.Adafactor(0.01, clip=0.5, weight_decay=0.1), adafactor, None),
}
"""Name: how it is made, the step in NumPy, state variables per parameter."""


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("layout", ["dp", "tp", "pp", "dp zero"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_numpy(name, layout, clip_norm):
    make, step_of, _ = OPTIMIZERS[name]
    with pc.run(job_of(layout, make(), clip_norm), ranks=2) as session:
        start = session.variables()
        weights = {key: start[key] for key in PARAMETERS}
        state = {key: {} for key in PARAMETERS}
        for step in range(1, STEPS + 1):
            session.step(x=X, y=Y)
            grads = gradients(weights)
            if clip_norm is not None:
                grads = clipped(grads, clip_norm)
            weights = {
                key: step_of(weights[key], grads[key], state[key], step) for key in PARAMETERS
            }
        actual = session.variables()
    for key in PARAMETERS:
        assert np.abs(weights[key] - start[key]).max() > 1e-3
        # The learning rate is a float32.
        np.testing.assert_allclose(actual[key], weights[key], rtol=1e-5, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_lie_as_their_parameters_do(name):
    make, _, states = OPTIMIZERS[name]
    variables = {op.attr("name"): op for op in job_of("tp", make()).ops if op.kind == "variable"}
    layouts = {key: str(op.sbp) for key, op in variables.items() if key not in PARAMETERS}
    if states is None:
        assert layouts == {
            "0.weight.adafactor_rows": "[S(0)]",
            "0.weight.adafactor_columns": "[B]",
            "0.bias.adafactor_v": "[S(0)]",
            "1.weight.adafactor_rows": "[B]",
            "1.weight.adafactor_columns": "[S(0)]",
            "1.bias.adafactor_v": "[B]",
        }
    else:
        assert len(layouts) == states * len(PARAMETERS)
        for key, sbp in layouts.items():
            assert sbp == str(variables[key.rpartition(".")[0]].sbp)


def test_clipping_across_stages_moves_one_scalar_each_way():
    def exchanges(clip_norm):
        graph = build_boxing_task_graph(infer_sbp(job_of("pp", optim.SGD(0.1), clip_norm)), 2)
        return Counter(str(f.transfer.primitive) for f in graph.families if f.transfer is not None)

    without, with_clipping = exchanges(None), exchanges(0.5)
    # A copy and an assembly for the sum of squares, and for the factor.
    assert with_clipping - without == Counter({"exchange": 4})


def test_small_gradients_are_not_clipped():
    with pc.run(job_of("pp", optim.SGD(0.01), 1e6), ranks=2) as session:
        before = session.variables()
        session.step(x=X, y=Y)
        actual = session.variables()
    grads = gradients(before)
    for key in PARAMETERS:
        np.testing.assert_allclose(actual[key], before[key] - 0.01 * grads[key], rtol=1e-6)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_positive(limit):
    with pytest.raises(UsageError, match="positive number"):
        job_of("dp", optim.SGD(0.1), limit)
