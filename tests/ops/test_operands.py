"""Operands in one line: what is checked, what follows, and gradients by their names."""

from __future__ import annotations

import pytest

from plancompiler.errors import DTypeError, ShapeError
from plancompiler.ir import DType
from plancompiler.ops import op_table
from plancompiler.ops.operands import parse_operands
from tests.ops.test_errors import f32, i64

NORM = parse_operands("x F!, gamma F -> y F, rstd A", "... [d], [d] -> ... [d], ... 1")
ROWS = parse_operands("x X groups rows ..., position? p () -> y X groups capacity ...", None)


def half(*shape):
    return f32(*shape)._replace(dtype=DType.FLOAT16)


def test_outputs_follow_from_inputs_and_attributes() -> None:
    assert NORM.results("norm", (half(2, 5, 3), half(3)), {}) == (half(2, 5, 3), f32(2, 5, 1))
    given = (i64(2, 5, 3), i64())
    assert ROWS.results("rows", given, {"capacity": 7}) == (i64(2, 7, 3),)
    assert list(ROWS.counts) == [1, 2]
    assert list(NORM.counts) == [2]
    made = parse_operands("-> x dtype shape", None)
    assert made.results("made", (), {"dtype": DType.INT64, "shape": (2, 3)}) == (i64(2, 3),)


@pytest.mark.parametrize(
    ("operands", "inputs", "error", "says"),
    [
        (NORM, (i64(2, 3), i64(3)), DTypeError, "its x"),
        (NORM, (f32(2, 3), half(3)), DTypeError, "one dtype"),
        (NORM, (f32(2, 3), f32(4)), ShapeError, "another shape for its gamma"),
        (NORM, (f32(2, 3), f32(3, 3)), ShapeError, "number of axes on its gamma"),
        (NORM, (f32(), f32(3)), ShapeError, "at least 1 axes"),
        (NORM, (f32(2, 0), f32(0)), ShapeError, "empty axis"),
        (ROWS, (f32(2, 5), i64(1)), ShapeError, "position"),
        (ROWS, (f32(2, 5), f32()), DTypeError, "position"),
        (ROWS, (f32(3, 5),), ShapeError, "another shape for its x"),
    ],
)
def test_wrong_operands_are_named(operands, inputs, error, says) -> None:
    attrs = {"capacity": 7, "groups": 2} if operands is ROWS else {}
    with pytest.raises(error, match=says):
        operands.check("an op", inputs, attrs)


def test_every_line_of_the_table_fits_its_rule() -> None:
    for definition in op_table().values():
        line = definition.line
        if line is None:
            continue
        names = [operand.name for operand in line.inputs]
        assert len(set(names)) == len(names), definition.kind
        if isinstance(definition.infer, str):
            assert all(operand.shape is not None for operand in line.outputs), definition.kind
