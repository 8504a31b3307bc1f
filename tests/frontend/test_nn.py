"""Modules: names and layouts of parameters, and what the layers compute."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import (
    AttributeValueError,
    PlacementError,
    PlacementMismatchError,
    SbpAxisError,
    SbpLengthError,
    TracingError,
    UsageError,
)
from tests.dense import DenseRun, run_dense

nn = pc.nn
MESH = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))


def traced(*models, shape=(2, 4), placement=MESH):
    """A job that applies each model to one input."""
    with pc.job("j") as job:
        x = pc.input("x", shape, "float32", placement)
        for number, model in enumerate(models):
            pc.output(str(number), model(x))
    return job


def variables(job):
    return {op.attr("name"): op for op in job.ops if op.kind == "variable"}


def test_names_are_paths_from_the_root():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    names = ["0.weight", "0.bias", "2.weight"]
    assert [name for name, _ in model.named_parameters()] == names
    assert list(variables(traced(model))) == names


def test_names_of_a_transformer_block():
    job = traced(nn.TransformerBlock(4, heads=2), shape=(2, 3, 4))
    layers = [
        "norm1",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.projection",
        "norm2",
        "mlp.fc1",
        "mlp.fc2",
    ]
    assert list(variables(job)) == [f"{x}.{y}" for x in layers for y in ("weight", "bias")]


def test_a_child_that_runs_first_is_named_by_its_root():
    class Two(nn.Module):
        def __init__(self):
            self.first = nn.Linear(4, 4)
            self.scale = nn.Parameter((4,), init="ones")

    two = Two()
    with pc.job("j") as job:
        x = pc.input("x", (2, 4), "float32", MESH)
        pc.output("y", two.first(x) * two.scale.place(MESH).value)
    assert list(variables(job)) == ["first.weight", "first.bias", "scale"]


def test_roots_whose_names_collide_get_a_prefix():
    job = traced(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    assert list(variables(job)) == [
        "weight",
        "bias",
        "linear_1.weight",
        "linear_1.bias",
        "layer_norm_1.weight",
        "layer_norm_1.bias",
    ]


def test_parameters_without_a_module_have_their_own_name():
    with pc.job("j") as job:
        for name in ("a", "b", "a"):
            assert nn.Parameter((2,), name=name).place(MESH).value.shape == (2,)
        pc.output("y", pc.zeros((2,), "float32", MESH))
    assert list(variables(job)) == ["a", "b", "a_1"]


def test_one_parameter_in_two_places_is_one_variable():
    class Tied(nn.Module):
        def __init__(self):
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]
    with pc.job("j") as job:
        ids = pc.input("ids", (3,), "int64", MESH)
        pc.output("y", model(ids))
    assert list(variables(job)) == ["embedding.weight"]


def test_a_module_serves_several_jobs():
    model = nn.Linear(4, 4)
    first, second = traced(model), traced(model, placement=GRID)
    assert list(variables(first)) == list(variables(second)) == ["weight", "bias"]
    assert variables(second)["weight"].placement == GRID
    with pc.job("j") as job:
        x = pc.input("x", (2, 4), "float32", MESH)
        pc.output("y", model(model(x)))
    assert len(variables(job)) == 2


def test_parameters_live_where_they_are_placed_or_where_the_input_is():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).place(
        GRID, {"0.weight": ["B", "S(0)"], "0.bias": "[B, S(0)]", "1.weight": ["B", "S(1)"]}
    )
    actual = variables(traced(model, nn.LayerNorm(4), placement=GRID))
    assert {name: str(op.sbp) for name, op in actual.items()} == {
        "0.weight": "[B, S(0)]",
        "0.bias": "[B, S(0)]",
        "1.weight": "[B, S(1)]",
        "1.bias": "[B, B]",
        "weight": "[B, B]",
        "bias": "[B, B]",
    }
    assert {op.placement for op in actual.values()} == {GRID}


def test_children_can_be_placed_elsewhere():
    later = pc.Placement("cpu", [2, 3])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).place(MESH)
    model[1].place(later)
    with pytest.raises(PlacementMismatchError):
        traced(model)
    with pc.job("j") as job:
        x = pc.input("x", (2, 4), "float32", MESH)
        pc.output("y", model[1](model[0](x).redistribute(later)))
    assert [op.placement for op in variables(job).values()] == [MESH, MESH, later, later]


@pytest.mark.parametrize(
    ("error", "sbp", "parts"),
    [
        (UsageError, {"wieght": "B"}, ("'wieght'", "weight, bias")),
        (SbpLengthError, {"weight": ["B"]}, ("2 entries",)),
        (SbpAxisError, {"bias": ["B", "S(1)"]}, ("below 1",)),
    ],
)
def test_wrong_layouts_are_refused_with_the_line(error, sbp, parts):
    with pytest.raises(error) as caught:
        nn.Linear(4, 4).place(GRID, sbp)
    assert all(part in str(caught.value) for part in parts)
    assert "test_nn.py:" in caught.value.report.source


def test_a_parameter_needs_a_placement():
    with pytest.raises(PlacementError, match=r"'weight' has no placement"), pc.job("j"):
        _ = nn.Linear(2, 2).weight.value


def test_modules_need_a_job_and_a_forward():
    with pc.job("j") as job:
        x = pc.input("x", (2, 4), "float32", MESH)
        pc.output("x", x)
    with pytest.raises(TracingError):
        nn.Linear(4, 4)(x)
    with pytest.raises(UsageError, match="Module defines no forward"), pc.job("k"):
        nn.Module()(3)
    assert job.outputs


def test_training_mode_and_freezing_reach_all_children():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    x = np.ones((2, 4), np.float32)
    kinds = [op.kind for op in traced(model).ops]
    assert kinds.count("dropout") == 2
    kinds = [op.kind for op in traced(model.eval()).ops]
    assert "dropout" not in kinds
    assert model[1].training is False
    assert model.train().training is True
    model.freeze()
    assert {op.attr("trainable") for op in variables(traced(model)).values()} == {False}
    model.freeze(False)
    assert {op.attr("trainable") for op in variables(traced(model)).values()} == {True}
    assert run_dense(traced(nn.Dropout(0.0)), 1, {"x": x})[0]["0"].tolist() == x.tolist()


def test_layers_compute_what_they_say():
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    layers = [nn.Linear(4, 3), nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Sigmoid()]
    run = DenseRun(traced(*layers))
    outputs = run.step(x=x)
    weight, bias = run.variables["weight"], run.variables["bias"]
    assert np.abs(weight).max() <= 0.5
    expected = [x @ weight.T + bias, np.maximum(x, 0), None, np.tanh(x), 1 / (1 + np.exp(-x))]
    for number, array in enumerate(expected):
        if array is not None:
            np.testing.assert_allclose(outputs[str(number)], array, rtol=1e-5, atol=1e-6)
    assert (np.abs(outputs["2"] - x * (1 / (1 + np.exp(-1.702 * x)))) < 0.03).all()


def test_initial_values():
    model = nn.Sequential(nn.Linear(64, 64, std=0.1), nn.LayerNorm(64))
    weights = DenseRun(traced(model, shape=(2, 64))).variables
    assert abs(weights["0.weight"].std() - 0.1) < 0.01
    assert (weights["0.bias"] == 0).all()
    assert (weights["1.weight"] == 1).all()
    again = DenseRun(traced(model, shape=(2, 64))).variables
    np.testing.assert_array_equal(weights["0.weight"], again["0.weight"])


def test_attention_heads_do_not_mix():
    attention = nn.CausalSelfAttention(4, heads=2)
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    run = DenseRun(traced(attention, shape=x.shape))
    outputs = run.step(x=x)["0"]
    w = run.variables

    def layer(name, of):
        return of @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    heads = []
    for columns in (slice(0, 2), slice(2, 4)):
        q, k, v = (layer(name, x[0])[:, columns] for name in ("query", "key", "value"))
        scores = np.where(np.tri(3, dtype=bool), q @ k.T / np.sqrt(2), -np.inf)
        powers = np.exp(scores)
        heads.append(powers / powers.sum(1, keepdims=True) @ v)
    expected = layer("projection", np.concatenate(heads, 1))
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-4, atol=1e-6)


def test_containers():
    modules = nn.ModuleList([nn.ReLU()])
    modules.append(nn.Linear(2, 2))
    assert len(modules) == 2
    assert [name for name, _ in modules.named_parameters()] == ["1.weight", "1.bias"]
    assert repr(nn.Sequential(nn.ReLU())) == "Sequential(\n  0: ReLU()\n)"
    assert repr(modules[1].bias).startswith("Parameter((2,), 'float32', 'uniform'")


@pytest.mark.parametrize(
    "make", [lambda: nn.Dropout(1.0), lambda: nn.CausalSelfAttention(6, heads=4)]
)
def test_wrong_sizes_are_refused(make):
    with pytest.raises(AttributeValueError):
        make()


def test_modules_below_a_module():
    inner = nn.Linear(3, 3)
    model = nn.Sequential(nn.Sequential(inner, nn.ReLU()), inner)
    named = [*model.named_modules()]
    assert [name for name, _ in named] == ["", "0", "0.0", "0.1"]  # what is shared, once
    assert [each for _, each in named] == model.modules()
    assert model.children() == [model[0], inner]
    seen = []
    assert model.apply(seen.append) is model
    assert seen == [inner, model[0][1], model[0], inner, model]


def test_a_tensor_or_an_array_is_the_initial_value_of_a_parameter():
    mesh = pc.Placement("cpu", [0, 1])
    values = np.arange(6.0).reshape(2, 3)

    def program():
        of_tensor = nn.Parameter(pc.tensor(values, mesh, "S(1)"))
        of_array = nn.Parameter(values.astype(np.float32), trainable=False).place(mesh)
        made = [each.value for each in (of_tensor, of_array)]
        return [(str(each.dtype), each.requires_grad, each.numpy()) for each in made]

    for made in spawn(program, 2):
        assert [each[:2] for each in made] == [("float64", True), ("float32", False)]
        for each in made:
            np.testing.assert_array_equal(each[2], values)
    with pc.job("value") as job:
        x = pc.input("x", (2, 3), "float32", mesh)
        pc.output("y", x)
        with pytest.raises(UsageError, match="a value of a job is no initial value"):
            nn.Parameter(x)
    assert job.outputs
