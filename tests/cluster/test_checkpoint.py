"""Checkpoints: any layout loads what any other saved, and damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from plancompiler.executor.checkpoint_index import StoredBox, StoredVariable, verify_cover
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
    plans = []
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
        plans.append(Plan("job", rank, world, 0, (), (), (), (), (), variables, ()))
    return plans


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


@pytest.mark.slow
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


WHOLE = {
    "file": "step3-rank00000.safetensors",
    "region": [[0, 7], [0, 5]],
    "xxh3": "0" * 16,
}
"""A box that no shard holds."""


def _edit(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["variables"]["w"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [7, 6]}, "another shape or dtype"),
        ({"dtype": "float64"}, "another shape or dtype"),
        ({"boxes": []}, "leave a gap"),
        (
            {"boxes": [{"file": "../x", "region": [[0, 7], [0, 5]], "xxh3": "0" * 16}]},
            "not a file name",
        ),
        (
            {
                "boxes": [
                    {
                        "file": "step3-rank00000.safetensors",
                        "region": [[0, 7], [0, 5]],
                        "xxh3": "0" * 16,
                    }
                ]
            },
            "says",
        ),
        ({"boxes": [{"file": "step3-rank00000.safetensors"}]}, "no valid 'region'"),
        ({"boxes": 7}, "no valid 'boxes'"),
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
    with pytest.raises(CheckpointError, match="leave a gap"):
        assemble([data])
    for damaged in (b"", data[:20], data[:-1], b"\xff" * 40):
        with pytest.raises(CheckpointError):
            assemble([damaged])


# --- every element once, and as it was written --------------------------------------------------

GRID = simple(Placement("cpu", [[0, 1], [2, 3]]), ["S(0)", "S(1)"])


def _boxes(folder: Path) -> list[dict[str, Any]]:
    boxes: list[dict[str, Any]] = json.loads((folder / INDEX).read_text())["variables"]["w"][
        "boxes"
    ]
    return boxes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda boxes: boxes[:3], "leave a gap"),
        (lambda boxes: [*boxes[:3], boxes[0]], "overlap"),
        (lambda boxes: [*boxes, boxes[0]], "overlap"),
        (lambda boxes: [*boxes, {**boxes[0], "region": [[1, 2], [0, 1]]}], "digests|overlap"),
        (lambda boxes: [{**boxes[0], "region": [[0, 3], [0, 3]]}, *boxes[1:]], "overlap"),
        (lambda boxes: [{**boxes[0], "region": [[0, 3], [0, 3]]}, *boxes[2:]], "gap|overlap"),
        (lambda boxes: [*boxes[:3], {**boxes[3], "region": [[4, 8], [3, 5]]}], "reach outside"),
        (lambda boxes: [*boxes[:3], {**boxes[3], "region": [[4, 7]]}], "reach outside"),
        (lambda boxes: [*boxes[:3], {**boxes[3], "region": [[7, 4], [3, 5]]}], "'region'"),
        (lambda boxes: [*boxes[:3], {**boxes[3], "region": [[4, 7], [-1, 5]]}], "'region'"),
        (lambda boxes: [*boxes[:3], {**boxes[3], "xxh3": ""}], "digests of other bytes"),
        (lambda boxes: [*boxes[:3], {**boxes[3], "file": boxes[0]["file"]}], "index says"),
    ],
)
def test_boxes_that_are_no_grid_of_the_variable(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object], said: str
) -> None:
    save(tmp_path, GRID)
    _edit(tmp_path, boxes=change(_boxes(tmp_path)))
    with pytest.raises(CheckpointError, match=said) as caught:
        load_shards(tmp_path, ONE[0])
    assert "'w'" in str(caught.value) or "boxes[3]" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_thousands_of_boxes_are_checked_without_their_elements(tmp_path: Path) -> None:
    """A variable of 2**40 elements in 4096 boxes, none of which is there."""
    side, cells = 1 << 20, 64
    step = side // cells
    boxes = tuple(
        StoredBox(
            "file",
            ((row * step, (row + 1) * step), (column * step, (column + 1) * step)),
            None,
        )
        for row in range(cells)
        for column in range(cells)
    )
    whole = StoredVariable((side, side), "float32", "[S(0), S(1)]", None, boxes)
    verify_cover("w", whole, "an index")
    for wrong, said in ((boxes[:-1], "gap"), ((*boxes[:-1], boxes[0]), "overlap")):
        with pytest.raises(CheckpointError, match=said):
            verify_cover("w", replace(whole, boxes=wrong), "an index")


def test_shards_that_do_not_make_a_variable_become_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, ONE, step=1)
    for plan in LINE[:2]:
        save_shards(tmp_path, plan, shards(plan), 3)
    with pytest.raises(CheckpointError, match="leave a gap"):
        write_index(tmp_path, 2, 3)
    assert load_shards(tmp_path, ONE[0])[1] == 1


def big(sbp: list[str], rows: int = 700, columns: int = 1000) -> list[Plan]:
    """One variable of 2.8 MB on two ranks: three digests for a whole box."""
    placement, nd = Placement("cpu", [0, 1]), NdSbp.of(sbp)
    return [
        Plan(
            "job", rank, 2, 0, (), (), (), (), (),
            (
                VariableDesc(
                    "big", 0, (rows, columns), DType.FLOAT32, placement, nd,
                    rank_region((rows, columns), placement, nd, rank), (),
                ),
            ),
            (),
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("big")
    values = np.arange(700_000, dtype=np.float32).reshape(700, 1000)
    world = big(["B"])
    for plan in world:
        save_shards(folder, plan, {"big": values}, 1)
    write_index(folder, 2, 1)
    return folder, values


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B"])
def test_parts_of_boxes_are_read_and_checked(stored: tuple[Path, np.ndarray], sbp: str) -> None:
    folder, values = stored
    for plan in big([sbp]):
        loaded = load_shards(folder, plan)[0]["big"]
        np.testing.assert_array_equal(loaded, values[region_index(plan.variables[0].region)])


def test_a_flipped_bit_is_seen_by_those_who_read_it(
    stored: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = stored
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "step1-rank00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 0x40
    path.write_bytes(data)
    top, bottom = big(["S(0)"])
    load_shards(copy, top)  # the other half, with digests of its own
    for plan in (bottom, *big(["S(1)"])):
        with pytest.raises(CheckpointError, match="not those that were written") as caught:
            load_shards(copy, plan)
        assert "'big'" in str(caught.value)
        assert str(path) in str(caught.value)
        load_shards(copy, plan, check=False)
    monkeypatch.setenv("PLANCOMPILER_CHECK_RESTORE", "0")
    load_shards(copy, bottom)


def test_shards_of_another_step_under_the_right_name_are_seen(tmp_path: Path) -> None:
    save(tmp_path / "a", LINE, step=3)
    name = "step3-rank00000.safetensors"
    newer = {each: value + 1 for each, value in shards(LINE[0]).items() if each != "none"}
    save_shards(tmp_path / "b", LINE[0], {**shards(LINE[0]), **newer}, 3)
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(CheckpointError, match="not those that were written"):
        load_shards(tmp_path / "a", ONE[0])


def test_a_checkpoint_of_the_format_before_loads_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, LINE)
    index = json.loads((tmp_path / INDEX).read_text())
    index["format"] = 1
    for variable in index["variables"].values():
        for box in variable["boxes"]:
            del box["xxh3"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    arrays, _ = load_shards(tmp_path, ONE[0])
    np.testing.assert_array_equal(arrays["w"], VALUES["w"])
    assert "has no digests" in caplog.text
