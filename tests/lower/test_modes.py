"""All four modes give the same plans, whatever the hash seed; counts and sizes are the classical
ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import plancompiler as pc
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.cli.job_file import load_job
from plancompiler.errors import RankError, UnknownModeError
from plancompiler.lower import compile as compile_module
from plancompiler.lower.compile import MODES, compile_plans, resolve_mode
from plancompiler.plan import digest as digest_module
from plancompiler.plan.plan import Plan
from plancompiler.plan.text import format_plan
from tests.examples import EXAMPLES, gpt, mlp

JOBS = {
    "mlp dp": lambda: mlp(layout="dp", ranks=3),
    "mlp tp": lambda: mlp(layout="tp", ranks=2),
    "mlp dp_tp": lambda: mlp(layout="dp_tp", ranks=4),
    "gpt tp": lambda: gpt(tp=2),
    "gpt pp": lambda: gpt(pp=2),
    "gpt dp tp pp": lambda: gpt(dp=2, tp=2, pp=2),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", JOBS)
def test_all_modes_give_the_same_plans(name: str) -> None:
    job = JOBS[name]()
    reference = compile_plans(job, job.world_size, "naive")
    for mode in MODES:
        compiled = compile_plans(job, job.world_size, mode)
        assert compiled.texts == reference.texts, mode
        assert compiled.digest == reference.digest


@pytest.mark.processes
def test_plans_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.examples import gpt, mlp\n"
        "from plancompiler.lower.compile import compile_plans\n"
        "for job in (gpt(dp=2, tp=2, pp=2), mlp(layout='dp_tp', ranks=4)):\n"
        "    print(compile_plans(job, job.world_size, 'rank_per_iter').digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(digests) == 1


def test_digests_do_not_depend_on_the_folder_from_which_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, sources = set(), set()
    for folder, file in (
        (EXAMPLES.parent, "examples/mlp.py"),
        (EXAMPLES, "mlp.py"),
        (tmp_path, str(EXAMPLES / "mlp.py")),
    ):
        monkeypatch.chdir(folder)
        compilation = compile_plans(load_job(file, {"hidden": 30, "batch": 30}), 2)
        digests.add(compilation.digest)
        sources |= {task.source.file for task in compilation.plans[0].tasks}
    assert len(digests) == 1
    # Lines are shown as one who stands in the folder would name them.
    assert {"examples/mlp.py", "mlp.py"} <= sources


def collectives(job: pc.Job) -> Counter[str]:
    """Link families of the job by primitive, before reductions are fused."""
    graph = build_boxing_task_graph(infer_sbp(job), job.world_size)
    return Counter(str(f.transfer.primitive) for f in graph.families if f.transfer is not None)


def test_a_tensor_parallel_block_takes_two_all_reduces_each_way() -> None:
    layers = 2
    assert collectives(gpt(tp=2)) == {"all_reduce": 4 * layers}


def test_data_parallel_takes_one_all_reduce_per_parameter() -> None:
    job = mlp(layout="dp", ranks=2, evaluate=False)
    parameters = [op for op in job.ops if op.kind == "variable" and op.attr("trainable")]
    counts = collectives(job)
    # One per parameter, and one for the loss that is reported.
    assert counts.pop("all_reduce") == len(parameters) + 1
    assert set(counts) <= {"slice"}


def test_stages_exchange_one_activation_and_one_gradient() -> None:
    assert collectives(gpt(pp=2))["exchange"] == 4  # a copy and an assembly each


def test_only_the_ranks_asked_for_are_compiled() -> None:
    job = gpt(dp=2, tp=2, pp=2)
    some = compile_plans(job, job.world_size, "rank_per_iter", only_ranks=[7, 0])
    every = compile_plans(job, job.world_size, "rank_per_iter")
    assert some.texts == {rank: every.texts[rank] for rank in (0, 7)}
    assert every.distinct_slices == 2  # one per stage


def test_ranks_outside_the_world_are_refused() -> None:
    job = gpt(tp=2)
    with pytest.raises(RankError, match="outside the world"):
        compile_plans(job, 1, "rank_per_iter")
    with pytest.raises(RankError, match="Got: 5"):
        compile_plans(job, 2, "rank_per_iter", only_ranks=[5])


def test_spare_ranks_have_plans_that_do_nothing() -> None:
    job = mlp(layout="dp", ranks=2)
    plan = compile_plans(job, 3, "rank_per_iter").plans[2]
    assert [str(task.kind) for task in plan.tasks] == ["StepEnd"]


def test_an_unknown_mode_lists_the_four(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModeError, match="naive, rank_per_thread, rank_per_iter, rank_per_p"):
        resolve_mode("fast")
    monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", "quick")
    with pytest.raises(UnknownModeError, match="quick"):
        resolve_mode()
    monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", "naive")
    assert resolve_mode() == "naive"
    assert resolve_mode("rank_per_iter") == "rank_per_iter"


def test_a_dump_holds_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANCOMPILER_DUMP", str(tmp_path))
    compile_plans(mlp(layout="tp", ranks=2), 2, "rank_per_iter")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "boxing_task_graph.txt",
        "control_0.txt",
        "control_1.txt",
        "job.txt",
        "offsets_0.txt",
        "offsets_1.txt",
        "op_graph.txt",
        "order_0.txt",
        "order_1.txt",
        "plan_0.txt",
        "plan_1.txt",
        "slice_0.txt",
        "slice_1.txt",
        "storage_0.txt",
        "storage_1.txt",
    ]
    assert "all_reduce" in (tmp_path / "boxing_task_graph.txt").read_text()


def test_texts_of_plans_are_made_only_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a fifth of the time in which plans are made."""
    job, made = mlp(layout="tp", ranks=2), Counter()

    def counted(plan: Plan, sources: bool = True) -> str:
        made[sources] += 1
        return format_plan(plan, sources=sources)

    for module in (compile_module, digest_module):
        monkeypatch.setattr(module, "format_plan", counted)
    compilation = compile_plans(job, 2, "rank_per_iter")
    with pc.run(job, 2, cache=False) as session:
        session.run(1)
    assert made == {}
    assert session.digest == compilation.digest
    assert made == {False: 4}
    assert len(compilation.texts) == made[True] == 2


def test_the_arena_is_close_to_its_lower_bound() -> None:
    job = gpt(dp=2, tp=2, pp=2)
    for plan in compile_plans(job, job.world_size, "rank_per_iter").plans.values():
        assert plan.peak_live_bytes <= plan.arena_bytes <= 1.1 * plan.peak_live_bytes
