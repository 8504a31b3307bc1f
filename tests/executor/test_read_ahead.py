"""The batch of the next step is read while this one is computed, however steps are asked for."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import DataError, ExecutionError
from plancompiler.ops import registry
from tests.dense import run_dense

BATCH, LENGTH = 8, 5
ENOUGH = 60
"""Seconds after which a test fails instead of waiting on."""


class Reads:
    """Which batches were read, by the first row of a rank's part and the number of the batch."""

    def __init__(self) -> None:
        self.done: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def add(self, row: int, number: int) -> None:
        with self._changed:
            self.done.add((row, number))
            self._changed.notify_all()

    def wait_for(self, row: int, number: int) -> None:
        with self._changed:
            seen = self._changed.wait_for(lambda: (row, number) in self.done, ENOUGH)
        assert seen, f"batch {number} of row {row} was not read"


READS = Reads()


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Takes note of what `token_batch` has read."""
    monkeypatch.setattr("tests.executor.test_read_ahead.READS", Reads())
    definition = registry.op_def("token_batch")

    def kernel(context, inputs, outputs):
        definition.kernel(context, inputs, outputs)
        READS.add(context.output_regions[0][0][0], context.step)

    monkeypatch.setitem(registry._TABLE, "token_batch", replace(definition, kernel=kernel))
    return READS


@pc.op(rule="n [d] -> n [d]", dtype="int64")
def after_the_next_read(x, *, fail_at=-1, context):
    """x, once this rank's part of the next step's batch was read."""
    if context.step == fail_at:
        raise ValueError("boom")
    READS.wait_for(context.output_regions[0][0][0], context.step + 1)
    return x


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    np.random.default_rng(3).integers(0, 256, 4000).astype(np.uint8).tofile(path)
    return path


def reading(path, ranks=2, *, fed=False, wait=True, fail_at=-1):
    mesh = pc.Placement("cpu", range(ranks))
    with pc.job("reading", seed=5) as job:
        x = pc.data.TokenFile(path, BATCH, LENGTH, placement=mesh, sbp="S(0)").tokens
        if wait:
            x = after_the_next_read(x, fail_at=fail_at)
        if fed:
            x = x + pc.input("more", (BATCH, LENGTH), "int64", mesh, "S(0)")
        pc.output("x", x)
    return job


def expected(path, steps):
    return [each["x"] for each in run_dense(reading(path, 1, wait=False), steps)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("at_a_time", [1, 2, 5])
def test_the_next_batch_is_read_before_a_step_ends(tokens, ranks, at_a_time):
    with pc.run(reading(tokens, ranks), cache=False) as session:
        results = [
            outputs["x"] for _ in range(10 // at_a_time) for outputs in list(session.run(at_a_time))
        ]
    np.testing.assert_array_equal(results, expected(tokens, 10))
    # One step ahead and no further: the register has two slots.
    assert {number for _, number in READS.done} == set(range(11))


def test_each_rank_reads_its_own_rows(tokens):
    with pc.run(reading(tokens), cache=False) as session:
        session.step()
    assert {row for row, _ in READS.done} == {0, BATCH // 2}


@pytest.mark.parametrize("fed", [False, True])
def test_a_restored_run_reads_what_the_first_one_would_have(tokens, tmp_path, fed):
    job = reading(tokens, fed=fed, wait=False)
    feeds = {"more": np.full((BATCH, LENGTH), 7)} if fed else {}
    plain = [each + 7 * fed for each in expected(tokens, 7)]
    with pc.run(job, cache=False) as session:
        outputs = [session.step(**feeds)["x"] for _ in range(3)]
        session.save(tmp_path / "there")
        outputs += [session.step(**feeds)["x"] for _ in range(4)]
    np.testing.assert_array_equal(outputs, plain)
    with pc.run(job, cache=False, restore=tmp_path / "there") as session:
        again = [session.step(**feeds)["x"] for _ in range(4)]
    np.testing.assert_array_equal(again, plain[3:])


def test_a_read_that_fails_ahead_fails_the_step_that_wants_it(tokens):
    with pc.run(reading(tokens, wait=False), cache=False) as session:
        first = session.step()["x"]
        READS.wait_for(0, 1)
        READS.wait_for(BATCH // 2, 1)
        tokens.write_bytes(tokens.read_bytes()[:1000])
        second = session.step()["x"]
        with pytest.raises(DataError, match="has changed") as caught:
            session.step()
    np.testing.assert_array_equal([first, second], expected_before_the_change(tokens))
    assert str(tokens) in caught.value.report.got
    assert "1000 bytes" in caught.value.report.got
    assert "4000 bytes" in caught.value.report.expected
    assert "token_batch" in caught.value.report.op


def expected_before_the_change(path):
    np.random.default_rng(3).integers(0, 256, 4000).astype(np.uint8).tofile(path)
    return expected(path, 2)


def test_a_step_that_fails_ends_the_reading_too(tokens):
    with (
        pc.run(reading(tokens, fail_at=2), cache=False) as session,
        pytest.raises(ExecutionError, match="boom"),
    ):
        list(session.run(5))
    assert max(number for _, number in READS.done) <= 4


def test_micro_batches_are_read_ahead_too(tokens):
    job = reading(tokens, 1, wait=False)
    cut = replace(job, config=pc.Config(microbatches=4))
    with pc.run(cut, cache=False) as session:
        outputs = [session.step()["x"] for _ in range(3)]
        # Past the end of the last step, as far as there are slots.
        READS.wait_for(0, 3)
    np.testing.assert_array_equal(outputs, expected(tokens, 3))
