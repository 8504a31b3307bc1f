"""The store of the plan cache: checked, bounded, shared by processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.cache.plan_cache import JobSlices, runs, slices_from_bytes, slices_to_bytes
from plancompiler.cache.store import DEFAULT_BYTES, Store, open_store
from plancompiler.errors import UsageError, WireFormatError

KEY, OTHER = "a" * 64, "b" * 64


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.read(KEY, "slices") is None
    store.write(KEY, "slices", {"job": "j", "world_size": 3}, b"bytes")
    store.write(KEY, "slices", {"job": "j", "world_size": 4}, b"other bytes")
    store.write(OTHER, "rank_12", {}, b"")
    entry = Store(tmp_path / "new" / "folder").read(KEY, "slices")
    assert entry is not None
    assert (entry.data, entry.facts["world_size"]) == (b"other bytes", 4)
    empty = store.read(OTHER, "rank_12")
    assert empty is not None
    assert empty.data == b""
    assert {each.key: each.names for each in store.kept()} == {
        KEY: ("slices",),
        OTHER: ("rank_12",),
    }


def test_any_damage_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.write(KEY, "slices", {"job": "j"}, bytes(range(64)))
    path = tmp_path / KEY / "slices"
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole + b"\0"]
    damaged += [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for at in range(len(whole))
        for bit in (1, 128)
    ]
    for data in damaged:
        path.write_bytes(data)
        caplog.clear()
        assert store.read(KEY, "slices") is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    path.write_bytes(whole)
    assert store.read(KEY, "slices") is not None


def test_an_entry_under_another_name_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    store.write(KEY, "rank_0", {}, b"plan")
    (tmp_path / KEY / "rank_0").rename(tmp_path / KEY / "rank_1")
    assert store.read(KEY, "rank_1") is None
    assert "belongs elsewhere" in caplog.text


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=64_000)
    size = 6_000
    for rank in range(10):
        store.write(KEY, f"rank_{rank}", {}, bytes(size))
        os.utime(tmp_path / KEY / f"rank_{rank}", (rank, rank))
    assert len(store.kept()[0].names) == 10
    assert store.read(KEY, "rank_0") is not None  # now the last that was used
    store.write(OTHER, "slices", {}, bytes(size))
    left = {each.key: each for each in store.kept()}
    assert left[OTHER].names == ("slices",)
    assert left[KEY].names == ("rank_0", *(f"rank_{rank}" for rank in range(3, 10)))
    assert sum(each.nbytes for each in left.values()) <= 0.9 * store.limit


def test_what_does_not_fit_at_all_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=1000)
    store.write(KEY, "slices", {}, bytes(1000))
    assert store.kept() == []
    Store(tmp_path, limit=0).write(KEY, "slices", {}, b"")
    assert store.kept() == []


def test_clearing_removes_entries_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(KEY, "slices", {}, b"1")
    store.write(OTHER, "rank_3", {}, b"22")
    (tmp_path / KEY / "slices.ab.partial").write_bytes(b"left by a killed process")
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / OTHER / "notes").write_text("more work")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "slices").write_text("not ours")
    count, nbytes = store.clear()
    assert count == 2
    assert nbytes > 3
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == [f"{OTHER}/notes", "photos/slices", "thesis.tex"]
    assert not (tmp_path / KEY).exists()


def test_files_of_killed_writers_go(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=1 << 20)
    folder = tmp_path / KEY
    folder.mkdir()
    old, fresh = folder / "slices.ab.partial", folder / "rank_0.cd.partial"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.write(OTHER, "slices", {}, b"1")  # the first write of a process measures the store
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    store = Store(tmp_path / "file" / "plans")
    for _ in range(3):
        store.write(KEY, "slices", {}, b"1")
        assert store.read(KEY, "slices") is None
    assert [r.message.split(":")[0] for r in caplog.records if "kept" in r.message] == [
        "plans are not kept"
    ]
    assert store.kept() == []
    assert store.clear() == (0, 0)


PROGRAM = """
import random, sys
from pathlib import Path
from plancompiler.cache.store import Store

seed = int(sys.argv[2])
rng = random.Random(seed)
store = Store(Path(sys.argv[1]), limit=40_000)
seen = 0
for _ in range(400):
    key = rng.choice("0123") * 64
    name = rng.choice(("slices", "rank_0", "rank_1"))
    chosen = rng.random()
    if chosen < 0.5:
        store.write(key, name, {}, (key + name).encode() * rng.randint(1, 60))
    elif chosen < 0.95:
        entry = store.read(key, name)
        if entry is not None:
            seen += 1
            assert entry.data.count((key + name).encode()) * len(key + name) == len(entry.data)
    elif chosen < 0.98:
        store.kept()
    else:
        store.clear()
print(seen)
"""


@pytest.mark.processes
def test_processes_share_a_store(tmp_path: Path) -> None:
    """Some write, read, evict and clear the same few entries; nobody ever sees half of one."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for child in children:
        out, err = child.communicate()
        assert (child.returncode, err) == (0, "")
        assert int(out) > 0
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names <= {"slices", "rank_0", "rank_1"}


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/plancompiler/plans"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/me"}, "/me/.cache/plancompiler/plans"),
        ({"HOME": "/me"}, "/me/.cache/plancompiler/plans"),
        ({"PLANCOMPILER_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
    ],
)
def test_where_the_store_is(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PLANCOMPILER_CACHE", "PLANCOMPILER_CACHE_BYTES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = open_store()
    assert store is not None
    assert (store.folder, store.limit) == (Path(folder), DEFAULT_BYTES)


def test_the_store_can_be_bounded_and_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANCOMPILER_CACHE", "/own")
    monkeypatch.setenv("PLANCOMPILER_CACHE_BYTES", "12345")
    store = open_store()
    assert store is not None
    assert store.limit == 12345
    monkeypatch.setenv("PLANCOMPILER_CACHE_BYTES", "1 GB")
    with pytest.raises(UsageError, match="'1 GB'"):
        open_store()
    monkeypatch.setenv("PLANCOMPILER_CACHE", "0")
    assert open_store() is None


# --- the bytes of slices --------------------------------------------------------------------------


def mesh_slices(world_size: int, stage_of: object) -> JobSlices:
    stages = [stage_of(rank) for rank in range(world_size)]  # type: ignore[operator]
    data = {stage: f"slice of stage {stage}".encode() for stage in stages}
    return JobSlices.of({rank: data[stage] for rank, stage in enumerate(stages)})


def test_slices_are_stored_once_and_their_ranks_as_runs() -> None:
    """GPT-3's mesh on 16,384 ranks, stages outermost and innermost: one run per stage."""
    for stage_of in (lambda rank: rank // 1024, lambda rank: rank % 16):
        slices = mesh_slices(16_384, stage_of)
        data = slices_to_bytes(slices)
        assert len(slices.distinct) == 16
        assert len(data) < 1000
        assert slices_from_bytes(data, 16_384) == slices


def test_runs_give_back_the_ranks() -> None:
    for ranks in ([], [3], [1, 5], [0, 1, 2, 9], [0, 2, 4, 5, 6, 11], list(range(7, 70, 7))):
        results = [
            start + step * stride for start, length, stride in runs(ranks) for step in range(length)
        ]
        assert results == ranks


@pytest.mark.parametrize(
    "index",
    [
        b'{"bytes": [4], "ranks": [[[0, 1, 1]]]}',
        b'{"bytes": [4], "ranks": [[[0, 3, 1]]]}',
        b'{"bytes": [4], "ranks": [[[0, 2, 0]]]}',
        b'{"bytes": [4], "ranks": [[[0, 99999999999, 1]]]}',
        b'{"bytes": [5], "ranks": [[[0, 2, 1]]]}',
        b'{"bytes": [4, 0], "ranks": [[[0, 2, 1]]]}',
        b'{"bytes": [-1, 5], "ranks": [[[0, 1, 1]], [[1, 1, 1]]]}',
        b'{"bytes": [], "ranks": []}',
        b'{"bytes": "four"}',
        b"[]",
        b"{",
    ],
)
def test_malformed_indices_are_refused(index: bytes) -> None:
    data = len(index).to_bytes(4, "big") + index + b"data"
    with pytest.raises(WireFormatError):
        slices_from_bytes(data, 2)
    with pytest.raises(WireFormatError):
        slices_from_bytes(data[:3], 2)


def test_damage_is_a_warning_of_the_package(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "plancompiler.cache"):
        Store(tmp_path).reject(KEY, "slices", "why")
    assert "compiling again" in caplog.text
