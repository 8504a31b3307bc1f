"""Paths that a job or a client names lead into the folders that the worker's user allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.cli.worker import default_folders
from plancompiler.errors import SecurityError
from plancompiler.ir import Job
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from plancompiler.worker.allowed_paths import AllowedPaths
from tests.cluster.conftest import WorkerThread

SAID = "outside of the folders that this worker allows"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that is allowed, with a link that leads out of it."""
    folder = tmp_path / "allowed"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"secret" * 20)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "out").symlink_to(tmp_path)
    (folder / "tokens").write_bytes(b"tokens" * 20)
    return folder


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{out}", SAID),
        ("{out}/secret", SAID),
        ("/", SAID),
        ("/etc/passwd", SAID),
        ("{allowed}x", SAID),
        ("{allowed}/link", SAID),
        ("{allowed}/out/secret", SAID),
        ("{allowed}/out/allowed/../secret", "by way of"),
        ("{allowed}/..", "by way of"),
        ("{allowed}/inner/../tokens", "by way of"),
        ("{allowed}/a\0b", "control characters"),
        ("{allowed}/a\nb", "control characters"),
        ("{allowed}/a\x1b[2Jb", "control characters"),
        ("{allowed}/a\x85b", "control characters"),
        ("secret", SAID),
    ],
)
def test_what_is_refused(folder: Path, path: str, said: str) -> None:
    named = path.format(allowed=folder, out=folder.parent)
    with pytest.raises(SecurityError, match=said) as caught:
        AllowedPaths([folder]).check(named, "a file")
    assert str(folder) in str(caught.value.report.expected)
    assert "--allow-path" in str(caught.value.report.hint)
    assert str(caught.value).isprintable()


def test_what_is_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = AllowedPaths([folder.parent / "other", folder])
    for path in (folder, folder / "tokens", folder / "new" / "deep", folder.parent / "other" / "x"):
        allowed.check(str(path), "a file")
    monkeypatch.chdir(folder)
    allowed.check("tokens", "a file")
    (folder / "inside").symlink_to(folder / "tokens")
    allowed.check(str(folder / "inside"), "a file")
    # A folder that is itself reached by a link is what the link leads to.
    AllowedPaths([folder / "out"]).check(str(folder.parent / "secret"), "a file")


def test_the_defaults_are_the_working_folder_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert default_folders() == [tmp_path, tmp_path / "cache" / "plancompiler"]
    monkeypatch.chdir("/")
    assert default_folders() == [tmp_path / "cache" / "plancompiler"]


def test_a_folder_that_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    arguments = ["worker", "--master", "127.0.0.1:1", "--allow-path", str(tmp_path / "none")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "none" in result.stderr


def tokens(path: Path) -> Job:
    """A job that shows what is in a file."""
    mesh = pc.Placement("cpu", [0])
    with pc.job("reads") as job:
        x, _ = pc.data.TokenFile(path, batch=1, length=8, dtype="uint8", placement=mesh, sbp="B")
        pc.output("read", x.cast("int32"))
    return job


def steps() -> Job:
    """A job with something to save."""
    mesh = pc.Placement("cpu", [0])
    with pc.job("saves") as job:
        layer = pc.nn.Linear(4, 2).place(mesh)
        loss = layer(pc.ones((3, 4), "float32", mesh)).sum()
        pc.optim.SGD(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    """Of a master with a worker that allows the folder."""
    with MasterServer(ranks=1) as server:
        worker = WorkerThread(server.address, allow_paths=[folder])
        try:
            with Client(server.address) as client:
                yield client
        finally:
            worker.stop()


@pytest.mark.processes
def test_jobs_of_clients_stay_inside(client: Client, folder: Path) -> None:
    outside = folder.parent
    for path in (outside / "secret", folder / "link", folder / "out" / "secret"):
        with pytest.raises(SecurityError, match="a data file of .*" + SAID):
            client.submit(tokens(path), 1).result()
    read = client.submit(tokens(folder / "tokens"), 1).result()["read"]
    assert bytes(read.astype("uint8").ravel()) in b"tokens" * 3

    before = sorted(outside.iterdir())
    for path in (outside / "model", folder / "out" / "model", f"{folder}/../model", "/model"):
        with pytest.raises(SecurityError, match="the folder of a checkpoint"):
            client.submit(steps(), 1, save=path).result()
    assert sorted(outside.iterdir()) == before
    client.submit(steps(), 1, save=folder / "model").result()
    assert (folder / "model" / "index.json").is_file()

    client.submit(steps(), 1, restore=folder / "model").result()
    for path in (outside, folder / "out"):
        with pytest.raises(SecurityError, match="the checkpoint to restore"):
            client.submit(steps(), 1, restore=path).result()
    shard = next((folder / "model").glob("*.safetensors"))
    shard.rename(outside / "shard")
    shard.symlink_to(outside / "shard")
    with pytest.raises(SecurityError, match="a file in the checkpoint to restore"):
        client.submit(steps(), 1, restore=folder / "model").result()


@pytest.mark.processes
def test_saves_that_are_asked_for_later_stay_inside(client: Client, folder: Path) -> None:
    with client.open(steps()) as session:
        next(iter(session.run(1)))
        session.save(folder / "model")
        with pytest.raises(SecurityError, match="the folder of a checkpoint"):
            session.save(folder.parent / "model")
    assert not (folder.parent / "model").exists()
