"""The ops between micro-batches and steps: what M calls of a kernel make together."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.errors import PlanCompilerError
from plancompiler.ir import DType, Split, TensorType
from plancompiler.ir.shard import piece_region, region_index, region_shape
from plancompiler.ops import KernelContext, axis_signatures, infer_types, op_def
from plancompiler.ops.kernel import kernel_for

M = 4
SHAPE = (3, 8)
WHOLE = ((0, 3), (0, 8))
COMBINE = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "prod": np.multiply.reduce,
}


def piece(microbatch: int) -> tuple[tuple[int, int], ...]:
    """The box of a micro-batch along axis 1."""
    return piece_region(((0, 3), (0, 2)), 1, 8, M, microbatch)


def context(attrs, inputs, outputs, microbatch: int = 0) -> KernelContext:
    return KernelContext(attrs, (SHAPE,), (SHAPE,), (inputs,), (outputs,), microbatch=microbatch)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bfloat16"])
@pytest.mark.parametrize("reduction", list(COMBINE))
def test_parts_are_combined_in_the_order_of_micro_batches(reduction: str, dtype: str) -> None:
    kind = DType.parse(dtype).numpy
    parts = [
        np.asarray(part, kind) for part in np.random.default_rng(1).integers(1, 5, (M, *SHAPE))
    ]
    total = np.zeros(SHAPE, kind)
    total.fill(77)  # what the step before left there
    kernel = kernel_for(op_def("accumulate"), [total.dtype, total.dtype])
    for microbatch, part in enumerate(parts):
        kernel(context({"reduction": reduction}, WHOLE, WHOLE, microbatch), [part], [total])
    expected = COMBINE[reduction](np.stack(parts).astype("float64"))
    np.testing.assert_array_equal(total.astype("float64"), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_of_16_bits_add_up_in_float32(dtype: str) -> None:
    kind = DType.parse(dtype).numpy
    kernel = kernel_for(op_def("accumulate"), [kind, kind])
    total, kept = np.zeros(SHAPE, kind), context({"reduction": "sum"}, WHOLE, WHOLE)
    # Where the numbers lie 2 apart (16 in bfloat16), each 1 is lost if it is added alone.
    for kept.microbatch, number in enumerate([2048.0] + 16 * [1.0]):
        kernel(kept, [np.full(SHAPE, number, kind)], [total])
    np.testing.assert_array_equal(total.astype("float64"), 2064.0)


def test_pieces_are_put_together_and_taken() -> None:
    whole = np.random.default_rng(1).normal(size=SHAPE)
    actual = np.full(SHAPE, np.nan)
    for microbatch in range(M):
        box = piece(microbatch)
        taken = np.full(region_shape(box), np.nan)
        take = context({"axis": 1}, WHOLE, box, microbatch)
        op_def("take_piece").kernel(take, [whole], [taken])
        np.testing.assert_array_equal(taken, whole[region_index(box)])
        collect = context({"axis": 1}, box, WHOLE, microbatch)
        op_def("collect_pieces").kernel(collect, [taken], [actual])
    np.testing.assert_array_equal(actual, whole)


def test_pieces_of_a_shard() -> None:
    # This device has rows 1 and 2 of the tensor.
    rows = (1, 3)
    whole = np.random.default_rng(1).normal(size=(2, 8))
    box = (rows, piece(2)[1])
    taken = np.full((2, 2), np.nan)
    take = context({"axis": 1}, (rows, (0, 8)), box, 2)
    op_def("take_piece").kernel(take, [whole], [taken])
    np.testing.assert_array_equal(taken, whole[:, 4:6])


@pytest.mark.parametrize("kind", ["collect_pieces", "take_piece"])
def test_devices_do_not_split_the_axis_of_the_pieces(kind: str) -> None:
    tensor = (TensorType((6, 4), DType.FLOAT32),)
    actual = axis_signatures(kind, tensor, tensor, (("axis", 0),), 2)
    splits = {sbp for each in actual for sbp in each.inputs if isinstance(sbp, Split)}
    assert splits == {Split(1)}


@pytest.mark.parametrize(
    ("kind", "attrs", "part"),
    [
        ("accumulate", {"reduction": "avg"}, "sum, max, min, prod"),
        ("accumulate", {}, "reduction"),
        ("take_piece", {"axis": 2}, "axis"),
        ("collect_pieces", {"axis": 0, "reduction": "sum"}, "reduction"),
    ],
)
def test_wrong_attributes_are_refused(kind: str, attrs: dict[str, object], part: str) -> None:
    with pytest.raises(PlanCompilerError, match=part):
        infer_types(kind, (TensorType(SHAPE, DType.FLOAT32),), attrs)
