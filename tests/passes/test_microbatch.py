"""Micro-batches: a job cut in time computes what it computed whole, and what cannot be cut is
refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

import plancompiler as pc
from plancompiler.ir import BROADCAST, DType, Job
from plancompiler.ir.pipeline import Segment, SegmentKind
from plancompiler.ops.registry import op_def
from plancompiler.passes import run_passes
from plancompiler.passes.recompute import AGAIN, regions_of, with_checkpoints
from tests.examples import gpt, mlp
from tests.passes.in_time import assert_same, cut, fed, in_segments, microbatch_error, segment_of
from tests.passes.worlds import Tower, mesh, record_of


def two_stages() -> tuple[pc.Placement, pc.Placement]:
    return mesh(1), mesh(1, first=1)


# --- what is computed stays the same --------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [2, 3, 5, 30])
def test_the_digits_network(microbatches: int) -> None:
    assert_same(mlp(evaluate=False), microbatches)


def test_metrics_on_other_data_are_accumulated() -> None:
    pieces = assert_same(mlp(), 6)
    (accuracy,) = [op for op in pieces.ops if op.kind == "output" and op.attr("name") == "accuracy"]
    assert segment_of(pieces, accuracy).kind is SegmentKind.EPILOGUE


GPT = {
    "one stage": {},
    "two stages": {"pp": 2},
    "four stages": {"pp": 4, "layers": 4},
    "data parallel": {"pp": 2, "dp": 2, "tp": 2},
    "dropout": {"pp": 2, "dropout": 0.2},
    "zero 1": {"pp": 2, "dp": 2, "zero": 1},
    "zero 2": {"pp": 2, "dp": 2, "zero": 2},
    "zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "zero 3 on one stage": {"dp": 2, "zero": 3, "dropout": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("config", GPT.values(), ids=GPT)
def test_gpt(config: dict[str, Any], schedule: str) -> None:
    assert_same(gpt(**config), 4, schedule=schedule)


@pytest.mark.slow
def test_gpt_in_float16() -> None:
    # What is summed in another order in float16 differs more, and Adam's first steps magnify it.
    assert_same(gpt(pp=2, precision="float16"), 4, rtol=1e-3, variables_atol=2e-3)


@pytest.mark.slow
def test_recomputed_activations() -> None:
    job = gpt(pp=2, dropout=0.1, layers=4)
    marked = with_checkpoints(job, set(regions_of(job)))
    pieces = assert_same(marked, 4, schedule="zero_bubble")
    copies = [op for op in pieces.ops if op.name.endswith(AGAIN)]
    assert copies
    for op in copies:
        assert segment_of(pieces, op).kind is SegmentKind.BACKWARD
        stage = int(op.placement.rank_list[0])
        assert segment_of(pieces, op).chunk == stage


def classifier(
    first: pc.Placement, last: pc.Placement, dropout: float = 0.0, clip_norm: float | None = None
) -> Job:
    """Two stages, a head that is the transposed input layer, and reports of every kind."""
    with pc.job("classifier") as job:
        x = pc.input("x", (12, 6), "float32", first)
        labels = pc.input("labels", (12,), "int64", last)
        table = pc.nn.Parameter((6, 8), init="normal", init_args=(0, 0.5), name="table")
        shared = table.place(first).value
        tower = Tower(2, 8).place(first)
        hidden = pc.dropout(tower(pc.matmul(x, shared)), dropout)
        pc.output("norms", pc.square(hidden).mean(0))
        hidden = pc.nn.Linear(8, 8).place(last)(hidden.redistribute(placement=last))
        logits = pc.matmul(hidden, shared.redistribute(placement=last), transpose_b=True)
        loss = pc.cross_entropy(logits, labels)
        parameters = [table, *tower.parameters()]
        pc.optim.SGD(0.5, momentum=0.9).minimize(loss, parameters, clip_norm=clip_norm)
        pc.output("loss", loss)
        pc.output("accuracy", pc.accuracy(logits, labels))
        pc.output("largest", logits.max())
        pc.output("probabilities", pc.softmax(logits, -1))
        pc.output("transposed", pc.transpose(logits))
    return job


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("stages", [1, 2])
def test_shared_weights_clipping_and_reports(
    stages: int, dropout: float, clip_norm: float | None
) -> None:
    first, last = two_stages()
    job = classifier(first, last if stages == 2 else first, dropout, clip_norm)
    feeds = fed({"x": (12, 6), "labels": (12,)}, classes=6)
    for step in feeds:
        step["labels"][:5] = -100  # the default says that these rows do not count
    pieces = assert_same(job, 4, feeds, schedule="1f1b")
    kinds = {str(op.attr("name")): op.inputs[0].name for op in pieces.ops if op.kind == "output"}
    makers = {value.name: op.kind for op in pieces.ops for value in op.outputs}
    assert makers[kinds["probabilities"]] == makers[kinds["transposed"]] == "collect_pieces"
    assert makers[kinds["largest"]] == "accumulate"


def test_data_that_is_needed_whole_is_read_before_the_micro_batches() -> None:
    first, last = two_stages()
    pieces = cut(classifier(first, last), 4)
    kinds = {op.name: segment_of(pieces, op).kind for op in pieces.ops}
    inputs = {str(op.attr("name")): kinds[op.name] for op in pieces.ops if op.kind == "input"}
    # How many labels count is known before the first loss.
    assert inputs == {"x": SegmentKind.FORWARD, "labels": SegmentKind.PROLOGUE}
    (piece,) = [op for op in pieces.ops if op.kind == "take_piece" and op.inputs[0].ndim == 1]
    assert segment_of(pieces, piece) == Segment(SegmentKind.FORWARD, 1)


def test_two_losses_with_two_optimizers() -> None:
    with pc.job("two") as job:
        x = pc.input("x", (8, 4), "float32", mesh(2), "S(0)")
        left, right = (pc.nn.Linear(4, 4).place(mesh(2)) for _ in range(2))
        hidden = left(x).tanh()
        first = pc.square(hidden).mean()
        second = pc.square(right(hidden) - x).sum() * 0.1 + pc.square(right.weight.value).sum()
        pc.optim.SGD(0.1).minimize(first, left.parameters())
        pc.optim.SGD(0.2).minimize(second, right.parameters())
        pc.output("first", first)
        pc.output("second", second)
        pc.output("both", first + second)
    assert_same(job, 4, fed({"x": (8, 4)}))


def test_random_tensors_and_early_values_are_made_in_pieces() -> None:
    with pc.job("noise") as job:
        where = mesh(1)
        x = pc.input("x", (8, 4), "float32", where)
        noise = pc.tanh(pc.normal((8, 4), placement=where)) * 0.5
        positions = pc.nn.Parameter((8, 4), init="normal", init_args=(0, 1)).place(where)
        shift = pc.full((8, 4), 2.0, "float32", where)
        loss = pc.square(x + noise + positions.value * shift).mean()
        pc.optim.SGD(1.0).minimize(loss, [positions])
        pc.output("loss", loss)
    pieces = assert_same(job, 4, fed({"x": (8, 4)}))
    early = in_segments(pieces, SegmentKind.PROLOGUE)
    assert [op.kind for op in early if any(v.shape == (8, 4) for v in op.outputs)] == ["variable"]
    assert "take_piece" in {op.kind for op in in_segments(pieces, SegmentKind.FORWARD)}


def test_gradients_of_inputs_are_collected() -> None:
    with pc.job("saliency") as job:
        x = pc.input("x", (8, 4), "float32", mesh(1))
        loss = pc.square(pc.nn.Linear(4, 4).place(mesh(1))(x)).sum()
        (grads,) = pc.gradients(loss, [x])
        assert grads is not None
        pc.output("saliency", (grads * x).sum(1))
    pieces = assert_same(job, 2, fed({"x": (8, 4)}))
    last = [op for op in pieces.ops if op.kind == "collect_pieces"]
    assert [segment_of(pieces, op).kind for op in last] == [SegmentKind.BACKWARD]


# --- what is said about the ops -------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_where_gradients_are_reduced(zero: int) -> None:
    job = cut(gpt(pp=2, dp=2, zero=zero), 4)
    moved = [op for op in job.ops if op.kind == "redistribute" and op.name.endswith(":shard")]
    assert bool(moved) is (zero > 0)
    each_time = {segment_of(job, op).kind.per_microbatch for op in moved}
    assert each_time == {0: set(), 1: {False}, 2: {True}, 3: {True}}[zero]
    sums = [op for op in job.ops if op.kind == "accumulate" and op.attr("reduction") == "sum"]
    assert len(sums) == 1 + sum(op.kind == "adam_update" for op in job.ops)


def test_gathers_of_zero_3_stay_in_the_segment_that_reads_them() -> None:
    job = cut(gpt(pp=2, dp=2, layers=4, zero=3), 4, schedule="1f1b")
    gathers = [op for op in job.ops if op.attr("late") is not None]
    assert {segment_of(job, op).kind for op in gathers} == {
        SegmentKind.FORWARD,
        SegmentKind.BACKWARD,
    }
    segment = {op.name: segment_of(job, op) for op in job.ops}
    ahead = 0
    for op in gathers:
        readers = [each for each in job.ops if any(op.outputs[0] is value for value in each.inputs)]
        assert readers
        assert {segment[each.name] for each in readers} == {segment[op.name]}
        if op.attr("late"):
            ahead += 1
            assert segment[str(op.attr("late"))] == segment[op.name]
    assert ahead


def test_float16_gradients_are_accumulated_in_float32() -> None:
    job = cut(gpt(pp=2, precision="float16"), 4)
    dtypes = [op.outputs[0].dtype for op in job.ops if op.kind == "accumulate"]
    assert dtypes
    assert set(dtypes) == {DType.FLOAT32}


@pytest.mark.parametrize(("zero", "kind"), [(1, SegmentKind.EPILOGUE), (2, SegmentKind.BACKWARD)])
def test_sums_of_gradients_are_divided_by_the_loss_scale_once(zero: int, kind: SegmentKind) -> None:
    """With ZeRO 2 parts are: their sums would be held whole before they are shared out."""
    job = cut(gpt(dp=2, precision="float16", zero=zero), 4)
    divided = [op for op in job.ops if op.name.endswith(":final")]
    assert divided
    assert {segment_of(job, op).kind for op in divided} == {kind}


def test_nothing_of_the_batch_is_made_before_it() -> None:
    for config in ({}, {"pp": 2, "dropout": 0.1}, {"pp": 2, "precision": "float16"}):
        job = cut(gpt(batch=8, **config), 4)
        early = in_segments(job, SegmentKind.PROLOGUE)
        large = [op for op in early if any(v.shape[:2] == (8, 16) for v in op.outputs)]
        assert not large


def test_updates_are_late_and_variables_early() -> None:
    job = cut(gpt(pp=2), 4)
    for op in job.ops:
        if op_def(op.kind).mutates:
            assert segment_of(job, op).kind is SegmentKind.EPILOGUE
        if op.kind == "variable":
            assert segment_of(job, op).kind is SegmentKind.PROLOGUE
        assert op.micro is not None
        if not segment_of(job, op).kind.per_microbatch:
            assert {*op.micro.inputs, *op.micro.outputs} <= {BROADCAST}


def test_one_micro_batch_leaves_a_job_alone() -> None:
    for schedule in ("1f1b", "interleaved"):
        whole, records = run_passes(gpt(pp=2, schedule=schedule))
        assert whole.pipeline is None
        assert all(op.micro is None for op in whole.ops)
        assert records[-1].name == "microbatch"
        assert records[-1].summary == "off"


def test_the_summary_counts() -> None:
    job = gpt(pp=2)
    record = record_of(job, "microbatch", microbatches=4, schedule="1f1b")
    ops = cut(job, 4).ops
    pieces = cut(job, 4)
    early, late = (
        len(in_segments(pieces, kind)) for kind in (SegmentKind.PROLOGUE, SegmentKind.EPILOGUE)
    )
    assert record.summary == (
        f"4 micro-batches, 2 stages (1f1b): {len(ops) - early - late} ops per micro-batch, "
        f"{early} before, {late} after; {sum(op_def(op.kind).collects for op in ops)} values "
        "accumulated"
    )


# --- refusals -------------------------------------------------------------------------------------


def test_an_op_that_couples_the_batch() -> None:
    def build() -> Job:
        with pc.job("coupled") as job:
            x = pc.nn.Linear(4, 4).place(mesh(1))(pc.input("x", (8, 4), "float32", mesh(1)))
            pc.output("loss", pc.square(pc.batch_norm(x)).mean())
        return job

    text = microbatch_error(build)
    assert "channel_variance needs the whole batch" in text
    assert "layer_norm" in text
