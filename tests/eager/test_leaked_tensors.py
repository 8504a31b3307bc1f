"""Tensors and values that somebody keeps after what they belong to was traced."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import PlanCompilerError, TracingError

ALONE = pc.Placement("cpu", [0])


def leaked():
    """A tensor of a compiled function, made by the line that is marked."""
    kept = []

    @pc.compile
    def step(x):
        kept.append(x.sum())  # made here
        kept.append(x[1:] * 2.0)
        return x.sum() * 1.0

    x = pc.tensor(np.ones(3, np.float32), ALONE, requires_grad=True)
    assert step(x).item() == 3.0
    return kept[0], kept[1], x


USES = {
    "add": lambda kept, x: kept + x.sum(),
    "add to": lambda kept, x: x.sum() + kept,
    "numpy": lambda kept, x: kept.numpy(),
    "item": lambda kept, x: kept.item(),
    "truth": lambda kept, x: bool(kept),
    "part": lambda kept, x: kept.to_local(),
    "view": lambda kept, x: kept.reshape(1),
    "detach": lambda kept, x: kept.detach(),
    "change": lambda kept, x: kept.zero_(),
    "into another": lambda kept, x: pc.tensor(np.float32(1), ALONE).copy_(kept),
    "backward": lambda kept, x: kept.backward(),
    "compiled": lambda kept, x: pc.compile(lambda: kept * 2.0)(),
    "argument": lambda kept, x: pc.compile(lambda y: y * 2.0)(kept),
}


@pytest.mark.parametrize("name", USES)
def test_a_tensor_of_a_compiled_function_says_what_it_is(name):
    kept, _, x = leaked()
    with pytest.raises(TracingError, match="after the function was traced") as raised:
        USES[name](kept, x)
    report = raised.value.report
    assert "test_leaked_tensors.py" in report.source
    assert "made in 'step' at" in report.got
    assert "test_leaked_tensors.py" in report.got
    assert "return the tensor from 'step'" in report.hint


def test_it_can_be_printed():
    for kept in leaked()[:2]:
        for text in (repr(kept), str(kept), f"{kept}"):
            assert str(kept.shape).strip("(),") in text
        assert "made in compiled 'step' at" in repr(kept)


def test_what_leaks_from_a_function_that_fails():
    kept = []

    @pc.compile
    def step(x):
        kept.append(x * 2.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        step(pc.tensor(np.ones(3), ALONE))
    assert "without numbers" in repr(kept[0])
    with pytest.raises(TracingError, match="after the function was traced"):
        kept[0].numpy()


def finished():
    with pc.job("first"):
        x = pc.input("x", (2,), "float32", ALONE)
        y = x * 2.0
        pc.output("y", y)
    return y


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y + 1.0,
        lambda y: 1.0 - y,
        lambda y: y[0],
        lambda y: y.sum(),
        lambda y: y.redistribute(sbp="B"),
        pc.relu,
        lambda y: y % 2.0,
    ],
)
def test_a_value_of_a_finished_job(use):
    y = finished()
    assert repr(y) == "<Value %mul_scalar_0: float32[2]>"
    with pytest.raises(PlanCompilerError, match="only be used while their job is traced") as raised:
        use(y)
    assert "%mul_scalar_0: float32[2], traced at" in raised.value.report.got
    assert "test_leaked_tensors.py" in raised.value.report.got
    assert "test_leaked_tensors.py" in raised.value.report.source
    with pc.job("second"):
        pc.output("z", pc.input("x", (2,), "float32", ALONE))
        with pytest.raises(TracingError, match="of another job was used") as raised:
            use(y)
    assert "traced at" in raised.value.report.got
    assert "test_leaked_tensors.py" in raised.value.report.got
