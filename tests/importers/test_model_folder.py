"""Imported models as folders, and the commands that make them and take them as jobs."""

from __future__ import annotations

import json
import sys
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
    assert "returns a module and an example" in said(
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
