"""Plans from the cache are those that would be compiled; what changes a plan misses."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import plancompiler as pc
from plancompiler.cache import keys
from plancompiler.cache.plan_cache import JobSlices, PlanCache, open_cache
from plancompiler.cli.job_file import load_job
from plancompiler.lower.cached import plans_of_job, slices_of_job
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.lower.rank import plan_of_slice
from plancompiler.plan.text import format_plan
from tests.cache.work import count_work
from tests.examples import gpt, mlp
from tests.structure import graph


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each stage of the compiler has run."""
    return count_work(monkeypatch)


def cache() -> PlanCache:
    cache = open_cache()
    assert cache is not None
    return cache


def losses(session: pc.Session) -> list[Any]:
    return [outputs["loss"] for outputs in session.run(3)]


def test_a_second_run_compiles_nothing(cache_folder: Path, work: Counter[str]) -> None:
    job = mlp(layout="dp_tp", ranks=4)
    with pc.run(job, cache=False) as session:
        assert not session.cached
        fresh, digest = losses(session), session.digest
    assert not cache_folder.exists()
    with pc.run(job) as session:
        assert not session.cached
        assert (losses(session), session.digest) == (fresh, digest)
    assert work.keys() >= {"run_passes", "infer_sbp", "build_boxing_task_graph"}
    work.clear()
    with pc.run(mlp(layout="dp_tp", ranks=4)) as session:
        assert session.cached
        assert (losses(session), session.digest) == (fresh, digest)
    assert work == Counter()
    with pc.run(job, cache=False) as session:
        assert not session.cached
    assert work["infer_sbp"] > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("chosen", "mode"), [("environment", "naive"), *(("argument", mode) for mode in MODES)]
)
def test_who_chooses_a_mode_gets_what_it_makes(
    chosen: str,
    mode: str,
    cache_folder: Path,
    work: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever plans the cache has; and it keeps them, though another mode was asked."""
    job = mlp(layout="dp_tp", ranks=4)
    with pc.run(job) as session:
        digest = session.digest
    kept = {path: path.read_bytes() for path in cache_folder.rglob("*") if path.is_file()}
    work.clear()
    if chosen == "environment":
        monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", mode)
    with pc.run(job, mode=mode if chosen == "argument" else None) as session:
        assert (session.mode, session.cached) == (mode, False)
        assert session.digest == digest
    made = {
        "naive": "plan_of_part",
        "rank_per_process": "compile_in_processes",
        "rank_per_iter": "emit_plan",
        "rank_per_thread": "emit_plan",
    }
    assert work["infer_sbp"] == 1
    assert work[made[mode]] > 0
    assert kept == {path: path.read_bytes() for path in cache_folder.rglob("*") if path.is_file()}


def test_kept_plans_are_the_compiled_plans(cache_folder: Path) -> None:
    """Also of a pipeline with several micro-batches."""
    job = gpt(pp=2, dp=2, microbatches=4, schedule="1f1b")
    made = plans_of_job(job, 4, cache=cache())
    kept = plans_of_job(job, 4, cache=cache())
    assert (made.cached, kept.cached) == (False, True)
    assert kept.plans == made.plans == compile_plans(job, 4).plans
    assert kept.digest == made.digest


def test_the_two_halves_of_a_cluster(cache_folder: Path, work: Counter[str]) -> None:
    """A master keeps slices, workers plans; together they serve `run` too, and it serves them."""
    job = gpt(pp=2, dp=2)
    slices, actual = slices_of_job(job, 4, cache())
    assert not actual
    assert len(slices.distinct) == 2
    texts = {}
    for number in range(4):
        plan, actual = plan_of_slice(slices.distinct[slices.of_rank[number]], number, cache())
        assert not actual
        texts[number] = format_plan(plan)
    work.clear()
    again, actual = slices_of_job(job, 4, cache())
    assert actual
    assert again == slices
    for number in range(4):
        plan, actual = plan_of_slice(again.distinct[again.of_rank[number]], number, cache())
        assert actual
        assert format_plan(plan) == texts[number]
    assert plans_of_job(job, 4, cache=cache()).cached
    assert work == Counter()
    shutil.rmtree(cache_folder)
    assert not plans_of_job(job, 4, cache=cache()).cached
    work.clear()
    slices, actual = slices_of_job(job, 4, cache())
    assert actual
    assert plan_of_slice(slices.distinct[slices.of_rank[3]], 3, cache())[1]
    assert work == Counter()


SMALL = """
import plancompiler as pc


def build(width=4, seed=0, world=2, **config):
    mesh = pc.Placement("cpu", range(world), axes=("dp",))
    with pc.job("small", seed=seed, config=pc.Config(**config)) as job:
        x = pc.ones((8, width), "float32", mesh).redistribute(sbp="S(0)")
        model = pc.nn.Linear(width, 3).place(mesh)
        loss = model(x).mean()
        pc.optim.SGD(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., pc.Job]:
    """Builds a small job from a file."""
    file = tmp_path / "small.py"
    file.write_text(SMALL)
    return lambda **settings: load_job(str(file), settings)


@pytest.mark.parametrize(
    "change",
    [{"width": 5}, {"seed": 1}, {"fuse_bytes": 0}, {"zero": 1}, {"passes": ("dce",)}, {"world": 3}],
    ids=str,
)
def test_a_change_of_the_job_misses(
    change: dict[str, Any], small: Callable[..., pc.Job], cache_folder: Path
) -> None:
    job, other = small(), small(**change)
    assert not plans_of_job(job, job.world_size, cache=cache()).cached
    assert plans_of_job(job, job.world_size, cache=cache()).cached
    made = plans_of_job(other, other.world_size, cache=cache())
    assert not made.cached
    assert made.plans == compile_plans(other, other.world_size).plans
    assert plans_of_job(job, job.world_size, cache=cache()).cached


def test_another_number_of_ranks_misses(small: Callable[..., pc.Job], cache_folder: Path) -> None:
    assert not plans_of_job(small(), 2, cache=cache()).cached
    assert not plans_of_job(small(), 3, cache=cache()).cached
    assert plans_of_job(small(), 3, cache=cache()).cached


def test_a_moved_line_misses(tmp_path: Path, small: Callable[..., pc.Job]) -> None:
    """Plans and errors name the line, so it is part of the job."""
    before = keys.job_key(small(), 2)
    file = tmp_path / "small.py"
    file.write_text("\n" + SMALL)
    moved = load_job(str(file), {})
    assert None not in (before, keys.job_key(moved, 2))
    assert keys.job_key(moved, 2) != before


def test_another_version_misses(
    small: Callable[..., pc.Job], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plans_of_job(small(), 2, cache=cache()).cached
    data = slices_of_job(small(), 2, cache())[0].distinct[0]
    assert plan_of_slice(data, 0, cache())[1]
    monkeypatch.setattr(keys, "version", lambda name: f"{name} of tomorrow")
    keys.software_digest.cache_clear()
    assert not slices_of_job(small(), 2, cache())[1]
    assert not plan_of_slice(data, 0, cache())[1]


def test_an_edit_of_the_compiler_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOADED", time.time() + 60)  # what is written now counts as loaded
    package = tmp_path / "package"
    for name in ("ops", "passes"):
        (package / name / "inner").mkdir(parents=True)
        (package / name / "inner" / "one.py").write_text("ONE = 1\n")
    results = {keys.sources_digest(package, ("ops", "passes"))}
    (package / "passes" / "inner" / "one.py").write_text("ONE = 2\n")
    results.add(keys.sources_digest(package, ("ops", "passes")))
    (package / "passes" / "inner" / "one.py").rename(package / "passes" / "inner" / "two.py")
    results.add(keys.sources_digest(package, ("ops", "passes")))
    assert None not in results
    assert len(results) == 3
    assert keys.sources_digest(package, ("ops", "lower")) is None


def test_sources_that_changed_since_the_start_are_not_trusted(
    tmp_path: Path, cache_folder: Path, small: Callable[..., pc.Job], monkeypatch: Any
) -> None:
    monkeypatch.setattr(keys, "LOADED", 0.0)
    keys.software_digest.cache_clear()
    for _ in range(2):
        assert not plans_of_job(small(), 2, cache=cache()).cached
    assert not cache_folder.exists()


def test_all_code_that_makes_plans_counts() -> None:
    """What `lower` imports, also by way of other packages; time limits and BLAS make no plans, and
    the version counts by itself.
    """
    imported = nx.descendants(graph.packages(graph.module_graph()), "lower")
    assert set(keys.COMPILER_PACKAGES) == (imported | {"lower"}) - {
        "blas",
        "errors",
        "hooks",
        "limits",
        "version",
    }


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)


def of_another_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] += 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, of_another_version, empty])
@pytest.mark.parametrize("name", ["slices", "rank_1"])
def test_a_damaged_entry_is_compiled_again(
    damage: Callable[[Path], None],
    name: str,
    small: Callable[..., pc.Job],
    cache_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pc.run(small()) as session:
        fresh, digest = losses(session), session.digest
    (victim,) = [path for path in files(cache_folder) if path.name == name]
    whole_bytes = victim.read_bytes()
    damage(victim)
    with pc.run(small()) as session:
        assert not session.cached
        assert (losses(session), session.digest) == (fresh, digest)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "damaged" in warnings[0].getMessage()
    assert victim.read_bytes() == whole_bytes
    with pc.run(small()) as session:
        assert session.cached
        assert (losses(session), session.digest) == (fresh, digest)


def test_a_whole_entry_that_holds_no_plan_is_compiled_again(
    small: Callable[..., pc.Job], cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = plans_of_job(small(), 2, cache=cache())
    (victim,) = [path for path in files(cache_folder) if path.name == "rank_0"]
    store = cache().store
    other = store.read(victim.parent.name, "rank_1")
    assert other is not None
    for data in (b"no plan", other.data):
        store.write(victim.parent.name, "rank_0", {"world_size": 2, "custom_ops": {}}, data)
        caplog.clear()
        again = plans_of_job(small(), 2, cache=cache())
        assert not again.cached
        assert again.plans == made.plans
        assert "damaged" in caplog.text
    assert plans_of_job(small(), 2, cache=cache()).cached


def test_plans_that_do_not_agree_are_compiled_again(
    small: Callable[..., pc.Job], cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan of another job's slice in place of one of this job's."""
    job, other = small(), small(width=5, fuse_bytes=0, passes=("dce",))
    made = plans_of_job(job, 2, cache=cache())
    slices = slices_of_job(job, 2, cache())[0]
    foreign = compile_plans(other, 2).plans[1]
    key = keys.slice_key(slices.distinct[slices.of_rank[1]])
    assert key is not None
    cache().keep_plan_by_key(key, foreign)
    again = plans_of_job(job, 2, cache=cache())
    assert not again.cached
    assert again.plans == made.plans
    assert "do not agree" in caplog.text


def test_runs_go_on_without_a_writable_folder(
    small: Callable[..., pc.Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PLANCOMPILER_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        with pc.run(small()) as session:
            assert not session.cached
            assert len(losses(session)) == 3


def test_a_dump_is_made_even_so(
    small: Callable[..., pc.Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
) -> None:
    assert not plans_of_job(small(), 2, cache=cache()).cached
    for number, make in enumerate((plans_of_job, slices_of_job)):
        monkeypatch.setenv("PLANCOMPILER_DUMP", str(tmp_path / f"dump{number}"))
        make(small(), 2, cache=cache())
        assert (tmp_path / f"dump{number}" / "boxing_task_graph.txt").is_file()


def test_ops_made_inside_a_function_are_not_cached(cache_folder: Path) -> None:
    @pc.op(rule="n -> n", linear=0)
    def halved(x: Any) -> Any:
        return x / 2

    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("halves") as job:
        pc.output("loss", halved(pc.ones((6,), "float32", mesh)).sum())
    for _ in range(2):
        with pc.run(job) as session:
            assert not session.cached
            assert losses(session) == [3.0] * 3
    assert not cache_folder.exists()


def test_equal_slices_are_one() -> None:
    one, other = b"slice", b"other"
    slices = JobSlices.of({2: one, 0: one, 1: other})
    assert (slices.distinct, slices.of_rank) == ((one, other), (0, 1, 0))
