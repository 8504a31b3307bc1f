"""The second submission of an unchanged job compiles nothing: not the master, and no rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import plancompiler as pc
from plancompiler.lower.compile import MODES
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.cache.work import count_work
from tests.cluster.conftest import Workers
from tests.examples import mlp

STEPS = 3


@pytest.fixture
def client(cache_folder: Path, workers: Workers) -> Iterator[Client]:
    """A client of a master and two workers, all of which have the plan cache on."""
    with MasterServer(ranks=2) as server:
        started = workers(server.address, 2)
        with Client(server.address) as client:
            yield client
        for worker in started:
            worker.stop()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_work(monkeypatch)


def submit(
    client: Client, job: pc.Job, mode: str | None = None, cache: bool = True
) -> tuple[list[float], str | None, bool | None]:
    """Losses, digest, and whether the plans were cached."""
    handle = client.submit(job, STEPS, mode=mode, cache=cache)
    losses = [each["loss"] for each in handle]
    assert len(losses) == STEPS
    return losses, handle.digest, handle.cached


def test_the_second_submission_compiles_nothing(
    client: Client, work: Counter[str], cache_folder: Path
) -> None:
    fresh, digest, cached = submit(client, mlp(ranks=2), cache=False)
    assert not cached
    assert not cache_folder.exists()
    assert submit(client, mlp(ranks=2)) == (fresh, digest, False)
    assert work["infer_sbp"] == 2
    work.clear()
    assert submit(client, mlp(ranks=2)) == (fresh, digest, True)
    assert work == Counter()
    assert submit(client, mlp(ranks=2), cache=False) == (fresh, digest, False)
    assert work["infer_sbp"] == 1


def test_who_chooses_a_mode_gets_what_it_makes(
    client: Client, work: Counter[str], cache_folder: Path
) -> None:
    fresh, digest, _ = submit(client, mlp(ranks=2))
    work.clear()
    for number, mode in enumerate(MODES, start=1):
        assert submit(client, mlp(ranks=2), mode) == (fresh, digest, False)
        assert work["infer_sbp"] == number
    assert work["plan_of_part"] == 2  # both by `naive`, on the master
    assert work["rebuild_rank_task_graph"] > 2


def test_a_changed_job_is_compiled(client: Client) -> None:
    first = submit(client, mlp(ranks=2))
    second = submit(client, mlp(ranks=2, hidden=31))
    assert (first[2], second[2]) == (False, False)
    assert first[1] != second[1]
    assert submit(client, mlp(ranks=2)) == (*first[:2], True)


def test_sessions_and_local_runs_share_the_plans(client: Client, work: Counter[str]) -> None:
    job = mlp(ranks=2)
    losses, digest, _ = submit(client, job)
    work.clear()
    with client.open(job) as remote:
        assert remote.cached
        assert remote.digest == digest
        assert [float(each["loss"]) for each in remote.run(STEPS)] == losses
    with pc.run(job) as session:
        assert session.cached
        assert session.digest == digest
    assert work == Counter()


@pytest.mark.parametrize("lost", ["rank_1", "slices"])
def test_one_lost_entry_is_made_again(
    lost: str, client: Client, work: Counter[str], cache_folder: Path
) -> None:
    losses, digest, _ = submit(client, mlp(ranks=2))
    (path,) = cache_folder.rglob(lost)
    path.unlink()
    work.clear()
    assert submit(client, mlp(ranks=2)) == (losses, digest, False)
    assert work["emit_plan"] == (lost == "rank_1")
    assert work["infer_sbp"] == (lost == "slices")
    assert submit(client, mlp(ranks=2)) == (losses, digest, True)


def test_a_damaged_plan_is_made_again(
    client: Client, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, digest, _ = submit(client, mlp(ranks=2))
    (path,) = cache_folder.rglob("rank_0")
    path.write_bytes(path.read_bytes()[:-1])
    assert submit(client, mlp(ranks=2)) == (losses, digest, False)
    assert [r.name for r in caplog.records if "damaged" in r.message] == [
        "plancompiler.cache.store"
    ]
    assert submit(client, mlp(ranks=2)) == (losses, digest, True)
