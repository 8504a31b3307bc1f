"""What the formula of an update may not do."""

from __future__ import annotations

import pytest

from plancompiler.errors import GradientError
from plancompiler.ir import DType
from plancompiler.ops.update import root, update_program


def program(formula):
    return update_program(formula, ("w", "m"), ("rate",), (("eps", 0.5),), DType.FLOAT32)


def test_numbers_alone_are_no_ops_of_tensors():
    for formula in (
        lambda w, m, rate: w - abs(rate),
        lambda w, m, rate: w - rate.sqrt(),
        lambda w, m, eps: w - eps.sqrt(),
    ):
        with pytest.raises(GradientError, match="of numbers alone"):
            program(formula)
    (instruction,) = program(lambda w, m, rate: w - root(rate)).program
    assert instruction.kind == "sub"


def test_a_tensor_is_no_result():
    """`m` would be read after the next `w` lies over it, or the other way round."""
    for formula in (lambda w, m: (w - m, w), lambda w, m: (m, w)):
        with pytest.raises(GradientError, match="must be computed"):
            program(formula)
