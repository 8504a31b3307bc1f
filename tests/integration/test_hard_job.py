"""One job with all that makes passes go wrong, against every pass alone and all together.

A block that is called twice, an embedding table that is also the output layer of another placement,
gradients that are clipped together, reported, and used by updates, two optimizers, and parameters
with different degrees of data parallelism. What it computes must be what the dense run computes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.executor.checkpoint import assemble, shards_to_bytes
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import Job
from plancompiler.ir.pipeline import SCHEDULES
from plancompiler.lower.compile import MODES, compile_plans, with_chosen_regions
from plancompiler.passes import Config, run_passes
from tests.dense import run_dense

STEPS = 4
BATCH, LENGTH, DIM, WORDS = 8, 4, 16, 12
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}

TENSOR_PARALLEL = {
    "attention.query.weight": ["B", "S(0)"],
    "attention.query.bias": ["B", "S(0)"],
    "attention.key.weight": ["B", "S(0)"],
    "attention.key.bias": ["B", "S(0)"],
    "attention.value.weight": ["B", "S(0)"],
    "attention.value.bias": ["B", "S(0)"],
    "attention.projection.weight": ["B", "S(1)"],
    "mlp.fc1.weight": ["B", "S(0)"],
    "mlp.fc1.bias": ["B", "S(0)"],
    "mlp.fc2.weight": ["B", "S(1)"],
}


class Model(pc.nn.Module):
    """Tokens to logits; `wide` and `narrow` are meshes over the ranks of the first stage."""

    def __init__(self, wide: pc.Placement, narrow: pc.Placement, last: pc.Placement) -> None:
        self.narrow, self.last = narrow, last
        self.table = pc.nn.Embedding(WORDS, DIM, std=0.3).place(wide)
        self.position = pc.nn.Parameter((LENGTH, DIM), init="normal", init_args=(0, 0.3))
        self.position.place(wide)
        self.front = pc.nn.TransformerBlock(DIM, 2, 0.1).place(narrow, TENSOR_PARALLEL)
        self.back = pc.nn.TransformerBlock(DIM, 2).place(last, TENSOR_PARALLEL)
        self.norm = pc.nn.LayerNorm(DIM).place(last)

    def forward(self, tokens: pc.Value) -> pc.Value:
        x = self.table(tokens) + self.position.value
        x = x.redistribute(placement=self.narrow, sbp=["S(0)", "B"])
        x = self.front(self.front(x))
        x = self.norm(self.back(x.redistribute(placement=self.last)))
        return pc.matmul(x, self.table.weight.value.redistribute(self.last), transpose_b=True)


@cache
def hard_job(stages: int = 1) -> Job:
    """With two stages the last block, the norm and the loss are on ranks 4 to 7, else on 0 to 3."""
    wide = pc.Placement("cpu", [[0], [1], [2], [3]], ("dp", "tp"))
    narrow = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    last = narrow if stages == 1 else pc.Placement("cpu", [[4, 5], [6, 7]], ("dp", "tp"))
    with pc.job("hard", seed=3) as job:
        model = Model(wide, narrow, last)
        tokens = pc.input("tokens", (BATCH, LENGTH), "int64", wide, ["S(0)", "B"])
        targets = pc.input("targets", (BATCH, LENGTH), "int64", last, ["S(0)", "B"])
        loss = pc.cross_entropy(model(tokens), targets, ignore_index=None)
        parameters = [each.value for each in model.parameters()]
        grads = [grad for grad in pc.gradients(loss, parameters) if grad is not None]
        clipped, norm = pc.clip_by_global_norm(grads, 0.5)
        scaled = [grad * 0.5 for grad in clipped]
        # A large eps: the gradient of a key's bias is nothing but rounding.
        pc.optim.AdamW(1e-2, eps=1e-3).apply(parameters[2:], scaled[2:])
        pc.optim.SGD(0.1, momentum=0.9).apply(parameters[:2], scaled[:2])
        pc.output("loss", loss * 1.0)
        pc.output("norm", norm)
        pc.output("table_grad", pc.square(grads[0]).sum())
    return job


def batches() -> list[dict[str, Any]]:
    """Feeds of each step."""
    random = np.random.default_rng(7)
    shape = (STEPS, 2, BATCH, LENGTH)
    return [
        {"tokens": tokens, "targets": targets}
        for tokens, targets in random.integers(0, WORDS, shape, np.int64)
    ]


@cache
def reference(stages: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Outputs of each step and final variables of the dense run."""
    variables: dict[str, Any] = {}
    return run_dense(hard_job(stages), STEPS, batches(), variables), variables


def check(stages: int, **settings: Any) -> None:
    """The job under a config gives the outputs and variables of the dense run."""
    job = replace(hard_job(stages), config=Config(**settings))
    plans = compile_plans(job, job.world_size, "rank_per_iter").plans
    with LocalWorld(plans) as world:
        outputs = [world.step(feeds) for feeds in batches()]
        shards = [shards_to_bytes(plan, world.variables(rank), 0) for rank, plan in plans.items()]
    variables = assemble(shards)
    wanted_outputs, wanted = reference(stages)
    tolerance = TOLERANCE[settings.get("precision", "float32")]
    for step, (got, expected) in enumerate(zip(outputs, wanted_outputs, strict=True)):
        for name, value in expected.items():
            loose = tolerance if name == "loss" else 4 * tolerance
            np.testing.assert_allclose(got[name], value, loose, err_msg=f"step {step} {name}")
    assert wanted.keys() <= variables.keys()
    for name, value in wanted.items():
        scale = float(np.abs(value).max())
        # Some gradients are zero but for rounding, as that of a bias added to all keys.
        least = 1e-7 if tolerance == TOLERANCE["float32"] else 1e-6
        np.testing.assert_allclose(
            variables[name], value, tolerance, max(tolerance * scale, least), err_msg=name
        )


WITHOUT_LAYOUTS: list[dict[str, Any]] = [
    {"passes": ()},
    {"passes": ("fold",)},
    {"passes": ("cse",)},
    {"passes": ("prune_scaling",)},
    {"passes": ("dce",)},
]
"""What these passes do to an op does not depend on the ranks of other ops: they are tested on the
two stages, which have all placements.
"""
ALONE: list[dict[str, Any]] = [
    {"passes": (), "fuse_bytes": 0},
    {"passes": (), "fuse_bytes": 500},
    {"passes": ("fuse_elementwise",)},
    {"passes": ("recompute",), "recompute": "auto"},
    {"passes": ("zero",), "zero": 1},
    {"passes": ("zero",), "zero": 2},
    {"passes": ("zero",), "zero": 3},
    {"passes": ("zero",), "zero": 3, "prefetch": 0, "fuse_bytes": 0},
    {"passes": ("mixed_precision",), "precision": "float16"},
]
ALL_PASSES = ("fold", "cse", "prune_scaling", "recompute", "zero", "fuse_elementwise", "dce")
TOGETHER: list[dict[str, Any]] = [
    {"passes": ALL_PASSES, "zero": zero, "recompute": "auto", "fuse_bytes": fuse_bytes}
    for zero, fuse_bytes in ((1, 1 << 20), (2, 0), (3, 0), (3, 1 << 20))
] + [
    {
        "passes": ("mixed_precision", *ALL_PASSES),
        "zero": zero,
        "recompute": "auto",
        "precision": "float16",
    }
    for zero in (0, 2, 3)
]


def text(settings: dict[str, Any]) -> str:
    return str(Config(**settings)) or "default"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        *((settings, stages) for settings in ALONE for stages in (1, 2)),
        *((settings, 2) for settings in WITHOUT_LAYOUTS),
    ],
    ids=lambda value: text(value) if isinstance(value, dict) else None,
)
def test_every_pass_alone(settings: dict[str, Any], stages: int) -> None:
    check(stages, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("settings", [{}, *TOGETHER], ids=text)
def test_passes_together(settings: dict[str, Any], stages: int) -> None:
    check(stages, **settings)


def test_the_job_is_as_hard_as_it_says() -> None:
    """Every pass finds something to do, so none of the tests above is about a pass that rests."""
    job = hard_job(2)
    placements = {op.placement for op in job.ops if op.kind == "variable"}
    assert {placement.hierarchy for placement in placements} == {(4, 1), (2, 2)}
    assert len(placements) == 3
    norms = [outputs["norm"] for outputs in reference(2)[0]]
    assert min(norms) > 0.5, "no step would be clipped otherwise"
    for settings in (*WITHOUT_LAYOUTS[1:], *ALONE[2:]):
        asked = with_chosen_regions(replace(job, config=Config(**settings)), job.world_size)
        rewritten, records = run_passes(asked)
        assert tuple(record.name for record in records) == settings["passes"]
        if settings["passes"] != ("dce",):  # Tracing leaves out what nobody reads.
            assert rewritten.ops != job.ops, settings


def test_factors_between_clipping_and_updates_go_into_the_updates() -> None:
    rewritten, _ = run_passes(replace(hard_job(), config=Config(passes=("prune_scaling",))))
    factors = [op.attr("grad_scale", 1.0) for op in rewritten.ops if op.kind.endswith("_update")]
    assert set(factors) == {0.5}


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{}, TOGETHER[-1]], ids=text)
def test_all_modes_give_the_same_plans(settings: dict[str, Any]) -> None:
    job = replace(hard_job(2), config=Config(**settings))
    assert len({compile_plans(job, 8, mode).digest for mode in MODES}) == 1


MICRO: list[dict[str, Any]] = [
    {"microbatches": 2},
    {"microbatches": 4},
    {"microbatches": 2, "zero": 1},
    {"microbatches": 4, "zero": 3, "recompute": "auto"},
    {"microbatches": 2, "precision": "float16"},
]
PIPELINES: list[dict[str, Any]] = [
    {"microbatches": microbatches, "schedule": schedule}
    for schedule in SCHEDULES
    for microbatches in (2, 4)
] + [
    {
        "microbatches": 4,
        "schedule": schedule,
        "zero": zero,
        "recompute": "auto",
        "sequence_parallel": True,
        "precision": precision,
    }
    for schedule, zero, precision in (
        ("1f1b", 2, "float32"),
        ("zero_bubble", 3, "float32"),
        ("1f1b", 1, "float16"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", MICRO, ids=text)
def test_micro_batches_without_stages(settings: dict[str, Any]) -> None:
    check(1, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", PIPELINES, ids=text)
def test_micro_batches_of_stages(settings: dict[str, Any]) -> None:
    check(2, **settings)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sequence_parallelism(stages: int) -> None:
    check(stages, sequence_parallel=True)
