"""Weights of transformers' models: folders that it wrote, and folders that it reads."""

from __future__ import annotations

import json
import logging
import re

import numpy as np
import pytest

import plancompiler as pc
from tests.importers.models import MODELS, made, torch, transformers
from tests.importers.training import ADAM, ONE, RATE, compare, reference, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def on_meta(name: str) -> pc.nn.Module:
    """A model of a configuration alone."""
    _, example = made(name)
    with torch.device("meta"):
        module, _ = MODELS[name]()
    return pc.from_torch(module.eval(), example)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_weights_of_several_files_train_as_those_in_memory(name, tmp_path):
    """Llama has an index; T5's embedding has four names, and one in the file."""
    module, example = made(name)
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    wanted = reference(module, example)
    model = on_meta(name)
    pc.load_weights(model, tmp_path)
    compare(trained(model.place(ONE), example, ONE, ["B", "B"], steps=3), wanted, 1e-5, 1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ranks_read_their_own_shards(backend, tmp_path, caplog):
    """All ranks together read the bytes of the files once, of split weights and of whole ones."""
    module, example = made("llama")
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    model = on_meta("llama")
    pc.load_weights(model, tmp_path)
    mesh = pc.Placement("cpu", [[0, 1, 2, 3]], ("dp", "tp"))
    plan = {**module.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    plan |= {"lm_head": "colwise"} | {
        f"layers.*.self_attn.{name}_proj": "replicate" for name in "kv"
    }
    model.place(mesh, pc.layouts.tensor_parallel(plan, axis="tp"))
    with pc.job("reading") as job:
        given = {
            name: pc.input(name, (4, 12), "int64", mesh, ["B", "B"])
            for name in ("input_ids", "labels")
        }
        pc.output("loss", model(**given).loss)
    with (
        caplog.at_level(logging.DEBUG, logger="plancompiler.ops.initializer"),
        pc.run(job, ranks=4, cache=False, backend=backend) as session,
    ):
        made_loss = session.step(**{name: example[name].numpy() for name in given})["loss"]
    with torch.no_grad():
        assert made_loss == pytest.approx(float(module(**example).loss), rel=1e-5)
    if backend == "processes":  # whose log is their own
        return
    read = [
        (int(each[1]), each[2])
        for record in caplog.records
        if (each := re.match(r"(\d+) bytes of variable (\S+) ", record.getMessage()))
    ]
    expected = {name: value.numel() * 4 for name, value in module.state_dict().items()}
    assert {name: sum(size for size, other in read if other == name) for name in expected} == (
        expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit"])
def test_transformers_reads_what_a_session_exports(name, tmp_path):
    """From weights in memory, after a step of training, and back, in one file and in several."""
    module, example = made(name)
    model = pc.from_torch(module, example).place(ONE)
    with pc.job("export") as job:
        given = {
            key: pc.input(key, tuple(value.shape), str(value.dtype)[len("torch.") :], ONE)
            for key, value in example.items()
            if torch.is_tensor(value)
        }
        out = model(**given)
        pc.optim.AdamW(RATE, **ADAM).minimize(out.loss)
        pc.output("loss", out.loss)
    feeds = {key: example[key].numpy() for key in given}
    with pc.run(job, ranks=1, cache=False) as session:
        session.step(**feeds)
        session.export_weights(tmp_path / "one", model)
        session.export_weights(tmp_path / "several", model, max_file_bytes=20_000)
        trained_loss = session.step(**feeds)["loss"]
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    for folder in ("one", "several"):
        again, told = type(module).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(told.values()), told
        with torch.no_grad():
            loss = float(again.eval()(**example).loss)
        assert loss == pytest.approx(trained_loss, rel=1e-6)
    again.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours, theirs = (
        json.loads((tmp_path / each / "model.safetensors.index.json").read_text())["weight_map"]
        for each in ("several", "theirs")
    )
    assert sorted(ours) == sorted(theirs), "tied weights come once, under the same name"


def test_a_folder_that_was_read_and_is_exported_has_its_configuration(tmp_path):
    module, example = made("gpt2")
    module.save_pretrained(tmp_path / "given")
    model = on_meta("gpt2")
    pc.load_weights(model, tmp_path / "given")
    with pc.job("export") as job:
        ids = pc.input("ids", (4, 12), "int64", ONE)
        pc.output("logits", model.place(ONE)(input_ids=ids, labels=ids).logits)
    with pc.run(job, ranks=1, cache=False) as session:
        logits = session.step(ids=example["input_ids"].numpy())["logits"]
        session.export_weights(tmp_path / "made")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    with torch.no_grad():
        expected = again(example["input_ids"]).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-6)
    for key, value in again.state_dict().items():
        assert torch.equal(value, module.state_dict()[key]), key
