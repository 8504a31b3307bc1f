"""Convolutions and pooling against their definitions, and what they refuse."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from plancompiler.errors import AttributeValueError, DTypeError, ShapeError
from plancompiler.ir import DType, TensorType
from plancompiler.ops import axis_signatures, flops_of, infer_types, mesh_signatures
from tests.ops.samples_conv import CONVOLUTIONS, POOLS
from tests.ops.sharding import run_dense

RANDOM = np.random.default_rng(4)


def f32(*shape):
    return TensorType(shape, DType.FLOAT32)


def padded(x, padding, ndim, value=0.0):
    pairs = list(zip(padding[::2], padding[1::2], strict=True)) if padding else [(0, 0)] * ndim
    widths = [(0, 0)] * (x.ndim - ndim) + pairs
    return np.pad(x, widths, constant_values=value)


def windows_of(x, attrs, kernel):
    """Each window of a padded array: its place and its elements."""
    ndim = len(kernel)
    stride, dilation = attrs.get("stride", (1,) * ndim), attrs.get("dilation", (1,) * ndim)
    spatial = x.shape[x.ndim - ndim :]
    counts = [
        (size - step * (extent - 1) - 1) // jump + 1
        for size, step, extent, jump in zip(spatial, dilation, kernel, stride, strict=True)
    ]
    for place in product(*map(range, counts)):
        box = tuple(
            slice(at * jump, at * jump + step * (extent - 1) + 1, step)
            for at, jump, step, extent in zip(place, stride, dilation, kernel, strict=True)
        )
        yield place, x[(..., *box)]


@pytest.mark.parametrize(("x_shape", "weight_shape", "attrs"), CONVOLUTIONS)
def test_convolution_is_a_sum_over_windows(x_shape, weight_shape, attrs):
    ndim = len(x_shape) - 2
    x, weight = RANDOM.normal(size=x_shape), RANDOM.normal(size=weight_shape)
    (outputs,) = run_dense(f"conv{ndim}d", [x, weight], attrs)
    groups = attrs.get("groups", 1)
    seen = weight_shape[1]
    wide = padded(x, attrs.get("padding"), ndim)
    for place, window in windows_of(wide, attrs, weight_shape[2:]):
        for row in range(weight_shape[0]):
            group = row // (weight_shape[0] // groups)
            part = window[:, group * seen : (group + 1) * seen]
            expected = (part * weight[row]).reshape(len(x), -1).sum(1)
            np.testing.assert_allclose(outputs[(slice(None), row, *place)], expected, 1e-10, 1e-10)


@pytest.mark.parametrize(("x_shape", "weight_shape", "attrs"), CONVOLUTIONS)
def test_the_transposed_convolution_is_the_transpose(x_shape, weight_shape, attrs):
    """<conv(x, w), y> = <x, transpose(y, w)> = <w, weight_grad(x, y)>, for all x, w and y."""
    ndim = len(x_shape) - 2
    kind = f"conv{ndim}d"
    x, weight = RANDOM.normal(size=x_shape), RANDOM.normal(size=weight_shape)
    (made,) = run_dense(kind, [x, weight], attrs)
    y = RANDOM.normal(size=made.shape)
    plain = run_dense(f"{kind}_transpose", [y, weight], attrs)[0].shape[2:]
    more = tuple(size - short for size, short in zip(x_shape[2:], plain, strict=True))
    (back,) = run_dense(f"{kind}_transpose", [y, weight], {**attrs, "output_padding": more})
    (dw,) = run_dense(f"{kind}_weight_grad", [x, y], {**attrs, "kernel": weight_shape[2:]})
    assert back.shape == x.shape
    np.testing.assert_allclose([(x * back).sum(), (weight * dw).sum()], (made * y).sum(), 1e-10)


@pytest.mark.parametrize(("shape", "attrs"), POOLS)
def test_pooling_looks_at_windows(shape, attrs):
    ndim, kernel = len(attrs["kernel"]), attrs["kernel"]
    x = RANDOM.normal(size=shape)
    window = {name: value for name, value in attrs.items() if name != "kernel"}
    (top,) = run_dense(f"max_pool{ndim}d", [x], attrs)
    (mean,) = run_dense(f"avg_pool{ndim}d", [x], attrs)
    (own,) = run_dense(f"avg_pool{ndim}d", [x], {**attrs, "count_padding": False})
    space = tuple(range(-ndim, 0))
    low = padded(x, attrs.get("padding"), ndim, np.nan)
    for place, seen in windows_of(low, window, kernel):
        at = (..., *place)
        np.testing.assert_array_equal(top[at], np.nanmax(seen, axis=space))
        np.testing.assert_allclose(own[at], np.nanmean(seen, axis=space))
        np.testing.assert_allclose(mean[at], np.nansum(seen, axis=space) / np.prod(kernel))


def test_an_average_to_a_size_covers_every_element():
    x = np.arange(7.0)[None]
    (outputs,) = run_dense("adaptive_avg_pool1d", [x], {"size": (3,)})
    np.testing.assert_allclose(outputs, [[1.0, 3.0, 5.0]])
    (same,) = run_dense("adaptive_avg_pool1d", [x], {"size": (7,)})
    np.testing.assert_allclose(same, x)


def test_the_first_of_equal_elements_has_the_gradient():
    x = np.ones((1, 4))
    inputs = [x, np.ones((1, 3)), np.array([[1.0, 2.0, 4.0]])]
    (dx,) = run_dense("max_pool1d_grad", inputs, {"kernel": (2,)})
    np.testing.assert_array_equal(dx, [[1, 2, 4, 0]])


def splits(kind, inputs, attrs, parts):
    outputs = infer_types(kind, inputs, attrs)
    splits = axis_signatures(kind, inputs, outputs, tuple(sorted(attrs.items())), parts)
    return {str(one) for one in splits}


def test_a_convolution_splits_like_a_product_and_along_space_with_a_halo():
    actual = splits("conv2d", (f32(4, 6, 8, 8), f32(8, 6, 3, 3)), {}, 2)
    assert actual == {
        "B, B -> B",
        "S(0), B -> S(0)",
        "S(1), S(1) -> P",
        "B, S(0) -> S(1)",
        "P, B -> P",
        "B, P -> P",
        # Window i of 6 sees elements i to i + 2 of 8.
        "H(2 6 1:0:2:1:8), B -> S(2)",
        "H(3 6 1:0:2:1:8), B -> S(3)",
    }
    # A window of one element needs no halo.
    point = splits("conv2d", (f32(4, 6, 8, 8), f32(8, 6, 1, 1)), {}, 2)
    assert {"S(2), B -> S(2)", "S(3), B -> S(3)"} <= point


def test_groups_split_where_they_divide():
    grouped = (f32(4, 12, 8), f32(6, 4, 3)), {"groups": 3}
    assert "S(1), S(0) -> S(1)" in splits("conv1d", *grouped, 3)
    assert "S(1), S(0) -> S(1)" not in splits("conv1d", *grouped, 2)
    assert "S(1), S(1) -> P" not in splits("conv1d", *grouped, 3)
    # One channel per group splits anywhere.
    assert "S(1), S(0) -> S(1)" in splits("conv1d", (f32(4, 5, 8), f32(5, 1, 3)), {"groups": 5}, 2)


def test_nested_splits_of_groups_must_divide_all_together():
    inputs, attrs = (f32(4, 8, 8), f32(8, 4, 3)), {"groups": 2}
    outputs = infer_types("conv1d", inputs, attrs)
    results = {
        str(one.inputs[0])
        for one in mesh_signatures("conv1d", inputs, outputs, tuple(attrs.items()), (2, 2))
    }
    assert {"[S(1), B]", "[B, S(1)]", "[S(0), S(1)]"} <= results
    assert "[S(1), S(1)]" not in results


def test_flops_of_a_convolution():
    inputs = (f32(2, 6, 8), f32(4, 3, 5))
    attrs = {"groups": 2}
    outputs = infer_types("conv1d", inputs, attrs)
    assert flops_of("conv1d", inputs, outputs, attrs) == 2 * (2 * 4 * 4) * (3 * 5)


X, WEIGHT = f32(2, 4, 6, 6), f32(8, 4, 3, 3)
WRONG = [
    ("conv2d", (X,), {}, ShapeError),
    ("conv2d", (f32(4, 6, 6), WEIGHT), {}, ShapeError),
    ("conv2d", (X, f32(8, 4, 3)), {}, ShapeError),
    ("conv2d", (X, f32(8, 3, 3, 3)), {}, ShapeError),
    ("conv2d", (X, WEIGHT), {"groups": 2}, ShapeError),
    ("conv2d", (X, f32(7, 2, 3, 3)), {"groups": 2}, ShapeError),
    ("conv2d", (X, f32(8, 4, 7, 3)), {}, ShapeError),
    ("conv2d", (X, WEIGHT), {"dilation": (3, 1)}, ShapeError),
    ("conv2d", (X, f32(8, 4, 0, 3)), {}, AttributeValueError),
    ("conv2d", (X, WEIGHT), {"stride": (1,)}, AttributeValueError),
    ("conv2d", (X, WEIGHT), {"stride": (0, 1)}, AttributeValueError),
    ("conv2d", (X, WEIGHT), {"padding": (1, 1)}, AttributeValueError),
    ("conv2d", (X, WEIGHT), {"padding": (1, 1, -1, 0)}, AttributeValueError),
    ("conv2d", (X, WEIGHT), {"groups": 0}, AttributeValueError),
    ("conv2d", (X, WEIGHT), {"strides": (1, 1)}, AttributeValueError),
    ("conv2d", (X, TensorType(WEIGHT.shape, DType.FLOAT64)), {}, DTypeError),
    ("conv2d", (TensorType(X.shape, DType.BOOL), WEIGHT), {}, DTypeError),
    ("conv2d_transpose", (X, WEIGHT), {}, ShapeError),
    ("conv2d_transpose", (X, f32(4, 2, 3, 3)), {"groups": 3}, ShapeError),
    ("conv2d_transpose", (X, f32(4, 2, 1, 1)), {"padding": (3, 3, 0, 0)}, ShapeError),
    ("conv2d_transpose", (X, f32(4, 2, 3, 3)), {"output_padding": (1, 0)}, AttributeValueError),
    ("conv2d_weight_grad", (X, f32(2, 8, 4, 4)), {"kernel": (3, 2)}, ShapeError),
    ("conv2d_weight_grad", (X, f32(2, 8, 4, 4)), {"kernel": (3,)}, AttributeValueError),
    ("conv2d_weight_grad", (X, f32(2, 8, 4, 4)), {}, AttributeValueError),
    ("max_pool2d", (f32(3),), {"kernel": (2, 2)}, ShapeError),
    ("max_pool2d", (X,), {"kernel": (2,)}, AttributeValueError),
    ("max_pool2d", (X,), {"kernel": (7, 1)}, ShapeError),
    ("max_pool2d", (X,), {"kernel": (2, 2), "padding": (2, 0, 0, 0)}, AttributeValueError),
    ("max_pool2d_grad", (X, f32(2, 4, 3, 3), f32(2, 4, 3, 2)), {"kernel": (4, 4)}, ShapeError),
    ("avg_pool2d", (TensorType(X.shape, DType.INT32),), {"kernel": (2, 2)}, DTypeError),
    ("avg_pool2d", (X,), {"kernel": (2, 2), "count_padding": 1}, AttributeValueError),
    ("avg_pool2d_grad", (X,), {"kernel": (2, 2), "size": (6, 6)}, ShapeError),
    ("adaptive_avg_pool2d", (X,), {"size": (0, 2)}, ShapeError),
    ("adaptive_avg_pool2d", (X,), {"size": (2,)}, ShapeError),
    ("adaptive_avg_pool2d", (f32(2, 0, 3),), {"size": (2, 2)}, ShapeError),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "error"), WRONG)
def test_wrong_calls_are_refused(kind, inputs, attrs, error):
    with pytest.raises(error) as caught:
        infer_types(kind, inputs, attrs)
    assert caught.value.report.what
