"""Optimizers against their papers' formulas in NumPy: in jobs with ZeRO, eager, and compiled."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from tests.frontend.test_optim_layouts import PARAMETERS, X, Y, gradients, job_of, placed

optim = pc.optim
STEPS = 7
"""RAdam's rate is adaptive from the sixth step on."""


def moved(state, name, value, share):
    state[name] = share * state.get(name, 0) + (1 - share) * value
    return state[name]


def lars(w, g, state, step):
    g = g + 0.1 * w
    norms = np.linalg.norm(w), np.linalg.norm(g - 0.1 * w)
    local = 0.02 * norms[0] / (norms[1] + 0.1 * norms[0] + 1e-8) if min(norms) > 0 else 1.0
    state["m"] = 0.9 * state.get("m", 0) + 0.5 * local * g
    return w - state["m"]


def dampened(w, g, state, step):
    state["m"] = g if step == 1 else 0.9 * state["m"] + 0.7 * g
    return w + 0.01 * state["m"]


def adagrad(w, g, state, step):
    g = g + 0.1 * w
    state["s"] = state.get("s", 0.3) + g * g
    return w - 0.1 / (1 + (step - 1) * 0.2) * g / (np.sqrt(state["s"]) + 1e-10)


def rmsprop(w, g, state, step):
    g = g + 0.1 * w
    return w - 0.01 * g / (np.sqrt(moved(state, "v", g * g, 0.9)) + 1e-8)


def centered(w, g, state, step):
    v, mean = moved(state, "v", g * g, 0.9), moved(state, "mean", g, 0.9)
    state["m"] = 0.5 * state.get("m", 0) + g / (np.sqrt(v - mean**2) + 1e-8)
    return w - 0.01 * state["m"]


def adadelta(w, g, state, step):
    v, before = moved(state, "v", g * g, 0.8), state.get("d", 0)
    delta = np.sqrt(before + 1e-3) / np.sqrt(v + 1e-3) * g
    moved(state, "d", delta**2, 0.8)
    return w - delta


def amsgrad(w, g, state, step):
    m, v = moved(state, "m", g, 0.9), moved(state, "v", g * g, 0.5)
    state["peak"] = np.maximum(state.get("peak", 0), v)
    w = w - 0.01 * 0.1 * w
    return w - 0.01 * m / (1 - 0.9**step) / (np.sqrt(state["peak"] / (1 - 0.5**step)) + 1e-8)


def adamax(w, g, state, step):
    m = moved(state, "m", g, 0.9)
    state["u"] = np.maximum(0.99 * state.get("u", 0), abs(g) + 1e-8)
    return w - 0.01 / (1 - 0.9**step) * m / state["u"]


def nadam(w, g, state, step):
    now, after = (0.9 * (1 - 0.5 * 0.96 ** (each * 0.1)) for each in (step, step + 1))
    state["p"] = state.get("p", 1) * now
    m, v = moved(state, "m", g, 0.9), moved(state, "v", g * g, 0.99)
    hat = m * after / (1 - state["p"] * after) + g * (1 - now) / (1 - state["p"])
    return w - 0.01 * hat / (np.sqrt(v / (1 - 0.99**step)) + 1e-8)


def radam(w, g, state, step):
    m, v = moved(state, "m", g, 0.9), moved(state, "v", g * g, 0.99)
    last = 2 / 0.01 - 1
    now = last - 2 * step * 0.99**step / (1 - 0.99**step)
    m = m / (1 - 0.9**step)
    if now <= 5:
        return w - 0.01 * m
    share = np.sqrt((now - 4) * (now - 2) * last / ((last - 4) * (last - 2) * now))
    return w - 0.01 * m * share * np.sqrt(1 - 0.99**step) / (np.sqrt(v) + 1e-8)


BETAS = (0.9, 0.99)
OPTIMIZERS = {
    "LARS": (lars, {"lr": 0.5, "trust_coefficient": 0.02, "weight_decay": 0.1}),
    "SGD": (dampened, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "Adagrad": (
        adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.3},
    ),
    "RMSprop": (rmsprop, {"alpha": 0.9, "weight_decay": 0.1}),
    "RMSprop centered": (centered, {"alpha": 0.9, "momentum": 0.5, "centered": True}),
    "Adadelta": (adadelta, {"rho": 0.8, "eps": 1e-3}),
    "AdamW amsgrad": (
        amsgrad,
        {"lr": 0.01, "betas": (0.9, 0.5), "weight_decay": 0.1, "amsgrad": True},
    ),
    "Adamax": (adamax, {"lr": 0.01, "betas": BETAS}),
    "NAdam": (nadam, {"lr": 0.01, "betas": BETAS, "momentum_decay": 0.1}),
    "RAdam": (radam, {"lr": 0.01, "betas": BETAS}),
}


def made(name, *parameters):
    return getattr(optim, name.split()[0])(*parameters, **OPTIMIZERS[name][1])


def by_numpy(name, start):
    step_of = OPTIMIZERS[name][0]
    weights, state = dict(start), {key: {} for key in PARAMETERS}
    for step in range(1, STEPS + 1):
        grads = gradients(weights)
        weights = {key: step_of(weights[key], grads[key], state[key], step) for key in PARAMETERS}
    return weights


def check(actual, name, start):
    for key, expected in by_numpy(name, start).items():
        assert np.abs(expected - start[key]).max() > 1e-3
        # The learning rate is a float32.
        np.testing.assert_allclose(actual[key], expected, rtol=1e-5, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_jobs_with_split_state(name):
    with pc.run(job_of("dp zero", made(name)), ranks=2) as session:
        start = session.variables()
        for _ in range(STEPS):
            session.step(x=X, y=Y)
        check(session.variables(), name, {key: start[key] for key in PARAMETERS})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_pytorch_is_typed(name, compiled):
    model, mesh, *_ = placed("pp")
    model.place(mesh)
    optimizer = made(name, model.parameters())
    x, y = (pc.tensor(each, mesh) for each in (X, Y))
    start = {key: each.value.numpy().copy() for key, each in model.named_parameters()}

    def step(x, y):
        error = model[1](model[0](x).tanh()) - y
        (error * error).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = pc.compile(step) if compiled else step
    for _ in range(STEPS):
        run(x, y)
    check({key: each.value.numpy() for key, each in model.named_parameters()}, name, start)


COUNTING = ["SGD", "Adagrad", "AdamW amsgrad", "Adamax", "NAdam", "RAdam"]
"""Those whose formulas go by the number of the update."""


@pytest.mark.parametrize("mode", ["eager", "compiled", "both"])
@pytest.mark.parametrize("name", COUNTING)
def test_every_parameter_counts_its_own_updates(name, mode, tmp_path):
    """Parameters that are left out of steps, and one that is added after some."""
    mesh = pc.Placement("cpu", [0])
    factors = dict(zip("abc", np.array([[1.0, 2.0], [0.5, 3.0], [2.0, -1.0]]), strict=True))
    weights = {
        key: pc.nn.Parameter((2,), dtype="float64", init="ones", name=key).place(mesh)
        for key in factors
    }
    given = {key: pc.tensor(each, mesh) for key, each in factors.items()}
    optimizer = made(name, [weights["a"], weights["b"]])

    def step(keys):
        losses = [(weights[key].value ** 2 * given[key]).sum() for key in keys]
        sum(losses[1:], losses[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    run, step_of = pc.compile(step), OPTIMIZERS[name][0]
    expected, state = dict.fromkeys(factors, np.ones(2)), {key: {} for key in factors}
    updates = dict.fromkeys(factors, 0)
    for number, keys in enumerate(["a", "a", "ab", "b", "ab", *["abc"] * 6, "bc", "ab", "abc"]):
        if number == 5:
            optimizer.add_param_group({"params": [weights["c"]]})
        (run if mode == "compiled" or (mode == "both" and number % 2) else step)(keys)
        for key in keys:
            updates[key] += 1
            grad = 2 * expected[key] * factors[key]
            expected[key] = step_of(expected[key], grad, state[key], updates[key])
        if number == 6 and mode == "eager":
            kept = optimizer.state_dict()
            assert {key: kept.get(f"{key}.missed", 0) for key in "abc"} == {
                key: number + 1 - count for key, count in updates.items()
            }
            optimizer = made(name, [{"params": [weights[key]]} for key in "abc"])
            pc.eager.save(tmp_path, kept)
            optimizer.load_state_dict(pc.eager.load(tmp_path, optimizer.state_dict()))
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key].value.numpy(), value, rtol=1e-5, atol=1e-7)
