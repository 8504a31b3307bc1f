"""Steps of several micro-batches: values on both transports, interleavings, refused plans."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from plancompiler.errors import DeadlineError, ExecutionError, FeedError, TransportError
from plancompiler.executor.actor import RETURNED
from plancompiler.executor.actor_loader import load_actors
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.local_run import LocalWorld
from plancompiler.executor.runtime import Runtime
from plancompiler.ir.pipeline import Segment, SegmentKind, Slot
from plancompiler.plan.plan import Plan, Stream
from tests.executor.pipelines import (
    COLUMNS,
    EPILOGUE,
    PROLOGUE,
    ROWS,
    WIDTH,
    accumulation,
    random_pipeline,
    train,
    train_reference,
)
from tests.executor.plans import Sketch
from tests.executor.test_actor import World

RNG = np.random.default_rng(11)
SCHEDULES = ["gpipe", "1f1b", "zero_bubble"]


def batches(microbatches: int, steps: int) -> list[dict[str, np.ndarray]]:
    return [
        {
            "x": RNG.normal(size=(ROWS * microbatches, WIDTH)).astype(np.float32) / 4,
            "scale": np.float32(0.4 + 0.1 * step),
        }
        for step in range(steps)
    ]


# --- values ---------------------------------------------------------------------------------------


class Local:
    """Ranks as threads; each call of `steps` runs them without a pause between steps."""

    def __init__(self, build, arguments) -> None:
        self.plans = build(*arguments)
        self.world = LocalWorld(self.plans, deadline=60)

    def variables(self) -> list[dict[str, np.ndarray]]:
        return [self.world.variables(rank) for rank in self.plans]

    def steps(self, feeds) -> list[dict[str, np.ndarray]]:
        return [self.world.step(fed) for fed in feeds]

    def close(self) -> None:
        self.world.close()


class Host:
    """Ranks as processes; all steps are fed at once, so that ranks run ahead of each other."""

    def __init__(self, build, arguments, host_world, several: bool) -> None:
        self.ranks = range(len(build(*arguments)))
        self.world = host_world
        hosts = [rank * 2 // len(self.ranks) for rank in self.ranks] if several else ()
        host_world.open(build, *arguments, ranks=self.ranks, hosts=hosts)

    def variables(self) -> list[dict[str, np.ndarray]]:
        return [self.world.ask(rank, "variables") for rank in self.ranks]

    def steps(self, feeds) -> list[dict[str, np.ndarray]]:
        return self.world.step(feeds, self.ranks)

    def close(self) -> None:
        self.world.close_run(self.ranks)


def open_world(transport, build, arguments, host_world):
    if transport == "local":
        return Local(build, arguments)
    return Host(build, arguments, host_world, transport == "hosts")


@pytest.mark.parametrize("transport", ["local", "host", "hosts"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("microbatches", [3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_on_two_stages(transport, schedule, microbatches, tp, host_world):
    """Losses, gradients and updates are those of the whole batch, whatever the schedule."""
    feeds = batches(microbatches, 5)
    arguments = (schedule, microbatches, tp, microbatches == 3, tp - 1)
    world = open_world(transport, train, arguments, host_world)
    try:
        before = world.variables()
        outputs = world.steps(feeds)
        after = world.variables()
    finally:
        world.close()
    w0, w1 = join(before, tp)
    for fed, actual in zip(feeds, outputs, strict=True):
        wanted = train_reference(fed, w0, w1)
        w0, w1 = wanted["w0"], wanted["w1"]
        ranks = range(tp)
        if tp == 1:
            close(actual["dw0_0"], wanted["dw0"])
            close(actual["dw0_sum_0"], wanted["dw0"])
        close(np.concatenate([actual[f"y_{rank}"] for rank in ranks], axis=1), wanted["y"])
        close(np.concatenate([actual[f"dw0_{rank}"] for rank in ranks]), wanted["dw0"])
        close(np.concatenate([actual[f"dw1_{rank}"] for rank in ranks], axis=1), wanted["dw1"])
        parts = np.split(wanted["dw0"], tp)
        for rank in ranks:
            close(actual[f"dw0_sum_{rank}"], sum(parts))
    for made, wanted in zip(join(after, tp), (w0, w1), strict=True):
        close(made, wanted)


def join(variables: list[dict[str, np.ndarray]], tp: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole variables of the two stages."""
    w0 = np.concatenate([variables[rank]["w0"] for rank in range(tp)])
    w1 = np.concatenate([variables[rank]["w1"] for rank in range(tp, 2 * tp)], axis=1)
    assert w0.shape[0] == WIDTH
    assert w1.shape[1] == COLUMNS
    return w0, w1


def close(results: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(results, wanted, rtol=2e-4, atol=1e-5)


def test_steps_run_ahead_of_each_other():
    """All ranks run all steps without meeting between them."""
    plans = train("1f1b", 4, 1, False, 2)
    feeds = batches(4, 6)
    outputs: dict[int, dict[str, np.ndarray]] = {}
    hub = LocalHub()

    def collect(step, name, value) -> None:
        outputs.setdefault(step, {})[name] = value

    runtimes = [Runtime(plans[rank], hub.link(rank), on_outputs=collect) for rank in plans]
    with ThreadPoolExecutor(len(runtimes)) as pool:
        list(pool.map(Runtime.prepare, runtimes))
        w0, w1 = runtimes[0].variables()["w0"], runtimes[1].variables()["w1"]
        for fed in feeds:
            for runtime in runtimes:
                runtime.feed({name: fed[name] for name in runtime.input_names})
        list(pool.map(lambda runtime: runtime.run(len(feeds)), runtimes))
        for runtime in runtimes:
            runtime.close()
    for step, fed in enumerate(feeds):
        wanted = train_reference(fed, w0, w1)
        w0, w1 = wanted["w0"], wanted["w1"]
        close(outputs[step]["y_0"], wanted["y"])
        close(outputs[step]["dw0_0"], wanted["dw0"])


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_kernels_know_step_micro_batch_and_region(merged, count, test_ops):
    with LocalWorld(accumulation("test_place", 4, merged, None, count), first_step=7) as world:
        for step in (7, 8):
            outputs = world.step({"x": np.zeros((4 * ROWS, 3), np.float32)})
            wanted = [(step, m, m * ROWS) for m in range(4) for _ in range(ROWS)]
            np.testing.assert_array_equal(outputs["y"], np.array(wanted, np.float32))
            total = np.array([4 * step, 6, 6 * ROWS], np.float32)
            np.testing.assert_array_equal(outputs["total"], np.tile(total, (ROWS, 1)))


@pytest.mark.parametrize("merged", [True, False])
def test_accumulation_starts_anew_in_every_step(merged):
    with LocalWorld(accumulation("exp", 3, merged)) as world:
        for _ in range(3):
            x = RNG.normal(size=(3 * ROWS, 3)).astype(np.float32)
            outputs = world.step({"x": x})
            np.testing.assert_allclose(outputs["y"], np.exp(x), rtol=1e-5)
            total = np.exp(x).reshape(3, ROWS, 3).sum(axis=0)
            np.testing.assert_allclose(outputs["total"], total, rtol=1e-5)


def test_a_bad_feed_is_refused_before_any_micro_batch():
    with LocalWorld(accumulation("exp", 3)) as world:
        with pytest.raises(FeedError, match="wrong shape"):
            world.step({"x": np.zeros((ROWS, 3), np.float32)})
        world.step({"x": np.zeros((3 * ROWS, 3), np.float32)})


# --- failures -------------------------------------------------------------------------------------


def test_a_failing_task_names_its_micro_batch(test_ops):
    attrs = {"step": 1, "microbatch": 2}
    x = np.zeros((4 * ROWS, 3), np.float32)
    with LocalWorld(accumulation("test_fail", 4, attrs=attrs)) as world:
        world.step({"x": x})
        with pytest.raises(ExecutionError, match="boom") as caught:
            world.step({"x": x})
    report = caught.value.report
    assert report.what == "ValueError: boom (step 1, micro-batch 2)"
    assert (report.op, report.rank) == ("the_op", 0)


def test_a_late_rank_is_reported_with_the_micro_batch():
    """Stage 1 runs and stage 0, which makes what it reads first, does not."""
    hub = LocalHub()
    plans = train("1f1b", 3, 1, True)
    runtimes = [Runtime(plans[rank], hub.link(rank), deadline=0.2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Runtime.prepare, runtimes))
        with pytest.raises(DeadlineError, match="rank 0 was not told to run step 0") as caught:
            runtimes[1].run(1)
    assert str(caught.value).count("micro-batch") == 1
    for runtime in runtimes:
        runtime.close()


def test_ranks_with_other_micro_batches_are_refused():
    plans = {**train("1f1b", 3, 2), 1: train("1f1b", 4, 2)[1]}
    with pytest.raises(TransportError, match="disagree about the collectives"):
        LocalWorld(plans, deadline=20)


# --- interleavings --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_every_interleaving_ends(schedule, microbatches):
    for tp, copy_each, ahead in ((1, False, 0), (1, True, 1), (2, True, 0)):
        plans = train(schedule, microbatches, tp, copy_each, ahead)
        for seed in range(12):
            try:
                World(plans, seed, slow=seed % 6 - 2).run(3)
            except AssertionError as error:
                raise AssertionError(f"tp {tp}, seed {seed}: {error}") from error


@pytest.mark.slow
def test_random_pipelines_under_random_interleavings():
    for seed in range(80):
        plans = random_pipeline(seed)
        for order in range(2):
            try:
                World(plans, order, slow=order - 1).run(3)
            except AssertionError as error:
                raise AssertionError(f"plan seed {seed}, order {order}: {error}") from error


def test_a_stage_runs_ahead_by_its_slots_and_no_more():
    """Stage 0 of GPipe does all forwards, and then waits for the first gradient."""
    compute = actor_of(train("gpipe", 4)[0], Stream.COMPUTE)
    data = actor_of(train("gpipe", 4)[0], Stream.DATA)
    data.limit = 3
    seen = []
    while data.begin() >= 0:
        seen.append((data.step, data.microbatch, data.version))
        data.finish()
    # The scale has one slot, the micro-batches of x have four.
    assert seen == [(0, 0, 0), (0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 3)]
    assert {token.kind for token in data.waiting_for()} == {RETURNED}
    assert compute.step_position == "step 0"


def actor_of(plan: Plan, stream: Stream):
    return next(actor for actor in load_actors(plan).actors if actor.stream is stream)


# --- refused plans --------------------------------------------------------------------------------


def small(crossing: int = 2) -> Plan:
    """x doubled in the forward segment, added to a sum in the backward one; two micro-batches."""
    sketch = Sketch(1, microbatches=2)
    forward, backward = Segment(SegmentKind.FORWARD, 0), Segment(SegmentKind.BACKWARD, 0)
    sketch.begin(0, PROLOGUE)
    (one,) = sketch.compute(0, 0, "input", [], [((2,), "float32")])
    sketch.begin(0, forward)
    x = sketch.input(0, 1, "x", (4,), region=((0, 2),), stream=Stream.COMPUTE)
    (y,) = sketch.compute(0, 2, "add", [x, one], [((2,), "float32")], count=crossing)
    sketch.begin(0, backward)
    (total,) = sketch.compute(
        0, 3, "accumulate", [y], [((2,), "float32")], attrs={"reduction": "sum"}, once=True
    )
    sketch.begin(0, EPILOGUE)
    sketch.output(0, 4, "total", total)
    work = [(forward, 0), (forward, 1), (backward, 0), (backward, 1)]
    sketch.follow(0, [(PROLOGUE, 0), *work, (EPILOGUE, 0)])
    return sketch.build()[0]


def test_the_small_plan_is_legal():
    assert load_actors(small()).actors[0].version == 0


def test_too_few_slots_are_refused():
    with pytest.raises(ExecutionError, match="too few slots for the micro-batches") as caught:
        load_actors(small(1))
    assert caught.value.report.got == "1 slots"
    assert caught.value.report.expected == "2 from forward 0 to backward 0"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_slot_less_than_needed_is_refused(schedule):
    """Every register of `train` that crosses segments has exactly the slots that it needs."""
    for plan in train(schedule, 4).values():
        for number, register in enumerate(plan.registers):
            if register.register_count > 1:
                fewer = replace(register, register_count=register.register_count - 1)
                registers = (*plan.registers[:number], fewer, *plan.registers[number + 1 :])
                with pytest.raises(ExecutionError, match="too few slots"):
                    load_actors(replace(plan, registers=registers))


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([(0, 0), (1, 0), (2, 0), (1, 1), (3, 0)], "do not run every segment"),
        ([(0, 0), (1, 1), (1, 0), (2, 0), (2, 1), (3, 0)], "do not run every segment"),
        ([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 1), (3, 0)], "do not run every segment"),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)], "do not run every segment"),
        ([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], "do not run every segment"),
        ([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0)], "do not run every segment"),
        ([(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (3, 0)], "before one that comes earlier"),
        ([(1, 0), (0, 0), (1, 1), (2, 0), (2, 1), (3, 0)], "before one that comes earlier"),
        ([(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (2, 1)], "before one that comes earlier"),
    ],
)
def test_slots_that_cannot_work_are_refused(slots, text):
    with pytest.raises(ExecutionError, match=text):
        load_actors(replace(small(), slots=tuple(Slot(*slot) for slot in slots)))


def test_tasks_out_of_segment_order_are_refused():
    plan = small()
    tasks = (plan.tasks[1], plan.tasks[0], *plan.tasks[2:])
    with pytest.raises(ExecutionError, match="segment by segment"):
        load_actors(replace(plan, tasks=tasks))


def edited(plan: Plan, family: int, **changes: object) -> Plan:
    """The plan with the register of this family changed."""
    made = plan.tasks[family].outputs[0]
    registers = tuple(replace(one, **changes) if one.id == made else one for one in plan.registers)
    return replace(plan, registers=registers)


def test_a_register_per_step_with_several_slots_is_refused():
    with pytest.raises(ExecutionError, match="one version per step, but several slots"):
        load_actors(edited(small(), 0, register_count=2))


def test_versions_per_micro_batch_outside_of_micro_batches_are_refused():
    with pytest.raises(ExecutionError, match="used by a task that runs once per step"):
        load_actors(edited(small(), 3, per_microbatch=True))


def test_a_sum_read_before_it_is_complete_is_refused():
    with pytest.raises(ExecutionError, match="before all micro-batches have added to it"):
        load_actors(edited(small(), 2, per_microbatch=False, register_count=1))


def test_an_output_per_micro_batch_is_refused():
    sketch = Sketch(1, microbatches=2)
    forward = Segment(SegmentKind.FORWARD, 0)
    sketch.begin(0, forward)
    x = sketch.input(0, 0, "x", (4,), region=((0, 2),))
    sketch.output(0, 1, "x", x)
    sketch.follow(0, [(forward, 0), (forward, 1)])
    with pytest.raises(ExecutionError, match="an output is reported once per step"):
        LocalWorld(sketch.build())
