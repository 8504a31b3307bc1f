"""Initial values and constants that lie in files; names of tied parameters; placement patterns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.errors import DataError, SecurityError, ShapeError, UsageError
from plancompiler.frontend.stored import kept_array
from plancompiler.lower.compile import compile_plans
from plancompiler.worker.allowed_paths import AllowedPaths

ONE = pc.Placement("cpu", [0], ("x",))
TWO = pc.Placement("cpu", [0, 1], ("x",))
RANDOM = np.random.default_rng(3)
WEIGHT = RANDOM.normal(size=(5, 4)).astype(np.float32)
TABLE = RANDOM.normal(size=(60, 30))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Scaled(pc.nn.Module):
    def __init__(self, init, dtype="float32"):
        self.weight = pc.nn.Parameter((5, 4), dtype, init)

    def forward(self, x):
        return x * self.weight.value


def outputs(mesh, sbp, init, dtype="float32"):
    """The weight of a job after no step, and a large constant."""
    with pc.job("stored") as job:
        model = Scaled(init, dtype).place(mesh, {"weight": sbp})
        pc.output("weight", model.weight.value)
        pc.output("table", pc.constant(TABLE, "float64", mesh, sbp))
    with pc.run(job, ranks=mesh.size) as session:
        return session.step()


@pytest.mark.parametrize("sbp", [["B"], ["S(0)"], ["S(1)"]])
def test_a_parameter_starts_from_an_array_in_any_layout(sbp):
    made = outputs(TWO, sbp, WEIGHT)
    np.testing.assert_array_equal(made["weight"], WEIGHT)
    np.testing.assert_array_equal(made["table"], TABLE)


def test_a_parameter_starts_from_a_tensor_of_a_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"b": np.zeros(3), "layer.weight": WEIGHT, "a": np.ones(2, np.int8)}, path)
    stored = pc.data.Stored(path, "layer.weight")
    assert str(stored.type) == "float32[5, 4]"
    np.testing.assert_array_equal(outputs(TWO, ["S(0)"], stored)["weight"], WEIGHT)
    wide = outputs(ONE, ["B"], stored, "float64")["weight"]
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, WEIGHT)


def test_an_eager_parameter_starts_from_an_array():
    model = Scaled(WEIGHT).place(ONE)
    np.testing.assert_array_equal(model.weight.value.numpy(), WEIGHT)


def test_equal_arrays_are_one_file():
    first, second = kept_array(WEIGHT), kept_array(WEIGHT.copy(order="F"))
    assert first == second
    assert kept_array(WEIGHT.astype(np.float64)) != first
    assert kept_array(WEIGHT.reshape(4, 5)) != first
    assert len(list(Path(first.file).parent.iterdir())) == 3


def test_a_file_that_others_read_is_not_replaced(monkeypatch):
    kept = Path(kept_array(WEIGHT).file)
    before = kept.stat()
    # Another process has seen no file, and writes it at the same time.
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert kept_array(WEIGHT).file == str(kept)
    after = kept.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]


def test_kept_arrays_can_be_removed():
    kept = kept_array(WEIGHT)
    result = CliRunner().invoke(cli, ["cache", "clear", "--arrays", "--json"])
    assert json.loads(result.stdout)["removed"] == 1, result.output
    assert not Path(kept.file).exists()


def test_a_worker_reads_initial_values_below_its_folders_only(tmp_path):
    with pc.job("stored") as job:
        pc.output("weight", Scaled(WEIGHT).place(ONE).weight.value)
    plan = compile_plans(job, 1, mode="rank_per_iter").plans[0]
    AllowedPaths([tmp_path]).check_plan(plan)
    with pytest.raises(SecurityError, match="a data file of variable_0"):
        AllowedPaths([tmp_path / "other"]).check_plan(plan)


def test_numbers_of_every_kind_are_kept():
    for value in (np.array(True), np.array(2.5), np.empty((0, 3)), np.arange(6)[::2]):
        kept = kept_array(value)
        assert kept.type.shape == value.shape


@pytest.mark.parametrize(
    ("content", "key", "dtype", "expected"),
    [
        ({"w": WEIGHT.T.copy()}, "w", "float32", "does not fit"),
        ({"w": np.zeros((5, 4), np.int32)}, "w", "float32", "does not fit"),
        ({"v": WEIGHT}, "w", "float32", "has no 'w'"),
        (b"short", "w", "float32", "damaged"),
        (b"\xff" * 64, "w", "float32", "damaged"),
        (None, "w", "float32", "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, content, key, dtype, expected):
    path = tmp_path / "w.safetensors"
    if isinstance(content, dict):
        save_file(content, path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=expected):
        Scaled(pc.data.Stored(path, key), dtype).place(ONE).weight.value  # noqa: B018


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match="another shape"):
        Scaled(WEIGHT.T)


def test_a_missing_value_is_asked_for_by_name(tmp_path):
    with pc.job("missing") as job:
        pc.output("weight", Scaled("missing").place(ONE).weight.value)
    with pytest.raises(DataError, match="'weight' has no initial value"), pc.run(job, ranks=1) as s:
        s.step()
    with pc.job("missing") as given:
        pc.output("weight", Scaled(WEIGHT).place(ONE).weight.value)
    with pc.run(given, ranks=1) as session:
        session.step()
        session.save(tmp_path / "saved")
    with pc.run(job, ranks=1, restore=tmp_path / "saved") as session:
        np.testing.assert_array_equal(session.step()["weight"], WEIGHT)


class Tied(pc.nn.Module):
    def __init__(self):
        self.embedding = pc.nn.Embedding(6, 4)
        self.head = pc.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_parameter_has_all_its_names():
    model = Tied().place(ONE)
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]
    state = model.state_dict()
    assert list(state) == ["embedding.weight", "head.weight"]
    assert state["embedding.weight"] is state["head.weight"]
    other = Tied().place(ONE)
    other.load_state_dict({"head.weight": state["head.weight"]})
    np.testing.assert_array_equal(
        other.embedding.weight.value.numpy(), state["head.weight"].numpy()
    )
    other.load_state_dict(state)
    with pytest.raises(UsageError, match="another module"):
        other.load_state_dict({})


def test_patterns_place_parameters_and_the_first_counts():
    model = pc.nn.Sequential(pc.nn.Linear(4, 4), pc.nn.Linear(4, 4), Tied())
    model.place(TWO, {"1.weight": ["S(1)"], "*.weight": ["S(0)"], "*.head.*": ["S(1)"]})
    sbp = {name: str(each.sbp) for name, each in model.named_parameters()}
    assert sbp == {
        "0.weight": "[S(0)]",
        "0.bias": "[B]",
        "1.weight": "[S(1)]",
        "1.bias": "[B]",
        "2.embedding.weight": "[S(0)]",
    }
    assert str(Tied().place(TWO, {"head.*": ["S(1)"]}).embedding.weight.sbp) == "[S(1)]"
    with pytest.raises(UsageError, match="no parameter of this name"):
        model.place(TWO, {"*.wieght": ["S(0)"]})
    with pytest.raises(UsageError, match="no parameter of this name"):
        model.place(TWO, {".weight": ["S(0)"]})
