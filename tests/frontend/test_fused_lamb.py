"""Distributed fused LAMB: every form of it is LAMB in NumPy, on every number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError, UsageError
from plancompiler.passes import run_passes
from tests.passes.worlds import collectives, compiled, record_of, variable_bytes

STEPS = 20
BROKEN = 7
"""The step whose data are not finite."""
ROWS, LIMIT = 12, 0.6
RANDOM = np.random.default_rng(5)
DATA = RANDOM.normal(size=(STEPS, ROWS, 5)).astype(np.float64)
# Norms that differ between steps and between devices: LAMB does not see a factor that stays.
DATA *= 3.0 ** (np.arange(STEPS) % 3 - 1)[:, None, None] * np.linspace(0.2, 3, ROWS)[:, None]
DATA[BROKEN, 3, 1] = np.inf
SHAPES = {"weight": (5, 3), "bias": (3,), "silent": (5,), "scalar": ()}
"""`silent` starts at zero and has no decay's pull: its norm is 0 at first."""
CASES = [
    (accumulate, clip, limit)
    for accumulate in (1, 4)
    for clip, limit in (("after", None), ("after", LIMIT), ("before", LIMIT))
]


class Model(pc.nn.Module):
    """Four parameters, none of which has elements that divide by 4."""

    def __init__(self):
        self.weight = pc.nn.Parameter(SHAPES["weight"], "float64", "normal", (0, 1))
        self.bias = pc.nn.Parameter(SHAPES["bias"], "float64", "constant", (0.5,))
        self.silent = pc.nn.Parameter(SHAPES["silent"], "float64", "zeros")
        self.scalar = pc.nn.Parameter(SHAPES["scalar"], "float64", "constant", (2.0,))

    def forward(self, x):
        y = (x @ self.weight.value + self.bias.value) * self.scalar.value
        return (y * y).mean() + (x * self.silent.value).mean()


def optimizer(accumulate, clip, limit):
    return pc.optim.DistributedFusedLamb(
        pc.optim.linear(0.02, warmup=2, total=STEPS),
        betas=(0.9, 0.99),
        weight_decay=0.1,
        max_norm=limit,
        clip=clip,
        accumulate=accumulate,
    )


# --- the reference --------------------------------------------------------------------------------


def gradients_by_hand(w, x, rows):
    """Of the share of the loss that some rows are, `x` being them."""
    z = x @ w["weight"] + w["bias"]
    dy = 2 * z * w["scalar"] / (rows * 3)
    dz = dy * w["scalar"]
    return {
        "weight": x.T @ dz,
        "bias": dz.sum(0),
        "silent": x.sum(0) / (rows * 5),
        "scalar": np.asarray((dy * z).sum()),
    }


def norm_of(tensors):
    return np.sqrt(sum((each**2).sum() for each in tensors.values()))


def rate_at(step):
    return 0.02 * (step + 1) / 2 if step < 2 else 0.02 * (1 - (step - 2) / (STEPS - 2))


def by_numpy(start, ranks, accumulate, clip, limit):
    """Parameters after each step."""
    w = dict(start)
    m, v, total = ({name: np.zeros_like(each) for name, each in w.items()} for _ in range(3))
    count, history = 0, []
    for step in range(STEPS):
        grads = {name: np.zeros_like(each) for name, each in w.items()}
        for part in np.array_split(DATA[step], ranks):
            with np.errstate(invalid="ignore"):
                share = gradients_by_hand(w, part, ROWS)
                factor = min(1, limit / (norm_of(share) + 1e-6)) if clip == "before" else 1.0
                grads = {name: grads[name] + factor * share[name] for name in w}
        first = step % accumulate == 0
        total = {name: grads[name] + (0 if first else total[name]) for name in w}
        if (step + 1) % accumulate == 0 and np.isfinite(norm_of(total)):
            count += 1
            mean = {name: total[name] / accumulate for name in w}
            factor = min(1, limit / (norm_of(mean) + 1e-6)) if limit and clip == "after" else 1.0
            for name, g in mean.items():
                g = g * factor
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.99 * v[name] + 0.01 * g * g
                u = m[name] / (1 - 0.9**count) / (np.sqrt(v[name] / (1 - 0.99**count)) + 1e-6)
                u = u + 0.1 * w[name]
                above, below = np.linalg.norm(w[name]), np.linalg.norm(u)
                trust = above / below if above > 0 and below > 0 else 1.0
                w[name] = w[name] - rate_at(step) * trust * u
        history.append(dict(w))
    return history


def test_the_limit_matters_and_so_does_when():
    start = {name: RANDOM.normal(size=shape) for name, shape in SHAPES.items()}
    last = [by_numpy(start, 2, *case)[-1] for case in CASES[:3]]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(last[left]["weight"], last[right]["weight"], 1e-3)


# --- jobs -----------------------------------------------------------------------------------------


def job_of(ranks, case, zero):
    mesh = pc.Placement("cpu", list(range(ranks)), axes=("dp",))
    config = pc.Config(zero=zero, dp_axes=("dp",)) if zero else None
    with pc.job("lamb", config=config) as job:
        model = Model().place(mesh)
        loss = model(pc.input("x", (ROWS, 5), "float64", mesh, "S(0)"))
        optimizer(*case).minimize(loss)
        pc.output("loss", loss, finite=False)
    return job


def check(results, history, start):
    for name, wanted in history.items():
        np.testing.assert_allclose(results[name], wanted, 1e-6, 1e-9, err_msg=name)
        assert not np.array_equal(results[name], start[name])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 0), (2, 2), (4, 2), (4, 3), (3, 1)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_is_lamb_in_numpy(case, ranks, zero):
    with pc.run(job_of(ranks, case, zero), ranks=ranks) as session:
        start = {name: session.variables()[name] for name in SHAPES}
        history = by_numpy(start, ranks, *case)
        for step in range(STEPS):
            session.step(x=DATA[step])
            if step == BROKEN:
                before = history[BROKEN - 1]
                for name, value in session.variables().items():
                    if name in SHAPES:
                        np.testing.assert_allclose(value, before[name], 1e-6, 1e-9)
        check(session.variables(), history[-1], start)


# --- eager ----------------------------------------------------------------------------------------


def train(ranks, case, mesh=None, layout="S(0)", split=None):
    mesh = mesh or pc.Placement("cpu", list(range(ranks)), axes=("dp",))
    model, update = Model().place(mesh, split), optimizer(*case)
    tensors = {name: each.value for name, each in model.named_parameters()}
    start = {name: each.numpy() for name, each in tensors.items()}
    counts = []
    for step in range(STEPS):
        with np.errstate(invalid="ignore"):
            loss = model(pc.tensor(DATA[step], mesh, layout))
            update.zero_grad()
            loss.backward()
            with pc.comm_trace() as trace:
                update.step()
        counts.append(trace.counts())
    return start, {name: each.numpy() for name, each in tensors.items()}, counts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_is_lamb_in_numpy(case, ranks):
    for start, actual, counts in spawn(train, ranks, ranks, case):
        check(actual, by_numpy(start, ranks, *case)[-1], start)
        if ranks == 1:
            assert not any(counts)
            continue
        for step, seen in enumerate(counts):
            updates = (step + 1) % case[0] == 0
            wanted = {"reduce_scatter": 1, "all_reduce": 2, "all_gather": 1} if updates else {}
            assert seen == wanted


def test_eager_parameters_that_are_split_are_updated_one_by_one():
    mesh = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
    split = {"weight": ["B", "S(1)"], "bias": ["B", "S(0)"]}
    for accumulate in (1, 4):
        case = (accumulate, "after", LIMIT)
        for start, actual, _ in spawn(train, 4, 4, case, mesh, ["S(0)", "B"], split):
            check(actual, by_numpy(start, 2, *case)[-1], start)


def train_compiled(case):
    mesh = pc.Placement("cpu", [0, 1], axes=("dp",))
    model, update = Model().place(mesh), optimizer(*case)

    @pc.compile
    def step(x):
        loss = model(x)
        update.minimize(loss)
        return loss

    tensors = {name: each.value for name, each in model.named_parameters()}
    start = {name: each.numpy() for name, each in tensors.items()}
    for data in DATA:
        step(pc.tensor(data, mesh, "S(0)"))
    return start, {name: each.numpy() for name, each in tensors.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_compiled_function_is_lamb_in_numpy(case):
    for start, actual in spawn(train_compiled, 2, case):
        check(actual, by_numpy(start, 2, *case)[-1], start)


def test_eager_and_compiled_steps_change_after_an_update_only():
    mesh = pc.Placement("cpu", [0])
    model, update = Model().place(mesh), optimizer(2, "after", None)

    def step(x):
        update.minimize(model(x))

    compiled = pc.compile(step)
    x = pc.tensor(DATA[0], mesh)
    for first, second in ((step, compiled), (compiled, step)):
        first(x)
        with pytest.raises(UsageError, match="after an update"):
            second(x)
        with pytest.raises(UsageError, match="added up"):
            update.state_dict()
        first(x)
        assert update.state_dict()["weight.lamb_m"].shape == (5, 3)


@pytest.mark.processes
def test_a_job_between_processes_is_lamb_in_numpy():
    case = (4, "after", LIMIT)
    with pc.run(job_of(2, case, 2), ranks=2, backend="processes") as session:
        start = {name: session.variables()[name] for name in SHAPES}
        for data in DATA:
            session.step(x=data)
        check(session.variables(), by_numpy(start, 2, *case)[-1], start)


def train_part(case, steps, mesh, layout, split, state):
    """As `train`, from a state of model and optimizer; also returns the state after it."""
    model, update = Model().place(mesh, split), optimizer(*case)
    tensors = {name: each.value for name, each in model.named_parameters()}
    start = {name: each.numpy() for name, each in tensors.items()}
    if state is not None:
        given = [
            {name: each if name == "step" else pc.tensor(each, mesh) for name, each in part.items()}
            for part in state
        ]
        model.load_state_dict(given[0])
        update.load_state_dict(given[1])
    for data in steps:
        with np.errstate(invalid="ignore"):
            update.minimize(model(pc.tensor(data, mesh, layout)))
    after = [
        {name: each if name == "step" else each.numpy() for name, each in part.items()}
        for part in (model.state_dict(), update.state_dict())
    ]
    return start, {name: each.numpy() for name, each in tensors.items()}, after


@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_goes_on_from_its_state_on_another_layout(accumulate):
    case = (accumulate, "after", LIMIT)
    data = (pc.Placement("cpu", [0, 1], axes=("dp",)), "S(0)", None)
    split = (data[0], "B", {"weight": "S(1)", "bias": "S(0)"})
    for first, second in ((data, split), (split, data), (data, data)):
        start, _, state = spawn(train_part, 2, case, DATA[:8], *first, None)[0]
        assert {"weight.lamb_m", "scalar.lamb_v", "step"} <= state[1].keys()
        for _, actual, _ in spawn(train_part, 2, case, DATA[8:], *second, state):
            check(actual, by_numpy(start, 1, *case)[-1], start)


def test_a_state_is_whole_after_an_update_only():
    mesh = pc.Placement("cpu", [0])
    model, update = Model().place(mesh), optimizer(4, "after", None)
    update.minimize(model(pc.tensor(DATA[0], mesh)))
    with pytest.raises(UsageError, match="added up"):
        update.state_dict()
    with pytest.raises(UsageError):
        update.load_state_dict({"step": 4, "nobody.lamb_m": model.bias.value})
    for _ in range(3):
        update.minimize(model(pc.tensor(DATA[0], mesh)))
    state = update.state_dict()
    # As a job has it: sums of gradients, zero after an update.
    sums = {"weight.lamb_gradient": model.weight.value * 0.0}
    update.load_state_dict({**state, **sums})
    sums["weight.lamb_gradient"] += 1.0
    with pytest.raises(UsageError, match="between two updates"):
        update.load_state_dict({**state, **sums})


# --- float16 --------------------------------------------------------------------------------------

SMALL = RANDOM.normal(size=(STEPS, ROWS, 5)).astype(np.float32)


def half_model():
    return nn.Linear(5, 3)


def half_update(clip, model=None):
    return pc.optim.DistributedFusedLamb(
        model, lr=0.02, betas=(0.9, 0.99), max_norm=LIMIT, clip=clip, accumulate=2
    )


def check_near(actual, exact, start):
    """Where gradients are near zero, rounding turns the direction of a step."""
    assert np.linalg.norm(actual - exact) < 0.4 * np.linalg.norm(exact - start)
    assert not np.array_equal(actual, exact)


def half_job(clip, ranks, **config):
    mesh = pc.Placement("cpu", range(ranks), axes=("dp",))
    with pc.job("half", config=pc.Config(**config)) as job:
        x = pc.input("x", (ROWS, 5), "float32", mesh, "S(0)")
        y = half_model().place(mesh)(x)
        half_update(clip).minimize((y * y).mean())
        pc.output("y", y)
    return job


@pytest.mark.parametrize(("clip", "zero"), [("after", 0), ("after", 2), ("before", 0)])
def test_jobs_in_float16_add_gradients_up_and_scale_losses(clip, zero):
    def trained(**config):
        job = half_job(clip, 2, zero=zero, dp_axes=("dp",), **config)
        with pc.run(job, ranks=2) as session:
            history = [session.variables()]
            for x in SMALL[:8]:
                session.step(x=x)
                history.append(session.variables())
        return history

    exact = trained()
    assert not np.array_equal(exact[0]["weight"], exact[-1]["weight"])
    for scale in (64, 1 << 24):
        actual = trained(precision="float16", loss_scale=scale)
        if scale == 64:
            for name in ("weight", "bias"):
                check_near(actual[-1][name], exact[-1][name], exact[0][name])
        else:
            # Gradients overflow in the first steps: they move nothing, and the scale falls.
            assert actual[2]["weight"].tobytes() == actual[0]["weight"].tobytes()
            assert actual[2]["loss_scale"] == scale / 4
            assert actual[2]["weight.lamb_count"] == 0


def test_clipping_before_the_reduction_sees_gradients_without_the_losses_scale():
    rewritten, _ = run_passes(half_job("before", 2, precision="float16"))
    (clip,) = [op for op in rewritten.ops if op.kind == "clip_addends"]
    assert [value.name.endswith(":final") for value in clip.inputs] == [True, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_eager_and_compiled_steps_in_float16_add_gradients_up(compiled):
    mesh, start = pc.Placement("cpu", [0]), SMALL[0, :3]

    def trained(dtype):
        model = half_model().place(mesh)
        with pc.no_grad():
            model.weight.value.copy_(pc.tensor(start, mesh))
        update, scale = half_update("after", model), pc.eager.LossScale(64.0)

        def step(x):
            y = (x.cast(dtype) @ model.weight.value.cast(dtype)).cast("float32")
            loss = ((y + model.bias.value.sum()) ** 2).mean()
            if compiled:
                update.minimize(loss)
            else:
                scale.backward(loss)
                assert scale.step(update, model.parameters())
                update.zero_grad()

        run = pc.compile(step) if compiled else step
        for x in SMALL[:8]:
            run(pc.tensor(x[:, :3], mesh))
        return model.weight.value.numpy()

    check_near(trained("float16"), trained("float32"), start)


# --- what a job exchanges and holds ---------------------------------------------------------------


def test_zero_scatters_gradients_splits_moments_and_gathers_parameters():
    plain, split = (compiled(job_of(4, CASES[0], 0), zero=zero, dp_axes=("dp",)) for zero in (0, 2))
    assert collectives(plain)["reduce_scatter"] == 0
    assert collectives(split)["reduce_scatter"] == 3
    assert collectives(split)["all_gather"] >= 3
    assert variable_bytes(split) < variable_bytes(plain) / 2


def test_sums_of_gradients_are_split_as_well():
    def summary(case):
        job = job_of(2, case, 0)
        return record_of(job, "zero", zero=2, dp_axes=("dp",)).summary

    assert "3 parameters and 6 states" in summary(CASES[0])
    assert "3 parameters and 9 states" in summary((4, "after", None))


# --- bad input ------------------------------------------------------------------------------------


def test_settings_are_checked():
    make = pc.optim.DistributedFusedLamb
    with pytest.raises(AttributeValueError, match="'after' or 'before'"):
        make(0.1, clip="between")
    for bad in ({"max_norm": 0.0}, {"max_norm": float("nan")}, {"accumulate": 0}):
        with pytest.raises(pc.PlanCompilerError):
            make(0.1, **bad)


def test_clipping_before_the_reduction_needs_broadcast_parameters():
    mesh = pc.Placement("cpu", [0, 1], axes=("dp",))
    model = Model().place(mesh, {"weight": "S(1)"})
    with pc.job("split"):
        loss = model(pc.input("x", (ROWS, 5), "float64", mesh))
        with pytest.raises(UsageError, match="broadcast"):
            optimizer(1, "before", LIMIT).minimize(loss)
        pc.output("loss", loss)


def test_every_step_updates_the_same_parameters():
    model, update = Model(), optimizer(*CASES[0])
    model.place(pc.Placement("cpu", [0]))
    for choice in (model.parameters(), model.parameters()[:2]):
        loss = model(pc.tensor(DATA[0], pc.Placement("cpu", [0])))
        loss.backward()
        if len(choice) == len(SHAPES):
            update.step(choice)
        else:
            with pytest.raises(UsageError, match="same parameters"):
                update.step(choice)
