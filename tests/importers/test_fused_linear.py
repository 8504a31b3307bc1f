"""Layers whose outputs are several things in one, held with an axis for them."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import DataError
from plancompiler.frontend.weights import weight_entries, write_weights
from plancompiler.importers.model_folder import read_model, write_model
from plancompiler.importers.torch_rules import TORCH_RULES
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import compile_plans
from tests.importers.models import SIZES, made, torch, transformers
from tests.importers.training import (
    ONE,
    TP,
    Trained,
    compare,
    fed,
    job_of,
    reference,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BOTH = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
BLOCKS = {
    "*.attn.c_attn.weight": ["B", "S(2)"],
    "*.attn.c_attn.bias": ["B", "S(1)"],
    "*.attn.c_proj.weight": ["B", "S(0)"],
    "*.mlp.c_fc.weight": ["B", "S(1)"],
    "*.mlp.c_fc.bias": ["B", "S(0)"],
    "*.mlp.c_proj.weight": ["B", "S(0)"],
}


def in_files(result: Trained, wanted: Trained) -> Trained:
    """With the author's shapes, in which elements have the same order."""
    gradients = {
        name: value.reshape(wanted.gradients[name].shape)
        for name, value in result.gradients.items()
    }
    return Trained(result.losses, gradients, {})


@pytest.mark.parametrize(
    ("mesh", "layout", "tolerance"),
    [(TP, BLOCKS, 1e-4), (BOTH, BLOCKS, 1e-4)],
)
def test_query_key_and_value_of_gpt2_train_as_in_pytorch(mesh, layout, tolerance):
    module, example = made("gpt2")
    wanted = reference(module, example)
    model = pc.from_torch(module, example, parts=True).place(mesh, layout)
    shapes = {name: each.shape for name, each in model.named_parameters()}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (32, 3, 32)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (3, 32)
    result = trained(model, example, mesh, ["S(0)", "B"])
    compare(in_files(result, wanted), wanted, tolerance, tolerance)


FUSED = {
    "layers.*.self_attn.qkv_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
HEADS_OF_THREE = {
    "layers.*.attention.query_key_value": "colwise",
    "layers.*.attention.dense": "rowwise",
    "layers.*.mlp.dense_h_to_4h": "colwise",
    "layers.*.mlp.dense_4h_to_h": "rowwise",
}
"""GPT-NeoX has query, key and value of a head side by side: a plain split crosses no border."""
HEADS_OF_BLOOM = {
    "transformer.h.*.self_attention.query_key_value": "colwise",
    "transformer.h.*.self_attention.dense": "rowwise",
    "transformer.h.*.mlp.dense_h_to_4h": "colwise",
    "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
}
"""Bloom multiplies matrices whose batch and heads are one axis."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("GPT2", BLOCKS),
        ("Phi3", pc.layouts.tensor_parallel(FUSED)),
        ("GPTNeoX", pc.layouts.tensor_parallel(HEADS_OF_THREE)),
        ("Bloom", pc.layouts.tensor_parallel(HEADS_OF_BLOOM)),
    ],
)
def test_each_layer_has_two_reductions_forward_and_two_backward(kind, layout):
    """As in `examples/gpt.py`; query, key and value are cut apart, sliced, or in turns."""

    def collectives(layers: int) -> int:
        config = getattr(transformers, f"{kind}Config")(
            **{**SIZES, "num_hidden_layers": layers, "intermediate_size": 64}
        )
        config.num_key_value_heads = 4
        torch.manual_seed(0)
        ids = torch.randint(0, 48, (4, 12))
        example = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
        causal = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        module = getattr(transformers, causal)(config).eval()
        model = pc.from_torch(module, example, parts=True)
        job = job_of(model.place(TP, layout), example, TP, ["S(0)", "B"], gradients=False)
        plan = compile_plans(job, 2, only_ranks=(0,)).plans[0]
        return sum(task.kind is TaskKind.COLLECTIVE_BOXING for task in plan.tasks)

    assert collectives(3) - collectives(2) == 4


def test_a_plan_splits_each_part_of_gate_and_up():
    """Phi-3's `gate_up_proj` is cut into halves; what its plan calls colwise splits both."""
    module, example = made("phi3")
    wanted = reference(module, example)
    model = pc.from_torch(module, example, parts=True)
    plan = {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    model.place(TP, pc.layouts.tensor_parallel(plan))
    fused = dict(model.named_parameters())["model.layers.0.mlp.gate_up_proj.weight"]
    assert (fused.shape, str(fused.sbp)) == ((2, 48, 32), "[B, S(1)]")
    result = trained(model, example, TP, ["B", "B"], steps=3)
    compare(in_files(result, wanted), wanted, 1e-4, 1e-4)


def test_weights_have_the_shapes_of_their_author_in_files(tmp_path):
    """Loaded split, exported, and read by transformers; checkpoints read into other layouts."""
    module, example = made("gpt2")
    module.save_pretrained(tmp_path / "given")
    with torch.device("meta"):
        empty = type(module)(module.config).eval()
    model = pc.from_torch(empty, example, parts=True)
    pc.load_weights(model, tmp_path / "given")
    job = job_of(model.place(TP, BLOCKS), example, TP, ["B", "B"], gradients=False)
    with pc.run(job, ranks=2, cache=False) as session:
        session.export_weights(tmp_path / "same", model)
        session.step(**fed(example))
        session.save(tmp_path / "checkpoint")
        session.export_weights(tmp_path / "trained")
        expected = float(session.step(**fed(example))["loss"])
    same = type(module).from_pretrained(tmp_path / "same")
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(same.state_dict()[name].numpy(), value.numpy())
    with torch.no_grad():
        after = type(module).from_pretrained(tmp_path / "trained").eval()(**example).loss.item()
    assert after == pytest.approx(expected, rel=1e-5)
    other = job_of(model.place(ONE), example, ONE, ["B", "B"], gradients=False)
    with pc.run(other, ranks=1, cache=False, restore=tmp_path / "checkpoint") as session:
        assert float(session.step(**fed(example))["loss"]) == pytest.approx(expected, rel=1e-5)


def test_layers_whose_parts_are_not_all_that_is_read_stay_as_they_are():
    """One whose result is read besides, one with unequal parts, and two with one weight."""

    class Several(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.unequal, self.tied, self.cut = (torch.nn.Linear(6, 6) for _ in range(4))
            self.twin = torch.nn.Linear(6, 6)
            self.twin.weight = self.tied.weight
            self.sliced, self.overlapping, self.gaps = (torch.nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            read = self.read(x)
            a, b = read.chunk(2, -1)
            c, d = self.unequal(x).split([2, 4], -1)
            e, f = self.tied(x).chunk(2, -1)
            g, h = self.twin(x).chunk(2, -1)
            i, j = self.cut(x).chunk(2, -1)
            s, t, u = self.sliced(x), self.overlapping(x), self.gaps(x)
            sums = a * b + c.sum() * d.mean() + e * f + g * h + i * j
            sums = sums + s[:, 3:] * s[:, :-3].sin() + t[:, :3] * t[:, 2:5] + u[:, :1] * u[:, 3:4]
            return sums.sum() + read.sum()

    torch.manual_seed(0)
    module, x = Several(), torch.randn(4, 6)
    model = pc.from_torch(module, (x,), parts=True)
    shapes = {name: each.shape for name, each in model.named_parameters() if "weight" in name}
    assert shapes.pop("cut.weight") == shapes.pop("sliced.weight") == (2, 3, 6)
    assert set(shapes.values()) == {(6, 6)}
    wanted = module(x)
    wanted.backward()
    with pc.job("parts") as job:
        result = model.place(ONE)(pc.input("x", (4, 6), "float32", ONE, ["B", "B"]))
        pc.output("result", result)
        (gradient,) = pc.gradients(result, [model.cut.weight.value])
        pc.output("gradient", gradient)
    with pc.run(job, ranks=1, cache=False) as session:
        outputs = session.step(x=x.numpy())
    np.testing.assert_allclose(outputs["result"], wanted.detach(), rtol=1e-5)
    cut = module.cut.weight.grad.numpy().reshape(2, 3, 6)
    np.testing.assert_allclose(outputs["gradient"], cut, rtol=1e-5, atol=1e-6)


def test_a_folder_keeps_the_shapes_of_files(tmp_path):
    module, example = made("gpt2")
    model = pc.from_torch(module, example, parts=True)
    write_model(model, tmp_path / "model")
    again = read_model(tmp_path / "model", TORCH_RULES)
    job = job_of(again.place(TP, BLOCKS), example, TP, ["B", "B"], gradients=False)
    with pc.run(job, ranks=2, cache=False) as session:
        session.export_weights(tmp_path / "out")
        loss = float(session.step(**fed(example))["loss"])
    assert loss == pytest.approx(module(**example).loss.item(), rel=1e-5)
    wanted = module.state_dict()
    for name, (_, _, stored) in weight_entries(tmp_path / "out").items():
        assert stored.shape == tuple(wanted[name].shape)


def test_weights_of_other_shapes_are_refused(tmp_path):
    module, example = made("gpt2")
    model = pc.from_torch(module, example, parts=True)
    name = "transformer.h.0.attn.c_attn.weight"
    for shape in ((32, 3, 32), (96, 32)):
        write_weights(tmp_path, {name: np.zeros(shape, "float32")}, 1 << 20)
        with pytest.raises(DataError, match=r"must be float32\[32, 96\]"):
            pc.load_weights(model, tmp_path, strict=False)
