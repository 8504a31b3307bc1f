"""Fused parts of transformers: the formula in NumPy on every layout, two reductions, and generation
with a cache that equals the whole sequence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from tests.ops.sharding import run_dense
from tests.passes.worlds import collectives, compiled

nn = pc.nn
SEED, BATCH, LENGTH, DIM = 4, 3, 5, 12
RANDOM = np.random.default_rng(2)
X, WEIGHT = RANDOM.normal(size=(2, BATCH, LENGTH, DIM))
PADDED = np.where(np.arange(LENGTH) < np.array([5, 3, 4])[:, None], 0.0, -np.inf)[:, None, None]
MASK = RANDOM.normal(size=(1, LENGTH, LENGTH))
RATES = {"dropout": 0.2, "attention_dropout": 0.3}


def mesh_of(*extents):
    axes = ("tp",) if len(extents) == 1 else ("dp", "tp")
    return pc.Placement("cpu", np.arange(np.prod(extents)).reshape(extents), axes)


def rows(mesh):
    """The layout of activations: batches over dp."""
    return "B" if mesh.ndim == 1 else ["S(0)", "B"]


# --- the formulas ---------------------------------------------------------------------------------


def normalised(x, w, kind):
    if kind is None:
        return x
    if kind == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["norm_weight"]
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return unit * w["norm_weight"] + w["norm_bias"]


def dropped(x, rate, key):
    if not rate:
        return x
    return x * run_dense("dropout", [np.ones(x.shape)], {"rate": rate, "key": key}, seed=SEED)[0]


def attention_part(x, w, mask, case):
    """The whole part, with keys 0 and 1 for its two dropouts."""
    kind, pre = case.get("norm", "layer"), case.get("pre_norm", True)
    inner = normalised(x, w, kind) if pre else x
    product = np.einsum("btm,gpdm->bgptd", inner, w["qkv_weight"])
    product += w["qkv_bias"][..., None, :]
    heads = product.shape[2] - 2
    query, key, value = product[:, :, :heads], product[:, :, heads:-1], product[:, :, -1:]
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores = scores.reshape(len(x), -1, *scores.shape[-2:])
    if mask is not None:
        scores = scores + mask
    if case.get("causal", True):
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = dropped(weights / weights.sum(-1, keepdims=True), case.get("attention_dropout"), 0)
    mixed = weights.reshape(*query.shape[:4], -1) @ value
    mixed = mixed.reshape(len(x), -1, *mixed.shape[-2:])
    product = np.einsum("bhtd,hdm->btm", mixed, w["out_weight"]) + w["out_bias"]
    key = 1 if case.get("attention_dropout") else 0
    attended = x + dropped(product, case.get("dropout"), key)
    return attended if pre else normalised(attended, w, kind)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def feedforward_part(x, w, mask, case):
    kind, pre = case.get("norm", "layer"), case.get("pre_norm", True)
    inner = normalised(x, w, kind) if pre else x
    hidden = inner @ w["weight1"].T + w["bias1"]
    act = {"relu": lambda x: np.maximum(x, 0), "silu": lambda x: x / (1 + np.exp(-x))}.get(
        case.get("activation", "gelu"), gelu
    )
    hidden = act(inner @ w["gate_weight"].T) * hidden if case.get("gated") else act(hidden)
    hidden = dropped(hidden, case.get("activation_dropout"), 0)
    product = hidden @ w["weight2"].T + w["bias2"]
    key = 1 if case.get("activation_dropout") else 0
    fed_forward = x + dropped(product, case.get("dropout"), key)
    return fed_forward if pre else normalised(fed_forward, w, kind)


def attention(**case):
    heads = case.pop("heads", 4)
    return nn.FusedAttention(DIM, heads, dtype="float64", std=0.4, **case)


def feedforward(**case):
    return nn.FusedFeedForward(DIM, 9, dtype="float64", std=0.4, **case)


PARTS = {
    "plain": (attention, attention_part, {}, None),
    "dropout": (attention, attention_part, RATES, None),
    "grouped": (attention, attention_part, {**RATES, "kv_heads": 2}, MASK),
    "post": (attention, attention_part, {"pre_norm": False, "causal": False}, PADDED),
    "rms": (attention, attention_part, {**RATES, "norm": "rms", "heads": 3}, MASK),
    "bare": (attention, attention_part, {"norm": None, "kv_heads": 1}, None),
    "forward": (feedforward, feedforward_part, {"dropout": 0.2, "activation_dropout": 0.3}, None),
    "gated": (feedforward, feedforward_part, {"gated": True, "activation": "silu"}, None),
    "relu": (feedforward, feedforward_part, {"activation": "relu", "pre_norm": False}, None),
}
"""How a part is made, its formula, its settings, its mask."""
MESHES = ((1,), (2,), (4,), (2, 2))


def run_job(name, extents, backend="threads"):
    """Value and gradients in a job: x, the mask, and parameters by name."""
    make, _, case, mask = PARTS[name]
    mesh, ranks = mesh_of(*extents), int(np.prod(extents))
    with pc.job("part", seed=SEED) as job:
        part = make(**case).place_split(mesh)
        x = pc.input("x", X.shape, "float64", mesh, rows(mesh))
        weight = pc.input("weight", X.shape, "float64", mesh, rows(mesh))
        given = (x,)
        if mask is not None:
            given = (x, pc.input("mask", mask.shape, "float64", mesh))
        y = part(*given)
        named = {f"p:{key}": each.value for key, each in part.named_parameters()}
        named.update(zip(("x", "mask"), given, strict=False))
        loss = (y * weight).sum()
        for key, grad in zip(named, pc.gradients(loss, list(named.values())), strict=True):
            pc.output(key, grad, finite=False)
        pc.output("y", y)
    feeds = {"x": X, "weight": WEIGHT} | ({} if mask is None else {"mask": mask})
    with pc.run(job, ranks=ranks, backend=backend) as session:
        outputs = session.step(**feeds)
        return dict(outputs), session.variables()


def run_eager(name, extents):
    make, _, case, mask = PARTS[name]
    mesh = mesh_of(*extents)
    pc.manual_seed(SEED)
    part = make(**case).place_split(mesh)
    given = [pc.tensor(X, mesh, rows(mesh), requires_grad=True)]
    if mask is not None:
        given.append(pc.tensor(mask, mesh, requires_grad=True))
    y = part(*given)
    (y * pc.tensor(WEIGHT, mesh, rows(mesh))).sum().backward()
    named = {f"p:{key}": each.value for key, each in part.named_parameters()}
    named.update(zip(("x", "mask"), given, strict=False))
    start = {key: each.value.numpy() for key, each in part.named_parameters()}
    return {"y": y.numpy(), **{key: each.grad.numpy() for key, each in named.items()}}, start


def check(name, results, start):
    """Value and gradients against the formula and its differences."""
    _, formula, case, mask = PARTS[name]
    arrays = {"x": X, **{f"p:{key}": each for key, each in start.items()}}
    if mask is not None:
        arrays["mask"] = mask

    def value(changed):
        w = {key[2:]: each for key, each in changed.items() if key.startswith("p:")}
        return formula(changed["x"], w, changed.get("mask"), case)

    np.testing.assert_allclose(results["y"], value(arrays), 1e-9, 1e-11)
    random = np.random.default_rng(1)
    for key, array in arrays.items():
        turn = random.normal(size=array.shape)
        # What is hidden stays hidden.
        turn = np.where(np.isfinite(array), turn, 0)
        moved = [
            (value({**arrays, key: array + step * turn}) * WEIGHT).sum() for step in (1e-6, -1e-6)
        ]
        slope = (moved[0] - moved[1]) / 2e-6
        np.testing.assert_allclose((results[key] * turn).sum(), slope, 1e-5, 1e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_its_formula_in_a_job(name):
    for extents in MESHES:
        check(name, *run_job(name, extents))


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_its_formula_on_eager_tensors(name):
    for extents in MESHES:
        for result in spawn(run_eager, int(np.prod(extents)), name, extents)[::3]:
            check(name, *result)


@pytest.mark.processes
def test_a_part_is_its_formula_between_processes():
    check("grouped", *run_job("grouped", (2,), "processes"))


# --- communication --------------------------------------------------------------------------------


def part_job(kind, backward):
    mesh = mesh_of(2)
    with pc.job("counted") as job:
        part = kind.place_split(mesh)
        x = pc.input("x", X.shape, "float64", mesh)
        y = part(x)
        if backward:
            named = {"x": x, **{key: each.value for key, each in part.named_parameters()}}
            for key, grad in zip(
                named, pc.gradients((y * y).sum(), list(named.values())), strict=True
            ):
                # Left as it is: reading it whole would gather it.
                pc.output(key, grad.mean())
        pc.output("y", y)
    return job


@pytest.mark.parametrize("make", [attention, feedforward])
@pytest.mark.parametrize("pre", [True, False])
def test_a_part_reduces_once_forward_and_once_backward(make, pre):
    part = make(dropout=0.1, pre_norm=pre)
    forward = collectives(compiled(part_job(part, backward=False)))
    assert forward == Counter(all_reduce=1)
    families = compiled(part_job(part, backward=True)).graph.families
    moved = [family for family in families if family.transfer is not None]
    # What is left are the means of gradients that are split: scalars.
    large = [family for family in moved if family.outputs[0].shape]
    assert [str(family.transfer.primitive) for family in large] == ["all_reduce"] * 2
    assert all(family.outputs[0].shape == X.shape for family in large)


@pytest.mark.parametrize("make", [attention, feedforward])
@pytest.mark.parametrize("pre", [True, False])
def test_an_eager_part_reduces_once_forward_and_once_backward(make, pre):
    def rank():
        mesh = mesh_of(2)
        part = make(dropout=0.1, pre_norm=pre).place_split(mesh)
        x = pc.tensor(X, mesh, requires_grad=True)
        with pc.comm_trace() as forward:
            y = part(x)
        loss = (y * y).sum()
        with pc.comm_trace() as backward:
            loss.backward()
        whole = str(x.grad.sbp) == "[B]"
        return forward.counts(), backward.counts(), forward.nbytes(), backward.nbytes(), whole

    for of_rank in spawn(rank, 2):
        assert of_rank == ({"all_reduce": 1}, {"all_reduce": 1}, X.nbytes, X.nbytes, True)


# --- training under passes ------------------------------------------------------------------------

BATCHES = RANDOM.normal(size=(4, 8, 6, 16)).astype(np.float32)
CONFIGS = {
    "zero": ({"zero": 3, "dp_axes": ("dp",)}, 1e-4),
    "sequence parallel": ({"sequence_parallel": True, "tp_axes": ("tp",)}, 1e-4),
    "micro-batches": ({"microbatches": 2}, 1e-4),
    "bfloat16": ({"precision": "bfloat16"}, 2e-2),
    "float16": ({"precision": "float16", "loss_scale": 64}, 2e-2),
}


def train(mesh, recomputed=False, **settings):
    with pc.job("layers", seed=SEED, config=pc.Config(**settings)) as job:
        x = pc.input("x", BATCHES.shape[1:], "float32", mesh, rows(mesh))
        for _ in range(2):
            attention = nn.FusedAttention(16, 4, 2, **RATES, rotary_base=100.0, std=0.3)
            layer = nn.FusedTransformerLayer(
                attention, nn.FusedFeedForward(16, 24, dropout=0.1, std=0.3)
            )
            x = (pc.checkpoint(layer) if recomputed else layer).place_split(mesh)(x)
        loss = (x * x).mean()
        pc.optim.AdamW(0.01).minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, ranks=mesh.size) as session:
        return [session.step(x=batch)["loss"] for batch in BATCHES]


@pytest.mark.slow
def test_layers_train_the_same_under_all_passes():
    plain = train(mesh_of(1))
    assert len(set(plain)) == len(plain)
    for recomputed in (False, True):
        np.testing.assert_allclose(train(mesh_of(2, 2), recomputed), plain, 1e-4)
    for name, (settings, bound) in CONFIGS.items():
        np.testing.assert_allclose(train(mesh_of(2, 2), **settings), plain, bound, err_msg=name)


PROGRAM = """
import sys
import numpy as np
import plancompiler as pc

def losses(ranks):
    mesh = pc.Placement("cpu", list(range(ranks)), axes=("tp",))
    pc.manual_seed(3)
    attention = pc.nn.FusedAttention(12, 4, 2, dropout=0.1, attention_dropout=0.2, std=0.4)
    layer = pc.nn.FusedTransformerLayer(attention, pc.nn.FusedFeedForward(12, 10, std=0.4))
    layer.place_split(mesh)
    optimizer = pc.optim.DistributedFusedLamb(0.02, max_norm=0.5, accumulate=2)
    rounded = []
    for step in range(6):
        pc.default_generator().start_step(step)
        data = np.random.default_rng(step).normal(size=(3, 5, 12)).astype(np.float32)
        loss = (layer(pc.tensor(data, mesh)) ** 2).mean()
        optimizer.minimize(loss)
        rounded.append(round(loss.item(), 4))
    return rounded

if __name__ == "__main__":
    world = pc.init()
    sys.stdout.write(f"{losses(world.size)}\\n")
    sys.stdout.flush()
"""


@pytest.mark.processes
def test_processes_train_as_threads_do(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    names = {"__name__": "program"}
    exec(compile(PROGRAM, "program", "exec"), names)  # noqa: S102  # the text of the script above
    (one,) = spawn(names["losses"], 1, 1)
    (two, again) = spawn(names["losses"], 2, 2)
    assert len(set(one)) == len(one)
    np.testing.assert_allclose(two, one, 1e-3)
    done = subprocess.run(
        [sys.executable, "-m", "plancompiler", "launch", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == [str(two), str(again)]


# --- generation -----------------------------------------------------------------------------------

CAPACITY, PROMPT = 9, 4
WIDE = 24
TOKENS = RANDOM.normal(size=(2, 8, WIDE))
MODELS = {
    "rotary": {"heads": 4},
    "grouped": {"heads": 4, "kv_heads": 2, "norm": "rms", "gated": True, "activation": "silu"},
    "three heads": {"heads": 3, "rotary_base": None, "bias": False},
}
PORTIONS = (PROMPT, 1, 1, 1, 1)


def stack(name):
    return nn.FusedMultiTransformer(
        WIDE, hidden=10, layers=2, dtype="float64", std=0.4, **MODELS[name]
    )


def generate_eager(name, ranks):
    mesh = mesh_of(ranks)
    pc.manual_seed(SEED)
    model = stack(name).place_split(mesh)
    caches = model.caches(2, CAPACITY).place_split(mesh)
    memory = [each.value.local for each in caches.parameters()]
    with pc.no_grad():
        whole, tokens, start, counts = model(pc.tensor(TOKENS, mesh)).numpy(), [], 0, []
        for portion in PORTIONS:
            x = pc.tensor(TOKENS[:, start : start + portion], mesh)
            with pc.comm_trace() as trace:
                y = model(x, caches, pc.tensor(np.int64(start), mesh))
            tokens.append(y.numpy())
            counts.append(trace.counts())
            start += portion
    kept = all(
        each.value.local is array for each, array in zip(caches.parameters(), memory, strict=True)
    )
    return whole, np.concatenate(tokens, 1), kept, counts


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("rotary", 1), ("rotary", 2), ("rotary", 4), ("grouped", 2), ("three heads", 2)],
)
def test_prompt_and_tokens_are_the_whole_sequence(name, ranks):
    (one,) = spawn(generate_eager, 1, name, 1)
    for whole, actual, kept, counts in spawn(generate_eager, ranks, name, ranks):
        np.testing.assert_allclose(whole, one[0], 1e-9, 1e-11)
        np.testing.assert_allclose(actual, whole, 1e-9, 1e-11)
        assert kept
        assert counts == [{"all_reduce": 4} if ranks > 1 else {}] * len(PORTIONS)


def generation_job(name, ranks, length):
    mesh = mesh_of(ranks)
    with pc.job("generate", seed=SEED) as job:
        model = stack(name).place_split(mesh)
        caches = model.caches(2, CAPACITY).place_split(mesh)
        x = pc.input("x", (2, length, WIDE), "float64", mesh)
        position = pc.input("position", (), "int64", mesh)
        pc.output("y", model(x, caches, position))
    return job


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "backend"),
    [
        ("rotary", 1, "threads"),
        ("rotary", 4, "threads"),
        ("grouped", 2, "threads"),
        ("three heads", 2, "threads"),
        ("grouped", 2, "processes"),
    ],
)
def test_jobs_generate_the_whole_sequence(name, ranks, backend, tmp_path):
    """One job takes the prompt, one goes on from its caches, token by token."""
    (one,) = spawn(generate_eager, 1, name, 1)
    job = generation_job(name, ranks, PROMPT)
    with pc.run(job, ranks=ranks, backend=backend) as session:
        outputs = [session.step(x=TOKENS[:, :PROMPT], position=np.int64(0))["y"]]
        session.save(tmp_path)
    job = generation_job(name, ranks, 1)
    with pc.run(job, ranks=ranks, backend=backend, restore=tmp_path) as session:
        for position in range(PROMPT, TOKENS.shape[1]):
            x = TOKENS[:, position : position + 1]
            outputs.append(session.step(x=x, position=np.int64(position))["y"])
    np.testing.assert_allclose(np.concatenate(outputs, 1), one[0], 1e-9, 1e-11)


def test_a_decoding_plan_changes_its_caches_in_place():
    compilation = compiled(generation_job("rotary", 2, 1))
    plan = compilation.plans[0]
    registers = plan.register_by_id
    cache = 2 * 2 * CAPACITY * (WIDE // 4) * 8  # of a rank: batch, heads, capacity, width
    caches = [
        registers[variable.register]
        for variable in plan.variables
        if variable.name.endswith(("keys", "values"))
    ]
    assert [each.nbytes for each in caches] == [cache] * 4
    assert plan.arena_bytes < cache * 4, "no second copy of the caches"


# --- examples and bad input -----------------------------------------------------------------------


@pytest.mark.processes
def test_the_example_of_generation_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    section = page.read_text().partition("## fused_multi_transformer")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    script = tmp_path / "generate.py"
    script.write_text(code)
    results = [
        subprocess.run(
            [sys.executable, "-m", "plancompiler", "launch", "-n", str(ranks), str(script)],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for ranks in (1, 2)
    ]
    assert results[0] == results[1]
    tokens = results[0].strip("[]\n").split(", ")
    assert len(tokens) == 20
    assert len(set(tokens[4:])) > 1


MESH = mesh_of(1)


def fused(**changes):
    shapes = {"qkv_weight": (2, 3, 6, DIM), "out_weight": (2, 6, DIM)}
    given = {
        name: pc.tensor(np.zeros(changes.pop(name, shape)), MESH) for name, shape in shapes.items()
    }
    return pc.fused_attention(pc.tensor(X, MESH), **given, **changes)


def at(position=0):
    return pc.tensor(np.int64(position), MESH)


def cache():
    return tuple(pc.tensor(np.zeros((BATCH, 2, 8, 6)), MESH) for _ in range(2))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (lambda: {"qkv_weight": (2, 3, 6, 5)}, ShapeError),
        (lambda: {"qkv_weight": (2, 2, 6, DIM)}, ShapeError),
        (lambda: {"out_weight": (DIM, DIM)}, ShapeError),
        (lambda: {"position": at()}, UsageError),
        (lambda: {"cache": cache()}, UsageError),
        (lambda: {"cache": cache(), "position": at(), "attention_dropout": 0.1}, UsageError),
        (lambda: {"cache": cache(), "position": at(), "mask": at()}, UsageError),
        (lambda: {"pre_norm": []}, UsageError),
        (lambda: {"dropout": 1.0}, AttributeValueError),
        (lambda: {"mask": pc.tensor(np.zeros((7, 7)), MESH)}, ShapeError),
    ],
)
def test_what_does_not_fit_is_refused(changes, error):
    fused()
    with pytest.raises(error):
        fused(**changes())


def test_settings_of_modules_are_checked():
    for make in (
        lambda: nn.FusedAttention(12, 5),
        lambda: nn.FusedAttention(12, 4, 3),
        lambda: nn.FusedAttention(12, 4, dropout=1.0),
        lambda: nn.FusedAttention(12, 4, norm="batch"),
        lambda: nn.FusedFeedForward(12, 24, activation_dropout=-0.5),
    ):
        with pytest.raises(AttributeValueError):
            make()
    with pytest.raises(AttributeValueError, match="unknown activation"):
        nn.FusedFeedForward(DIM, 5, activation="cube", dtype="float64").place(MESH)(
            pc.tensor(X, MESH)
        )
    with pytest.raises(UsageError, match="no axis"):
        nn.FusedAttention(12, 4).place_split(MESH, "model")
    model = nn.FusedMultiTransformer(DIM, 2, 8, layers=1, dtype="float64").place(MESH)
    with pytest.raises(UsageError, match="go together"):
        model(pc.tensor(X, MESH), position=at())
