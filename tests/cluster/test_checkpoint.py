"""Checkpoints: any layout loads what any other saved, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import CheckpointError
from plancompiler.executor.checkpoint import (
    INDEX,
    assemble,
    load_shards,
    read_index,
    save_shards,
    shards_to_bytes,
    write_index,
)
from plancompiler.ir import DType, NdSbp, Placement
from plancompiler.ir.shard import rank_region, region_index
from plancompiler.plan.plan import Plan, VariableDesc

SHAPES = {"w": (7, 5), "b": (3,), "scalar": (), "none": (0, 4), "h": (4, 2)}
DTYPES = {
    "w": DType.FLOAT32,
    "b": DType.INT64,
    "scalar": DType.FLOAT64,
    "none": DType.BOOL,
    "h": DType.BFLOAT16,
}
VALUES = {
    name: np.arange(100)[: int(np.prod(shape))].reshape(shape).astype(DTYPES[name].numpy)
    for name, shape in SHAPES.items()
}


def plans(placements: dict[str, Placement], sbps: dict[str, NdSbp], world: int) -> list[Plan]:
    """A plan per rank that holds nothing but its variables."""
    found = []
    for rank in range(world):
        variables = tuple(
            VariableDesc(
                name,
                index,
                shape,
                DTYPES[name],
                placements[name],
                sbps[name],
                rank_region(shape, placements[name], sbps[name], rank),
                (),
            )
            for index, (name, shape) in enumerate(SHAPES.items())
            if rank in placements[name]
        )
        found.append(Plan("job", rank, world, 0, (), (), (), (), (), variables, ()))
    return found


def shards(plan: Plan) -> dict[str, np.ndarray]:
    """What the plan's rank holds."""
    return {each.name: VALUES[each.name][region_index(each.region)] for each in plan.variables}


def save(folder: Path, world: list[Plan], step: int = 3, tag: str = "") -> None:
    for plan in world:
        save_shards(folder, plan, shards(plan), step, tag)
    write_index(folder, len(world), step, tag)


def simple(mesh: Placement, sbp: list[str]) -> list[Plan]:
    """All variables on one mesh, split like this where they have the axes."""
    nd = {
        name: NdSbp.of(sbp if len(shape) == 2 else ["B"] * mesh.ndim)
        for name, shape in SHAPES.items()
    }
    return plans(dict.fromkeys(SHAPES, mesh), nd, mesh.size)


LINE = simple(Placement("cpu", [0, 1, 2]), ["S(0)"])
ONE = simple(Placement("cpu", [0]), ["B"])


@st.composite
def worlds(draw: st.DrawFn) -> list[Plan]:
    """Each variable somewhere in a world of up to six ranks."""
    size = draw(st.integers(1, 6))
    placements, sbps = {}, {}
    for name, shape in SHAPES.items():
        ranks = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
        hierarchy = draw(st.sampled_from(_hierarchies(len(ranks))))
        placements[name] = Placement("cpu", np.reshape(ranks, hierarchy))
        entries = ["B", *(f"S({axis})" for axis in range(len(shape)))]
        sbps[name] = NdSbp.of([draw(st.sampled_from(entries)) for _ in hierarchy])
    return plans(placements, sbps, size)


def _hierarchies(count: int) -> list[tuple[int, ...]]:
    return [(count,)] + [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]


@given(source=worlds(), target=worlds())
@settings(max_examples=60, deadline=None)
def test_any_layout_loads_any_other(
    source: list[Plan], target: list[Plan], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(folder, source)
    for plan in target:
        arrays, step = load_shards(folder, plan)
        assert step == 3
        for name, expected in shards(plan).items():
            assert arrays[name].dtype == expected.dtype
            np.testing.assert_array_equal(arrays[name], expected)
    whole = assemble(shards_to_bytes(plan, shards(plan), 3) for plan in source)
    assert whole.keys() == VALUES.keys()
    for name, expected in VALUES.items():
        assert whole[name].dtype == expected.dtype
        np.testing.assert_array_equal(whole[name], expected)


def test_copies_are_written_once(tmp_path: Path) -> None:
    save(tmp_path, simple(Placement("cpu", [[0, 1], [2, 3]]), ["S(0)", "B"]))
    boxes = read_index(tmp_path)["variables"]["w"]["boxes"]
    assert [box["file"][-17:-12] for box in boxes] == ["00000", "00002"]


def test_the_index_says_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, LINE)
    index = read_index(tmp_path)
    assert (index["step"], index["job"], index["world_size"]) == (3, "job", 3)
    entry = index["variables"]["w"]
    assert (entry["shape"], entry["dtype"], entry["sbp"]) == ([7, 5], "float32", "[S(0)]")
    assert entry["placement"] == {"device_type": "cpu", "ranks": [0, 1, 2], "axes": None}


def test_a_newer_checkpoint_replaces_an_older_one(tmp_path: Path) -> None:
    save(tmp_path, LINE, step=3)
    save(tmp_path, ONE, step=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        INDEX, "step5-rank00000.safetensors",
    ]  # fmt: skip
    assert load_shards(tmp_path, LINE[2])[1] == 5


def test_an_unfinished_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, LINE, step=3)
    save_shards(tmp_path, ONE[0], shards(ONE[0]), 5)
    arrays, step = load_shards(tmp_path, ONE[0])
    assert step == 3
    np.testing.assert_array_equal(arrays["w"], VALUES["w"])
    with pytest.raises(CheckpointError, match="missing"):
        write_index(tmp_path, 2, 5)
    assert load_shards(tmp_path, ONE[0])[1] == 3


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        load_shards(tmp_path / "nowhere", ONE[0])
    save(tmp_path, LINE)
    (tmp_path / "step3-rank00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank00001"):
        load_shards(tmp_path, ONE[0])
    load_shards(tmp_path, LINE[0])  # needs the other files only


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_shards(tmp_path: Path, keep: int) -> None:
    save(tmp_path, LINE)
    path = tmp_path / "step3-rank00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError):
        load_shards(tmp_path, ONE[0])
    with pytest.raises(CheckpointError):
        write_index(tmp_path, 3, 3)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "variables": 3}']
)
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError):
        load_shards(tmp_path, ONE[0])


def _edit(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["variables"]["w"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [7, 6]}, "another shape or dtype"),
        ({"dtype": "float64"}, "another shape or dtype"),
        ({"boxes": []}, "does not hold all"),
        ({"boxes": [{"file": "../x", "region": [[0, 7], [0, 5]]}]}, "not a file name"),
        ({"boxes": [{"file": "step3-rank00000.safetensors", "region": [[0, 7], [0, 5]]}]}, "shape"),
        ({"boxes": [{"file": "step3-rank00000.safetensors"}]}, "damaged"),
        ({"boxes": 7}, "damaged"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    save(tmp_path, LINE)
    _edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said):
        load_shards(tmp_path, ONE[0])


def test_a_missing_variable(tmp_path: Path) -> None:
    save(tmp_path, LINE)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["variables"]["b"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no variable 'b'"):
        load_shards(tmp_path, ONE[0])


def test_arrays_that_do_not_fit_are_not_saved(tmp_path: Path) -> None:
    plan = ONE[0]
    good = shards(plan)
    for name, wrong in {
        "w": good["w"][:3],
        "b": good["b"].astype("int32"),
    }.items():
        with pytest.raises(CheckpointError, match=f"'{name}'"):
            save_shards(tmp_path, plan, {**good, name: wrong}, 0)
    with pytest.raises(CheckpointError, match="'w'"):
        save_shards(tmp_path, plan, {}, 0)
    partial = simple(Placement("cpu", [0, 1]), ["P"])
    with pytest.raises(CheckpointError, match="partial"):
        save_shards(tmp_path, partial[0], shards(partial[0]), 0)
    assert not list(tmp_path.iterdir())


def test_shards_in_memory_that_are_damaged() -> None:
    data = shards_to_bytes(LINE[0], shards(LINE[0]), 0)
    with pytest.raises(CheckpointError, match="not complete"):
        assemble([data])
    for damaged in (b"", data[:20], data[:-1], b"\xff" * 40):
        with pytest.raises(CheckpointError):
            assemble([damaged])
