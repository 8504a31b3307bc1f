"""Shape rules refuse wrong calls with an error that says what was got and expected."""

from __future__ import annotations

import pytest

from plancompiler.errors import AttributeValueError, DTypeError, ShapeError, UnknownOpError
from plancompiler.ir import DType, TensorType
from plancompiler.ops import flops_of, infer_types, op_table


def f32(*shape):
    return TensorType(shape, DType.FLOAT32)


def i64(*shape):
    return TensorType(shape, DType.INT64)


def boolean(*shape):
    return TensorType(shape, DType.BOOL)


ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
VARIABLE = {
    "name": "w",
    "shape": (2,),
    "dtype": "float32",
    "init": "zeros",
    "init_args": (),
    "trainable": True,
}

WRONG = [
    # Numbers of inputs and attributes.
    ("exp", (), {}, ShapeError),
    ("add", (f32(2),), {}, ShapeError),
    ("exp", (f32(2),), {"base": 2}, AttributeValueError),
    ("dropout", (f32(2),), {"key": 1}, AttributeValueError),
    ("dropout", (f32(2),), {"rate": 1.0, "key": 1}, AttributeValueError),
    ("dropout", (f32(2),), {"rate": float("nan"), "key": 1}, AttributeValueError),
    ("dropout", (f32(2),), {"rate": "half", "key": 1}, AttributeValueError),
    ("dropout", (f32(2),), {"rate": 0.5, "key": 1.5}, AttributeValueError),
    # Shapes.
    ("add", (f32(2, 3), f32(2)), {}, ShapeError),
    ("where", (boolean(3), f32(2), f32(2)), {}, ShapeError),
    ("matmul", (f32(2, 3), f32(2, 3)), {}, ShapeError),
    ("matmul", (f32(2, 3), f32(2, 3)), {"transpose_a": True, "transpose_b": True}, ShapeError),
    ("matmul", (f32(3), f32(3, 2)), {}, ShapeError),
    ("matmul", (f32(2, 4, 3), f32(3, 3, 2)), {}, ShapeError),
    ("contract_leading", (f32(2, 3), f32(3, 3)), {}, ShapeError),
    ("reshape", (f32(2, 3),), {"shape": (4,)}, ShapeError),
    ("reshape", (f32(2, 3),), {"shape": (-1, 4)}, ShapeError),
    ("reshape", (f32(2, 3),), {"shape": (-1, -1)}, AttributeValueError),
    ("reshape", (f32(2, 3),), {"shape": (6.0,)}, AttributeValueError),
    ("transpose", (f32(2, 3),), {"axes": (0, 0)}, AttributeValueError),
    ("expand_to", (f32(2),), {"shape": (1,)}, ShapeError),
    ("concat", (), {"axis": 0}, ShapeError),
    ("concat", (f32(2, 3), f32(2, 4)), {"axis": 0}, ShapeError),
    ("concat", (f32(2, 3), f32(2)), {"axis": 0}, ShapeError),
    ("concat", (f32(2, 3),), {"axis": 2}, AttributeValueError),
    ("slice", (f32(3),), {"starts": (2,), "stops": (1,)}, AttributeValueError),
    ("slice", (f32(3),), {"starts": (0,), "stops": (4,)}, AttributeValueError),
    ("slice_grad", (f32(3),), {"shape": (4,), "starts": (2,)}, AttributeValueError),
    ("sum", (f32(2),), {"axes": (1,)}, AttributeValueError),
    ("sum", (f32(2, 2),), {"axes": (0, 0)}, AttributeValueError),
    ("max", (f32(2, 0),), {"axes": (1,)}, ShapeError),
    ("argmax", (f32(0),), {"axis": 0}, ShapeError),
    ("softmax", (f32(2, 0),), {"axis": 1}, ShapeError),
    ("softmax", (f32(),), {"axis": 0}, AttributeValueError),
    ("softmax_grad", (f32(2), f32(3)), {"axis": 0}, ShapeError),
    ("cross_entropy", (f32(2, 3), i64(3)), {}, ShapeError),
    ("cross_entropy", (f32(), i64()), {}, ShapeError),
    ("layer_norm", (f32(2, 3), f32(2), f32(3)), {"eps": 1e-5}, ShapeError),
    ("embedding", (f32(2, 3, 4), i64(3)), {}, ShapeError),
    ("embedding_grad", (i64(3), f32(2, 4)), {"vocabulary": 3}, ShapeError),
    ("adam_update", (f32(2), f32(3), f32(2), f32(2), f32()), ADAM, ShapeError),
    ("sgd_update", (f32(2), f32(2), f32(1)), {}, ShapeError),
    # Dtypes.
    ("exp", (i64(2),), {}, DTypeError),
    ("neg", (boolean(2),), {}, DTypeError),
    ("add", (f32(2), i64(2)), {}, DTypeError),
    ("div", (i64(2), i64(2)), {}, DTypeError),
    ("add_scalar", (i64(2),), {"scalar": 0.5}, DTypeError),
    ("mul_scalar", (f32(2),), {"scalar": True}, DTypeError),
    ("less", (boolean(2), boolean(2)), {}, DTypeError),
    ("where", (f32(2), f32(2), f32(2)), {}, DTypeError),
    ("cross_entropy", (f32(2, 3), f32(2)), {}, DTypeError),
    ("embedding", (f32(2, 3), f32(2)), {}, DTypeError),
    ("cast", (f32(2),), {"dtype": "complex64"}, DTypeError),
    ("fill", (), {"shape": (2,), "dtype": "int32", "value": 0.5}, DTypeError),
    ("variable", (), {**VARIABLE, "dtype": "int32"}, DTypeError),
    # Attribute values.
    ("add_scalar", (f32(2),), {}, AttributeValueError),
    ("add_scalar", (TensorType((2,), DType.UINT8),), {"scalar": 300}, AttributeValueError),
    ("fill", (), {"shape": (-1,), "dtype": "int32", "value": 0}, AttributeValueError),
    ("fill", (), {"shape": (1,), "dtype": "int8", "value": 128}, AttributeValueError),
    ("variable", (), {**VARIABLE, "init": "normal"}, AttributeValueError),
    ("learning_rate", (), {"schedule": "steps", "base": 0.1}, AttributeValueError),
    ("learning_rate", (), {"schedule": "linear", "base": 0.1}, AttributeValueError),
    *(
        ("learning_rate", (), {"schedule": "listed", "base": 0.0, **wrong}, AttributeValueError)
        for wrong in (
            {"first": 0},
            {"rates": (0.1,)},
            {"rates": (0.1, -0.1), "first": 0},
            {"rates": (float("nan"),), "first": 0},
            {"rates": (float("inf"),), "first": 0},
        )
    ),
    (
        "learning_rate",
        (),
        {"schedule": "cosine", "base": 0.1, "warmup": 5, "total": 5},
        AttributeValueError,
    ),
    ("adam_update", (f32(2),) * 4 + (f32(),), {**ADAM, "beta1": 1.0}, AttributeValueError),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "error"), WRONG)
def test_wrong_calls_are_refused(kind, inputs, attrs, error):
    with pytest.raises(error) as caught:
        infer_types(kind, inputs, attrs)
    assert caught.value.report.what


def test_errors_show_what_was_got_and_expected():
    with pytest.raises(ShapeError) as caught:
        infer_types("matmul", (f32(2, 3), f32(4, 5)), {})
    assert "(2, 3) @ (4, 5)" in str(caught.value)
    with pytest.raises(DTypeError) as caught:
        infer_types("add", (f32(2), i64(2)), {})
    assert "float32[2], int64[2]" in str(caught.value)
    assert "cast" in str(caught.value)


def test_an_unknown_op_is_named():
    with pytest.raises(UnknownOpError, match="convolve"):
        infer_types("convolve", (), {})


def test_every_op_says_what_it_is():
    assert all(definition.doc for definition in op_table().values())


def test_flops_count_the_global_work():
    inputs = (f32(3, 4, 5), f32(5, 6))
    assert flops_of("matmul", inputs, infer_types("matmul", inputs, {}), {}) == 2 * 3 * 4 * 5 * 6
    swapped = (f32(5, 4), f32(5, 6))
    attrs = {"transpose_a": True}
    outputs = infer_types("matmul", swapped, attrs)
    assert flops_of("matmul", swapped, outputs, attrs) == 2 * 4 * 5 * 6
    assert flops_of("sum", (f32(7, 3),), (f32(),), {"axes": (0, 1)}) == 21
    assert flops_of("reshape", (f32(6),), (f32(2, 3),), {"shape": (2, 3)}) == 0
    assert flops_of("exp", (f32(6),), (f32(6),), {}) == 6
