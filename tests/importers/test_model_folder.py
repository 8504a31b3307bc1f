"""Imported models as folders, and the commands that make them and take them as jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.errors import ModelImportError
from plancompiler.importers.model_folder import read_model, write_model
from plancompiler.importers.rules import TORCH_RULES
from tests.importers.models import made, torch
from tests.importers.training import ONE, compare, reference, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "mixtral", "resnet"])
def test_a_model_that_was_written_and_read_trains_as_before(name, tmp_path, monkeypatch):
    module, example = made(name)
    model = pc.from_torch(module, example)
    write_model(model, tmp_path / "model")
    again = read_model(tmp_path / "model", TORCH_RULES)
    assert repr(again) == repr(model)
    assert again.graph.nodes == model.graph.nodes
    names = dict(again.named_parameters(remove_duplicate=False))
    assert list(names) == list(dict(model.named_parameters(remove_duplicate=False)))
    wanted = reference(module, example)
    compare(trained(again.place(ONE), example, ONE, ["B", "B"], steps=3), wanted, 1e-5, 1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a small model, `make.py` that makes it, and data for it."""
    here = tmp_path_factory.mktemp("imported")
    (here / "make.py").write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "class Classifier(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))\n\n"
        "    def forward(self, x, labels):\n"
        "        logits = self.layers(x)\n"
        "        loss = nn.functional.cross_entropy(logits, labels)\n"
        "        return {'logits': logits, 'loss': loss}\n\n\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    example = {'x': torch.zeros(4, 6), 'labels': torch.zeros(4, dtype=torch.long)}\n"
        "    return Classifier(), example\n\n\n"
        "def nothing():\n"
        "    return Classifier()\n"
    )
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    np.savez(here / "data.npz", x=x, labels=x.argmax(1) % 3)
    (here / "layout.json").write_text(json.dumps({"layers.*.weight": ["B", "S(0)"]}))
    made = command("import", "torch", f"{here / 'make.py'}:make", "--out", here / "model")
    assert made["parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert made["inputs"] == {"x": "float32[4, 6]", "labels": "int64[4]"}
    return here


def command(*words: Any) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_folder_whose_fused_layers_have_an_axis_of_parts(folder, tmp_path):
    """Layouts split each part; the losses are those of the folder without."""
    (tmp_path / "make.py").write_text(
        "import torch\n\n\n"
        "class Gated(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.both = torch.nn.Linear(6, 8)\n\n"
        "    def forward(self, x, labels):\n"
        "        gate, up = self.both(x).chunk(2, -1)\n"
        "        return torch.nn.functional.cross_entropy(gate.sigmoid() * up, labels)\n\n\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return Gated(), (torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))\n"
    )
    (tmp_path / "layout.json").write_text(json.dumps({"both.weight": ["B", "S(1)"]}))
    source = f"{tmp_path / 'make.py'}:make"
    command("import", "torch", source, "--out", tmp_path / "plain")
    command("import", "torch", source, "--parts", "--out", tmp_path / "parts")
    shapes = [
        read_model(tmp_path / each, TORCH_RULES).both.weight.shape for each in ("plain", "parts")
    ]
    assert shapes == [(8, 6), (2, 4, 6)]
    settings = ("-D", "optimizer=SGD", "-D", "lr=0.5", "-D", f"data={folder / 'data.npz'}")
    run = ("--steps", 4, "--no-cache", *settings)
    split = ("--ranks", 2, "-D", "tp=2", "-D", f"layout={tmp_path / 'layout.json'}")
    wanted = command("run", tmp_path / "plain", *run)["losses"]
    made = command("run", tmp_path / "parts", *run, *split)["losses"]
    np.testing.assert_allclose(made, wanted, rtol=1e-5)


def test_a_folder_is_trained_in_layouts_without_pytorch(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    settings = ("-D", "optimizer=SGD", "-D", "lr=0.5", "-D", f"data={folder / 'data.npz'}")
    run = ("run", folder / "model", "--steps", 12, "--no-cache", *settings)
    one = command(*run)["losses"]
    assert one[-1] < one[0]
    np.testing.assert_allclose(command(*run, "--ranks", 2)["losses"], one, rtol=1e-5)
    layout = ("-D", "tp=2", "-D", f"layout={folder / 'layout.json'}")
    np.testing.assert_allclose(command(*run, "--ranks", 2, *layout)["losses"], one, rtol=1e-5)


def test_a_folder_is_compiled_and_shows_the_authors_names_and_lines(folder, tmp_path):
    settings = ("-D", "optimizer=AdamW")
    command("compile", folder / "model", "--ranks", 2, "--out", tmp_path / "plans", *settings)
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "plans"), "--rank", "0"])
    assert "layers.0.weight" in shown.output
    assert "make.py:11" in shown.output


def test_a_folder_is_printed_with_the_authors_names_and_lines(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    described = command("inspect", folder / "model")
    assert described["inputs"] == {"x": "float32[4, 6]", "labels": "int64[4]"}
    weight = described["parameters"][0]
    assert (weight["name"], weight["shape"]) == ("layers.0.weight", [8, 6])
    (first, *_) = described["operations"]
    assert first["reads"] == ["x", "layers.0.weight", "layers.0.bias"]
    assert first["source"].endswith("make.py:11")
    shown = CliRunner().invoke(cli, ["inspect", str(folder / "model")])
    for text in ("Classifier", "labels: int64[4]", "layers.0.weight", "aten.tanh.default"):
        assert text in shown.output
    refused = CliRunner().invoke(cli, ["inspect", str(folder / "model"), "--memory"])
    assert refused.exit_code
    assert "has no plans yet" in str(refused.exception or "") + refused.output


@pytest.mark.processes
def test_a_folder_is_submitted_to_a_master_with_two_workers(folder, tmp_path):
    """The workers read the folder's weights and the data; the client has neither PyTorch."""
    program = [sys.executable, "-m", "plancompiler"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    settings = ("-D", "optimizer=SGD", "-D", "lr=0.5", "-D", f"data={folder / 'data.npz'}")
    layout = ("-D", "tp=2", "-D", f"layout={folder / 'layout.json'}")
    job = [str(folder / "model"), "--steps", "6", *settings, *layout]
    with ExitStack() as ended:

        def start(*words: str) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [*program, *words, "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            ended.callback(child.communicate, timeout=60)
            ended.callback(child.terminate)
            return child

        master = start("master", "--listen", "127.0.0.1:0", "--ranks", "2")
        assert master.stdout is not None
        address = json.loads(master.stdout.readline())["address"]
        for _ in range(2):
            start("worker", "--master", address, "--allow-path", str(folder))
        client = start("submit", *job, "--master", address)
        report = json.loads(client.communicate(timeout=120)[0])
    assert report["ranks"] == 2
    alone = command("run", *job, "--ranks", 2, "--no-cache")
    np.testing.assert_allclose(report["losses"], alone["losses"], rtol=1e-6)


def test_wrong_settings_and_files(folder, tmp_path):
    def said(*words: Any) -> str:
        result = CliRunner().invoke(cli, [*map(str, words)])
        assert result.exit_code
        return str(result.exception or "") + result.output

    model = folder / "model"
    assert "no such optimizer" in said("compile", model, "--ranks", 1, "-D", "optimizer=Fast")
    assert "does not accept" in said("compile", model, "--ranks", 1, "-D", "optimiser=SGD")
    assert "number of ranks" in said("compile", model, "--ranks", 3, "-D", "tp=2")
    make = folder / "make.py"
    assert "returns what to import and an example" in said(
        "import", "torch", f"{make}:nothing", "--out", tmp_path / "out"
    )
    assert "no function" in said("import", "torch", f"{make}:other", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace("aten.tanh.default", "os.system.default"),
        lambda text: text.replace("[4, 8]", "[4, 9]"),
        lambda text: text.replace('"value"', '"other"'),
        lambda text: text.replace('"format": 1', '"format": 2'),
    ],
)
def test_a_damaged_description_is_refused(folder, tmp_path, damage):
    (tmp_path / "model").mkdir()
    for file in (folder / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    description = tmp_path / "model" / "model.json"
    description.write_text(damage(description.read_text()))
    with pytest.raises(ModelImportError):
        read_model(tmp_path / "model", TORCH_RULES)


def test_weights_that_are_missing_stay_so(tmp_path):
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2)
        example = (torch.empty(1, 3),)
    write_model(pc.from_torch(module, example), tmp_path / "model")
    again = read_model(tmp_path / "model", TORCH_RULES)
    assert again.weight.init == "missing"
    assert (tmp_path / "model" / "weights.safetensors").stat().st_size < 1000


# --- folders of Hugging Face's form ---------------------------------------------------------------


def without_prefix(folder: Path) -> None:
    """Names as in files that were written from the base model, and a mask that is no weight."""
    from safetensors.numpy import load_file, save_file

    file = folder / "model.safetensors"
    named = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    named["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
    save_file(named, file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "vit", "bart"])
def test_a_folder_of_transformers_becomes_a_model_folder(name, tmp_path):
    """GPT-2's files have other names, Mixtral's have experts one by one."""
    module, example = made(name)
    module.save_pretrained(tmp_path / "hub", max_shard_size="1MB" if name == "gpt2" else "20KB")
    if name == "gpt2":
        without_prefix(tmp_path / "hub")
    source, out = f"hf:{tmp_path / 'hub'}", tmp_path / "model"
    told = command("import", "torch", source, "--out", out, "--batch", 4, "--length", 12)
    assert told["model"] == type(module).__name__
    model = read_model(out, TORCH_RULES)
    labels = example["labels"]
    if tuple(labels.shape) == (4, 8):
        labels = torch.randint(3, 48, (4, 12))
    given = {module.main_input_name: example[module.main_input_name], "labels": labels}
    with torch.no_grad():
        expected = float(module(**given).loss)
    with pc.job("folder") as job:
        inputs = {
            key: pc.input(key, tuple(value.shape), str(value.dtype)[len("torch.") :], ONE)
            for key, value in given.items()
        }
        pc.output("loss", model.place(ONE)(**inputs).loss)
    with pc.run(job, ranks=1, cache=False) as session:
        loss = session.step(**{key: value.numpy() for key, value in given.items()})["loss"]
        session.export_weights(tmp_path / "back")
    assert loss == pytest.approx(expected, rel=1e-5)
    again, lost = type(module).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(lost.values()), lost
    with torch.no_grad():
        assert float(again.eval()(**given).loss) == pytest.approx(expected, rel=1e-6)


def refused(source: str, out: Path) -> str:
    result = CliRunner().invoke(cli, ["import", "torch", source, "--out", str(out)])
    assert result.exit_code == 1, result.output
    assert not out.exists()
    return result.stderr


def test_folders_that_are_refused(tmp_path):
    module, _ = made("llama")
    folder, out = tmp_path / "hub", tmp_path / "out"
    folder.mkdir()
    assert "no configuration" in refused(f"hf:{folder}", out)
    config = json.loads(module.config.to_json_string())
    (folder / "config.json").write_text(json.dumps(config))
    assert "names no class" in refused(f"hf:{folder}", out)
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "has no weights" in refused(f"hf:{folder}", out)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    assert "does not know" in refused(f"hf:{folder}", out)
    (folder / "config.json").write_text('{"model_type": ')
    assert "does not know" in refused(f"hf:{folder}", out)


def test_weights_in_a_folder_that_do_not_fit(tmp_path):
    module, _ = made("llama")
    folder, out = tmp_path / "hub", tmp_path / "out"
    module.save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    for change, said in (
        ('"lm_head.weight": "../', "the name of a file in"),
        ('"model.lm.weight": "', "does not hold 'model.lm.weight'"),
    ):
        index.write_text(text.replace('"lm_head.weight": "', change))
        assert said in refused(f"hf:{folder}", out)
    listed = json.loads(text)
    del listed["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(listed))
    assert "missing: lm_head.weight float32[48, 32]" in refused(f"hf:{folder}", out)


def test_code_in_a_folder_is_not_run(tmp_path):
    (tmp_path / "own.py").write_text("open('ran', 'w')\nclass Config: pass\nclass Model: pass\n")
    config = {
        "model_type": "own",
        "architectures": ["Model"],
        "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "does not know" in refused(f"hf:{tmp_path}", tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not Path("ran").exists()
