"""`pc.from_onnx`: what ONNX models become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.errors import FeedError, ModelImportError, ShapeError, UsageError
from plancompiler.importers.imported_module import ImportedModel, reserved_names

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
ONE = pc.Placement("cpu", [0])
TWO = pc.Placement("cpu", [0, 1])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def info(name: str, shape: Any, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def proto(
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[str],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    functions: list[Any] | None = None,
    domains: dict[str, int] | None = None,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "Small",
        inputs,
        [helper.make_tensor_value_info(name, 0, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(*each) for each in (domains or {}).items()]
    return helper.make_model(graph, opset_imports=imports, functions=functions or [])


def node(operator: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> Any:
    given = [each if each != "_" else "" for each in inputs.split()]
    return helper.make_node(operator, given, outputs.split(), name or None, **attributes)


def called(model: Any, *args: np.ndarray) -> Any:
    """What a model computes for arrays, with eager tensors."""
    return model(*(pc.tensor(each, ONE, dtype=str(each.dtype)) for each in args))


def mlp(batch: Any = "batch") -> Any:
    """Two layers and the loss of labels."""
    rng = np.random.default_rng(0)
    weights = {
        "fc1.weight": rng.normal(size=(8, 6)).astype(np.float32),
        "fc1.bias": np.zeros(8, np.float32),
        "fc2.weight": rng.normal(size=(8, 3)).astype(np.float32),
        "scale": np.array(0.5, np.float32),
        "mask": np.array([[0, -np.inf, 0]], np.float32),
        "shape": np.array([0, -1], np.int64),
    }
    nodes = [
        node("Gemm", "x fc1.weight fc1.bias", "h", "/fc1/Gemm", transB=1),
        node("Tanh", "h", "t", "/act/Tanh"),
        node("MatMul", "t fc2.weight", "o", "/fc2/MatMul"),
        node("Mul", "o scale", "s", "/Mul"),
        node("Reshape", "s shape", "logits", "/Reshape"),
        node("Add", "logits mask", "masked", "/Add"),
        node("ReduceSum", "masked", "unused", "/ReduceSum"),
        node("SoftmaxCrossEntropyLoss", "logits labels", "loss", "/Loss"),
    ]
    inputs = [info("x", [batch, 6]), info("labels", [batch], INT64)]
    return proto(nodes, inputs, ["logits", "loss"], weights)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(rows, 6)).astype(np.float32)
    return {"x": x, "labels": (x[:, :3].argmax(1)).astype(np.int64)}


def losses(model: Any, mesh: pc.Placement, sbp: Any, layout: Any = None) -> list[float]:
    model.place(mesh, layout)
    given = batch_of(8)
    with pc.job("train") as job:
        inputs = {
            name: pc.input(name, value.shape, str(value.dtype), mesh, sbp)
            for name, value in given.items()
        }
        out = model(**inputs)
        pc.optim.SGD(0.5).minimize(out.loss)
        pc.output("loss", out.loss)
    with pc.run(job) as session:
        return [float(session.step(**given)["loss"]) for _ in range(4)]


def test_parameters_have_the_authors_names_and_train_the_same_on_two_ranks():
    model = pc.from_onnx(mlp(), shapes={"x": (8, 6), "labels": (8,)})
    assert isinstance(model, ImportedModel)
    assert dict(model.named_parameters()).keys() == {"fc1.weight", "fc1.bias", "fc2.weight"}
    assert list(model.graph.inputs) == ["x", "labels"]
    one = losses(model, ONE, "B")
    assert one[-1] < one[0]
    again = pc.from_onnx(mlp(8))
    np.testing.assert_allclose(losses(again, TWO, "S(0)"), one, rtol=1e-5)
    again = pc.from_onnx(mlp(8).SerializeToString())
    layout = {"fc1.*": "S(0)", "fc2.weight": "S(0)"}
    np.testing.assert_allclose(losses(again, TWO, "B", layout), one, rtol=1e-5)


def test_a_free_batch_axis_has_another_size_in_each_call():
    model = pc.from_onnx(mlp(), batch="x:0")
    for rows in (1, 8, 5):
        given = batch_of(rows)
        out = called(model, given["x"], given["labels"])
        assert out["logits"].shape == (rows, 3)
    with pytest.raises(FeedError, match="different sizes"):
        called(model, batch_of(4)["x"], batch_of(3)["labels"])


def test_trainable_patterns_and_statistics():
    weights = {
        name: np.ones(4, np.float32) for name in ("bn.scale", "bn.bias", "bn.mean", "bn.var")
    }
    weights["conv"] = np.ones((4, 2, 1, 1), np.float32)
    nodes = [
        node("Conv", "x conv", "c"),
        node("BatchNormalization", "c bn.scale bn.bias bn.mean bn.var", "y"),
    ]
    model = pc.from_onnx(proto(nodes, [info("x", [1, 2, 3, 3])], ["y"], weights))
    trained = {name: each.trainable for name, each in model.named_parameters()}
    assert trained.pop("bn.mean") is trained.pop("bn.var") is False
    assert all(trained.values())
    some = pc.from_onnx(proto(nodes, [info("x", [1, 2, 3, 3])], ["y"], weights), trainable="bn.*")
    assert not some.conv.trainable
    assert some.bn.scale.trainable
    with pytest.raises(UsageError, match="matches a pattern"):
        pc.from_onnx(proto(nodes, [info("x", [1, 2, 3, 3])], ["y"], weights), trainable="fc.*")


def test_what_is_a_parameter_follows_from_who_reads_it():
    rng = np.random.default_rng(0)
    weights = {
        "angles": rng.normal(size=(1, 3, 4)).astype(np.float32),
        "positions": rng.normal(size=(1, 3, 4)).astype(np.float32),
        "scale": rng.normal(size=(1, 1, 4)).astype(np.float32),
        "half": np.full((1, 1, 1), 0.5, np.float32),
        "low": np.array([[-1e38, 0, 0, 0]], np.float32),
        "table": np.arange(6).reshape(1, 6),
        "places": np.array([[5, -1, 0, 2]], np.int64),
        "dense": rng.normal(size=(1, 4)).astype(np.float32),
    }
    nodes = [
        node("Mul", "x angles", "a"),
        node("Add", "a positions", "b"),
        node("Mul", "b scale", "c"),
        node("Mul", "c half", "d"),
        node("Add", "d low", "e"),
        node("GatherElements", "table places", "f", axis=1),
        node("Cast", "f", "picked", to=FLOAT),
        node("Add", "d picked", "g"),
        node("Abs", "e", "h"),
        node("MatMul", "one dense", "i"),
        node("Sum", "g i", "y"),
    ]
    inputs = [info("x", [2, 3, 4]), info("one", [1, 1])]
    model = pc.from_onnx(proto(nodes, inputs, ["y", "h"], weights), trainable=["*"])
    assert dict(model.named_parameters()).keys() == {"positions", "scale", "dense"}
    x, one = rng.normal(size=(2, 3, 4)).astype(np.float32), np.ones((1, 1), np.float32)
    w = weights
    wanted = (x * w["angles"] + w["positions"]) * w["scale"] * 0.5
    wanted = wanted + np.array([5, 5, 0, 2]) + one @ w["dense"]
    np.testing.assert_allclose(called(model, x, one).y.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_names_that_modules_have_already_are_changed():
    names = ["graph", "a", "a.b", "forward", "__class__", ".x", "rules.weight"]
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(2,)).astype(np.float32) for name in names}
    nodes = [node("Sum", " ".join(["x", *names]), "y")]
    model = pc.from_onnx(proto(nodes, [info("x", [2])], ["y"], weights))
    assert len(model.parameters()) == len(names)
    assert "a.b" in dict(model.named_parameters())
    x = np.ones(2, np.float32)
    np.testing.assert_allclose(called(model, x).numpy(), x + sum(weights.values()), rtol=1e-5)
    own = set(vars(model)) - {name.split(".")[0] for name, _ in model.named_parameters()}
    assert own <= reserved_names()


def test_conditions_loops_and_functions_are_resolved():
    body = helper.make_graph(
        [
            node("Identity", "go", "on"),
            node("Mul", "v v", "w"),
            node("Cast", "i", "number", to=FLOAT),
            node("Add", "w number", "next"),
            node("Add", "next outer", "row"),
        ],
        "body",
        [info("i", [], INT64), info("go", [], onnx.TensorProto.BOOL), info("v", [2])],
        [info("on", [], onnx.TensorProto.BOOL), info("next", [2]), info("row", [2])],
    )
    branches = {
        name: helper.make_graph(
            [node("Neg" if name == "then_branch" else "Abs", "x", name)],
            name,
            [],
            [info(name, [2])],
        )
        for name in ("then_branch", "else_branch")
    }
    double = helper.make_function(
        "own", "Double", ["a"], ["b"],
        [node("Constant", "", "two", value_float=2.0), node("Mul", "a two", "b")],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Double", ["x"], ["outer"], domain="own"),
        node("If", "flag", "chosen", **branches),
        node("Loop", "count _ chosen", "last rows", body=body),
        node("SequenceConstruct", "last x", "both"),
        node("ConcatFromSequence", "both", "joined", axis=0),
    ]
    inputs = [info("x", [2]), info("flag", [], onnx.TensorProto.BOOL), info("count", [], INT64)]
    model = proto(nodes, inputs, ["rows", "joined"], functions=[double], domains={"own": 1})
    with pytest.raises(ModelImportError, match=r"which branch is taken.*Got: flag.*constants="):
        pc.from_onnx(model)
    with pytest.raises(ModelImportError, match="how often a loop runs"):
        pc.from_onnx(model, constants={"flag": True})
    made = pc.from_onnx(model, constants={"flag": True, "count": 3})
    x = np.array([1.0, -2.0], np.float32)
    out = called(made, x)
    value, rows = -x, []
    for number in range(3):
        value = value * value + number
        rows.append(value + 2 * x)
    np.testing.assert_allclose(out.rows.numpy(), rows)
    np.testing.assert_allclose(out["joined"].numpy(), np.concatenate([value, x]))


def test_errors_and_lines_name_the_nodes(tmp_path):
    wide = [node("Identity", "x", "a"), node("MatMul", "a w", "y", "/blocks.0/fc/MatMul")]
    weights = {"w": np.ones((5, 2), np.float32)}
    with pytest.raises(ShapeError, match=r"inner extents.*model\[/blocks.0/fc/MatMul\]:2"):
        pc.from_onnx(proto(wide, [info("x", [3, 4])], ["y"], weights))
    model = pc.from_onnx(proto(wide, [info("x", [3, 5])], ["y"], weights)).place(ONE)
    with pc.job("lines") as job:
        pc.output("y", model(pc.input("x", (3, 5), "float32", ONE)))
    assert "model[/blocks.0/fc/MatMul]:2" in str(job)


def test_layouts_that_the_file_asks_for():
    model = mlp(8)
    model.configuration.add(name="two", num_devices=2)
    for at, name, axis in ((0, "fc1.weight", 0), (2, "fc2.weight", -2), (0, "x", 0)):
        each = model.graph.node[at].device_configurations.add(configuration_id="two")
        spec = each.sharding_spec.add(tensor_name=name, device=[0, 1])
        spec.sharded_dim.add(axis=axis).simple_sharding.add(dim_value=8, num_shards=2)
    made = pc.from_onnx(model)
    assert {name: str(sbp) for name, sbp in made.layouts.items()} == dict.fromkeys(
        ("fc1.weight", "fc2.weight", "x"), "[S(0)]"
    )
    given, mesh = batch_of(8), made.mesh
    assert mesh == pc.Placement("cpu", [0, 1], ("devices",))
    with pc.job("asked") as job:
        x = pc.input("x", (8, 6), "float32", mesh, made.layouts["x"])
        pc.output("loss", made(x, pc.input("labels", (8,), "int64", mesh, "B")).loss)
    whole = pc.from_onnx(mlp(8))
    with pc.run(job) as session:
        wanted = float(called(whole, given["x"], given["labels"]).loss.numpy())
        assert session.step(**given)["loss"] == pytest.approx(wanted, rel=1e-5)


def test_all_unknown_operators_are_listed_at_once():
    nodes = [
        node("TfIdfVectorizer", "x", "a", mode="TF", max_gram_length=1, max_skip_count=0,
             min_gram_length=1, ngram_counts=[0], ngram_indexes=[0], pool_int64s=[1]),
        helper.make_node("Strange", ["a"], ["b"], "odd", domain="com.example"),
        helper.make_node("Strange", ["b"], ["c"], domain="com.example"),
    ]  # fmt: skip
    with pytest.raises(ModelImportError, match=r"2 of the model's operators") as raised:
        pc.from_onnx(proto(nodes, [info("x", [3], INT64)], ["c"], domains={"com.example": 1}))
    assert "com.example.Strange (2 times, at model[odd]:2" in str(raised.value)
    assert "TfIdfVectorizer (1 times" in str(raised.value)


def test_rules_of_users(monkeypatch):
    from plancompiler.importers.rules import ONNX_RULES

    monkeypatch.setattr("plancompiler.importers.rules.ONNX_RULES", ONNX_RULES)
    nodes = [helper.make_node("Shift", ["x"], ["y"], domain="com.example", by=2.0)]
    model = proto(nodes, [info("x", [3])], ["y"], domains={"com.example": 3})
    try:
        pc.onnx_rule("com.example.Shift", since=2)(lambda x, by: x + by)
        pc.onnx_rule("com.example.Shift", since=4)(lambda x, by: x - by)
        x = np.arange(3, dtype=np.float32)
        np.testing.assert_array_equal(called(pc.from_onnx(model), x).numpy(), x + 2)
    finally:
        for since in (2, 4):
            del ONNX_RULES[f"com.example.Shift.{since}"]


def external(tmp_path: Path, location: str, offset: int = 0, length: int = 48) -> Path:
    model = proto([node("MatMul", "x w", "y")], [info("x", [2, 4])], ["y"])
    weight = model.graph.initializer.add(name="w", data_type=FLOAT, dims=[4, 3])
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        weight.external_data.add(key=key, value=str(value))
    file = tmp_path / "model" / "model.onnx"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(model.SerializeToString())
    return file


def test_weights_beside_the_file(tmp_path):
    file = external(tmp_path, "data.bin", 16)
    values = np.arange(12, dtype=np.float32)
    (file.parent / "data.bin").write_bytes(bytes(16) + values.tobytes())
    x = np.ones((2, 4), np.float32)
    made = called(pc.from_onnx(file), x).numpy()
    np.testing.assert_array_equal(made, x @ values.reshape(4, 3))
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (file.parent / "link.bin").symlink_to(tmp_path / "secret.bin")
    outside = ["../secret.bin", str(tmp_path / "secret.bin"), "link.bin", ""]
    for location in outside:
        with pytest.raises(ModelImportError, match="outside of its folder"):
            pc.from_onnx(external(tmp_path, location))
    with pytest.raises(ModelImportError, match="cannot be read"):
        pc.from_onnx(external(tmp_path, "missing.bin"))
    for offset, length in ((32, 48), (-4, 48), (0, 44)):
        with pytest.raises(ModelImportError, match="not where it says"):
            pc.from_onnx(external(tmp_path, "data.bin", offset, length))
    with pytest.raises(ModelImportError, match="in another file"):
        pc.from_onnx(external(tmp_path, "data.bin").read_bytes())


def test_damaged_files_are_refused(tmp_path):
    whole = mlp(4).SerializeToString()
    for size in (0, 1, 7, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ModelImportError):
            pc.from_onnx(whole[:size])
    with pytest.raises(ModelImportError, match="no ONNX model"):
        pc.from_onnx(b"not a model at all")
    with pytest.raises(ModelImportError, match="cannot be read"):
        pc.from_onnx(tmp_path / "none.onnx")
    with pytest.raises(UsageError, match="takes an ONNX model"):
        pc.from_onnx(3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.opset_import[0].__setattr__("version", 6), "opset"),
        (lambda m: m.opset_import[0].__setattr__("version", 99), "opset"),
        (lambda m: m.graph.node[0].input.__setitem__(0, "nothing"), "nothing before it makes"),
        (lambda m: m.graph.node[0].attribute.add(name="odd", i=1, type=2), "standard says"),
        (lambda m: m.graph.initializer[0].__setattr__("raw_data", b"123"), "damaged"),
        (lambda m: m.graph.initializer[0].dims.__setitem__(0, 1 << 40), "damaged"),
        (lambda m: m.graph.initializer[0].dims.__setitem__(0, -8), "damaged"),
        (lambda m: m.graph.node[1].__setattr__("op_type", "Tan2"), "no rule"),
        (lambda m: m.graph.node[1].__setattr__("domain", "own"), "does not name"),
        (lambda m: m.graph.input[0].type.tensor_type.__setattr__("elem_type", 8), "dtype"),
    ],
)
def test_models_that_are_wrong_are_refused(change, match):
    model = mlp(4)
    change(model)
    with pytest.raises(ModelImportError, match=match):
        pc.from_onnx(model)


@pytest.mark.parametrize(
    "huge",
    [
        [node("ConstantOfShape", "large", "c")],
        [node("Expand", "one large", "c")],
        [node("Range", "zero end step", "c")],
        [node("Tile", "one large", "c")],
    ],
    ids=lambda nodes: nodes[0].op_type,
)
def test_constants_that_grow_without_bound_are_refused(huge):
    weights = {
        "large": np.array([1 << 20, 1 << 20], np.int64),
        "one": np.ones((1, 1), np.int64),
        "zero": np.array(0, np.int64),
        "end": np.array(1 << 50, np.int64),
        "step": np.array(1, np.int64),
    }
    nodes = [
        *huge,
        node("Cast", "c", "f", to=FLOAT),
        node("ReduceMax", "f", "m"),
        node("Add", "x m", "y"),
    ]
    with pytest.raises(ModelImportError, match="too large"):
        pc.from_onnx(proto(nodes, [info("x", [1])], ["y"], weights))


def test_axes_without_a_size_need_one():
    with pytest.raises(UsageError, match=r"x \['batch', 6\].*shapes="):
        pc.from_onnx(mlp())
    with pytest.raises(UsageError, match="another shape"):
        pc.from_onnx(mlp(), shapes={"x": (4, 7), "labels": (4,)})
    with pytest.raises(UsageError, match="no such input"):
        pc.from_onnx(mlp(), shapes={"y": (4, 7)})
    for wrong in ("y:0", "x:5", "x"):
        with pytest.raises(UsageError, match="no such axis"):
            pc.from_onnx(mlp(), batch=wrong)
    with pytest.raises(UsageError, match="fixed size"):
        pc.from_onnx(mlp(), batch="x:1")
    given = batch_of(4)
    assert pc.from_onnx(mlp(), given).graph.inputs["labels"].shape == (4,)
    assert pc.from_onnx(mlp(), tuple(given.values())).graph.inputs["x"].shape == (4, 6)


def test_what_depends_on_values_is_refused_with_its_place():
    nodes = [node("NonZero", "x", "n"), node("Cast", "n", "y", to=FLOAT)]
    with pytest.raises(ModelImportError, match=r"values of tensors.*model\[NonZero_1\]"):
        pc.from_onnx(proto(nodes, [info("x", [3])], ["y"]))
    nodes = [node("Reshape", "x shape", "y", "r")]
    with pytest.raises(ModelImportError, match=r"values of tensors.*model\[r\].*Got: shape"):
        pc.from_onnx(proto(nodes, [info("x", [4]), info("shape", [2], INT64)], ["y"]))


def command(*words: Any) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_folder_is_trained_without_onnx(tmp_path, monkeypatch):
    file = tmp_path / "mlp.onnx"
    file.write_bytes(mlp().SerializeToString())
    sizes = ("--shape", "x=8,6", "--shape", "labels=8")
    made = command("import", "onnx", file, "--out", tmp_path / "model", *sizes)
    assert made["parameters"] == 8 * 6 + 8 + 8 * 3
    assert made["inputs"] == {"x": "float32[8, 6]", "labels": "int64[8]"}
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    np.savez(tmp_path / "data.npz", **batch_of(16))
    settings = ("-D", "optimizer=SGD", "-D", "lr=0.5", "-D", f"data={tmp_path / 'data.npz'}")
    run = ("run", tmp_path / "model", "--steps", 6, "--no-cache", *settings)
    one = command(*run)["losses"]
    assert one[-1] < one[0]
    np.testing.assert_allclose(command(*run, "--ranks", 2)["losses"], one, rtol=1e-5)
    command("compile", tmp_path / "model", "--ranks", 2, "--out", tmp_path / "plans", *settings)
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "plans"), "--rank", "0"])
    assert "mlp.onnx[/fc1/Gemm]" in shown.output
    with pytest.raises(UsageError, match="needs the package onnx"):
        pc.from_onnx(file)


# --- attention ------------------------------------------------------------------------------------


def attention(mask: str = "causal", copies: int = 1, turned: str = "last two", scale: str = "both"):
    """Attention of four heads as exporters write it; keys and values are those of 4 / copies."""
    rng = np.random.default_rng(2)
    t, s, heads = (2, 5, 4) if mask == "some new positions" else (5, 5, 4)
    triangle = np.tri(t, s, s - t, dtype=bool)
    low = np.finfo(np.float32).min
    weights: dict[str, np.ndarray] = {
        "factor": np.array([0.8], np.float32),
        "apart": np.array([2], np.int64),
        "copies": np.array([2, heads // copies, copies, s, 3], np.int64),
        "all heads": np.array([2, heads, s, 3], np.int64),
        "rows": np.array([-1, s, 3], np.int64),
        "heads": np.array([2, heads, 3, s], np.int64),
        "low": np.array(low, np.float32),
        "seen": triangle,
        "hidden": ~triangle,
    }
    masks = {
        "causal": np.where(triangle, 0, -np.inf),
        "some new positions": np.where(triangle, 0, low),
        "large": np.where(triangle, 0, -1e4),
        "nothing seen": np.where(np.tri(5, k=-1, dtype=bool), 0, low),
    }
    if mask in masks:
        weights["mask"] = masks[mask].astype(np.float32)
    nodes = []
    for name in "kv" if copies > 1 else "":
        nodes += [
            node("Unsqueeze", f"{name} apart", f"{name}1"),
            node("Expand", f"{name}1 copies", f"{name}2"),
            helper.make_node("Reshape", [f"{name}2", "all heads"], [f"{name}h"]),
        ]
    k, v = ("kh", "vh") if copies > 1 else ("k", "v")
    if turned == "last two":
        nodes.append(node("Transpose", k, "kt", perm=[0, 1, 3, 2]))
    else:
        nodes += [
            node("Reshape", f"{k} rows", "kr"),
            node("Transpose", "kr", "ks", perm=[0, 2, 1]),
            node("Reshape", "ks heads", "kt"),
        ]
    if scale == "both":
        nodes += [node("Mul", "q factor", "qf"), node("Mul", "factor kt", "kf")]
        nodes.append(node("MatMul", "qf kf", "scores"))
    else:
        nodes += [node("MatMul", "q kt", "product"), node("Div", "product factor", "scores")]
    if mask in masks:
        nodes.append(node("Add", "scores mask", "masked"))
    elif mask == "where":
        nodes.append(node("Where", "seen scores low", "masked"))
    elif mask == "where not":
        nodes.append(node("Where", "hidden low scores", "masked"))
    else:
        nodes.append(node("Identity", "scores", "masked"))
    nodes += [node("Softmax", "masked", "p", axis=-1), node("MatMul", f"p {v}", "y")]
    shapes = {"q": (2, 4, t, 3), "k": (2, 4 // copies, s, 3), "v": (2, 4 // copies, s, 3)}
    given = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    made = proto(nodes, [info(n, shape) for n, shape in shapes.items()], ["y"], weights)
    return made, given


@pytest.mark.parametrize(
    ("options", "causal", "masked"),
    [
        ({}, True, False),
        ({"copies": 2, "turned": "rows"}, True, False),
        ({"copies": 4, "scale": "scores"}, True, False),
        ({"mask": "some new positions"}, "lower_right", False),
        ({"mask": "where", "scale": "scores"}, True, False),
        ({"mask": "where not"}, True, False),
        ({"mask": "large"}, False, True),
        ({"mask": "none", "copies": 2}, False, False),
        ({"mask": "nothing seen"}, None, None),
    ],
)
def test_attention_of_several_operators(options, causal, masked):
    made, given = attention(**options)
    model = pc.from_onnx(made, trainable=[])
    fused = [each for each in model.graph.nodes if each.target == "imported.attention"]
    if causal is None:  # of what sees nothing ONNX takes the mean
        assert fused == []
    else:
        (one,) = fused
        assert (one.kwargs["causal"], len(one.args) > 3) == (causal, masked)
        assert [shape[1] for shape in one.kwargs["shapes"][:2]] == [
            4,
            4 // options.get("copies", 1),
        ]
        assert [each.target for each in model.graph.nodes] == ["imported.attention"]
    expected = onnx.reference.ReferenceEvaluator(made).run(None, given)[0]
    place = pc.Placement("cpu", [0, 1], ("tp",))
    for mesh, sbp in ((ONE, ["B"]), (place, ["S(0)"]), (place, ["S(1)"])):
        if sbp == ["S(1)"] and options.get("copies") == 4:
            continue  # one head of keys
        with pc.job("attention") as job:
            inputs = {n: pc.input(n, e.shape, "float32", mesh, sbp) for n, e in given.items()}
            y = model(**inputs)
            pc.output("y", y)
            gradients = pc.gradients((y * y).sum(), list(inputs.values()))
            for name, each in zip(given, gradients, strict=True):
                pc.output(f"gradient {name}", each)
        with pc.run(job, ranks=mesh.size, cache=False) as session:
            out = session.step(**given)
        np.testing.assert_allclose(out["y"], expected, rtol=1e-4, atol=1e-5)
        if mesh is ONE:
            alone = out
        for name, each in alone.items():
            np.testing.assert_allclose(out[name], each, rtol=1e-4, atol=1e-5)


def test_masks_are_no_parameters():
    """Masks of large numbers are none, either; a bias with one of them is."""
    made, _ = attention(mask="large")
    assert dict(pc.from_onnx(made).named_parameters()) == {}
    weights = {"bias": np.array([[0, -1e4], [0.5, 0]], np.float32)}
    made = proto([node("Add", "x bias", "y")], [info("x", [2, 2])], ["y"], weights)
    assert dict(pc.from_onnx(made).named_parameters()).keys() == {"bias"}
