"""Ops that only tests use, put into the op table by a fixture or once in a test's own process."""

from __future__ import annotations

import signal
import threading

import numpy as np

from plancompiler.ops.attributes import Attribute
from plancompiler.ops.registry import OpDef


def _fail_kernel(context, inputs, outputs) -> None:
    if (context.step, context.microbatch) == (
        context.attrs["step"],
        context.attrs.get("microbatch", 0),
    ):
        raise ValueError("boom")
    np.copyto(outputs[0], inputs[0])


def _interrupt_kernel(context, inputs, outputs) -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    np.copyto(outputs[0], inputs[0])


class Gate:
    """Where `test_block` waits, for tests that open it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()


GATES: dict[int, Gate] = {}
"""By the op's attribute `gate`."""


def _block_kernel(context, inputs, outputs) -> None:
    if context.step == context.attrs["step"]:
        gate = GATES[context.attrs["gate"]]
        gate.entered.set()
        gate.opened.wait()
    np.copyto(outputs[0], inputs[0])


def burn(count: int) -> float:
    """A counted amount of work: half a million additions for each count."""
    numbers = np.ones(1 << 19, np.float32)
    return sum(float(numbers.sum()) for _ in range(count))


def _burn_kernel(context, inputs, outputs) -> None:
    burn(context.attrs["count"])
    np.copyto(outputs[0], inputs[0])


def _step_kernel(context, inputs, outputs) -> None:
    outputs[0].fill(context.step)


def _place_kernel(context, inputs, outputs) -> None:
    """Writes step, micro-batch and first row of the box that it makes into three columns."""
    (rows, _), (made, _) = context.input_regions[0], context.output_regions[0]
    assert rows == made
    outputs[0][...] = context.step, context.microbatch, made[0]


def _overflow_kernel(context, inputs, outputs) -> None:
    np.multiply(inputs[0], np.float32(3e38), out=outputs[0])
    np.multiply(outputs[0], np.float32(3e38), out=outputs[0])


def _greedy_kernel(context, inputs, outputs) -> None:
    inputs[0][...] = 0


def _same(inputs, attrs):
    return inputs[:1]


_ATTRS = tuple(Attribute(name) for name in ("step", "microbatch", "gate", "count"))


def _op(kind, kernel, **options) -> OpDef:
    return OpDef(kind, infer=_same, rule="... -> ...", kernel=kernel, attrs=_ATTRS, **options)


TEST_OPS = {
    one.kind: one
    for one in (
        _op("test_fail", _fail_kernel),
        _op("test_interrupt", _interrupt_kernel),
        _op("test_step", _step_kernel),
        _op("test_block", _block_kernel),
        _op("test_burn", _burn_kernel),
        _op("test_place", _place_kernel),
        _op("test_overflow", _overflow_kernel),
        _op("test_greedy", _greedy_kernel),
        _op("test_view", _fail_kernel, view=((0, 0),)),
    )
}
