"""Npz shards: one dataset in several files, mapped or unpacked, and all that may be wrong."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import DataError, UsageError
from plancompiler.ops.stored import StoredArray
from tests.dense import run_dense

MESH = pc.Placement("cpu", [0])
ROWS = 20
X = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 3, 2)
Y = np.arange(ROWS, dtype=np.int64)


def write(folder, cuts, save=np.savez):
    """Shards of X and Y, cut at these rows."""
    bounds = [0, *cuts, ROWS]
    paths = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        how = save[number % len(save)] if isinstance(save, tuple) else save
        paths.append(folder / f"shard-{number:02d}.npz")
        how(paths[-1], x=X[start:stop], y=Y[start:stop])
    return paths


def batches(steps, path, batch=6, **config):
    with pc.job("j") as job:
        data = pc.data.Arrays(path, ("x", "y"), batch, placement=MESH, **config)
        for key in ("x", "y"):
            pc.output(key, data[key])
    return run_dense(job, steps)


def same(results, expected):
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])
        np.testing.assert_array_equal(one["y"], other["y"])


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cuts", [(7,), (1, 2, 19), tuple(range(1, ROWS))])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, (np.savez, np.savez_compressed)])
def test_shards_are_one_dataset(tmp_path, shuffle, cuts, save):
    paths = write(tmp_path, cuts, save)
    whole = tmp_path / "whole.npz"
    np.savez(whole, x=X, y=Y)
    expected = batches(8, whole, shuffle=shuffle)
    same(batches(8, paths, shuffle=shuffle), expected)
    same(batches(8, str(tmp_path / "shard-*.npz"), shuffle=shuffle), expected)
    same(batches(8, [str(path) for path in paths], shuffle=shuffle, split=(0, ROWS)), expected)
    for step in expected:
        np.testing.assert_array_equal(step["x"], X[step["y"]])


def test_a_split_counts_rows_over_all_shards(tmp_path):
    paths = write(tmp_path, (4, 9))
    actual = batches(1, paths, shuffle=False, split=(3, 12), batch=9)
    assert actual[0]["y"].tolist() == list(range(3, 12))


@pytest.mark.parametrize(
    "stored", [np.asfortranarray(X), X.astype(">f4"), X[::-1][::-1]], ids=["F", "big-endian", "C"]
)
def test_arrays_in_other_orders_of_bytes(tmp_path, stored):
    np.savez(tmp_path / "a.npz", x=stored, y=Y)
    for step in batches(4, tmp_path / "a.npz"):
        assert step["x"].dtype == np.float32
        np.testing.assert_array_equal(step["x"], X[step["y"]])


def test_rows_are_mapped_and_not_read_whole(tmp_path):
    path = tmp_path / "large.npz"
    np.savez(path, x=np.zeros((16, 1 << 20), np.uint8), y=np.zeros(16))
    with pc.job("j") as job:
        x = pc.data.Arrays(path, ["x"], 2, placement=MESH)["x"]
        pc.output("sum", x.cast("float32").mean())
    tracemalloc.start()
    try:
        run_dense(job, 1)
        assert tracemalloc.get_traced_memory()[1] < 14 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_shard_is_unpacked_when_a_row_of_it_is_wanted(tmp_path, monkeypatch):
    paths = write(tmp_path, (6, 12), np.savez_compressed)
    unpacked = []
    unpack = StoredArray._unpacked

    def taking_note(self):
        unpacked.append((self.file.path, self.key))
        return unpack(self)

    monkeypatch.setattr(StoredArray, "_unpacked", taking_note)
    batches(1, paths, shuffle=False)
    assert unpacked == [(str(paths[0]), "x"), (str(paths[0]), "y")]
    unpacked.clear()
    batches(2, paths, shuffle=False)
    assert {path for path, _ in unpacked} == {str(paths[0]), str(paths[1])}
    assert len(unpacked) == 4


def refused(match, path, *, got=None, **config):
    with pytest.raises(DataError, match=match) as caught, pc.job("j"):
        pc.data.Arrays(path, **{"keys": ("x", "y"), "placement": MESH, **config})
    report = caught.value.report
    assert report.got
    if got is not None:
        assert str(got) in report.got, report
    return report


def test_a_shard_that_is_missing(tmp_path):
    paths = write(tmp_path, (7,))
    away = tmp_path / "shard-07.npz"
    report = refused("cannot be read", [*paths, away], got=away)
    assert "on every machine" in report.hint
    report = refused("no data file matches", str(tmp_path / "train-*.npz"), got="train-*.npz")
    assert "listed by their names" in report.hint


@pytest.mark.parametrize(
    ("arrays", "match", "got", "expected"),
    [
        ({"x": X}, "no array 'y'", "odd.npz with x", None),
        ({"x": X[:, :2], "y": Y}, "not like those in the first", "[2, 2]", "[3, 2]"),
        ({"x": X.astype(np.float64), "y": Y}, "not like", "float64", "float32"),
        ({"x": X[:3], "y": Y}, "different numbers of rows", "x: 3, y: 20", "one number"),
        ({"x": X[:0], "y": Y[:0]}, "has no rows", "[0, 3, 2]", "at least one"),
        ({"x": np.float32(1), "y": Y}, "has no rows", "[]", "at least one"),
        ({"x": X.astype(complex), "y": Y}, "dtype that no tensor has", "complex128", "float32"),
        ({"x": X.astype("U3"), "y": Y}, "dtype that no tensor has", "<U3", "float32"),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_shard_that_is_not_like_the_others(tmp_path, arrays, match, got, expected, save):
    paths = write(tmp_path, (7,))
    odd = tmp_path / "odd.npz"
    save(odd, **arrays)
    report = refused(match, [*paths, odd], got=odd)
    assert got in report.got
    if expected is not None:
        assert expected in report.expected


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "o.npz", x=np.array([{}], dtype=object), y=Y)
    refused("no readable npz", tmp_path / "o.npz", got="Python objects")


@pytest.mark.parametrize("keep", [0, 3, 50, 300, -1, -200])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_that_was_cut_short(tmp_path, keep, save):
    (path,) = write(tmp_path, (), save)
    path.write_bytes(path.read_bytes()[:keep])
    report = refused("no readable npz", path, got=path)
    assert "cut short" in report.hint


def test_damage_inside_a_compressed_array_is_found_when_it_is_read(tmp_path):
    (path,) = write(tmp_path, (), np.savez_compressed)
    data = bytearray(path.read_bytes())
    # In the middle of x's data, behind the part with its header.
    data[data.index(b"y.npy") - 60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match="no readable npz") as caught:
        batches(1, path)
    assert str(path) in caught.value.report.got


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_that_changes_while_a_job_reads_it(tmp_path, save):
    """Without the check the process would be killed: pages beyond a file's end cannot be read."""
    first, second = write(tmp_path, (12,), save)
    with pc.job("j") as job:
        pc.output(
            "y", pc.data.Arrays([first, second], ["y"], 6, placement=MESH, shuffle=False)["y"]
        )
    with pc.run(job, cache=False) as session:
        session.step()
        second.write_bytes(second.read_bytes()[:100])
        with pytest.raises(DataError, match="has changed") as caught:
            list(session.run(4))
    report = caught.value.report
    assert str(second) in report.got
    assert "100 bytes" in report.got
    assert "new file" in report.hint


def test_a_file_that_grows_short_between_tracing_and_running(tmp_path):
    paths = write(tmp_path, (12,))
    with pc.job("j") as job:
        pc.output("y", pc.data.Arrays(paths, ["y"], 6, placement=MESH)["y"])
    np.savez(paths[1], x=X[12:14], y=Y[12:14])
    with pytest.raises(DataError, match="too short") as caught:
        run_dense(job, 1)
    assert "14 rows in 2 files" in caught.value.report.got
    np.savez(paths[1], x=X[12:], y=Y[12:].astype(np.int32))
    with pytest.raises(DataError, match="not what the job says") as caught:
        run_dense(job, 1)
    assert str(paths[1]) in caught.value.report.got
    paths[0].unlink()
    with pytest.raises(DataError, match="cannot be read"):
        run_dense(job, 1)


@pytest.mark.parametrize("path", [[], 3, None, b"a.npz", [b"a.npz"], [3]])
def test_paths_that_are_none(path):
    with pytest.raises(UsageError), pc.job("j"):
        pc.data.Arrays(path, placement=MESH)


def test_keys_as_one_text_are_refused(tmp_path):
    (path,) = write(tmp_path, ())
    with pytest.raises(UsageError, match="several names"), pc.job("j"):
        pc.data.Arrays(path, "xy", placement=MESH)
