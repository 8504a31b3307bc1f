"""What costs are computed of: links by where ranks are, kernels by rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from plancompiler.boxing.planner import boxing_path
from plancompiler.boxing.report import boxing_costs
from plancompiler.boxing.step_time import step_time
from plancompiler.costs import (
    generic_machine,
    link_between,
    links_of,
    machine_of,
    machine_of_job,
    op_seconds,
    primitive_cost,
)
from plancompiler.costs.choice import FOLDER
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.ir import DType, NdSbp, TensorType
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import compile_plans
from plancompiler.ops.registry import pointwise_of
from tests.examples import gpt
from tests.passes.worlds import configured, mesh

A100 = machine_of("a100-sxm")


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        (range(8), 300e9),  # one node
        (range(16), 200e9),  # two nodes, whose eight adapters are all in use
        (range(0, 64, 8), 25e9),  # one rank of each node
        ((0, 1, 8, 9), 50e9),
        ((6, 7, 8, 9), 50e9),
    ],
)
def test_a_group_has_the_bandwidth_of_its_narrowest_links(ranks: range, rate: float) -> None:
    link = link_between(A100, tuple(ranks))
    assert 1 / link.per_byte == pytest.approx(rate)
    assert link.per_message == (5e-6 if rate == 300e9 else 10e-6)


def test_axes_of_a_mesh_have_links_of_their_own() -> None:
    links = links_of(A100, mesh(4, 8, axes=("dp", "tp")))
    assert 1 / links.along((1,)).per_byte == pytest.approx(300e9)
    assert 1 / links.along((0,)).per_byte == pytest.approx(25e9)
    assert 1 / links.along((0, 1)).per_byte == pytest.approx(200e9)
    # Meshes whose links are all the same share one object, so that paths are found once.
    assert links_of(A100, mesh(2, 4, axes=("a", "b"))) is links_of(A100, mesh(8))
    assert links_of(generic_machine(), mesh(512)) is links_of(generic_machine(), mesh(2))


@pytest.mark.parametrize(
    ("primitive", "share"),
    [
        (Primitive.ALL_REDUCE, 2 * 7 / 8),
        (Primitive.REDUCE_SCATTER, 7 / 8),
        (Primitive.ALL_GATHER, 7 / 8),
        (Primitive.ALL_TO_ALL, 7 / 64),
        (Primitive.SLICE, 0.0),
    ],
)
def test_a_collective_moves_its_share(primitive: Primitive, share: float) -> None:
    link = link_between(A100, range(8))
    cost = primitive_cost(primitive, 8, link)
    assert cost.share == share
    large = cost.seconds(1 << 30)
    assert large >= share * (1 << 30) / 300e9
    slower = primitive_cost(primitive, 8, link._replace(per_byte=1.0))
    assert slower.per_byte >= cost.per_byte


@pytest.mark.parametrize(
    ("primitive", "copied"),
    [(Primitive.REDUCE_SCATTER, 1.0), (Primitive.ALL_GATHER, 1.0), (Primitive.ALL_TO_ALL, 1 / 8)],
)
def test_parts_that_lie_apart_are_copied(primitive: Primitive, copied: float) -> None:
    link = link_between(A100, range(8))
    together = primitive_cost(primitive, 8, link)
    apart = primitive_cost(primitive, 8, link, sent_apart=True)
    assert apart.per_byte - together.per_byte == pytest.approx(copied * link.per_copied_byte)
    assert (apart.start, apart.share) == (together.start, together.share)
    both = primitive_cost(primitive, 8, link, True, True)
    assert both.per_byte - apart.per_byte == pytest.approx(copied * link.per_copied_byte)


def test_a_kernel_takes_its_arithmetic_or_its_memory() -> None:
    device = A100.device
    flops = op_seconds(A100, 1e15, 1, DType.FLOAT16)
    assert flops == pytest.approx(3e-6 + 1e15 / (312e12 * device.matrix_efficiency))
    traffic = op_seconds(A100, 1, 1e12, DType.FLOAT16)
    assert traffic == pytest.approx(3e-6 + 1e12 / (2.039e12 * device.memory_efficiency))
    both = op_seconds(A100, 1e15, 1, DType.FLOAT16, pointwise=1e13)
    assert both - flops == pytest.approx(1e13 / 19.5e12)
    # int64 has no figure.
    assert op_seconds(A100, 1e15, 1, DType.INT64) == op_seconds(A100, 1e15, 1, DType.FLOAT32)


def test_attention_does_more_than_products() -> None:
    """Of each score that is made, of which a causal mask leaves half."""
    query = TensorType((2, 4, 128, 64), DType.FLOAT16)
    made = (query, TensorType((2, 4, 128), DType.FLOAT32))
    attrs = {"causal": False, "scale": 0.125}
    whole = pointwise_of("attention", (query,) * 3, made, attrs)
    assert whole == 18 * 2 * 4 * 128 * 128
    assert pointwise_of("attention", (query,) * 3, made, attrs | {"causal": True}) == whole // 2
    assert pointwise_of("matmul", (query, query), (query,), {"transpose_b": True}) == 0
    job = gpt(dp=1, layers=1, length=256)
    plan = compile_plans(job, 1).plans[0]
    (task,) = (each for each in plan.tasks if getattr(each.spec, "kind", "") == "attention")
    times, scores = TaskTimes(A100), 8 * 4 * 256 * 256 / 2
    products, others = 2 * scores * (8 + 8), 18 * scores
    rate = A100.device.peak_flops(DType.FLOAT32)
    expected = products / (rate * A100.device.matrix_efficiency) + others / rate
    assert times.seconds(plan, task) == pytest.approx(3e-6 + expected)


def test_buckets_and_reports_go_by_the_machine_of_the_config(tmp_path: Path) -> None:
    """Where starting a call takes long, one bucket pays; reports say the machine's seconds."""
    text = (FOLDER / "cpu-generic.toml").read_text()
    slow = tmp_path / "slow.toml"
    slow.write_text(text.replace("value = 10e-6", "value = 1.0"))
    near = tmp_path / "near.toml"
    near.write_text(text.replace("value = 10e-6", "value = 1e-9"))
    collectives = {}
    for path in (slow, near):
        job = configured(gpt(dp=2), fuse_bytes="auto", machine=str(path))
        graph = compile_plans(job, 2, "rank_per_iter").graph
        collectives[path] = len(boxing_costs(graph))
        machine = machine_of_job(job)
        assert step_time(graph, machine).transport_seconds == pytest.approx(
            sum(each.seconds for each in boxing_costs(graph, machine))
        )
        assert boxing_costs(graph, machine) != boxing_costs(graph)
    assert collectives[slow] < collectives[near]


def test_a_path_between_layouts_is_chosen_by_its_links(tmp_path: Path) -> None:
    """A value that two axes cut is gathered over fast links before it moves over slow ones."""
    layouts = NdSbp.of(["S(0)", "S(1)"]), NdSbp.of(["S(1)", "S(0)"])
    paths = {}
    for name in ("cpu-generic", "h100-sxm"):
        links = links_of(machine_of(name), mesh(2, 8, axes=("dp", "tp")))
        path = boxing_path(*layouts, (1024, 1024), DType.FLOAT32, (2, 8), links)
        paths[name] = [(str(step.primitive), step.mesh_axes, step.seconds) for step in path]
    assert paths["cpu-generic"] != paths["h100-sxm"]
