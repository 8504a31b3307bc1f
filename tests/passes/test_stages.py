"""Segments: which stage and which part of a step the ops of a job with micro-batches are in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import MicrobatchError, PlanCompilerError
from plancompiler.ir import Job, Partial, Phase, Split
from plancompiler.ir.pipeline import Segment, SegmentKind
from plancompiler.ops.registry import op_def
from tests.examples import gpt
from tests.passes.in_time import (
    STEPS,
    assert_same,
    cut,
    fed,
    in_segments,
    microbatch_error,
    segment_of,
)
from tests.passes.worlds import mesh


def two_stages() -> tuple[pc.Placement, pc.Placement]:
    return mesh(1), mesh(1, first=1)


# --- stages by placement --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_follow_from_placements(pp: int, schedule: str) -> None:
    job = cut(gpt(pp=pp, layers=4, dp=2, dropout=0.1), 2, schedule=schedule)
    assert job.pipeline is not None
    assert (job.pipeline.stages, job.pipeline.chunks) == (pp, pp)
    for op in job.ops:
        segment = segment_of(job, op)
        if segment.chunk >= 0:
            assert segment.chunk == op.placement.rank_list[0] // 2, op.name
            forward = op.origin.phase is Phase.FORWARD
            assert (segment.kind is SegmentKind.FORWARD) is forward, op.name


def test_interleaved_stages_go_round_the_placements() -> None:
    first, last = two_stages()
    with pc.job("rounds") as job:
        x = pc.input("x", (12, 4), "float32", first)
        y = pc.input("y", (12, 4), "float32", last)
        mask = pc.greater(x, 0.0).cast("float32")
        made = []
        for number, home in enumerate([first, last, first, last]):
            x = pc.nn.Linear(4, 4).place(home)(x.redistribute(placement=home)).tanh()
            if home == first:
                x = x * mask
            made.append(x)
            pc.output(f"mean{number}", x.mean())
        loss = pc.square(x - y).mean()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    pieces = assert_same(job, 4, fed({"x": (12, 4), "y": (12, 4)}), schedule="interleaved")
    assert pieces.pipeline is not None
    assert (pieces.pipeline.stages, pieces.pipeline.chunks) == (2, 4)
    chunks = {v.name: segment_of(pieces, op).chunk for op in pieces.ops for v in op.outputs}
    assert [chunks[value.name] for value in made] == [0, 1, 2, 3]
    for kind in (SegmentKind.FORWARD, SegmentKind.BACKWARD):
        results = {segment_of(pieces, op).chunk for op in in_segments(pieces, kind)}
        assert results == {0, 1, 2, 3}
    with pytest.raises(MicrobatchError, match=r"chunks 0 and 2.*schedule=interleaved"):
        cut(job, 4, schedule="1f1b")
    with pytest.raises(PlanCompilerError, match="groups of as many as there are stages"):
        cut(job, 3, schedule="interleaved")


def test_weight_gradients_of_zero_bubble() -> None:
    job = cut(gpt(pp=2), 4, schedule="zero_bubble")
    weights = in_segments(job, SegmentKind.WEIGHT)
    assert {op.kind for op in weights} >= {"contract_leading", "accumulate", "embedding_grad"}
    for op in weights:
        assert op.micro is not None
        collected = op_def(op.kind).collects and isinstance(op.micro.inputs[0], Partial)
        assert collected or all(isinstance(sbp, Partial) for sbp in op.micro.outputs)
    for op in in_segments(job, SegmentKind.BACKWARD):
        assert op.micro is not None
        assert op_def(op.kind).collects or any(isinstance(sbp, Split) for sbp in op.micro.outputs)
    assert not in_segments(cut(gpt(pp=2), 4, schedule="1f1b"), SegmentKind.WEIGHT)


# --- stages by name -------------------------------------------------------------------------------


def named_job(
    homes: Sequence[pc.Placement], stages: Sequence[int], inside: bool = True
) -> tuple[Job, list[pc.Value]]:
    """A layer per home, named as these stages; values move inside the named part or outside."""
    made = []
    with pc.job("named") as job:
        x = pc.input("x", (8, 4), "float32", homes[0])
        for home, number in zip(homes, stages, strict=True):
            if not inside:
                x = x.redistribute(placement=home)
            with pc.stage(number):
                x = pc.nn.Linear(4, 4).place(home)(x.redistribute(placement=home)).tanh()
            made.append(x)
        loss = pc.square(x).mean()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    return job, made


@pytest.mark.parametrize("inside", [True, False])
def test_named_stages(inside: bool) -> None:
    first, last = two_stages()
    job, made = named_job([first, first, last], [0, 0, 1], inside)
    pieces = assert_same(job, 4, fed({"x": (8, 4)}), schedule="1f1b")
    chunks = {v.name: segment_of(pieces, op).chunk for op in pieces.ops for v in op.outputs}
    assert [chunks[value.name] for value in made] == [0, 0, 1]
    for op in in_segments(pieces, SegmentKind.BACKWARD):
        assert segment_of(pieces, op).chunk == op.placement.rank_list[0]


def test_named_chunks_on_one_placement_are_interleaved() -> None:
    job, _made = named_job([mesh(1)] * 3, [0, 1, 2])
    pieces = assert_same(job, 4, fed({"x": (8, 4)}), schedule="interleaved")
    assert pieces.pipeline is not None
    assert (pieces.pipeline.stages, pieces.pipeline.chunks) == (1, 3)
    backward = [segment_of(pieces, op).chunk for op in in_segments(pieces, SegmentKind.BACKWARD)]
    assert set(backward) == {0, 1, 2}
    assert backward == sorted(backward, reverse=True)
    with pytest.raises(MicrobatchError, match="chunks 0 and 1 of the model share ranks"):
        cut(job, 4, schedule="gpipe")


def test_the_innermost_name_counts_in_any_order() -> None:
    first, last = two_stages()
    with pc.job("nested") as job:
        x = pc.input("x", (8, 4), "float32", first)
        with pc.stage(1):
            later = pc.nn.Linear(4, 4).place(last)
            with pc.stage(0):
                hidden = pc.nn.Linear(4, 4).place(first)(x)
            y = later(hidden.redistribute(placement=last))
        pc.output("y", y)
        pc.output("loss", pc.square(y).mean())
    stages = {value.name: op.origin.stage for op in job.ops for value in op.outputs}
    assert (stages[hidden.name], stages[y.name], stages[x.name]) == (0, 1, -1)
    assert_same(job, 4, fed({"x": (8, 4)}))


def test_gradients_are_on_the_stage_of_their_forward_op() -> None:
    first, last = two_stages()
    job, _ = named_job([first, last], [0, 1])
    results = {
        (op.origin.phase, op.origin.stage) for op in job.ops if op.kind in ("tanh", "tanh_grad")
    }
    assert results == {
        (phase, stage) for phase in (Phase.FORWARD, Phase.BACKWARD) for stage in (0, 1)
    }


@pytest.mark.parametrize("number", [-1, 1.0, True, "0", None])
def test_what_is_no_stage_is_refused(number: object) -> None:
    with pc.job("j"):
        with pytest.raises(pc.UsageError, match="pipeline stage is a whole number"):
            pc.stage(number)  # type: ignore[arg-type]
        pc.output("x", pc.zeros((2,), "float32", mesh(1)))


def test_stages_are_named_inside_jobs() -> None:
    with pytest.raises(pc.TracingError, match="while a job is traced"):
        pc.stage(0)


# --- random pipelines -----------------------------------------------------------------------------


class RandomPipeline:
    """A model of random layers over random stages, with skips, masks, shared weights and losses on
    the way; `layers` says which value each chunk makes first.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.schedule = self.pick(["gpipe", "1f1b", "interleaved", "zero_bubble"])
        stages = int(self.rng.integers(1, 5))
        rounds = int(self.rng.integers(1, 4)) if self.schedule == "interleaved" else 1
        self.named = (rounds > 1 and stages == 1) or self.rng.random() < 0.4
        self.chunks = stages * rounds
        self.microbatches = stages * int(self.rng.integers(2, 4)) if stages < 3 else stages
        self.batch = 2 * self.microbatches
        width = int(self.rng.integers(1, 3))
        homes = [mesh(width, first=stage * width) for stage in range(stages)]
        self.homes = [homes[chunk % stages] for chunk in range(self.chunks)]
        self.layers: dict[str, int] = {}
        with pc.job(f"pipeline_{seed}", seed=seed) as self.job:
            self.model()

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def stage(self, chunk: int) -> Any:
        return pc.stage(chunk) if self.named else nullcontext()

    def model(self) -> None:
        data = pc.input("x", (self.batch, 4), "float64", self.homes[0])
        target = pc.input("y", (self.batch, 4), "float64", self.homes[self.pick([0, -1])])
        parameters: list[pc.nn.Parameter] = []
        made: list[pc.Value] = []
        terms: list[pc.Value] = []
        x = data
        for chunk, home in enumerate(self.homes):
            with self.stage(chunk):
                x = x.redistribute(placement=home)
                for layer in range(int(self.rng.integers(1, 3))):
                    weight = pc.nn.Parameter(
                        (4, 4), "float64", "normal", (0, 0.5), True, name=f"w{chunk}.{layer}"
                    ).place(home)
                    parameters.append(weight)
                    x = self.layer(x, weight.value)
                    self.layers[x.name] = chunk
                x = self.extra(x, home, data, made, parameters)
                made.append(x)
                if self.rng.random() < 0.4:
                    terms.append(pc.square(x).mean() * 0.1)
        with self.stage(self.chunks - 1):
            loss = pc.square(x - target.redistribute(placement=self.homes[-1])).mean()
        for term in terms:
            loss = loss + term.redistribute(placement=self.homes[-1])
        optimizer = self.pick([pc.optim.SGD(0.1), pc.optim.SGD(0.1, momentum=0.9)])
        optimizer.minimize(loss, parameters, clip_norm=self.pick([None, 0.1]))
        pc.output("loss", loss)
        pc.output("x", self.pick(made))

    def layer(self, x: pc.Value, weight: pc.Value) -> pc.Value:
        def call(value: pc.Value) -> pc.Value:
            return pc.matmul(pc.tanh(value), weight) + 0.1

        return pc.checkpoint(call)(x) if self.rng.random() < 0.3 else call(x)

    def extra(
        self,
        x: pc.Value,
        home: pc.Placement,
        data: pc.Value,
        made: list[pc.Value],
        parameters: list[pc.nn.Parameter],
    ) -> pc.Value:
        choice = int(self.rng.integers(7))
        if choice == 0:
            return pc.dropout(x, 0.3)
        if choice == 1 and made:
            return x + self.pick(made).redistribute(placement=home)
        if choice == 2:
            mask = pc.greater(data.redistribute(placement=home), 0.0).cast("float64")
            return x * mask
        if choice == 3:
            square = [each for each in parameters if each.shape == (4, 4)]
            shared = self.pick(square).value.redistribute(placement=home)
            return pc.matmul(x, shared, transpose_b=True)
        if choice == 4:
            return x + pc.normal((self.batch, 4), dtype="float64", placement=home)
        if choice == 5:
            rows = pc.nn.Parameter((self.batch, 4), "float64", "ones", (), True, name="rows")
            if all(each.name != "rows" for each in parameters):
                parameters.append(rows.place(home))
                return x * rows.value
        return x


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_pipelines(seed: int) -> None:
    model = RandomPipeline(seed)
    rng = np.random.default_rng(seed)
    feeds = [{name: rng.normal(size=(model.batch, 4)) for name in ("x", "y")} for _ in range(STEPS)]
    exact = {"rtol": 1e-9, "atol": 1e-10, "variables_atol": 1e-10}
    job = assert_same(model.job, model.microbatches, feeds, schedule=model.schedule, **exact)
    assert job.pipeline is not None
    assert job.pipeline.chunks == model.chunks
    homes = {chunk: set(home.rank_list) for chunk, home in enumerate(model.homes)}
    for op in job.ops:
        segment = segment_of(job, op)
        if segment.chunk >= 0:
            assert set(op.placement.rank_list) <= homes[segment.chunk], op.name
        for value in op.outputs:
            if value.name in model.layers:
                assert segment == Segment(SegmentKind.FORWARD, model.layers[value.name])


# --- refusals -------------------------------------------------------------------------------------


def test_a_stage_without_ops() -> None:
    homes = [mesh(1, first=rank) for rank in range(2)]
    for last in (2, 1 << 40):
        text = microbatch_error(lambda number=last: named_job(homes, [0, number])[0])
        assert "stage 1 has no op" in text


def test_a_value_that_goes_back() -> None:
    homes = [mesh(1, first=rank) for rank in range(3)]
    text = microbatch_error(lambda: named_job(homes, [0, 2, 1])[0])
    assert "a value goes back to an earlier stage" in text
    assert "Expected: stage 2 or later" in text


def test_stages_that_share_ranks() -> None:
    homes = [mesh(2), mesh(1, first=1)]
    assert "chunks 0 and 1 of the model share ranks" in microbatch_error(
        lambda: named_job(homes, [0, 1])[0]
    )


def test_interleaved_chunks_out_of_turn() -> None:
    first, last = two_stages()
    text = microbatch_error(
        lambda: named_job([first, last, last], [0, 1, 2])[0], schedule="interleaved"
    )
    assert "chunks 1 and 2 of the model share ranks" in text


def test_recomputation_across_stages() -> None:
    first, last = two_stages()

    def build() -> Job:
        with pc.job("across") as job:
            x = pc.input("x", (8, 4), "float32", first)
            front, back = pc.nn.Linear(4, 4).place(first), pc.nn.Linear(4, 4).place(last)

            def call(value: pc.Value) -> pc.Value:
                hidden = pc.tanh(front(value))
                return pc.tanh(back(pc.tanh(hidden.redistribute(placement=last))))

            loss = pc.square(pc.checkpoint(call)(x)).mean()
            pc.optim.SGD(0.1).minimize(loss)
            pc.output("loss", loss)
        return job

    assert "must lie within one stage" in microbatch_error(build)
