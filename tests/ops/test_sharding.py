"""Every signature of every op, proved against the dense result by brute force."""

from __future__ import annotations

import math
from math import prod

import numpy as np
import pytest

from plancompiler.ir import DType, NdSbp, Split, TensorType, freeze_attrs
from plancompiler.ops import (
    axis_signatures,
    infer_types,
    mesh_signatures,
    op_table,
)
from plancompiler.ops.rule import NdSignature
from tests.ops.samples import Sample, samples
from tests.ops.sharding import ShardedCall, assert_close, local_feed, run_dense, type_of

MESHES = ((2,), (3,), (2, 2), (2, 1, 3))
LEAST_SIGNATURES = 25_000


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return samples(tmp_path_factory.mktemp("data"))


def signatures_on(sample: Sample, hierarchy: tuple[int, ...]) -> tuple[NdSignature, ...]:
    inputs = tuple(map(type_of, sample.inputs))
    outputs = infer_types(sample.kind, inputs, sample.attrs)
    attrs = freeze_attrs(sample.attrs)
    if len(hierarchy) > 1:
        return mesh_signatures(sample.kind, inputs, outputs, attrs, hierarchy)
    return tuple(
        NdSignature(
            tuple(NdSbp((one,)) for one in signature.inputs),
            tuple(NdSbp((one,)) for one in signature.outputs),
        )
        for signature in axis_signatures(sample.kind, inputs, outputs, attrs, hierarchy[0])
    )


def tolerance(array: np.ndarray) -> float:
    if array.dtype == np.float64:
        return 1e-10
    return 1e-5 if array.dtype.kind == "f" else 0.0


def test_every_kind_has_a_sample(calls):
    assert {sample.kind for sample in calls} == set(op_table())


def prove(sample, rng):
    """Prove all signatures of a call; their number."""
    proved = 0
    state = {"value": local_feed(sample.attrs)} if sample.kind == "input" else {}
    dense = run_dense(sample.kind, sample.inputs, sample.attrs, seed=5, step=2, state=state)
    call = ShardedCall(sample.kind, sample.inputs, sample.attrs, seed=5, step=2)
    for hierarchy in MESHES:
        for signature in signatures_on(sample, hierarchy):
            try:
                results = call.run(signature, hierarchy, rng)
                for got, expected in zip(results, dense, strict=True):
                    assert_close(got, expected, tolerance(expected))
            except Exception as error:
                raise AssertionError(f"{sample} on {hierarchy}: {signature}") from error
            proved += 1
    return proved


@pytest.mark.slow
def test_every_signature_gives_the_dense_result(calls, record_property):
    rng = np.random.default_rng(1)
    proved = sum(prove(sample, rng) for sample in calls)
    record_property("signatures_proved_against_dense", proved)
    print(f"{proved} signatures of {len(op_table())} op kinds proved")
    assert proved >= LEAST_SIGNATURES


@pytest.mark.slow
def test_constants_that_are_infinite_zero_or_no_number():
    """Parts of a sum are added up first, for 0 * inf is no number: also where a constant is
    infinite or zero only in the dtype of the tensor.
    """
    rng = np.random.default_rng(4)
    x = rng.normal(size=(5, 3))
    constants = {
        "mul_scalar": [*SPECIAL, 1e39, 0.0],
        "div_scalar": [*SPECIAL, 0.0, -0.0, -1e-46],
        "maximum_scalar": SPECIAL,
        "minimum_scalar": SPECIAL,
        "add_scalar": SPECIAL,
        "pow_scalar": [*SPECIAL, 0.0],
    }
    with np.errstate(all="ignore"):
        for kind, numbers in constants.items():
            for scalar in numbers:
                for dtype in ("float32", "float16"):
                    prove(Sample(kind, (x.astype(dtype),), {"scalar": scalar}), rng)
        for value in SPECIAL:
            prove(Sample("pad", (x,), {"low": (1, 0), "high": (0, 2), "value": value}), rng)
            prove(Sample("leaky_relu_grad", (x, x[::-1]), {"slope": value}), rng)
        prove(Sample("clip", (x,), {"low": -math.inf, "high": math.inf}), rng)


SPECIAL = [math.inf, -math.inf, math.nan]

IN_BFLOAT16 = (
    "add",
    "attention",
    "cast",
    "contract_leading",
    "conv2d",
    "cross_entropy",
    "dropout",
    "embedding_grad",
    "gelu",
    "layer_norm",
    "layer_norm_grad",
    "matmul",
    "max",
    "reshape",
    "softmax",
    "sum",
)


def test_signatures_hold_in_bfloat16(tmp_path):
    """Values and parts are small whole numbers, so that only the kernels round."""
    rng = np.random.default_rng(3)
    dtype = DType.BFLOAT16.numpy
    proved = {}
    for sample in samples(tmp_path, "bfloat16"):
        if sample.kind not in IN_BFLOAT16 or not any(one.dtype == dtype for one in sample.inputs):
            continue
        inputs = [np.round(one) if one.dtype == dtype else one for one in sample.inputs]
        dense = run_dense(sample.kind, inputs, sample.attrs, seed=5, step=2)
        call = ShardedCall(sample.kind, inputs, sample.attrs, seed=5, step=2)
        for signature in signatures_on(sample, (3,)):
            results = call.run(signature, (3,), rng)
            for got, expected in zip(results, dense, strict=True):
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(
                    got.astype(np.float64),
                    expected.astype(np.float64),
                    rtol=2e-2,
                    atol=2e-2 * float(np.abs(expected.astype(np.float64)).max(initial=1)),
                    err_msg=f"{sample}: {signature}",
                )
            proved[sample.kind] = proved.get(sample.kind, 0) + 1
    print(proved)
    assert set(proved) == set(IN_BFLOAT16)


def split_axes(kind, inputs, attrs, parts):
    """Pairs (axes split on the inputs, axes split on the outputs) of an op's signatures."""
    outputs = infer_types(kind, inputs, attrs)
    pairs = set()
    for signature in axis_signatures(kind, inputs, outputs, freeze_attrs(attrs), parts):
        axes = [
            tuple(entry.axis if isinstance(entry, Split) else None for entry in side)
            for side in (signature.inputs, signature.outputs)
        ]
        pairs.add(tuple(axes))
    return pairs


def test_matmul_has_the_four_classic_signatures():
    types = (TensorType((8, 4), DType.FLOAT32), TensorType((4, 6), DType.FLOAT32))
    outputs = infer_types("matmul", types, {})
    signatures = {str(one) for one in axis_signatures("matmul", types, outputs, (), 2)}
    assert signatures == {
        "B, B -> B",
        "S(0), B -> S(0)",
        "S(1), S(0) -> P",
        "B, S(1) -> S(1)",
        "P, B -> P",
        "B, P -> P",
    }


@pytest.mark.parametrize(
    ("kind", "attrs", "linear"),
    [
        ("add_scalar", {"scalar": 1.0}, False),
        ("sub_scalar", {"scalar": 1.0}, False),
        ("mul_scalar", {"scalar": 2.0}, True),
        ("div_scalar", {"scalar": 2.0}, True),
        ("div_scalar", {"scalar": 2.0, "swapped": True}, False),
        ("cast", {"dtype": "float64"}, True),
        ("cast", {"dtype": "int32"}, False),
        ("relu", {}, False),
        ("neg", {}, True),
        ("mul_scalar", {"scalar": math.inf}, False),
        ("mul_scalar", {"scalar": math.nan}, False),
        ("mul_scalar", {"scalar": 1e39}, False),
        ("div_scalar", {"scalar": 0.0}, False),
        ("div_scalar", {"scalar": 1e-46}, False),
        ("sum", {"axes": (0,)}, True),
        ("max", {"axes": (0,)}, False),
        ("softmax", {"axis": 0}, False),
        ("dropout", {"rate": 0.5, "key": 1}, True),
    ],
)
def test_partial_sums_flow_only_through_linear_ops(kind, attrs, linear):
    types = (TensorType((4, 3), DType.FLOAT32),)
    outputs = infer_types(kind, types, attrs)
    signatures = {str(one) for one in axis_signatures(kind, types, outputs, freeze_attrs(attrs), 2)}
    assert ("P -> P" in signatures) == linear


def test_reshape_splits_leading_axes_only_where_they_divide():
    types = (TensorType((4, 6, 5), DType.FLOAT32),)
    attrs = {"shape": (24, 5)}
    assert split_axes("reshape", types, attrs, 2) == {
        ((None,), (None,)),
        ((0,), (0,)),
        ((2,), (1,)),
    }
    assert split_axes("reshape", types, attrs, 3) == {((None,), (None,)), ((2,), (1,))}


@pytest.mark.parametrize(("extent", "nested"), [(4, True), (6, False)])
def test_nested_splits_of_a_reshape_must_divide_all_together(extent, nested):
    types = (TensorType((extent, 3), DType.FLOAT32),)
    attrs = {"shape": (extent * 3,)}
    outputs = infer_types("reshape", types, attrs)
    layouts = {
        str(one.inputs[0])
        for one in mesh_signatures("reshape", types, outputs, freeze_attrs(attrs), (2, 2))
    }
    assert {"[S(0), B]", "[B, S(0)]"} <= layouts
    assert ("[S(0), S(0)]" in layouts) == nested


def test_a_reshape_that_keeps_an_axis_splits_it_unevenly():
    types = (TensorType((5, 6), DType.FLOAT32),)
    assert ((0,), (0,)) in split_axes("reshape", types, {"shape": (5, 2, 3)}, 3)


def test_meshes_have_uneven_and_empty_shards(calls):
    """The proof above must not be about even shards only."""
    extents = {n for sample in calls for array in sample.inputs for n in array.shape}
    assert any(n % parts for n in extents for parts in (2, 3))
    assert any(0 < n < max(map(prod, MESHES)) for n in extents)
