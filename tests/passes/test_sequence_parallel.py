"""Sequence parallelism: the losses of one rank, two halves for every all-reduce, less memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.report import boxing_costs
from plancompiler.errors import UsageError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import Job, NdSbp, Phase, Split
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.passes import Config, run_passes
from tests.dense import run_dense
from tests.examples import gpt
from tests.passes.worlds import (
    STEPS,
    arena,
    collectives,
    compiled,
    configured,
    losses,
    mesh,
    record_of,
    usage_error,
)

SPLIT = {"sequence_parallel": True}
SIZES = {"length": 16, "dim": 32, "heads": 4}
BY_OUTPUT, BY_INPUT = "S(0)", "S(1)"
BLOCK = {
    **{f"attention.{name}.weight": BY_OUTPUT for name in ("query", "key", "value")},
    **{f"attention.{name}.bias": BY_OUTPUT for name in ("query", "key", "value")},
    "attention.projection.weight": BY_INPUT,
    "mlp.fc1.weight": BY_OUTPUT,
    "mlp.fc1.bias": BY_OUTPUT,
    "mlp.fc2.weight": BY_INPUT,
}


def blocks_job(
    layers: int, tp: int = 2, training: bool = True, dropout: float = 0.0, axis: str = "tp"
) -> Job:
    """Transformer blocks on noise, with tensor parallelism."""
    place = mesh(tp, axes=(axis,))
    with pc.job("blocks") as job:
        blocks = pc.nn.ModuleList(
            pc.nn.TransformerBlock(SIZES["dim"], SIZES["heads"], dropout) for _ in range(layers)
        )
        x = pc.normal((4, SIZES["length"], SIZES["dim"]), placement=place)
        for block in blocks:
            x = block.place(place, BLOCK)(x)
        loss = pc.square(x).mean()
        if training:
            pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    return job


def counts(job: Job, **settings: object) -> Counter[str]:
    """Collectives, without local slices and moves between placements."""
    counts = collectives(compiled(job, **settings))
    return Counter({name: counts[name] for name in ("all_reduce", "reduce_scatter", "all_gather")})


def per_layer(training: bool, **settings: object) -> Counter[str]:
    """What one more block costs."""
    few, many = (counts(blocks_job(layers, training=training), **settings) for layers in (2, 3))
    return many - few


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}])
def test_losses_are_those_of_one_rank(layout: dict[str, int], one_rank: tuple[float, ...]) -> None:
    np.testing.assert_allclose(losses(gpt(**layout), STEPS, **SPLIT), one_rank, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 1},
        {"zero": 3},
        {"recompute": "auto"},
        {"zero": 1, "recompute": "auto", "fuse_bytes": 1 << 20},
        {"passes": ("sequence_parallel", "fuse_elementwise")},
    ],
)
def test_losses_with_other_passes(settings: dict[str, object], one_rank: tuple[float, ...]) -> None:
    actual = losses(gpt(dp=2, tp=2), STEPS, **SPLIT, **settings)
    np.testing.assert_allclose(actual, one_rank, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_losses_in_16_bits(precision: str, one_rank: tuple[float, ...]) -> None:
    actual = losses(gpt(dp=2, tp=2), STEPS, precision=precision, **SPLIT)
    np.testing.assert_allclose(actual, one_rank, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "tp"), [(13, 2), (3, 4), (2, 4)])
def test_uneven_lengths(length: int, tp: int) -> None:
    expected = [float(each["loss"]) for each in run_dense(gpt(length=length), 10)]
    np.testing.assert_allclose(losses(gpt(length=length, tp=tp), 10, **SPLIT), expected, rtol=1e-4)


def test_dropout_drops_the_same_elements() -> None:
    def job_on(tp: int) -> Job:
        place = mesh(tp, axes=("tp",))
        with pc.job("dropped") as job:
            x = pc.normal((2, 7, 6), placement=place)
            first = pc.nn.Linear(6, 8).place(place, {"weight": "S(0)", "bias": "S(0)"})
            second = pc.nn.Linear(8, 6).place(place, {"weight": "S(1)"})
            pc.output("y", pc.nn.Dropout(0.4)(second(first(x).gelu())))
        return job

    (dense,) = run_dense(job_on(1), 1)
    with LocalWorld(compiled(job_on(3), **SPLIT).plans) as world:
        (actual,) = world.run(1)
    assert 0 < np.count_nonzero(dense["y"] == 0) < dense["y"].size
    np.testing.assert_array_equal(actual["y"] == 0, dense["y"] == 0)
    np.testing.assert_allclose(actual["y"], dense["y"], rtol=1e-5, atol=1e-6)
    graph = infer_sbp(run_passes(configured(job_on(3), **SPLIT))[0])
    layouts = {
        op.kind: signature.outputs
        for op, signature in zip(graph.job.ops, graph.signatures, strict=True)
    }
    assert layouts["dropout"] == (NdSbp((Split(1),)),)


@pytest.mark.slow
def test_training_with_dropout() -> None:
    expected = [float(each["loss"]) for each in run_dense(gpt(dropout=0.2), STEPS)]
    actual = losses(gpt(dropout=0.2, dp=2, tp=2), STEPS, **SPLIT)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.processes
def test_all_modes_give_the_same_plans() -> None:
    job = configured(gpt(dp=2, tp=2), zero=1, **SPLIT)
    assert len({compile_plans(job, 4, mode).digest for mode in MODES}) == 1


# --- communication and memory ---------------------------------------------------------------------


def test_every_all_reduce_of_a_block_becomes_two_halves() -> None:
    plain = {training: per_layer(training) for training in (False, True)}
    split = {training: per_layer(training, **SPLIT) for training in (False, True)}
    print(f"per block: {plain} -> {split}")
    assert plain == {False: {"all_reduce": 2}, True: {"all_reduce": 4}}
    assert split[False] == {"reduce_scatter": 2, "all_gather": 2}
    # Backward gathers what both halves have read again. The weights and biases of two norms see a
    # share of the positions on each device.
    assert split[True] == {"reduce_scatter": 4, "all_gather": 6, "all_reduce": 4}


def test_backward_gathers_again_what_forward_has_gathered() -> None:
    job, _ = run_passes(configured(blocks_job(3), **SPLIT))
    demands = Counter(
        (op.origin.phase, str(op.sbp[0])) for op in job.ops if op.attr("along") == "tp"
    )
    # One more split in forward: the noise that enters.
    assert demands == {
        (Phase.FORWARD, "S(1)"): 7,
        (Phase.FORWARD, "B"): 6,
        (Phase.BACKWARD, "S(1)"): 6,
        (Phase.BACKWARD, "B"): 6 + 6,
    }


def received(job: Job, **settings: object) -> int:
    """Bytes that a rank receives of activations in a step, by the cost model of boxing."""
    graph = compiled(job, **settings).graph
    shapes = {family.number: family.outputs[0].shape for family in graph.families if family.outputs}
    return sum(cost.bytes_per_rank for cost in boxing_costs(graph) if len(shapes[cost.family]) == 3)


def test_activations_move_the_same_bytes_but_for_what_is_gathered_again() -> None:
    # Of 12 reductions 24 halves, and 6 more.
    assert 24 * received(blocks_job(3), **SPLIT) == 30 * received(blocks_job(3)) > 0


def test_micro_batches_gather_their_own_rows() -> None:
    """Also what is gathered again: along the tensor-parallel axis alone."""
    whole, halves = (received(gpt(dp=2, tp=2), microbatches=each, **SPLIT) for each in (1, 2))
    assert halves == whole > 0


def test_reductions_of_norms_join_those_of_data_parallelism() -> None:
    plain, split = (counts(gpt(dp=2, tp=2), **each) for each in ({}, SPLIT))
    print(f"gpt, dp=2 tp=2: {plain} -> {split}")
    # Eight all-reduces of activations became halves; none came in addition.
    assert split["all_reduce"] == plain["all_reduce"] - 8
    assert split["reduce_scatter"] == 8


def test_a_split_vocabulary() -> None:
    """The embedding's output is partial; the output layer gathers its input as blocks do. Rows of
    activations are no short runs of bytes: to pack those would cost more than the small table.
    """

    def job_on(tp: int) -> Job:
        place = mesh(tp, axes=("tp",))
        rows = {"weight": "S(0)"}
        with pc.job("vocabulary") as job:
            tokens, targets = (pc.input(name, (3, 9), "int64", place) for name in ("x", "y"))
            x = pc.nn.Dropout(0.1)(pc.nn.Embedding(11, 128).place(place, rows)(tokens))
            for _ in range(2):
                x = pc.nn.TransformerBlock(128, 4, 0.1).place(place, BLOCK)(x)
            x = pc.nn.LayerNorm(128).place(place)(x)
            logits = pc.nn.Linear(128, 11, bias=False).place(place, rows)(x)
            loss = pc.cross_entropy(logits, targets, ignore_index=None)
            pc.optim.AdamW(1e-2).minimize(loss)
            pc.output("loss", loss)
        return job

    rng = np.random.default_rng(4)
    feeds = [{name: rng.integers(0, 11, (3, 9)) for name in ("x", "y")} for _ in range(10)]
    expected = [each["loss"] for each in run_dense(job_on(1), 10, feeds)]
    compilation = compiled(job_on(2), **SPLIT)
    with LocalWorld(compilation.plans) as world:
        outputs = [world.step(fed)["loss"] for fed in feeds]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4)
    plain, split = collectives(compiled(job_on(2))), collectives(compilation)
    print(f"split vocabulary: {plain} -> {split}")
    # Halves of blocks, output layer, backward, and what that gathers again.
    assert split["all_gather"] == 4 + 1 + 4 + 4
    assert split["reduce_scatter"] == 4 + 1 + 4 + 1 + 1  # with the embedding and its gradient
    assert split["all_to_all"] == plain["all_to_all"] == 2


@pytest.mark.parametrize("microbatches", [1, 4])
def test_each_device_makes_its_rows_of_a_large_table_s_gradient(microbatches: int) -> None:
    """Partial sums of a whole table are made only where they have fewer bytes than a micro-batch of
    what they are sums of."""

    def job_on(tp: int, rows: int, layout: str = "S(0)") -> Job:
        place = mesh(tp, axes=("tp",))
        with pc.job("table") as job:
            tokens = pc.input("tokens", (4, 8), "int64", place)
            table = pc.nn.Embedding(rows, 16).place(place, {"weight": layout})
            first = pc.nn.Linear(16, 16).place(place, {"weight": "S(0)", "bias": "S(0)"})
            second = pc.nn.Linear(16, 16).place(place, {"weight": "S(1)"})
            loss = pc.square(second(first(pc.nn.LayerNorm(16).place(place)(table(tokens))))).mean()
            pc.optim.SGD(0.1).minimize(loss)
            pc.output("loss", loss)
        return job

    def gradient(rows: int, layout: str = "S(0)") -> tuple[int, ...]:
        settings = {"microbatches": microbatches, **SPLIT}
        plan = compiled(job_on(2, rows, layout), **settings).plans[0]
        (made,) = (
            task.outputs[0]
            for task in plan.tasks
            if task.kind is TaskKind.COMPUTE and task.spec.kind == "embedding_grad"
        )
        return plan.register_by_id[made].shape

    assert gradient(64) == (32, 16)
    assert gradient(64, "B") == (64, 16)
    assert gradient(30) == ((30, 16) if microbatches == 1 else (15, 16))
    feeds = [{"tokens": np.arange(32).reshape(4, 8) + step} for step in range(3)]
    expected = [each["loss"] for each in run_dense(job_on(1, 64), 3, feeds)]
    with LocalWorld(compiled(job_on(2, 64), microbatches=microbatches, **SPLIT).plans) as world:
        outputs = [world.step(fed)["loss"] for fed in feeds]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4)


def test_recomputed_blocks_gather_again() -> None:
    split = per_layer(True, **SPLIT)
    again = per_layer(True, recompute="auto", **SPLIT)
    # What blocks read is gathered again anyway.
    assert again - split == {"reduce_scatter": 1}


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_activations_take_less_memory(tp: int) -> None:
    job = gpt(tp=tp, layers=4, length=64, dim=64)
    plain, split = (arena(compiled(job, **each)) for each in ({}, SPLIT))
    print(f"tp={tp}: arena {plain} -> {split} bytes")
    assert split < plain * {2: 0.95, 4: 0.85}[tp]


def test_the_summary_counts_what_changed() -> None:
    record = record_of(blocks_job(3), "sequence_parallel", **SPLIT)
    assert record.summary == (
        "tp: 12 partial values split along the sequence, 1 value on the way in, "
        "18 values gathered for the next block"
    )
    assert record.notes == ()
    assert record_of(blocks_job(1), "sequence_parallel").summary == "off"


# --- what does not fit ----------------------------------------------------------------------------


def perceptron(*shape: int, tp: int = 2) -> pc.Value:
    """A row-parallel product of noise [*shape, 6]."""
    place = mesh(tp, axes=("tp",))
    first = pc.nn.Linear(6, 8).place(place, {"weight": "S(0)", "bias": "S(0)"})
    second = pc.nn.Linear(8, 6).place(place, {"weight": "S(1)"})
    return second(first(pc.normal((*shape, 6), placement=place)).tanh())


def test_other_shapes_are_left_alone_with_a_note() -> None:
    with pc.job("mixed") as job:
        flat, long, short = perceptron(5), perceptron(5, 4), perceptron(5, 1)
        pc.output("loss", flat.tanh().sum() + long.tanh().sum() + short.tanh().sum())
    record = record_of(job, "sequence_parallel", **SPLIT)
    assert record.summary.startswith("tp: 1 partial value split")
    assert [note.partition(": ")[2] for note in record.notes] == [
        "float32[5, 6] is partial, but no activation [batch, length, dim]",
        "float32[5, 1, 6] has one position",
    ]
    expected = [float(each["loss"]) for each in run_dense(job, 2)]
    np.testing.assert_allclose(losses(job, 2, **SPLIT), expected, rtol=1e-5)


def test_a_gradient_of_a_parameter_is_no_activation() -> None:
    """The weight of a 1-D convolution has three axes, and its gradient is partial here."""
    place = mesh(2, axes=("tp",))
    with pc.job("convolution") as job:
        x = perceptron(5, 4)
        kernel = pc.nn.Parameter((5, 4, 3), init="ones", name="k").place(place).value
        loss = pc.conv1d(x, kernel, padding=1).tanh().sum()
        pc.optim.SGD(0.1).minimize(loss)
        pc.output("loss", loss)
    expected = [float(each["loss"]) for each in run_dense(job, 3)]
    np.testing.assert_allclose(losses(job, 3, **SPLIT), expected, rtol=1e-4)


def refused(job: Job) -> str:
    error = usage_error(job, **SPLIT)
    assert error.report.hint
    return str(error)


def test_a_missing_axis_is_refused() -> None:
    text = refused(blocks_job(1, axis="model"))
    assert "a mesh axis that the job does not have" in text
    assert "Got: tp_axes=tp. Expected: some of model." in text
    assert losses(blocks_job(1, axis="model"), 1, tp_axes=("model",), **SPLIT)


def test_nothing_to_split_is_refused() -> None:
    assert "finds nothing to split" in refused(gpt(dp=2))
    with pc.job("flat") as job:
        pc.output("loss", perceptron(5).tanh().sum())
    assert "float32[5, 6] is partial, but no activation" in refused(job)


def test_settings() -> None:
    config = Config(sequence_parallel=True, tp_axes=("tp", "model"))
    assert str(config) == "sequence_parallel=1 tp_axes=tp,model"
    assert Config.parse(str(config)) == config
    assert Config.parse("sequence_parallel=0") == Config()
    for wrong in (1, "yes", None):
        with pytest.raises(UsageError, match="sequence_parallel is on or off"):
            Config(sequence_parallel=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sequence_parallel is on or off"):
        Config.parse("sequence_parallel=2")
    with pytest.raises(UsageError, match="the work of a pass that is not chosen"):
        Config(sequence_parallel=True, passes=("dce",))
