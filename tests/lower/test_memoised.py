"""What is kept of equal layers, and looked up again, changes nothing about the plans."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from plancompiler.boxing import infer_sbp
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.ir import Job
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.compile import compile_plans
from plancompiler.passes import microbatch
from tests.examples import gpt

SETTINGS: dict[str, dict[str, Any]] = {
    "dp tp pp": {"dp": 2, "tp": 2, "pp": 2},
    "zero": {"dp": 2, "zero": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "micro-batches": {"dp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "uneven": {"pp": 2, "layers": 3, "tp": 3, "heads": 4},
}


class Forgetful(dict[Any, Any]):
    """A dict in which nothing is found again."""

    def get(self, _key: Any, default: Any = None) -> Any:
        return default


def forget_everything(patch: pytest.MonkeyPatch) -> int:
    """Take all memory of equal structures out of the compiler; the number of functions that had
    one. But for the graph of all layouts, which depends on the mesh alone and takes long to make.
    """
    count = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith("plancompiler."):
            continue
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "cache_info") and attribute != "_state_graph":
                patch.setattr(module, attribute, value.__wrapped__)
                count += 1

    class Choices(infer_sbp._Choices):
        def __init__(self, job: Job) -> None:
            super().__init__(job)
            self.by_key = Forgetful()
            self._number_of = Forgetful()
            self._passed_on = Forgetful()

    class Layouts(microbatch._LayoutsInTime):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._choices = Forgetful()

    patch.setattr(infer_sbp, "_Choices", Choices)
    patch.setattr(microbatch, "_LayoutsInTime", Layouts)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_plans_are_those_of_a_compiler_that_remembers_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = gpt(**SETTINGS[name])
    remembered = compile_plans(job, job.world_size)
    assert forget_everything(monkeypatch) > 10
    forgotten = compile_plans(job, job.world_size)
    assert forgotten.texts == remembered.texts
    assert forgotten.slices == remembered.slices


def counted_choices(job: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a signature is really chosen for an op of a job."""
    count = 0
    choose = infer_sbp._choose

    def counting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return choose(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(infer_sbp, "_choose", counting)
        graph = infer_sbp.infer_sbp(job)
        build_boxing_task_graph(graph, job.world_size)
    return count


def test_equal_layers_are_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (gpt(dp=2, tp=2, layers=layers) for layers in (3, 9))
    assert counted_choices(many, monkeypatch) == counted_choices(few, monkeypatch)


def test_the_collector_is_on_again_when_the_last_compiler_has_left() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
