"""Layouts of whole models by the names of mesh axes."""

from __future__ import annotations

import pytest

import plancompiler as pc
from plancompiler.errors import PlacementError, UsageError

MESH = pc.Placement("cpu", [[[0, 1]], [[2, 3]]], ("pp", "dp", "tp"))


class Model(pc.nn.Module):
    def __init__(self, layers: int = 3):
        self.embed = pc.nn.Embedding(8, 4)
        self.layers = pc.nn.ModuleList(pc.nn.TransformerBlock(4, 2) for _ in range(layers))
        self.norm = pc.nn.LayerNorm(4)
        self.head = pc.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.attention.query": "colwise",
    "layers.*.attention.projection": "rowwise",
    "norm": "sequence_parallel",
}


def placed(model):
    return {
        name: (each.placement.rank_list, str(each.sbp)) for name, each in model.named_parameters()
    }


def test_a_plan_splits_outputs_and_inputs_along_its_axis():
    mesh = pc.Placement("cpu", [[0, 1]], ("dp", "tp"))
    where = placed(Model().place(mesh, pc.layouts.tensor_parallel(PLAN, axis="tp")))
    assert {ranks for ranks, _ in where.values()} == {(0, 1)}
    split = {name: sbp for name, (_, sbp) in where.items() if "S" in sbp}
    expected = {"embed.weight": "[B, S(0)]"}
    for layer in range(3):
        expected[f"layers.{layer}.attention.query.weight"] = "[B, S(0)]"
        expected[f"layers.{layer}.attention.query.bias"] = "[B, S(0)]"
        expected[f"layers.{layer}.attention.projection.weight"] = "[B, S(1)]"
    assert split == expected


def test_layers_are_dealt_to_stages_and_split_within_them():
    model = Model()
    inner = pc.layouts.tensor_parallel(PLAN, axis="tp")
    where = placed(model.place(MESH, pc.layouts.stages(model, "layers.*", "pp", inner)))
    assert where["embed.weight"] == ((0, 1), "[B, S(0)]")
    assert where["layers.0.attention.query.weight"] == ((0, 1), "[B, S(0)]")
    assert where["layers.1.attention.query.weight"][0] == (0, 1)
    assert where["layers.2.attention.projection.weight"] == ((2, 3), "[B, S(1)]")
    assert where["norm.weight"] == ((2, 3), "[B, B]")
    meshes = pc.layouts.stage_meshes(MESH, "pp")
    assert [each.rank_list for each in meshes] == [(0, 1), (2, 3)]
    assert all(each.axes == ("dp", "tp") for each in meshes)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda m: pc.layouts.tensor_parallel({"embed": "diagonal"}), UsageError, "diagonal"),
        (lambda m: pc.layouts.tensor_parallel(None), UsageError, "no tensor-parallel plan"),
        (lambda m: pc.layouts.tensor_parallel({"layers.*.up": "colwise"}), UsageError, r"\.up"),
        (lambda m: pc.layouts.tensor_parallel({"embed": "colwise"}, "sp"), PlacementError, "'sp'"),
        (lambda m: pc.layouts.stages(m, "blocks.*"), UsageError, r"blocks\.\*"),
        (lambda m: pc.layouts.stages(m, "embed"), UsageError, "at least one layer"),
    ],
)
def test_what_fits_no_model(make, error, said):
    model = Model()
    with pytest.raises(error, match=said):
        model.place(MESH, make(model))
