"""What jobs wrote on their workers' hosts comes back through the master."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.cluster.checked import Received
from plancompiler.cluster.chunks import CHUNK_BYTES, arrays_from_bytes
from plancompiler.cluster.file_parts import FileReceiver, parts_of_file
from plancompiler.errors import (
    CheckpointError,
    ClusterError,
    OutputError,
    PlanCompilerError,
    SecurityError,
    WireFormatError,
)
from plancompiler.executor.checkpoint import read_index
from plancompiler.executor.checkpoint_index import INDEX
from plancompiler.forecasting.recorded_trace import read_trace
from plancompiler.master.server import MasterServer
from plancompiler.plan.compiled_plans import read_plans
from plancompiler.proto.cluster_pb2 import FilePart
from plancompiler.proto.cluster_pb2_grpc import ClientStub
from plancompiler.running.client import Client
from plancompiler.running.watched_job import job_request
from tests.cluster.conftest import Workers, eventually, signed_in
from tests.examples import mlp

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1)


def parts(size: int) -> list[FilePart]:
    return list(parts_of_file("a.b", io.BytesIO(bytes(range(256)) * (size // 256 + 1)), size))


@pytest.mark.parametrize("size", SIZES)
def test_files_of_any_size(tmp_path: Path, size: int) -> None:
    receiver = FileReceiver(tmp_path)
    for part in parts(size):
        assert len(part.data) <= CHUNK_BYTES
        receiver.add(part)
    assert receiver.is_complete
    (path,) = receiver.paths
    assert path.read_bytes() == (bytes(range(256)) * (size // 256 + 1))[:size]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../b"},
        {"name": ""},
        {"name": ".hidden"},
        {"name": "a\0b"},
        {"size": 3},
        {"size": 1 << 40},
        {"checksum": 7},
        {"checksum": 0},
        {"data": b"other bytes"},
    ],
)
def test_parts_that_are_not_what_they_announce(tmp_path: Path, change: dict[str, Any]) -> None:
    (part,) = parts(11)
    receiver = FileReceiver(tmp_path)
    for name, value in change.items():
        setattr(part, name, value)
    with pytest.raises((WireFormatError, OutputError)) as refused:
        receiver.add(part)
    receiver.abandon(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_of_a_job(workers: Workers, tmp_path: Path) -> None:
    """While it runs, after its end from an idle worker, and again as another job's beginning."""
    saved, here = tmp_path / "saved", tmp_path / "here"
    with MasterServer(ranks=2) as server, Client(server.address) as client:
        started = workers(server.address, 2, allow_paths=[saved, EXAMPLES])
        handle = client.submit(mlp(ranks=2), 5, save=saved)
        handle.result()
        fetched = handle.fetch_checkpoint(here)
        assert sorted(here.iterdir()) == sorted(fetched)  # rank 1 holds nothing first
        assert [path.name[-18:] for path in fetched] == [
            "rank00000.safetensors"[-18:],
            "index.json",
        ]
        assert all(path.read_bytes() == (saved / path.name).read_bytes() for path in fetched)
        assert read_index(here)["step"] == 5
        with pytest.raises(CheckpointError, match="holds a checkpoint already"):
            handle.fetch_checkpoint(here)

        with client.open(mlp(ranks=2)) as session:
            with pytest.raises(ClusterError, match="writes no checkpoint"):
                client.fetch_checkpoint(session.job_id, tmp_path / "none")
            session.save(saved / "inner")
            client.fetch_checkpoint(session.job_id, tmp_path / "inner")
            assert read_index(tmp_path / "inner")["step"] == 0

        for path in saved.glob("*rank00000*"):
            path.unlink()
        assert_refused(client, handle.job_id, tmp_path / "partly", "file of the checkpoint")
        (saved / "index.json").write_text("{}")
        assert_refused(client, handle.job_id, tmp_path / "damaged", "CheckpointError")
        (saved / "index.json").unlink()
        (saved / "index.json").symlink_to("/etc/passwd")
        assert_refused(client, handle.job_id, tmp_path / "link", "outside of the folders")
        for worker in started:
            worker.stop()
        assert_refused(client, handle.job_id, tmp_path / "gone", "none of its workers is there")
        (other,) = workers(server.address, allow_paths=[tmp_path / "elsewhere"], rank=0)
        eventually(lambda: bool(client.status().workers))
        assert_refused(client, handle.job_id, tmp_path / "other", "outside of the folders")
        other.stop()
        waiting = client.submit(mlp(ranks=2), 5, save=saved)
        assert_refused(client, waiting.job_id, tmp_path / "early", "has not begun")
        with pytest.raises(ClusterError, match="no such job"):
            client.fetch_checkpoint(99, tmp_path / "unknown")


@pytest.mark.slow
def test_checkpoints_that_are_fetched_while_steps_run(workers: Workers, tmp_path: Path) -> None:
    """Each of them is the newest that was whole, and from each the losses go on."""
    steps = 40
    with MasterServer(ranks=2) as server, Client(server.address) as client:
        started = workers(server.address, 2)
        quiet = [each["loss"] for each in client.submit(mlp(ranks=2), steps + 1)]
        handle = client.submit(mlp(ranks=2), steps, save=tmp_path / "saved", save_every=1)
        for _ in range(3):  # the second checkpoint begins when the first one is whole
            next(handle)
        folders: list[Path] = []
        while not handle.status().phase.is_end:
            folders.append(tmp_path / f"fetched{len(folders)}")
            handle.fetch_checkpoint(folders[-1])
        assert handle.result()["step"] == steps - 1
        folders.append(tmp_path / "last")
        handle.fetch_checkpoint(folders[-1])
        saved = [read_index(folder)["step"] for folder in folders]
        assert saved == sorted(saved)
        assert saved[0] >= 1
        assert saved[-1] == steps
        for place in {0, len(folders) // 2, len(folders) - 1}:
            with client.submit(mlp(ranks=2), 1, restore=folders[place]) as again:
                assert next(again)["loss"] == quiet[saved[place]]
        for worker in started:
            worker.stop()


def test_a_later_save_does_not_disturb_a_checkpoint_on_its_way(
    cluster: MasterServer, tmp_path: Path
) -> None:
    saved, here = tmp_path / "saved", tmp_path / "here"

    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    with (
        Client(cluster.address) as client,
        signed_in(cluster.address) as channel,
        client.open(mlp(ranks=1, hidden=1500)) as session,
    ):
        session.save(saved)
        before = files(saved)
        here.mkdir()
        receiver, received = FileReceiver(here), Received("the master")
        stream = ClientStub(channel).FetchCheckpoint(job_request(session.job_id))
        receiver.add(received(next(stream)))
        list(session.run(1))
        session.save(saved)
        assert not (before.keys() & files(saved).keys()) - {INDEX}
        for part in stream:
            receiver.add(received(part))
        assert receiver.is_complete
        assert files(here) == before
        assert sum(map(len, before.values())) > 8 * CHUNK_BYTES  # more than is on its way at once


def assert_refused(client: Client, job_id: int, folder: Path, why: str) -> None:
    """And nothing is left of it."""
    with pytest.raises(PlanCompilerError, match=why) as refused:
        client.fetch_checkpoint(job_id, folder)
    assert isinstance(refused.value, (CheckpointError, ClusterError, SecurityError))
    assert list(folder.iterdir()) == []


def test_the_command_fetches_everything(workers: Workers, tmp_path: Path) -> None:
    with MasterServer() as server, Client(server.address) as client:
        (worker,) = workers(server.address)
        with pc.job("measured") as job:
            x = pc.ones((4,), "float32", pc.Placement("cpu", [0]))
            pc.output("loss", x.sum())
            pc.output("values", x * 2.0)
        handle = client.submit(job, 3, record=True, save=tmp_path / "saved")
        losses = [step["loss"] for step in handle]

        def fetch(what: str) -> dict[str, Any]:
            arguments = ["fetch", str(handle.job_id), "--what", what, "--out", str(tmp_path / what)]
            done = CliRunner().invoke(cli, [*arguments, "--master", server.address, "--json"])
            assert done.exit_code == 0, done.output
            return dict(json.loads(done.stdout.splitlines()[-1]))

        outputs = fetch("outputs")
        assert (outputs["steps"], outputs["dropped_steps"]) == (3, 0)
        rows = (tmp_path / "outputs/outputs.jsonl").read_text().splitlines()
        assert [json.loads(row) for row in rows] == [
            {"step": step, "loss": loss} for step, loss in enumerate(losses)
        ]
        arrays = arrays_from_bytes((tmp_path / "outputs/step_00000002.safetensors").read_bytes())
        assert arrays["values"].tolist() == [2.0] * 4
        assert fetch("timeline")["files"] == ["timeline.json"]
        plans, backend, timelines = read_trace(tmp_path / "timeline/timeline.json")
        assert (plans[0].job, backend, len(timelines[0].begins)) == ("measured", "processes", 3)
        fetch("plans")
        assert read_plans(tmp_path / "plans").digest == handle.digest
        assert fetch("checkpoint")["files"][0] == "index.json"
        assert read_index(tmp_path / "checkpoint")["step"] == 3
        worker.stop()
