"""`pc.run`: sessions from Python, with ranks as threads and as processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import plancompiler as pc
from plancompiler.errors import (
    CheckpointError,
    FeedError,
    NonFiniteError,
    RankError,
    UnknownModeError,
    UsageError,
)
from plancompiler.lower.compile import MODES
from plancompiler.plan.digest import digest_of_plans
from plancompiler.running.session import BACKENDS


def regression(ranks: int = 2) -> pc.Job:
    """Least squares with a weight split over the ranks and Adam's state beside it."""
    mesh = pc.Placement("cpu", list(range(ranks)))
    with pc.job("regression", seed=1) as job:
        x = pc.input("x", (12, 5), "float32", mesh, ["S(0)"])
        y = pc.input("y", (12, 3), "float32", mesh, ["S(0)"])
        model = pc.nn.Linear(5, 3).place(mesh, {"weight": ["S(0)"]})
        error = model(x) - y
        loss = (error * error).mean()
        pc.optim.Adam(lr=0.05).minimize(loss)
        pc.output("loss", loss)
        pc.output("error", error)
    return job


def batches(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(seed)
    truth = random.normal(size=(5, 3)).astype(np.float32)
    for _ in range(count):
        x = random.normal(size=(12, 5)).astype(np.float32)
        yield {"x": x, "y": x @ truth}


@pytest.fixture(autouse=True)
def _no_chosen_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANCOMPILER_COMPILE_MODE", raising=False)


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_steps_and_reports(backend: str) -> None:
    with pc.run(regression(), backend=backend) as session:
        results = [session.step(**feeds) for feeds in batches(4)]
        assert session.ranks == 2
        assert len(session.step_seconds) == 4
        assert session.compile_seconds > 0
        assert sorted(session.plans) == [0, 1]
        assert session.digest == digest_of_plans(session.plans)
        variables = session.variables()
    assert all(type(result["loss"]) is float for result in results)
    error = results[0]["error"]
    assert isinstance(error, np.ndarray)
    assert error.shape == (12, 3)
    assert float((error**2).mean()) == pytest.approx(results[0]["loss"], rel=1e-5)
    assert variables["weight"].shape == (3, 5)
    assert set(variables) == {
        "weight",
        "bias",
        "weight.adam_m",
        "weight.adam_v",
        "bias.adam_m",
        "bias.adam_v",
    }


@pytest.mark.processes
def test_backends_and_numbers_of_ranks_agree() -> None:
    runs = [("threads", 1), ("threads", 2), ("threads", 3), ("processes", 2)]
    losses, variables = [], []
    for backend, ranks in runs:
        with pc.run(regression(ranks), ranks, backend=backend) as session:
            losses.append([session.step(**feeds)["loss"] for feeds in batches(6)])
            variables.append(session.variables())
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)
    for other in variables[1:]:
        np.testing.assert_allclose(other["weight"], variables[0]["weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.processes
def test_all_modes_have_one_digest_and_one_result() -> None:
    digests, losses = set(), []
    for mode in MODES:
        with pc.run(regression(), mode=mode) as session:
            assert session.mode == mode
            digests.add(session.digest)
            losses.append([session.step(**feeds)["loss"] for feeds in batches(3)])
    assert len(digests) == 1
    assert losses[1:] == losses[:1] * 3


def test_the_mode_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pc.run(regression()) as session:
        assert session.mode == "rank_per_iter"
    monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", "naive")
    with pc.run(regression()) as session:
        assert session.mode == "naive"
    with pc.run(regression(), mode="rank_per_thread") as session:
        assert session.mode == "rank_per_thread"
    monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", "odd")
    with pytest.raises(UnknownModeError, match="'odd'"):
        pc.run(regression())


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_feed_is_explained_and_the_session_goes_on(backend: str) -> None:
    feeds = next(batches(1))
    wrong = [
        ({"x": feeds["x"]}, "'y'"),
        ({**feeds, "z": feeds["x"]}, "'z'"),
        ({**feeds, "x": feeds["x"][:5]}, r"\[5, 5\]"),
        ({**feeds, "x": feeds["x"].astype(np.float64) + 1e300}, "out of range"),
        ({**feeds, "x": "text"}, "'x'"),
    ]
    with pc.run(regression(), backend=backend) as session:
        for given, words in wrong:
            with pytest.raises(FeedError, match=words):
                session.step(**given)
        assert session.step(**feeds)["loss"] > 0
        with pytest.raises(FeedError, match="'x'"):
            next(session.run(1))


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_failed_step_a_session_makes_no_more(backend: str, tmp_path: Path) -> None:
    feeds = next(batches(1))
    feeds["x"] = np.full_like(feeds["x"], np.inf)
    with pc.run(regression(), backend=backend) as session:
        with pytest.raises(NonFiniteError, match="loss"):
            session.step(**feeds)
        with pytest.raises(NonFiniteError, match="loss"):
            session.step(**next(batches(1)))
        session.save(tmp_path / "model")  # the state is still there
        assert session.variables()["weight"].shape == (3, 5)


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_goes_on_where_it_was_saved_on_another_layout(
    backend: str, tmp_path: Path
) -> None:
    feeds = list(batches(8))
    with pc.run(regression(), backend=backend) as session:
        for each in feeds[:5]:
            session.step(**each)
        session.save(tmp_path / "model")
        kept = session.variables()
        rest = [session.step(**each)["loss"] for each in feeds[5:]]
    with pc.run(regression(3), 3, backend=backend, restore=tmp_path / "model") as session:
        restored = session.variables()
        assert sorted(restored) == sorted(kept)
        for name, value in kept.items():
            np.testing.assert_array_equal(restored[name], value)
        np.testing.assert_allclose(
            [session.step(**each)["loss"] for each in feeds[5:]], rest, rtol=1e-4
        )


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_checkpoint_holds_beyond_the_job_is_named_or_left(
    backend: str, tmp_path: Path
) -> None:
    with pc.run(regression()) as session:
        session.save(tmp_path)
        kept = session.variables()
    predicting = predictor()
    with pytest.raises(CheckpointError, match="that the job does not have") as caught:
        pc.run(predicting, backend=backend, restore=tmp_path)
    assert "'weight.adam_v' float32[3, 5]" in str(caught.value)
    with pc.run(predicting, backend=backend, restore=tmp_path, strict_restore=False) as session:
        np.testing.assert_array_equal(session.variables()["weight"], kept["weight"])


def predictor() -> pc.Job:
    """Uses what `regression` learns, on one of its two ranks."""
    with pc.job("predictor") as job:
        model = pc.nn.Linear(5, 3).place(pc.Placement("cpu", [1]))
        pc.output("y", model(pc.input("x", (12, 5), "float32", pc.Placement("cpu", [1]), ["B"])))
    return job


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_checkpoint(backend: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none"):
        pc.run(regression(), backend=backend, restore=tmp_path / "none")


def test_too_few_ranks_name_the_op() -> None:
    with pytest.raises(RankError) as caught:
        pc.run(regression(3), 2)
    report = caught.value.report
    assert report.rank == 2
    assert report.op is not None
    assert report.source is not None
    assert "test_session.py" in report.source


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="threads or processes"):
        pc.run(regression(), backend="fibres")
    with pytest.raises(UsageError, match="not a job"):
        pc.run("job")  # type: ignore[arg-type]
    with pc.run(regression()) as session, pytest.raises(UsageError, match="negative"):
        next(session.run(-1))


@pytest.mark.parametrize("ranks", ["2", 2.0, True, [2], np.ones(2)])
def test_a_number_of_ranks_of_another_type(ranks: Any) -> None:
    with pytest.raises(UsageError, match="ranks must be a whole number"):
        pc.run(regression(), ranks)


def test_arguments_of_a_session_of_another_type(tmp_path: Path) -> None:
    with pc.run(regression(), np.int64(2)) as session:  # type: ignore[arg-type]
        for steps in ("3", 2.5, None, True):
            with pytest.raises(UsageError, match="steps must be a whole number"):
                session.run(steps)  # type: ignore[arg-type]
        for folder in (3, None, b"folder", ""):
            with pytest.raises(UsageError, match="must be a path"):
                session.save(folder)  # type: ignore[arg-type]
        for value in ("text", None, object(), [[1.0], [1.0, 2.0]]):
            with pytest.raises(FeedError, match="'x'"):
                session.step(**{**next(batches(1)), "x": value})
        assert session.step(**next(batches(1)))["loss"] > 0
    for restore in (3, b"folder", ""):
        with pytest.raises(UsageError, match="restore must be a path"):
            pc.run(regression(), restore=restore)  # type: ignore[arg-type]


def test_ranks_with_nothing_to_do_get_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pc.run(regression(), ranks=300) as session:
        loss = session.step(**next(batches(1)))["loss"]
        assert threading.active_count() - before < 20
        assert sorted(session.plans) == list(range(300))
        assert [rank for rank, plan in session.plans.items() if not plan.is_idle] == [0, 1]
        session.save(tmp_path)
        after = session.step(**next(batches(1)))["loss"]
    with pc.run(regression(), ranks=2) as session:
        assert session.step(**next(batches(1)))["loss"] == loss
    with pc.run(regression(), ranks=3, restore=tmp_path) as session:
        assert session.step(**next(batches(1)))["loss"] == pytest.approx(after, rel=1e-6)


def test_a_closed_session_says_so() -> None:
    session = pc.run(regression())
    session.close()
    session.close()
    for use in (session.variables, session.__enter__, lambda: session.save("model")):
        with pytest.raises(UsageError, match="closed"):
            use()


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_that_forgets_to_close_its_session_ends(backend: str, tmp_path: Path) -> None:
    file = tmp_path / "forgetful.py"
    file.write_text(
        "import plancompiler as pc\n"
        "with pc.job('sum') as job:\n"
        "    x = pc.input('x', (), 'float32', pc.Placement('cpu', [0, 1]))\n"
        "    pc.output('twice', x + x)\n"
        f"session = pc.run(job, backend={backend!r})\n"
        "print(session.step(x=2.0)['twice'])\n"
    )
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4.0\n"
    assert done.stderr == ""


def blas_threads() -> set[int]:
    return {
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    }


@pytest.mark.skipif(os.cpu_count() == 1, reason="BLAS has one thread anyway")
def test_blas_has_one_thread_while_any_session_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS", "OMP", "MKL", "BLIS"):
        monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        before = blas_threads()
        first = pc.run(regression())
        second = pc.run(regression())
        first.close()
        assert blas_threads() == {1}
        second.close()
        assert blas_threads() == before
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
        with pc.run(regression()):
            assert blas_threads() == before


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_callers_from_several_threads_take_turns(backend: str) -> None:
    with pc.job("echo") as job:
        x = pc.input("x", (4,), "float32", pc.Placement("cpu", [0, 1]), "S(0)")
        pc.output("y", x * 2.0)
        pc.output("whole", x.sum().cast("int64"))
    with pc.run(job, backend=backend) as session, ThreadPoolExecutor(4) as pool:
        fed = [np.full(4, number, np.float32) for number in range(20)]
        stepped = list(pool.map(lambda each: session.step(x=each), fed))
    for array, outputs in zip(fed, stepped, strict=True):
        np.testing.assert_array_equal(outputs["y"], array * 2)
        assert outputs["whole"] == int(array.sum())
        assert isinstance(outputs["whole"], int)


def test_an_input_may_be_called_self() -> None:
    with pc.job("names") as job:
        pc.output("y", pc.input("self", (2,), "float32", pc.Placement("cpu", [0])) + 1.0)
    with pc.run(job) as session:
        np.testing.assert_array_equal(session.step(self=np.zeros(2, np.float32))["y"], 1)
