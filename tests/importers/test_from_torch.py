"""What an imported model is: its names, structures, modes, lines and errors."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import FeedError, ModelImportError, UsageError
from plancompiler.importers.rules import TORCH_RULES
from tests.importers.models import MODELS, made, torch
from tests.importers.training import (
    ADAM,
    DP,
    ONE,
    RATE,
    TP,
    compare,
    fed,
    job_of,
    loss_of,
    reference,
    rows_split,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
nn = torch.nn


@pytest.fixture(scope="module")
def gpt2():
    module, example = made("gpt2")
    return module, example, pc.from_torch(module, example)


def test_the_model_of_the_readme_learns(tmp_path):
    """Its own weights, names and layouts."""
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "torch" in each]
    (tmp_path / "readme.py").write_text(code)
    made_there = runpy.run_path(str(tmp_path / "readme.py"))
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 8)).astype(np.float32)
    with pc.run(made_there["job"]) as session:
        losses = [session.step(x=x, labels=x.argmax(1) % 4)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "opt", "bert", "vit", "clip", "whisper_encoder", "resnet", "convnext"]
)
def test_in_float64_numbers_agree_to_nine_digits(name):
    module, example = made(name, "float64")
    if name in ("gpt2", "opt"):
        del example["labels"]  # their loss is computed in float32, whatever the model's dtype
    wanted = reference(module, example)
    model = pc.from_torch(module, example).place(ONE)
    compare(trained(model, example, ONE, ["B", "B"]), wanted, 1e-9, 1e-9)


@pytest.mark.slow
def test_batch_norm_in_training_mode_and_its_running_statistics():
    module, example = made("resnet", "float64", train=True)
    model = pc.from_torch(module, example).place(ONE)
    assert model.training
    job = job_of(model, example, ONE, ["B", "B"])
    original = module.train()
    with torch.no_grad():
        losses = [float(original(**example).loss) for _ in range(1)]
    with pc.run(job, ranks=1, cache=False) as session:
        assert float(session.step(**fed(example))["loss"]) == pytest.approx(losses[0], rel=1e-9)
        state = session.variables()
    for name, value in original.state_dict().items():
        if "running" in name:
            np.testing.assert_allclose(state[name], value.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_eager_training_and_compiled_training_agree_with_pytorch(gpt2):
    module, example, _ = gpt2
    wanted = reference(module, example)

    def losses(compiled: bool) -> list[float]:
        model = pc.from_torch(module, example).place(ONE)
        given = {
            name: pc.tensor(value.numpy(), ONE) if torch.is_tensor(value) else value
            for name, value in example.items()
        }
        optimizer = pc.optim.AdamW(model.parameters(), lr=RATE, **ADAM)
        call = pc.compile(lambda given: loss_of(model(**given))) if compiled else None
        made = []
        for _ in range(5):
            loss = loss_of(model(**given)) if call is None else call(given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made.append(loss.item())
        return made

    for compiled in (False, True):
        np.testing.assert_allclose(losses(compiled), wanted.losses[:5], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_modes_give_one_digest_and_more_layouts_agree(name):
    module, example = made(name)
    wanted = reference(module, example)
    model = pc.from_torch(module, example)
    both = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    placed = model.place(both, rows_split(model))
    compare(trained(placed, example, both, ["S(0)", "B"], steps=3), wanted, 1e-4, 1e-4)
    digests = set()
    for mode in ("naive", "rank_per_iter", "rank_per_thread"):
        job = job_of(placed, example, both, ["S(0)", "B"])
        with pc.run(job, ranks=4, mode=mode, cache=False) as session:
            digests.add(session.digest)
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_pipeline_of_two_stages(microbatches):
    module, example = made("llama")
    labels = example["labels"] = example["input_ids"].clone()
    assert (labels >= 0).all()  # so that each micro-batch counts alike
    wanted = reference(module, example)
    model = pc.from_torch(module, example)
    mesh = pc.Placement("cpu", [[[0]], [[1]]], ("pp", "dp", "tp"))
    model.place(mesh, pc.layouts.stages(model, "model.layers.*", axis="pp"))
    first = pc.layouts.stage_meshes(mesh, "pp")[0]
    with pc.job("stages", config=pc.Config(microbatches=microbatches)) as job:
        given = {name: pc.input(name, (4, 12), "int64", first) for name in ("input_ids", "labels")}
        loss = model(**given, use_cache=False).loss
        pc.optim.AdamW(RATE, **ADAM).minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, ranks=2, cache=False) as session:
        losses = [float(session.step(**fed(example))["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, wanted.losses[:3], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_training_state_split_over_ranks_and_a_plan_of_transformers(backend):
    module, example = made("llama")
    wanted = reference(module, example)
    model = pc.from_torch(module, example)
    mesh = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    model.place(mesh, pc.layouts.tensor_parallel(module.config, axis="tp"))
    assert str(model.model.layers.__dict__["0"].mlp.down_proj.weight.sbp) == "[B, S(1)]"
    with pc.job("zero", config=pc.Config(zero=3)) as job:
        given = {
            name: pc.input(name, (4, 12), "int64", mesh, ["S(0)", "B"])
            for name in ("input_ids", "labels")
        }
        loss = model(**given).loss
        pc.optim.AdamW(RATE, **ADAM).minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, ranks=4, cache=False, backend=backend) as session:
        losses = [float(session.step(**fed(example))["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, wanted.losses[:3], rtol=1e-5)


def test_stages_whose_labels_live_on_the_last():
    module, example = made("llama")
    wanted = reference(module, example)
    model = pc.from_torch(module, example)
    mesh = pc.Placement("cpu", [[[0], [1]], [[2], [3]]], ("pp", "dp", "tp"))
    model.place(mesh, pc.layouts.stages(model, "model.layers.*", "pp"))
    first, last = pc.layouts.stage_meshes(mesh, "pp")
    with pc.job("stages", config=pc.Config(microbatches=2)) as job:
        ids = pc.input("input_ids", (4, 12), "int64", first, ["S(0)", "B"])
        labels = pc.input("labels", (4, 12), "int64", last, ["S(0)", "B"])
        loss = model(input_ids=ids, labels=labels).loss
        pc.optim.AdamW(RATE, **ADAM).minimize(loss)
        pc.output("loss", loss)
    weights = {op.outputs[0]: op.placement for op in job.ops if op.kind == "variable"}
    products = [op for op in job.ops if op.kind == "matmul" and op.inputs[1] in weights]
    assert len(products) >= 15
    assert all(op.placement == weights[op.inputs[1]] for op in products)
    with pc.run(job, ranks=4, cache=False) as session:
        losses = [float(session.step(**fed(example))["loss"]) for _ in range(3)]
    # Micro-batches have means of their own, of other numbers of labels.
    np.testing.assert_allclose(losses, wanted.losses[:3], rtol=2e-2)


def test_micro_batches_of_attention_whose_heads_and_rows_are_merged_at_once():
    """PyTorch's attention turns the batch behind the length, and merges both for a product."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return {"loss": self.layers(x).pow(3).mean()}

    torch.manual_seed(0)
    module, example = Encoder(), {"x": torch.randn(4, 6, 16)}
    wanted = reference(module, example)
    model = pc.from_torch(module, example)
    compare(trained(model.place(DP), example, DP, ["S(0)", "B"], 2), wanted, 1e-5, 1e-4)
    job = job_of(model, example, DP, ["S(0)", "B"], pc.Config(microbatches=2), gradients=False)
    with pc.run(job, ranks=2, cache=False) as session:
        losses = [float(session.step(**fed(example))["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, wanted.losses[:3], rtol=1e-4)


def test_the_line_where_an_export_fails_is_the_authors():
    """At any depth, and not that of the call."""
    with pytest.raises(ModelImportError) as caught:
        pc.from_torch(nn.Sequential(nn.Linear(3, 3), DataDependent()), (torch.ones(1, 3),))
    file, _, line = str(caught.value.report.source).rpartition(":")
    assert file.endswith("test_from_torch.py")
    assert int(line) == DataDependent.forward.__code__.co_firstlineno + 1


def test_attention_of_gpt2_and_norms_of_llama_are_recognised(gpt2):
    _, _, model = gpt2
    with pc.job("gpt2") as job:
        ids = pc.input("ids", (4, 12), "int64", ONE)
        pc.output("loss", model.place(ONE)(input_ids=ids, labels=ids).loss)
    attention = [op for op in job.ops if op.kind == "attention"]
    assert [op.attr("causal") for op in attention] == [True, True]
    assert all(len(op.inputs) == 3 for op in attention)
    assert [op.kind for op in job.ops].count("gelu") == 2, "gelu, written with seven operations"
    assert [op.kind for op in job.ops].count("embedding") == 1, "positions are a slice"
    module, example = made("llama")
    llama = pc.from_torch(module, example).place(ONE)
    with pc.job("llama") as job:
        ids = pc.input("ids", (4, 12), "int64", ONE)
        pc.output("loss", llama(input_ids=ids, labels=ids).loss)
    kinds = [op.kind for op in job.ops]
    assert kinds.count("rms_norm") == 5
    keys = [op.inputs[1].shape for op in job.ops if op.kind == "attention"]
    assert keys == [(4, 2, 12, 8)] * 2, "heads of keys were copied"
    assert {op.attr("causal") for op in job.ops if op.kind == "attention"} == {True}


# --- names, structures, lines ---------------------------------------------------------------------


def test_names_are_the_authors_and_tied_weights_are_one(gpt2):
    module, _, model = gpt2
    model.place(ONE)
    assert list(model.state_dict()) == list(module.state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), module.state_dict()[name].numpy())
    assert "GPT2LMHeadModel(" in repr(model)


def test_weights_are_copied():
    module = nn.Linear(3, 2)
    before = module.weight.detach().numpy().copy()
    model = pc.from_torch(module, (torch.zeros(1, 3),))
    with torch.no_grad():
        module.weight.zero_()
    np.testing.assert_array_equal(model.place(ONE).weight.value.numpy(), before)


def test_ops_and_errors_have_the_authors_line(gpt2):
    _, _, model = gpt2
    with pc.job("gpt2") as job:
        ids = pc.input("ids", (4, 12), "int64", ONE)
        pc.output("logits", model.place(ONE)(input_ids=ids, labels=ids).logits)
    lines = {op.source.file for op in job.ops if op.kind not in ("input", "output")}
    assert any("modeling_gpt2" in line for line in lines)
    assert not any("plancompiler/importers" in line or "torch/nn" in line for line in lines), lines


class Nested(nn.Module):
    def forward(self, x, pair, *, scale=2.0, flags=None):
        first, second = pair["a"], pair["b"][0]
        return {"sum": x + first * scale, "parts": [second - 1, (x,)]}


def test_structures_of_arguments_and_results():
    x, a, b = (torch.randn(2, 3) for _ in range(3))
    module = Nested()
    model = pc.from_torch(module, {"x": x, "pair": {"a": a, "b": [b]}, "scale": 3.0})
    with pc.job("nested") as job:
        x_, a_, b_ = (pc.input(name, (2, 3), "float32", ONE) for name in "xab")
        out = model(x_, {"a": a_, "b": [b_]}, scale=3.0)
        assert list(out) == ["sum", "parts"]
        with pytest.raises(UsageError, match="another value than in the example"):
            model(x_, {"a": a_, "b": [b_]}, scale=4.0)
        pc.output("sum", out["sum"])
        pc.output("second", out["parts"][0])
        pc.output("x", out["parts"][1][0])
    with pc.run(job, ranks=1, cache=False) as session:
        made = session.step(x=x.numpy(), a=a.numpy(), b=b.numpy())
    np.testing.assert_allclose(made["sum"], (x + a * 3).numpy(), rtol=1e-6)
    np.testing.assert_allclose(made["second"], (b - 1).numpy(), rtol=1e-6)
    np.testing.assert_array_equal(made["x"], x.numpy())


def test_fields_by_name_and_position(gpt2):
    _, _, model = gpt2
    with pc.job("fields"):
        ids = pc.input("ids", (4, 12), "int64", ONE)
        out = model.place(ONE)(ids, labels=ids, use_cache=False)
        assert out.loss is out["loss"] is out[0]
        assert out.logits is out[1]
        assert list(out.keys()) == ["loss", "logits"]
        with pytest.raises(AttributeError, match=r"loss, logits and no 'hidden'"):
            _ = out.hidden
        pc.output("loss", out.loss)


def test_arguments_that_are_not_those_of_the_example(gpt2):
    _, _, model = gpt2
    model.place(ONE)
    with pc.job("wrong"):
        ids = pc.input("ids", (4, 12), "int64", ONE)
        short = pc.input("short", (4, 8), "int64", ONE)
        pc.output("ids", ids)
        with pytest.raises(FeedError, match="'labels'"):
            model(ids)
        with pytest.raises(FeedError, match=r"int64\[4, 8\]"):
            model(short, labels=ids)
        with pytest.raises(UsageError, match="attention_mask"):
            model(ids, labels=ids, attention_mask=ids)
        with pytest.raises(UsageError, match="fewer arguments"):
            model(ids, ids, ids, ids)


def test_a_batch_of_another_size():
    module, example = made("gpt2")
    model = pc.from_torch(module, example, batch="input_ids:0").place(ONE)
    for size in (4, 6, 2):
        rows = torch.randint(0, 48, (size, 12))
        with torch.no_grad():
            expected = float(module(input_ids=rows, labels=rows).loss)
        given = pc.tensor(rows.numpy(), ONE)
        assert model(given, labels=given).loss.item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(FeedError, match="different sizes"):
        model(given, labels=pc.tensor(np.zeros((3, 12), np.int64), ONE))
    with pytest.raises(FeedError, match=r"int64\[2, 8\]"):
        model(pc.tensor(np.zeros((2, 8), np.int64), ONE), labels=given)
    for wrong in ("input_ids:2", "tokens:0", "input_ids"):
        with pytest.raises(UsageError, match="no such axis"):
            pc.from_torch(module, example, batch=wrong)


def test_running_statistics_are_updated_once_in_a_step():
    module = nn.BatchNorm1d(3)
    model = pc.from_torch(module.train(), (torch.zeros(4, 3),)).place(ONE)
    with pc.job("twice"):
        x = pc.input("x", (4, 3), "float32", ONE)
        pc.output("y", model(x))
        with pytest.raises(pc.JobError, match="twice"):
            model(x)


def test_a_model_stays_in_its_mode(gpt2):
    _, _, model = gpt2
    assert not model.training
    assert model.eval() is model
    with pytest.raises(UsageError, match="evaluation mode"):
        model.train()


# --- sources --------------------------------------------------------------------------------------


def test_exported_programs_and_their_files(tmp_path):
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    program = torch.export.export(module, (x,))
    torch.export.save(program, tmp_path / "model.pt2")
    for source in (program, tmp_path / "model.pt2"):
        model = pc.from_torch(source).place(ONE)
        y = model(pc.tensor(x.numpy(), ONE))
        np.testing.assert_allclose(y.numpy(), module(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    (tmp_path / "broken.pt2").write_bytes(b"no program")
    with pytest.raises(ModelImportError, match=r"broken\.pt2"):
        pc.from_torch(tmp_path / "broken.pt2")


def test_a_model_on_the_meta_device_has_its_shapes_and_no_weights(tmp_path):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        example = (torch.empty(2, 3),)
    model = pc.from_torch(module, example)
    assert {name: each.shape for name, each in model.named_parameters()} == {
        name: tuple(each.shape) for name, each in module.named_parameters()
    }
    with pytest.raises(pc.errors.DataError, match=r"0\.weight' has no initial value"):
        model.place(ONE)(pc.tensor(np.zeros((2, 3), np.float32), ONE))


def test_buffers_on_the_meta_device_are_computed_from_the_configuration():
    """Rotary frequencies and position ids, which no file of weights has."""
    for name in ("llama", "gemma3", "opt", "whisper_encoder", "clip"):
        module, example = made(name)
        with torch.device("meta"):
            empty, _ = MODELS[name]()
        with torch.no_grad():
            expected = module(**example)
        model = pc.from_torch(empty.eval(), example).place(ONE)
        state = module.state_dict()
        for key, parameter in model.named_parameters():
            assert parameter.init == "missing", key
            parameter.init, parameter._stored = "stored", state[key].numpy().copy()
        given = {
            key: pc.tensor(value.numpy(), ONE) if torch.is_tensor(value) else value
            for key, value in example.items()
        }
        assert all(each.device.type == "meta" for each in empty.buffers())
        result = model(**given)[0].numpy()
        np.testing.assert_allclose(result, expected[0].numpy(), rtol=1e-4, atol=1e-5)


class Frequencies(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("known", torch.arange(3.0), persistent=False)
        self.register_buffer("random", torch.rand(3), persistent=False)
        self.register_buffer("unused", torch.rand(3), persistent=False)

    def reset_parameters(self):
        self.known.copy_(torch.arange(3.0))
        self.random.uniform_()

    def forward(self, x):
        return x * self.known + self.random


def test_buffers_on_the_meta_device_that_nothing_computes():
    with torch.device("meta"):
        module = Frequencies()
    with pytest.raises(ModelImportError, match=r"have no value.*Got: random on the meta device"):
        pc.from_torch(module, (torch.ones(3),))
    assert module.known.device.type == "meta"


class PartlyFrozen(nn.Module):
    """A scale that is no part of the gradient, computed with and without changes in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        with torch.no_grad():
            scale = self.weight * 2
            if self.in_place:
                scale += x
        return (x * scale * self.weight).sum()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("exported", [False, True])
def test_gradients_stop_at_no_grad(in_place, exported):
    module, x = PartlyFrozen(in_place), torch.tensor([1.0, -1.0, 2.0])
    module(x).backward()
    source = torch.export.export(module, (x,), strict=False) if exported else module
    model = pc.from_torch(source, None if exported else (x,)).place(ONE)
    model(pc.tensor(x.numpy(), ONE)).backward()
    gradient = model.weight.value.grad
    np.testing.assert_allclose(gradient.numpy(), module.weight.grad.numpy(), rtol=1e-6)
    again = pc.from_torch(source, None if exported else (x,))
    assert again.graph.nodes == model.graph.nodes, "importing changed the program"


def test_a_tensor_that_the_example_has_twice_is_two_inputs():
    class Difference(nn.Module):
        def forward(self, a, b):
            return a - 2 * b

    x = torch.ones(3)
    model = pc.from_torch(Difference(), {"a": x, "b": x}).place(ONE)
    a, b = (pc.tensor(np.full(3, value, np.float32), ONE) for value in (5, 1))
    np.testing.assert_array_equal(model(a=a, b=b).numpy(), [3, 3, 3])


class Strange(nn.Module):
    def forward(self, x):
        y = torch.special.bessel_j0(x)
        return torch.special.bessel_j0(y) + torch.special.i0(x)


def test_one_error_lists_every_operation_without_a_rule():
    with pytest.raises(ModelImportError) as caught:
        pc.from_torch(Strange(), (torch.eye(3),))
    text = str(caught.value)
    assert "special_bessel_j0.default (2 times" in text
    assert "i0.default" in text
    assert text.count("test_from_torch.py:") >= 3
    assert "@pc.torch_rule" in text


def test_a_rule_can_be_added_and_a_wrong_one_is_seen(monkeypatch):
    monkeypatch.setattr("plancompiler.importers.rules.TORCH_RULES", TORCH_RULES)
    before = dict(TORCH_RULES)

    class Bessel(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    try:

        @pc.torch_rule("aten.special_bessel_j0.default")
        def bessel(x):
            return x.sum()

        with pytest.raises(ModelImportError, match="another type than the original"):
            pc.from_torch(Bessel(), (torch.zeros(3),))

        @pc.torch_rule("aten.special_bessel_j0.default")
        def series(x):
            square = x * x * 0.25
            return 1 - square + square * square * 0.25

        model = pc.from_torch(Bessel(), (torch.zeros(3),)).place(ONE)
        x = np.array([0.1, 0.2, 0.3], np.float32)
        expected = torch.special.bessel_j0(torch.tensor(x)).numpy()
        np.testing.assert_allclose(model(pc.tensor(x, ONE)).numpy(), expected, rtol=1e-4)
    finally:
        TORCH_RULES.clear()
        TORCH_RULES.update(before)
    with pytest.raises(UsageError, match=r"namespace\.op\.overload"):
        pc.torch_rule("scale")


def test_layouts_whose_patterns_match_nothing(gpt2):
    module, _, model = gpt2
    with pytest.raises(UsageError, match=r"no parameter of this name.*'\*\.q_proj\.weight'"):
        model.place(TP, {"*.q_proj.weight": ["B", "S(0)"]})
    with pytest.raises(UsageError, match=r"plan matches no parameter.*'layers\.\*\.q_proj'"):
        model.place(TP, pc.layouts.tensor_parallel({"layers.*.q_proj": "colwise"}))
    with pytest.raises(UsageError, match="no tensor-parallel plan"):
        pc.layouts.tensor_parallel(module.config)
    with pytest.raises(UsageError, match=r"style that is not known.*diagonal"):
        pc.layouts.tensor_parallel({"h.*.mlp": "diagonal"})
    with pytest.raises(UsageError, match="no module has this name"):
        pc.layouts.stages(model, "*.layers.*")


class DataDependent(nn.Module):
    def forward(self, x):
        return x[x > 0].sum() if x.sum() > 0 else x.sum()


@pytest.mark.parametrize(
    ("source", "example", "error", "said"),
    [
        (DataDependent(), (torch.ones(3),), ModelImportError, "cannot export DataDependent"),
        (nn.Linear(2, 2), None, UsageError, "an example is needed"),
        (nn.Linear(2, 2), (torch.ones(2, 3),), ModelImportError, "cannot export Linear"),
        (lambda x: x, (torch.ones(3),), UsageError, "takes a PyTorch module"),
    ],
)
def test_what_cannot_be_imported(source, example, error, said):
    with pytest.raises(error, match=said):
        pc.from_torch(source, example)


# --- semantics of single operations ---------------------------------------------------------------


class Positions(nn.Module):
    """Rows by constant numbers, some of which follow one another; one is the padding's."""

    def __init__(self):
        super().__init__()
        self.padded = nn.Embedding(6, 3, padding_idx=2)
        self.table = nn.Embedding(6, 3)

    def forward(self, x):
        run = torch.arange(1, 5)
        return {
            "run": self.table(run) + x,
            "rows": self.table(run.expand(2, 4)).sum(0) * x,
            "padded": self.padded(run) * x,
            "whole": self.table(torch.arange(6).reshape(1, 6)).sum() * x,
            "grid": self.table(torch.arange(4).reshape(2, 2)).sum() * x,
            "mixed": self.table(torch.tensor([4, 3, 2, 1])) * x,
            "almost": x * 0.5 * (torch.tanh(0.79 * (x + 0.044715 * x**3)) + 1.0),
            "gelu": (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + x**3.0 * 0.044715))) * (x * 0.5),
        }


def test_rows_of_positions_and_the_written_gelu():
    torch.manual_seed(0)
    module, x = Positions(), torch.randn(4, 3)
    model = pc.from_torch(module, (x,))
    assert [node.target for node in model.graph.nodes].count("imported.gelu.tanh") == 1
    with pc.job("positions") as job:
        out = model.place(ONE)(pc.input("x", (4, 3), "float32", ONE))
        for name, value in out.items():
            pc.output(name, value)
        total = pc.concat([value.reshape(-1) for value in out.values()], 0).sum()
        tables = [model.padded.weight.value, model.table.weight.value]
        for name, gradient in zip(("one", "two"), pc.gradients(total, tables), strict=True):
            pc.output(name, gradient)
    with pc.run(job, ranks=1, cache=False) as session:
        made = session.step(x=x.numpy())
    expected = module(x)
    sum(value.sum() for value in expected.values()).backward()
    for name, value in expected.items():
        np.testing.assert_allclose(made[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, table in (("one", module.padded), ("two", module.table)):
        np.testing.assert_allclose(made[name], table.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


class Operations(nn.Module):
    """Operations whose meaning in PyTorch differs from the obvious one somewhere."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def forward(self, x, ids, mask):
        q = x.reshape(2, 3, 4)
        return {
            "promoted": ids[:, :1] + x[:2, :1] * 2,
            "halved": ids / 2,
            "floored": ids // 2,
            "compared": (ids < 2.5).to(torch.float32),
            "negative": x[-1, [-1, 0]],
            "outer": x[torch.tensor([[0], [2]]), torch.tensor([1, -1])],
            "looked": x[ids[:, 0]],
            "chunked": torch.cat(torch.chunk(x, 4, dim=0)[::-1]),
            "strided": x[::2, 1:],
            "padded": nn.functional.pad(x, (1, -1, 2, 0), value=3.0),
            "attended": nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask),
            "added": nn.functional.scaled_dot_product_attention(
                q, q, q, attn_mask=mask.to(torch.float32) * -2
            ),
            "normed": nn.functional.layer_norm(q, (3, 4)),
            "spread": x.var(0) + x.std(1, correction=0).sum(),
            "highest": x.max(dim=1).values + x.max(dim=1).indices,
            "rows": self.table(ids) * self.steps,
            "exact": nn.functional.gelu(x) + nn.functional.gelu(x, approximate="tanh"),
            "filled": x.masked_fill(x > 0, float("-inf")).clamp(min=-3),
            "smooth": nn.functional.cross_entropy(x[:2], ids[:, 0] % 4, label_smoothing=0.1),
            "shares": nn.functional.cross_entropy(x, x.softmax(-1).flip(0), label_smoothing=0.2),
        }


@pytest.mark.parametrize("mesh", [ONE, DP, TP], ids=["one", "dp", "tp"])
def test_operations_mean_what_they_mean_in_pytorch(mesh):
    torch.manual_seed(0)
    example = {
        "x": torch.randn(6, 4),
        "ids": torch.tensor([[0, 3, 5], [1, 0, 2]]),
        "mask": torch.tensor([[True, False, True]] * 2 + [[False, True, True]]),
    }
    module = Operations()
    model = pc.from_torch(module, example).place(mesh)
    with pc.job("operations") as job:
        given = {
            name: pc.input(name, tuple(each.shape), str(each.dtype)[len("torch.") :], mesh)
            for name, each in example.items()
        }
        out = model(**given)
        for name, value in out.items():
            pc.output(name, value, finite=False)
        (gradient,) = pc.gradients(out["rows"].sum(), [model.table.weight.value])
        pc.output("gradient", gradient)
    with pc.run(job, ranks=mesh.size, cache=False) as session:
        made = session.step(**{name: each.numpy() for name, each in example.items()})
    expected = module(**example)
    expected["rows"].sum().backward()
    for name, value in expected.items():
        array = value.detach().numpy()
        if array.shape:  # numbers come back as Python's
            assert made[name].dtype == array.dtype, name
        np.testing.assert_allclose(made[name], array, rtol=2e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(made["gradient"], module.table.weight.grad.numpy(), rtol=1e-6)


def test_a_loss_without_any_label_is_not_a_number():
    class Loss(nn.Module):
        def forward(self, x, labels):
            return nn.functional.cross_entropy(x, labels)

    x, labels = torch.zeros(2, 3), torch.full((2,), -100)
    model = pc.from_torch(Loss(), (x, labels)).place(ONE)
    assert torch.isnan(Loss()(x, labels))
    with np.errstate(invalid="ignore"):
        loss = model(pc.tensor(x.numpy(), ONE), pc.tensor(labels.numpy(), ONE))
    assert np.isnan(loss.numpy())


class Drawing(torch.nn.Module):
    """Random numbers of every kind, which are not those of PyTorch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4096))

    def forward(self, x):
        return {
            "uniform": torch.rand(4096) * self.weight,
            "normal": x + self.weight.exp() * torch.randn_like(x),
            "placed": torch.empty_like(x).uniform_(2, 4),
            "shifted": torch.empty_like(x).normal_(3, 2),
            "waits": torch.empty_like(x).exponential_(2.0),
            "chances": torch.bernoulli(x + 0.25),
            "kept": torch.bernoulli(x, 0.75),
            "whole": torch.randint(2, 6, (4096,)).float(),
            "like": torch.randint_like(x, 3),
            "order": torch.randperm(4096).float(),
            "choices": torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), 4096, True).float(),
            "gumbel": torch.nn.functional.gumbel_softmax(x.reshape(64, 64)).reshape(-1),
        }


MOMENTS = {
    "uniform": (0.5, 12**-0.5),
    "normal": (0.0, np.e),
    "placed": (3.0, 3**-0.5),
    "shifted": (3.0, 2.0),
    "waits": (0.5, 0.5),
    "chances": (0.25, 0.1875**0.5),
    "kept": (0.75, 0.1875**0.5),
    "whole": (3.5, 1.25**0.5),
    "like": (1.0, (2 / 3) ** 0.5),
    "order": (2047.5, 4096 / 12**0.5),
    "choices": (1.5, 0.75**0.5),
    "gumbel": (1 / 64, None),
}
"""Means and standard deviations."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_numbers_are_drawn_anew_in_each_step(ranks):
    example = (torch.zeros(4096),)
    mesh = pc.Placement("cpu", range(ranks))
    model = pc.from_torch(Drawing(), example).place(mesh)
    with pc.job("draws") as job:
        made = model(pc.input("x", (4096,), "float32", mesh, ["S(0)"]))
        for name, each in made.items():
            pc.output(name, each)
        (slope,) = pc.gradients(made["normal"].sum(), [model.weight.value])
        pc.output("slope", slope)
    feed = np.zeros(4096, np.float32)
    with pc.run(job, ranks=ranks, cache=False) as session:
        first, second = (session.step(x=feed) for _ in range(2))
    for name, (mean, deviation) in MOMENTS.items():
        assert first[name].mean() == pytest.approx(mean, abs=0.1 * (deviation or 1)), name
        if deviation is not None:
            assert first[name].std() == pytest.approx(deviation, rel=0.1), name
        assert not np.array_equal(first[name], second[name]), name
    assert sorted(first["order"]) == list(range(4096))
    np.testing.assert_allclose(first["slope"], first["normal"], rtol=1e-5)


class Masked(torch.nn.Module):
    """It takes the columns, pairs and rows that masks choose."""

    def __init__(self, changes=False):
        super().__init__()
        self.layer = torch.nn.Linear(6, 8)
        self.register_buffer("columns", torch.arange(8) % 3 == 0)
        self.register_buffer("pairs", torch.eye(4, 8) > 0, persistent=False)
        self.register_buffer("nothing", torch.zeros(4, dtype=torch.bool))
        self.head = torch.nn.Linear(3, 2)
        self.changes = changes

    def forward(self, x):
        y = self.layer(x)
        chosen = self.head(y[:, self.columns])
        if self.changes:
            self.columns.logical_not_()
        return chosen, y[self.pairs], y[..., self.columns, None], y[self.nothing].sum()


def test_masks_that_are_buffers_choose_elements():
    module, x = Masked(), torch.randn(4, 6)
    wanted = module(x)
    sum((each**2).sum() for each in wanted).backward()
    for ranks in (1, 2):
        mesh = pc.Placement("cpu", range(ranks))
        model = pc.from_torch(module, (x,)).place(mesh, {"layer.weight": ["S(0)"]})
        with pc.job("masked") as job:
            made = model(pc.input("x", (4, 6), "float32", mesh, ["S(0)"]))
            for number, each in enumerate(made):
                pc.output(f"result {number}", each)
            loss = sum((each**2).sum() for each in made)
            (slope,) = pc.gradients(loss, [model.layer.weight.value])
            pc.output("slope", slope)
        with pc.run(job, ranks=ranks, cache=False) as session:
            out = session.step(x=x.numpy())
        for number, each in enumerate(wanted):
            expected = each.detach().numpy()
            np.testing.assert_allclose(out[f"result {number}"], expected, rtol=1e-5, atol=1e-6)
        expected = module.layer.weight.grad.numpy()
        np.testing.assert_allclose(out["slope"], expected, rtol=1e-4, atol=1e-5)


def test_a_mask_that_changes_cannot_choose_elements():
    with pytest.raises(ModelImportError, match=r"are taken changes.* Got: columns"):
        pc.from_torch(Masked(changes=True), (torch.randn(4, 6),))
