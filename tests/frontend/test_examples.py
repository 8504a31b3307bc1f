"""The examples: they learn, their layouts are what they say, and wrong settings are refused."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import UsageError
from tests.dense import DenseRun, run_dense

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mlp, gpt = load("mlp"), load("gpt")
SMALL = {"layers": 2, "dim": 32, "heads": 2, "length": 32, "batch": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_digits_are_whole():
    with np.load(EXAMPLES / "data" / "digits.npz") as data:
        images, labels = data["images"], data["labels"]
    assert (images.shape, images.dtype, images.max()) == ((1797, 64), np.uint8, 16)
    assert (labels.shape, labels.dtype) == ((1797,), np.uint8)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.slow
def test_mlp_reads_digits_it_never_saw():
    outputs = run_dense(mlp.build(), 300)
    assert outputs[0]["accuracy"] < 0.5
    assert outputs[-1]["accuracy"] >= 0.97
    assert outputs[-1]["loss"] < 0.1


@pytest.mark.parametrize(
    ("layout", "ranks", "hierarchy", "weights"),
    [
        ("dp", None, (2,), ["[B]", "[B]", "[B]"]),
        ("dp", 4, (4,), ["[B]", "[B]", "[B]"]),
        ("tp", 3, (3,), ["[S(0)]", "[S(1)]", "[B]"]),
        ("dp_tp", None, (2, 2), ["[B, S(0)]", "[B, S(1)]", "[B, B]"]),
        ("dp_tp", 6, (3, 2), ["[B, S(0)]", "[B, S(1)]", "[B, B]"]),
        ("dp_tp", 1, (1, 1), ["[B, S(0)]", "[B, S(1)]", "[B, B]"]),
    ],
)
def test_layouts_of_mlp(layout, ranks, hierarchy, weights):
    job = mlp.build(layout=layout, ranks=ranks, hidden=8, evaluate=False)
    results = {op.attr("name"): str(op.sbp) for op in job.ops if op.kind == "variable"}
    assert [results[f"{layer}.weight"] for layer in (0, 2, 4)] == weights
    assert {op.placement.hierarchy for op in job.ops} == {hierarchy}
    assert job.world_size == math.prod(hierarchy)
    assert list(job.outputs) == ["loss"]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"layout": "pp"}, "unknown layout"),
        ({"layout": "dp_tp", "ranks": 3}, "pairs of ranks"),
        ({"hidden": 0}, "hidden must be"),
        ({"hidden": "64"}, "hidden must be"),
        ({"batch": 1.5}, "batch must be"),
        ({"total": True}, "total must be"),
        ({"lr": "fast"}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
    ],
)
def test_wrong_settings_of_mlp(config, part):
    with pytest.raises(UsageError, match=part):
        mlp.build(**config)


@pytest.mark.slow
def test_gpt_learns_more_than_how_often_bytes_occur():
    job = gpt.build(layers=1, dim=32, heads=2, length=32, batch=8, lr=1e-2, total=150)
    losses = [step["loss"] for step in run_dense(job, 150)]
    entropy = gpt.byte_entropy(gpt.text_file())
    assert abs(losses[0] - math.log(256)) < 0.2
    assert np.mean(losses[-10:]) < entropy - 0.3


def test_the_text_is_written_once_and_read_again(cache, tmp_path):
    path = gpt.text_file()
    assert path.parent == cache / "plancompiler"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    before = path.stat().st_mtime_ns
    assert gpt.text_file() == path
    assert path.stat().st_mtime_ns == before
    assert b"for" in path.read_bytes()
    other = tmp_path / "own.txt"
    assert gpt.text_file(str(other)) == other


def test_byte_entropy(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"abababcc")
    expected = -(2 * 3 / 8 * math.log(3 / 8) + 1 / 4 * math.log(1 / 4))
    assert gpt.byte_entropy(path) == pytest.approx(expected)


def test_stages_and_layouts_of_gpt():
    job = gpt.build(dp=1, tp=2, pp=2, **{**SMALL, "layers": 3})
    variables = {op.attr("name"): op for op in job.ops if op.kind == "variable"}
    ranks = {name: op.placement.rank_list for name, op in variables.items()}
    first, second = (0, 1), (2, 3)
    assert ranks["token.weight"] == ranks["position"] == first
    assert [ranks[f"blocks.{layer}.mlp.fc1.weight"] for layer in range(3)] == [first, first, second]
    assert ranks["norm.weight"] == ranks["head.weight"] == second
    assert str(variables["blocks.2.attention.value.bias"].sbp) == "[B, S(0)]"
    assert str(variables["blocks.2.mlp.fc2.weight"].sbp) == "[B, S(1)]"
    moves = [op for op in job.ops if op.kind == "redistribute"]
    assert [op.placement.rank_list for op in moves] == [second, first]
    tokens = [op for op in job.ops if op.kind == "token_batch"]
    where = [(op.attr("shift"), op.placement.rank_list) for op in tokens]
    assert where == [(0, first), (1, second)]
    assert job.world_size == 4


@pytest.mark.slow
def test_chunks_of_gpt_are_dealt_to_the_stages_in_turn():
    sizes = {**SMALL, "layers": 8}
    job = gpt.build(pp=2, chunks=2, schedule="interleaved", **sizes)
    variables = {op.attr("name"): op for op in job.ops if op.kind == "variable"}
    ranks = [variables[f"blocks.{layer}.mlp.fc1.weight"].placement.rank_list for layer in range(8)]
    assert ranks == [(0,), (0,), (1,), (1,), (0,), (0,), (1,), (1,)]
    assert variables["token.weight"].placement.rank_list == (0,)
    assert variables["head.weight"].placement.rank_list == (1,)
    steps = [[step["loss"] for step in run_dense(each, 2)] for each in (job, gpt.build(**sizes))]
    assert steps[0] == steps[1]


@pytest.mark.slow
def test_what_gpt_learns_does_not_depend_on_its_layout():
    def losses(**layout):
        return [step["loss"] for step in run_dense(gpt.build(**SMALL, **layout), 3)]

    assert losses() == losses(ranks=2) == losses(dp=2, tp=2, pp=2)


@pytest.mark.parametrize(
    ("preset", "dp", "tp", "pp"), [("tiny", 2, 2, 2), ("gpt2", 2, 2, 2), ("gpt3-175b", 2, 8, 16)]
)
def test_presets_have_as_many_parameters_as_their_sizes_say(preset, dp, tp, pp):
    job = gpt.build(preset=preset, dp=dp, tp=tp, pp=pp, ranks=dp * tp * pp)
    actual = sum(
        math.prod(op.outputs[0].shape)
        for op in job.ops
        if op.kind == "variable" and op.attr("trainable")
    )
    sizes = gpt.PRESETS[preset]
    d = sizes.dim
    # Per layer: four d*d and two d*4d weights, nine biases of d in all, two norms of 2d.
    expected = sizes.layers * (12 * d * d + 13 * d) + (2 * sizes.vocabulary + sizes.length + 2) * d
    assert actual == expected
    assert job.world_size == dp * tp * pp


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"zero": 4}, "zero must be"),
        ({"microbatches": 0}, "microbatches must be"),
        ({"schedule": "2f2b"}, "unknown schedule"),
        ({"recompute": "all"}, "unknown recompute"),
        ({"passes": "cse,none"}, "no such pass"),
        ({"preset": "huge"}, "unknown preset"),
        ({"dp": 2, "tp": 2, "ranks": 3}, "number of ranks"),
        ({"tp": 2, "ranks": 1}, "number of ranks"),
        ({"tp": 0}, "tp must be"),
        ({"dim": "256"}, "dim must be"),
        ({"total": 0}, "total must be"),
        ({"lr": 0}, "lr must be"),
        ({"pp": 5}, "at least one layer"),
        ({"chunks": 0}, "chunks must be"),
        ({"chunks": 2, "schedule": "1f1b"}, "only the interleaved schedule"),
        ({"chunks": 3, "pp": 2, "schedule": "interleaved"}, "every chunk .* at least one layer"),
    ],
)
def test_wrong_settings_of_gpt(config, part):
    with pytest.raises(UsageError, match=part):
        gpt.build(**config)


def test_the_sampler_has_the_variables_of_training():
    sampler = gpt.build_sampler(layers=2, dim=32, heads=2, length=32)
    training = gpt.build(**SMALL)
    assert set(sampler.variables) == {
        op.attr("name") for op in training.ops if op.kind == "variable" and op.attr("trainable")
    }
    run = DenseRun(sampler)
    tokens = np.zeros((1, 32), np.int64)
    before = run.step(tokens=tokens)["logits"]
    tokens[0, 20:] = 65
    after = run.step(tokens=tokens)["logits"]
    assert before.shape == (1, 32, 256)
    np.testing.assert_array_equal(before[0, :20], after[0, :20])


def test_choosing_a_byte():
    random = np.random.default_rng(0)
    logits = np.log(np.array([0.7, 0.2, 0.1]))
    drawn = [gpt.choose(logits, 1.0, random) for _ in range(2000)]
    np.testing.assert_allclose(np.bincount(drawn) / 2000, [0.7, 0.2, 0.1], atol=0.03)
    assert {gpt.choose(logits, 0.0, random) for _ in range(10)} == {0}
    assert {gpt.choose(logits, 0.01, random) for _ in range(50)} == {0}


def test_training_saves_what_sampling_reads(tmp_path, monkeypatch, capsys):
    sizes = ["--layers", "1", "--dim", "16", "--heads", "2"]
    folder = str(tmp_path / "checkpoint")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["gpt.py", *arguments, *sizes])
        code = gpt.main()
        return code, capsys.readouterr()

    code, printed = run("train", "--steps", "3", "--tp", "2", "--save", folder)
    assert code == 0
    assert "byte-frequency entropy" in printed.out
    assert "step     2  loss 5." in printed.out
    code, printed = run("sample", "--restore", folder, "--length", "5", "--prompt", "for ")
    assert code == 0
    assert printed.out.startswith("for ")
    code, again = run("sample", "--restore", folder, "--length", "5", "--prompt", "for ")
    assert again.out == printed.out
    code, printed = run("sample", "--restore", str(tmp_path / "missing"))
    assert code == 1
    assert "CheckpointError" in printed.err
    code, printed = run("train", "--dp", "0")
    assert code == 2


def test_a_sample_needs_a_prompt(tmp_path):
    with pytest.raises(UsageError, match="prompt"):
        gpt.sample(tmp_path, prompt="")


def test_jobs_are_the_same_each_time():
    assert str(gpt.build(**SMALL)) == str(gpt.build(**SMALL))
    assert isinstance(mlp.build(hidden=8), pc.Job)
