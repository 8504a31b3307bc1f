"""Checkpoints written while steps go on: what they hold, what must not happen, what is said."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import CheckpointError, UsageError
from plancompiler.executor import checkpoint
from plancompiler.executor.checkpoint import INDEX, read_index
from plancompiler.executor.checkpoint_writer import CheckpointWriter
from plancompiler.running import session as session_module
from plancompiler.running.session import BACKENDS

ENOUGH = 60


@pytest.fixture
def job(tmp_path: Path) -> pc.Job:
    """Learns from its own data, with weights split over two ranks and Adam's state beside them."""
    rows = tmp_path / "rows.npz"
    random = np.random.default_rng(0)
    np.savez(rows, x=random.normal(size=(50, 5)).astype(np.float32), y=np.arange(50) % 3)
    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("learner", seed=1) as job:
        x, y = pc.data.Arrays(rows, batch=10, placement=mesh, sbp="S(0)")
        model = pc.nn.Linear(5, 3).place(mesh, {"weight": ["S(0)"]})
        loss = pc.cross_entropy(model(x), y)
        pc.optim.Adam(lr=0.05).minimize(loss)
        pc.output("loss", loss)
    return job


class Disk:
    """Holds up the writing of every file until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.indices: list[int] = []
        write, index = checkpoint.write_whole, checkpoint.write_index

        def slow(*arguments: Any, **named: Any) -> None:
            self.reached.set()
            assert self.go.wait(ENOUGH)
            write(*arguments, **named)

        def noted(folder: Path, world_size: int, step: int, tag: str = "") -> None:
            index(folder, world_size, step, tag)
            self.indices.append(step)

        monkeypatch.setattr(checkpoint, "write_whole", slow)
        monkeypatch.setattr(session_module, "write_index", noted)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.go.set()


@pytest.fixture(autouse=True)
def nobody_writes_on() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if "checkpoint" in each.name]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder: Path) -> dict[str, bytes]:
    """Contents by rank. Names of workers' files have a number that counts requests."""
    return {name.rpartition("-")[2]: data for name, data in files(folder).items() if name != INDEX}


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_holds_the_values_of_its_step_to_the_bit(
    backend: str, job: pc.Job, tmp_path: Path
) -> None:
    with pc.run(job, backend=backend, cache=False) as session:
        list(session.run(3))
        session.save(tmp_path / "beside", wait=False)
        after = [each["loss"] for each in session.run(20)]
    with pc.run(job, backend=backend, cache=False) as session:
        list(session.run(3))
        session.save(tmp_path / "stopped")
        kept = session.variables()
    assert read_index(tmp_path / "beside")["step"] == 3
    assert shards(tmp_path / "beside") == shards(tmp_path / "stopped")
    with pc.run(job, restore=tmp_path / "beside", cache=False) as session:
        for name, value in session.variables().items():
            np.testing.assert_array_equal(value, kept[name])
        assert [each["loss"] for each in session.run(20)] == after


def test_steps_go_on_while_it_is_written(job: pc.Job, tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "model"
    with pc.run(job, cache=False) as session:
        list(session.run(2))
        session.save(folder, wait=False)
        assert disk.reached.wait(ENOUGH)
        assert len(list(session.run(5))) == 5
        assert session.variables()
        assert not (folder / INDEX).exists()
        with pytest.raises(CheckpointError, match=r"index\.json"):
            pc.run(job, restore=folder, cache=False)
        disk.go.set()
    assert read_index(folder)["step"] == 2, "closing waits for it"


def test_the_next_save_waits_for_it(job: pc.Job, tmp_path: Path, disk: Disk) -> None:
    with pc.run(job, cache=False) as session:
        session.save(tmp_path / "first", wait=False)
        assert disk.reached.wait(ENOUGH)
        list(session.run(1))
        second = threading.Thread(target=session.save, args=(tmp_path / "second",))
        second.start()
        disk.go.set()
        second.join(ENOUGH)
        assert not second.is_alive()
        assert disk.indices == [0, 1]


def spoil(folder: Path) -> Callable[[], None]:
    """Makes a folder one that cannot be written; the returned function makes it good again."""
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("")
    return folder.unlink


def test_a_failure_is_told_by_the_next_call_and_only_once(job: pc.Job, tmp_path: Path) -> None:
    good_again = spoil(tmp_path / "model")
    with pc.run(job, cache=False) as session:
        for use in (session.step, session.variables, lambda: session.save(tmp_path / "other")):
            session.save(tmp_path / "model" / "inner", wait=False)
            thread = session._world._writer._thread  # type: ignore[union-attr]  # threads have one
            thread.join(ENOUGH)
            with pytest.raises(CheckpointError, match="cannot be written") as caught:
                use()
            assert str(tmp_path / "model") in str(caught.value.report.got)
            assert caught.value.report.hint is not None
            use()
        good_again()
        session.save(tmp_path / "model" / "inner", wait=False)
    assert read_index(tmp_path / "model" / "inner")["step"] == 1


def test_a_failure_that_nobody_asked_about_is_raised_at_the_end(
    job: pc.Job, tmp_path: Path
) -> None:
    spoil(tmp_path / "model")
    with (
        pytest.raises(CheckpointError, match="cannot be written"),
        pc.run(job, cache=False) as session,
    ):
        session.save(tmp_path / "model", wait=False)
    with pytest.raises(UsageError, match="closed"):
        session.step()


def interrupted_beside(job: pc.Job, folder: Path) -> None:
    with pc.run(job, cache=False) as session:
        session.save(folder, wait=False)
        raise KeyboardInterrupt


def test_a_failure_never_hides_why_the_block_ended(
    job: pc.Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        interrupted_beside(job, tmp_path / "model")
    assert "E132" in caplog.text
    assert str(tmp_path / "model") in caplog.text


def saves_beside(job: pc.Job, folder: Path, steps: int) -> None:
    with pc.run(job, backend="processes", cache=False) as session:
        session.save(folder, wait=False)
        for _ in range(steps):
            session.step()


@pytest.mark.processes
@pytest.mark.parametrize("steps", [0, 10_000])
def test_workers_that_cannot_write_fail_the_job(job: pc.Job, tmp_path: Path, steps: int) -> None:
    """Whether somebody asks for more steps, or only closes the session."""
    spoil(tmp_path / "model")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        saves_beside(job, tmp_path / "model", steps)
    assert str(tmp_path / "model") in str(caught.value.report.got)


def test_checkpoints_on_the_way(job: pc.Job, tmp_path: Path, disk: Disk) -> None:
    disk.go.set()
    with pc.run(job, cache=False) as session:
        losses = [each["loss"] for each in session.run(8, save=tmp_path / "m", save_every=3)]
        assert disk.indices == [3, 6, 8]
        list(session.run(4, save=tmp_path / "m", save_every=2))
        list(session.run(2, save=tmp_path / "m"))
        assert disk.indices == [3, 6, 8, 10, 12, 14]
    assert len(losses) == 8
    assert read_index(tmp_path / "m")["step"] == 14


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_was_written_on_the_way_can_be_gone_on_from(
    backend: str, job: pc.Job, tmp_path: Path
) -> None:
    with pc.run(job, backend=backend, cache=False) as session:
        steps = session.run(9, save=tmp_path / "m", save_every=4)
        first = [next(steps)["loss"] for _ in range(8)]
        # The reader stops, as one does whose program is interrupted.
        steps.close()  # type: ignore[attr-defined]  # it is a generator
    done = read_index(tmp_path / "m")["step"]
    assert done in (4, 8)
    with pc.run(job, cache=False, restore=tmp_path / "m") as session:
        again = [each["loss"] for each in session.run(8 - done)]
    np.testing.assert_allclose(again, first[done:], rtol=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    backend: str, job: pc.Job, tmp_path: Path
) -> None:
    spoil(tmp_path / "model")
    with pc.run(job, backend=backend, cache=False) as session:
        with pytest.raises(CheckpointError, match="cannot be written"):
            session.run(5, save=tmp_path / "model")
        assert session.step_seconds == []
        for every, folder in ((-1, tmp_path), (2, None), (1.5, tmp_path)):
            with pytest.raises(UsageError, match="save_every"):
                session.run(5, save=folder, save_every=every)  # type: ignore[arg-type]  # wrong on purpose


def test_what_is_given_up_leaves_no_trace_and_the_older_one_stays(
    job: pc.Job, tmp_path: Path
) -> None:
    with pc.run(job, cache=False) as session:
        list(session.run(2))
        session.save(tmp_path / "model")
        plan = session.plans[0]
        local = session._world._local  # type: ignore[union-attr]  # ranks are threads
        arrays = local.variables(0)
    before = files(tmp_path / "model")
    writer = CheckpointWriter("plancompiler-checkpoint")
    begun = threading.Event()
    stopped = threading.Event()

    def write(keep_going: Callable[[], None]) -> None:
        def slowly() -> None:
            if any(path.suffix == ".partial" for path in (tmp_path / "model").iterdir()):
                begun.set()
                assert stopped.wait(ENOUGH)
            keep_going()

        checkpoint.save_shards(tmp_path / "model", plan, arrays, 7, keep_going=slowly)

    writer.start(write)
    assert begun.wait(ENOUGH)
    assert [path for path in (tmp_path / "model").iterdir() if path.suffix == ".partial"]
    writer._given_up.set()
    stopped.set()
    writer.stop()
    assert files(tmp_path / "model") == before
    writer.check()
    writer.wait()


def test_a_process_that_is_killed_while_it_writes_leaves_the_older_one(
    job: pc.Job, tmp_path: Path
) -> None:
    """What a killed process leaves: shards of the next step, one of them half written."""
    folder = tmp_path / "model"
    with pc.run(job, cache=False) as session:
        list(session.run(2))
        session.save(folder)
        kept = session.variables()
        list(session.run(1))
        session.save(tmp_path / "next")
    shutil.copy(tmp_path / "next" / "step3-rank00000.safetensors", folder)
    half = (tmp_path / "next" / "step3-rank00001.safetensors").read_bytes()[:100]
    (folder / "step3-rank00001.safetensors.ab.partial").write_bytes(half)
    with pc.run(job, cache=False, restore=folder) as session:
        for name, value in session.variables().items():
            np.testing.assert_array_equal(value, kept[name])
        session.save(folder)
    assert sorted(files(folder)) == [
        "index.json",
        "step2-rank00000.safetensors",
        "step2-rank00001.safetensors",
    ]


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flipped_bit_in_a_shard_is_refused_unless_nobody_looks(
    backend: str, job: pc.Job, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    with pc.run(job, cache=False) as session:
        list(session.run(1))
        session.save(folder)
        kept = session.variables()
    path = folder / "step1-rank00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="not those that were written"):
        pc.run(job, backend=backend, restore=folder, cache=False)
    with pc.run(job, backend=backend, restore=folder, cache=False, check_restore=False) as session:
        actual = session.variables()
    assert sum(not np.array_equal(actual[name], value) for name, value in kept.items()) == 1


def test_boxes_that_overlap_leave_no_memory_that_nobody_wrote(job: pc.Job, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pc.run(job, cache=False) as session:
        session.save(folder)
    index = json.loads((folder / INDEX).read_text())
    for variable in index["variables"].values():
        if len(variable["boxes"]) == 2:
            variable["boxes"][1] = variable["boxes"][0]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"the boxes of variable .*overlap"):
        pc.run(job, restore=folder, cache=False)
