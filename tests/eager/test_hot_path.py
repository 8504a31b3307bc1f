"""What a call that was seen before runs in Python: a number of functions that does not creep up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn

MESH = pc.Placement("cpu", [0])
VALUE = np.ones((8, 8), np.float32)


def python_calls(function: Callable[..., object], *arguments: object) -> list[str]:
    """The Python functions that the third call of a function runs, by name."""
    function(*arguments)
    function(*arguments)
    names: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return names[1:]


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: x + x, 4),
        (lambda x: x @ x, 4),
        (lambda x: x.relu(), 4),
        (lambda x: x + 1.0, 5),
        (lambda x: x.reshape(64), 4),
        (lambda x: pc.from_local(x.local, MESH), 4),
    ],
    ids=["add", "matmul", "relu", "scalar", "reshape", "from_local"],
)
def test_an_op_that_was_seen_before_runs_few_functions(
    function: Callable[[pc.Tensor], pc.Tensor], most: int
) -> None:
    x = pc.tensor(VALUE, MESH)
    assert len(python_calls(function, x)) <= most


def test_a_step_runs_few_functions_and_reads_every_gradient_once() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).place(MESH)
    net(pc.tensor(VALUE, MESH)).sum().backward()
    parameters = [each.value for each in net.parameters()]
    update = pc.optim.AdamW(lr=1e-3)
    names = python_calls(update.step, parameters)
    assert names.count("DistTensor.grad") == len(parameters)
    assert len(names) <= 150
