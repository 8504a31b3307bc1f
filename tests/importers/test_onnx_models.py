"""ONNX models as other people made them: beside onnxruntime, and trained beside PyTorch."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from tests.importers import onnx_cases

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
DIGITS = Path(__file__).parents[2] / "examples" / "data" / "digits.npz"


@pytest.mark.parametrize("letters", ["[ac]", "[bd-mo-q]", "[nr]", "[s-z]"])
def test_the_cases_of_the_standard(letters):
    outcomes = [onnx_cases.outcome(each) for each in onnx_cases.cases(f"^test_{letters}")]
    assert [each for each in outcomes if each.kind == "wrong"] == []
    refused = [each for each in outcomes if each.kind == "refused"]
    assert len(refused) < 0.3 * len(outcomes)
    unknown = {onnx_cases.reason(each.why) for each in refused} - {
        name for name, _ in onnx_cases.REASONS
    }
    assert unknown <= {"other forms"}


def shipped(package: str, file: str) -> Path:
    """A model inside of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / "models" / file


@pytest.mark.parametrize(
    ("file", "size"),
    [
        ("ch_ppocr_mobile_v2.0_cls_infer.onnx", (48, 192)),
        ("ch_PP-OCRv4_det_infer.onnx", (64, 64)),
        ("ch_PP-OCRv4_rec_infer.onnx", (48, 64)),
    ],
    ids=["orientation", "detector", "recogniser"],
)
def test_models_of_packages_compute_what_onnxruntime_does(file, size):
    path = shipped("rapidocr_onnxruntime", file)
    rng = np.random.default_rng(0)
    x = np.ones((2, 3, *size), np.float32)  # white, with something like letters
    x[:, :, 16:32, 8:56] = (
        np.where(rng.random((2, 1, 4, 12)) > 0.5, -1, 1).repeat(4, 2).repeat(4, 3)
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": x})
    assert np.abs(wanted).max() > 1e-2
    model = pc.from_onnx(path, {"x": x})
    assert sum(np.prod(each.shape) for each in model.parameters()) > 100_000
    for ranks in (1, 2):
        mesh = pc.Placement("cpu", list(range(ranks)))
        model.place(mesh)
        with pc.job("ocr") as job:
            pc.output("y", model(pc.input("x", x.shape, "float32", mesh, "S(0)")))
        with pc.run(job) as running:
            np.testing.assert_allclose(running.step(x=x)["y"], wanted, 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("operator", "gates", "attributes"),
    [
        ("LSTM", 4, {}),
        ("LSTM", 4, {"clip": 0.3}),
        ("LSTM", 4, {"activations": ["Sigmoid", "Softsign", "Tanh"] * 2}),
        ("GRU", 3, {"linear_before_reset": 1}),
        ("GRU", 3, {"linear_before_reset": 0}),
        ("GRU", 3, {"linear_before_reset": 1, "clip": 0.3}),
        ("RNN", 1, {"activations": ["Tanh", "Relu"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_recurrent_layers_in_both_directions(operator, gates, attributes, lengths):
    import onnx

    time, batch, size, hidden = 5, 3, 4, 2
    rng = np.random.default_rng(0)
    shapes = {
        "w": (2, gates * hidden, size),
        "r": (2, gates * hidden, hidden),
        "b": (2, 2 * gates * hidden),
        "h": (2, batch, hidden),
        "c": (2, batch, hidden),
    }
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values["n"] = np.array([5, 2, 4], np.int32)
    read = ["x", "w", "r", "b", "n" if lengths else "", "h", *(["c"] if operator == "LSTM" else [])]
    made = ["y", "yh", *(["yc"] if operator == "LSTM" else [])]
    layer = onnx.helper.make_node(
        operator, read, made, direction="bidirectional", hidden_size=hidden, **attributes
    )
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [layer],
            "layer",
            [onnx.helper.make_tensor_value_info("x", 1, [time, batch, size])],
            [onnx.helper.make_tensor_value_info(name, 1, None) for name in made],
            [onnx.numpy_helper.from_array(values[name], name) for name in read[1:] if name],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 14)],
        ir_version=10,
    )
    x = rng.normal(size=(time, batch, size)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    wanted = session.run(None, {"x": x})
    out = pc.from_onnx(proto)(pc.tensor(x, onnx_cases.HERE))
    for ours, theirs in zip(out, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, 1e-5, 1e-6)


def test_a_resnet_that_pytorch_exported_is_tuned_on_digits():
    """Batch norm keeps the statistics that it has, in PyTorch too."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        downsample_in_first_stage=False,
        num_labels=10,
    )
    original = transformers.ResNetForImageClassification(config).eval()
    for name, buffer in original.named_buffers():
        if "running_mean" in name:
            buffer.uniform_(-0.1, 0.1)
        elif "running_var" in name:
            buffer.uniform_(0.5, 1.5)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = original

        def forward(self, pixels):
            return self.model(pixels).logits

    data = np.load(DIGITS)
    images = (data["images"].reshape(-1, 1, 8, 8) / np.float32(16)).repeat(2, 2).repeat(2, 3)
    labels = data["labels"].astype(np.int64)
    sizes = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            Logits(), (torch.from_numpy(images[:2]),), dynamo=True, dynamic_shapes=sizes,
            optimize=False, verbose=False,
        )  # fmt: skip
    content = exported.model_proto.SerializeToString()
    steps, rows = 22, 64
    batches = [slice(rows * step, rows * (step + 1)) for step in range(steps)] * 2

    optimizer = torch.optim.Adam(original.parameters(), lr=2.0**-6)
    wanted = []
    for batch in batches:
        optimizer.zero_grad()
        made = original(torch.from_numpy(images[batch])).logits
        loss = torch.nn.functional.cross_entropy(made, torch.from_numpy(labels[batch]))
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert wanted[-1] < 0.5 * wanted[0]
    trained = {f"model.{name}" for name, _ in original.named_parameters()}

    for ranks in (1, 2):
        mesh = pc.Placement("cpu", list(range(ranks)))
        model = pc.from_onnx(content, batch="pixels:0").place(mesh)
        names = dict(model.named_parameters())
        assert trained == {n for n, p in names.items() if p.trainable}
        with pc.job("digits") as job:
            x = pc.input("x", (rows, 1, 16, 16), "float32", mesh, "S(0)")
            y = pc.input("y", (rows,), "int64", mesh, "S(0)")
            loss = pc.cross_entropy(model(x), y)
            pc.optim.Adam(2.0**-6).minimize(loss)
            pc.output("loss", loss)
        with pc.run(job) as session:
            losses = [float(session.step(x=images[b], y=labels[b])["loss"]) for b in batches]
        # Rounding grows from step to step, which no two orders of adding share.
        np.testing.assert_allclose(losses[:10], wanted[:10], rtol=1e-4)
        assert losses[-1] < 0.3 * losses[0]
