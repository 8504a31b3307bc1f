"""Weights in safetensors files: what fits a module, and what is refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.errors import DataError, OutputError, UsageError
from plancompiler.ir import DType
from plancompiler.plan.arrays import array_pieces

HERE = pc.Placement("cpu", [0])
INDEX = "model.safetensors.index.json"


class Model(nn.Module):
    """A tied weight, a whole number, and nothing else."""

    def __init__(self):
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.steps = nn.Buffer((), "int64")
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def values() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "embed.weight": random.normal(size=(6, 4)).astype(np.float32),
        "norm.weight": random.normal(size=4).astype(np.float32),
        "norm.bias": random.normal(size=4).astype(np.float32),
        "steps": np.array(7),
    }


def write(file, arrays):
    file.write_bytes(b"".join(array_pieces(arrays, {})))
    return file


@pytest.fixture
def folder(tmp_path):
    """Two files and an index."""
    arrays = values()
    first = {"embed.weight": arrays.pop("embed.weight")}
    write(tmp_path / "a.safetensors", first)
    write(tmp_path / "b.safetensors", arrays)
    where = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(arrays, "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    return tmp_path


def state(model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.place(HERE).state_dict().items()}


def test_a_buffer_that_is_not_saved_is_asked_of_no_file(folder):
    model = Model()
    model.cache = nn.Buffer((2,), init=np.ones(2, np.float32), saved=False)
    pc.load_weights(model, folder)
    np.testing.assert_array_equal(model.cache.place(HERE).value.numpy(), np.ones(2))
    model.counts = nn.Buffer((2,))
    with pytest.raises(DataError, match=r"missing: counts float32\[2\]"):
        pc.load_weights(model, folder)


def test_files_an_index_and_a_folder_with_one_file(folder, tmp_path):
    single = tmp_path / "single"
    single.mkdir()
    write(single / "weights.safetensors", values())
    for source in (folder, str(folder), single, single / "weights.safetensors"):
        model = Model()
        pc.load_weights(model, source)
        loaded = state(model)
        for name, value in values().items():
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
        np.testing.assert_array_equal(loaded["head.weight"], values()["embed.weight"])


def test_the_other_name_of_a_tied_weight_and_another_floating_dtype(tmp_path):
    arrays = values()
    arrays["head.weight"] = arrays.pop("embed.weight").astype(DType.BFLOAT16.numpy)
    arrays["norm.bias"] = arrays["norm.bias"].astype(np.float64)
    model = Model()
    pc.load_weights(model, write(tmp_path / "x.safetensors", arrays))
    loaded = state(model)
    expected = arrays["head.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded["embed.weight"], expected)
    np.testing.assert_array_equal(loaded["norm.bias"], values()["norm.bias"])


def test_eager_tensors_take_the_values_at_once(folder):
    model = Model().place(HERE)
    before = model.embed.weight.value
    pc.load_weights(model, folder)
    assert model.embed.weight.value is before, "optimizers hold this tensor"
    np.testing.assert_array_equal(before.numpy(), values()["embed.weight"])


def test_a_job_that_has_read_a_parameter(folder):
    model = Model().place(HERE)
    with pc.job("late"):
        pc.output("y", model(pc.input("x", (2,), "int64", HERE)))
        with pytest.raises(UsageError, match="before the job is traced"):
            pc.load_weights(model, folder)


def without(name):
    return lambda arrays: arrays.pop(name)


def changed(name, value):
    return lambda arrays: arrays.update({name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("norm.bias"), r"missing: norm\.bias float32\[4\]"),
        (without("embed.weight"), r"missing: embed\.weight float32\[6, 4\]"),
        (changed("other", np.zeros(2)), r"not in the model: other"),
        (changed("norm.bias", np.zeros((4, 1), np.float32)), r"norm\.bias is float32\[4, 1\] and"),
        (changed("norm.bias", np.zeros(4, np.int32)), r"norm\.bias is int32\[4\] and must be fl"),
        (changed("steps", np.zeros((), np.float32)), r"steps is float32\[\] and must be int64\[\]"),
        (changed("head.weight", np.zeros((6, 4), np.float32)), "head.weight differs from embed"),
    ],
)
def test_weights_that_do_not_fit(change, said, tmp_path):
    arrays = values()
    change(arrays)
    model = Model()
    with pytest.raises(DataError, match=said):
        pc.load_weights(model, write(tmp_path / "x.safetensors", arrays))
    assert model.norm.weight.init == "ones", "nothing changed"


def test_all_that_does_not_fit_is_in_one_error_and_may_be_let_pass(tmp_path):
    arrays = values()
    del arrays["norm.bias"]
    file = write(tmp_path / "x.safetensors", arrays | {"other": np.zeros(2)})
    with pytest.raises(DataError, match=r"missing: norm\.bias.*not in the model: other"):
        pc.load_weights(Model(), file)
    model = Model()
    pc.load_weights(model, file, strict=False)
    loaded = state(model)
    np.testing.assert_array_equal(loaded["norm.bias"], np.zeros(4))
    np.testing.assert_array_equal(loaded["norm.weight"], arrays["norm.weight"])


def header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape, offsets, dtype="F32") -> bytes:
    described = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return json.dumps({"norm.bias": described}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0",
        header(b"{}", length=1 << 62),
        header(b"{"),
        header(b"[]"),
        header(b'{"a": 1}'),
        header(b"[" * 9000),
        header(entry([4], [0, 16])),  # without its data
        header(entry([4], [-16, 0]), bytes(16)),
        header(entry([4], [0, 8]), bytes(16)),
        header(entry([1 << 62, 4], [0, 16]), bytes(16)),
        header(entry([-4], [0, 16]), bytes(16)),
        header(entry([4], [0, 16], "Q7"), bytes(16)),
        header(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}', bytes(8)),
        header(entry([4], [0, 16])[:-1] + b',"norm.bias":{}}', bytes(16)),
    ],
)
def test_damaged_and_malicious_headers(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError):
        pc.load_weights(Model(), tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"norm.bias": "../secret.safetensors"}, "the name of a file in"),
        ({"norm.bias": "/etc/passwd"}, "the name of a file in"),
        ({"norm.bias": "sub/a.safetensors"}, "the name of a file in"),
        ({"norm.bias": "..\\secret"}, "the name of a file in"),
        ({"norm.bias": ".."}, "the name of a file in"),
        ({"norm.bias": ""}, "the name of a file in"),
        ({"norm.bias": 3}, "norm.bias"),
        ({"norm.bias": "absent.safetensors"}, "cannot be read"),
        ({"norm.bias": "a.safetensors"}, "does not hold 'norm.bias'"),
        (["norm.bias"], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_an_index_that_is_wrong_or_leaves_its_folder(weight_map, said, folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match=said):
        pc.load_weights(Model(), folder)


def test_folders_without_a_choice(tmp_path):
    with pytest.raises(DataError, match="has no weights"):
        pc.load_weights(Model(), tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        pc.load_weights(Model(), tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for pipe in (tmp_path, tmp_path / "pipe.safetensors"):
        with pytest.raises(DataError, match="it is a pipe, not a file"):
            pc.load_weights(Model(), pipe)
    with pytest.raises(DataError, match="it is a device, not a file"):
        pc.load_weights(Model(), "/dev/zero")
    (tmp_path / "pipe.safetensors").unlink()
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", values())
    with pytest.raises(DataError, match="several files of weights and no index"):
        pc.load_weights(Model(), tmp_path)


def test_what_is_exported_is_read_again(folder, tmp_path):
    """By another layout, in several files; then fewer, which replace them."""
    mesh = pc.Placement("cpu", [0, 1])
    model = Model()
    pc.load_weights(model, folder)
    model.place(mesh, {"embed.weight": ["S(0)"]})
    with pc.job("export") as job:
        pc.output("y", model(pc.input("x", (2,), "int64", mesh)).sum())
    out = tmp_path / "out"
    with pc.run(job, ranks=2, cache=False) as session:
        session.export_weights(out, max_file_bytes=20)
        assert len(list(out.glob("model-*.safetensors"))) == 3
        again = Model()
        with pytest.raises(DataError, match=r"missing: steps int64\[\]"):
            pc.load_weights(again, out)  # the job does not use it
        session.export_weights(out, model)
        assert [each.name for each in out.iterdir()] == ["model.safetensors"]
        pc.load_weights(again, out)
        with pytest.raises(OutputError, match="file of weights"):
            session.export_weights(out / "model.safetensors")
    loaded = state(again)
    for name, value in values().items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
