"""What a worker tells its master: in order, in few messages, and again to one that comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from plancompiler.cluster.chunks import CHUNK_BYTES
from plancompiler.cluster.messages import (
    Heartbeat,
    LogLines,
    OperationDone,
    Outputs,
    Register,
)
from plancompiler.worker.outbox import Outbox
from tests.cluster.conftest import eventually

REGISTER = Register(None, "host", "cpu", "0.1.0")
SECONDS = 60.0


def test_what_there_is_goes_out_together() -> None:
    outbox = Outbox()
    stream = outbox.messages(REGISTER)
    assert next(stream) == [(0, REGISTER)]
    done = [OperationDone(1, ticket) for ticket in range(3)]
    lines, beat = LogLines(1, ()), Heartbeat()
    for message in (done[0], lines, done[1], beat):
        outbox.put(message)
    outbox.opened(0, is_durable=False)
    assert next(stream) == [(0, beat), (0, lines), (1, done[0]), (2, done[1])]
    outbox.put(done[2])
    outbox.end()
    assert [*stream] == [[(3, done[2])]]


def test_outputs_without_hurry_wait_for_what_comes_next() -> None:
    outbox = Outbox()
    stream = outbox.messages(REGISTER)
    next(stream)
    outbox.opened(0, is_durable=False)
    with ThreadPoolExecutor() as pool:
        for step in range(100):
            waiting = pool.submit(next, stream)
            eventually(lambda: bool(vars(outbox._changed)["_waiters"]))
            outputs, done = Outputs(1, step, b"loss"), OperationDone(1, step)
            outbox.put(outputs, hurry=False)
            pool.submit(int).result(SECONDS)  # who was woken has its turn, too
            outbox.put(done)
            assert [each for _, each in waiting.result(SECONDS)] == [outputs, done]


def test_large_outputs_go_out_one_after_another() -> None:
    outbox = Outbox()
    stream = outbox.messages(REGISTER)
    next(stream)
    outbox.opened(0, is_durable=True)
    outputs = [Outputs(1, step, bytes(CHUNK_BYTES)) for step in range(3)]
    for each in outputs:
        outbox.put(each)
    assert [next(stream) for _ in outputs] == [[(step + 1, outputs[step])] for step in range(3)]
    # A master that was started again has the first of them only.
    outbox.closed()
    again = outbox.messages(REGISTER)
    assert next(again) == [(0, REGISTER)]
    outbox.opened(1, is_durable=True)
    assert [next(again), next(again)] == [[(2, outputs[1])], [(3, outputs[2])]]
