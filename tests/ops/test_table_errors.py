"""The shape rules of the wider op table refuse wrong calls, as those of the first ops do."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.errors import AttributeValueError, DTypeError, ExecutionError, ShapeError
from plancompiler.ir import DType, TensorType
from plancompiler.ops import infer_types
from tests.ops.sharding import run_dense
from tests.ops.test_errors import boolean, f32, i64

SLICE = {"starts": (0,), "stops": (3,), "steps": (1,)}
DRAWN = {"shape": (3,), "dtype": "float32", "key": 1}

WRONG = [
    # Elementwise.
    ("sin", (i64(2),), {}, DTypeError),
    ("sin", (f32(2),), {"degrees": True}, AttributeValueError),
    ("isnan", (i64(2),), {}, DTypeError),
    ("bitwise_and", (f32(2), f32(2)), {}, DTypeError),
    ("bitwise_not", (f32(2),), {}, DTypeError),
    ("shift_left", (boolean(2), boolean(2)), {}, DTypeError),
    ("logical_and", (i64(2), i64(2)), {}, DTypeError),
    ("atan2", (f32(2), f32(3)), {}, ShapeError),
    ("fmod", (f32(2), i64(2)), {}, DTypeError),
    ("clip", (f32(2),), {}, AttributeValueError),
    ("clip", (f32(2),), {"low": 2.0, "high": 1.0}, AttributeValueError),
    ("clip", (i64(2),), {"low": 0.5}, DTypeError),
    ("clip", (TensorType((2,), DType.UINT8),), {"high": 256}, AttributeValueError),
    ("nan_to_num", (i64(2),), {}, DTypeError),
    ("nan_to_num", (f32(2),), {"nan": "zero"}, AttributeValueError),
    ("lerp", (f32(2), f32(2)), {}, ShapeError),
    ("lerp", (f32(2), f32(2), f32(3)), {}, ShapeError),
    ("leaky_relu", (f32(2),), {"slope": "steep"}, AttributeValueError),
    ("elu", (f32(2),), {"slope": 0.1}, AttributeValueError),
    ("silu_grad", (f32(2), f32(3)), {}, ShapeError),
    # Reductions.
    ("square_sum", (boolean(2),), {"axes": (0,)}, DTypeError),
    ("all", (f32(2),), {"axes": (0,)}, DTypeError),
    ("any", (boolean(2),), {"axes": (1,)}, AttributeValueError),
    ("logsumexp", (f32(2, 0),), {"axes": (1,)}, ShapeError),
    ("var", (f32(1, 3),), {"axes": (0,), "correction": 1.0}, AttributeValueError),
    ("var", (f32(3),), {"axes": (0,), "correction": -1.0}, AttributeValueError),
    ("argmin", (f32(0),), {"axis": 0}, ShapeError),
    ("cumsum", (f32(),), {"axis": 0}, AttributeValueError),
    ("cumsum", (f32(3),), {"axis": 0, "reverse": 1}, AttributeValueError),
    ("cummax", (boolean(3),), {"axis": 0}, DTypeError),
    ("sort", (boolean(3),), {"axis": 0}, DTypeError),
    ("argsort", (f32(3),), {"axis": -1}, AttributeValueError),
    ("topk", (f32(3),), {"axis": 0, "k": 4}, AttributeValueError),
    ("topk", (f32(3),), {"axis": 0, "k": -1}, AttributeValueError),
    # Moves and diagonals.
    ("flip", (f32(3),), {"axes": (1,)}, AttributeValueError),
    ("roll", (f32(3),), {"axes": (0,), "shifts": (1, 2)}, AttributeValueError),
    ("tile", (f32(3),), {"repeats": (2, 2)}, AttributeValueError),
    ("tile", (f32(3),), {"repeats": (-1,)}, AttributeValueError),
    ("pad", (f32(3),), {"low": (-1,), "high": (0,), "value": 0.0}, AttributeValueError),
    ("pad", (f32(3),), {"low": (1,), "high": (0, 0), "value": 0.0}, AttributeValueError),
    ("pad", (i64(3),), {"low": (1,), "high": (0,), "value": 0.5}, DTypeError),
    ("strided_slice", (f32(3),), {**SLICE, "steps": (0,)}, AttributeValueError),
    ("strided_slice", (f32(3),), {**SLICE, "stops": (4,)}, AttributeValueError),
    ("strided_slice_grad", (f32(2),), {**SLICE, "shape": (3,)}, ShapeError),
    ("slice_scatter", (f32(4), f32(2)), SLICE, ShapeError),
    ("unfold_axis", (f32(3),), {"axis": 0, "size": 4, "step": 1}, ShapeError),
    ("unfold_axis", (f32(3),), {"axis": 0, "size": 2, "step": 0}, AttributeValueError),
    ("diagonal", (f32(3),), {"offset": 0}, ShapeError),
    ("diag_embed", (f32(3),), {"rows": 2, "columns": 3, "offset": 0}, ShapeError),
    ("tril", (f32(3),), {"diagonal": 0}, ShapeError),
    ("triu", (f32(3, 3),), {"diagonal": 0.5}, AttributeValueError),
    ("eye", (), {"rows": -1, "columns": 2, "offset": 0, "dtype": "int8"}, AttributeValueError),
    # Indexing.
    ("take_along_axis", (f32(3), f32(3)), {"axis": 0}, DTypeError),
    ("take_along_axis", (f32(3, 2), i64(3, 3)), {"axis": 0}, ShapeError),
    ("take_along_axis", (f32(3, 2), i64(3)), {"axis": 0}, ShapeError),
    ("put_along_axis", (f32(3), i64(2), f32(3)), {"axis": 0, "mode": "set"}, ShapeError),
    ("put_along_axis", (f32(3), i64(2), i64(2)), {"axis": 0, "mode": "set"}, DTypeError),
    ("put_along_axis", (f32(3), i64(2), f32(2)), {"axis": 0, "mode": "xor"}, AttributeValueError),
    ("index_select", (f32(3), i64(1, 2)), {"axis": 0}, ShapeError),
    ("index_select", (f32(3), f32(2)), {"axis": 0}, DTypeError),
    ("index_select_grad", (i64(3), f32(2)), {"axis": 0, "extent": 4}, ShapeError),
    ("one_hot", (f32(3),), {"classes": 3, "dtype": "float32"}, DTypeError),
    ("one_hot", (i64(3),), {"classes": -3, "dtype": "float32"}, AttributeValueError),
    ("bincount", (f32(3),), {"classes": 3}, DTypeError),
    # Sources.
    ("arange", (), {"start": 0.5, "step": 1, "count": 3, "dtype": "int64"}, DTypeError),
    ("arange", (), {"start": 0, "step": 1, "count": -3, "dtype": "int64"}, AttributeValueError),
    ("linspace", (), {"start": 0.0, "stop": 1.0, "count": 3, "dtype": "int64"}, DTypeError),
    ("uniform", (), {**DRAWN, "low": 1.0, "high": 0.0}, AttributeValueError),
    ("uniform", (), {**DRAWN, "dtype": "int8", "low": 0.0, "high": 1.0}, DTypeError),
    ("normal", (), {**DRAWN, "mean": 0.0, "std": -1.0}, AttributeValueError),
    ("bernoulli", (), {**DRAWN, "p": 1.5}, AttributeValueError),
    ("bernoulli", (), {**DRAWN, "p": float("nan")}, AttributeValueError),
    ("randint", (), {**DRAWN, "dtype": "bool", "low": 0, "high": 2}, DTypeError),
    ("randint", (), {**DRAWN, "dtype": "float16", "low": 0, "high": 2050}, AttributeValueError),
    ("exponential", (), {**DRAWN, "rate": 0.0}, AttributeValueError),
    ("geometric", (), {**DRAWN, "p": 1.0}, AttributeValueError),
    ("randint", (), {**DRAWN, "dtype": "int8", "low": 0, "high": 129}, AttributeValueError),
    ("permutation", (), {**DRAWN, "dtype": "uint8", "shape": (300,)}, AttributeValueError),
    # einsum.
    ("einsum", (f32(2, 3),), {"equation": "ij"}, AttributeValueError),
    ("einsum", (f32(2, 2),), {"equation": "ii->i"}, AttributeValueError),
    ("einsum", (f32(2, 3),), {"equation": "ij->ijj"}, AttributeValueError),
    ("einsum", (f32(2, 3),), {"equation": "ij->ik"}, AttributeValueError),
    ("einsum", (f32(2, 3),), {"equation": "i1->i"}, AttributeValueError),
    ("einsum", (f32(2, 3),), {"equation": "ijk->i"}, ShapeError),
    ("einsum", (f32(2, 3),), {"equation": "ij,jk->ik"}, ShapeError),
    ("einsum", (f32(2, 3), f32(2, 3)), {"equation": "ij,jk->ik"}, ShapeError),
    ("einsum", (f32(2), i64(2)), {"equation": "i,i->"}, DTypeError),
    ("einsum", (boolean(2),), {"equation": "i->"}, DTypeError),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "error"), WRONG)
def test_wrong_calls_are_refused(kind, inputs, attrs, error):
    with pytest.raises(error) as caught:
        infer_types(kind, inputs, attrs)
    assert caught.value.report.what


@pytest.mark.parametrize("kind", ["fmod", "remainder", "floor_divide"])
def test_whole_numbers_over_zero_fail_the_run(kind):
    with pytest.raises(ExecutionError, match="divided by zero"):
        run_dense(kind, [np.array([4, 2]), np.array([2, 0])], {})


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs"),
    [
        ("take_along_axis", (np.zeros(3), np.array([1, 7])), {"axis": 0}),
        ("take_along_axis_grad", (np.array([7, 0]), np.zeros(2)), {"axis": 0, "extent": 3}),
        (
            "put_along_axis",
            (np.zeros(3), np.array([7]), np.zeros(1)),
            {"axis": 0, "mode": "set"},
        ),
        ("index_select", (np.zeros((2, 3)), np.array([7])), {"axis": 1}),
        ("index_select_grad", (np.array([7]), np.zeros(1)), {"axis": 0, "extent": 3}),
        ("one_hot", (np.array([7]),), {"classes": 3, "dtype": "float32"}),
        ("bincount", (np.array([7]),), {"classes": 3}),
    ],
)
def test_an_index_outside_its_axis_is_named(kind, inputs, attrs):
    with pytest.raises(ExecutionError, match="index 7"):
        run_dense(kind, inputs, attrs)
