"""Kernels for devices, on arrays that refuse what CuPy refuses."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.executor.cuda.kernels import kernel_on
from plancompiler.executor.cuda.kernels.written import DEVICE_KERNELS
from plancompiler.ir import DType
from plancompiler.ops import op_def, op_table
from tests.executor.cuda.strict import StrictArray, StrictNamespace
from tests.ops.sample import Sample
from tests.ops.samples import samples
from tests.ops.sharding import run_dense
from tests.ops.test_kernels import context_of

HOST_ONLY = {"input", "output", "variable", "arrays_batch", "token_batch"}
"""What the executor does itself, or the host for the device."""
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Calls of all kinds that a device runs, by the dtype of their floats."""
    folder = tmp_path_factory.mktemp("data")
    return {
        dtype: [
            sample
            for sample in samples(folder, dtype)
            if sample.kind not in HOST_ONLY and not op_def(sample.kind).source
        ]
        for dtype in BOUNDS
    }


def run_on(arrays, sample, kernel=None):
    """Outputs of a call on strict arrays, as host arrays."""
    expected = run_dense(sample.kind, sample.inputs, sample.attrs)
    context = context_of(sample)
    context.arrays = arrays
    outputs = [StrictArray(np.full_like(each, 7)) for each in expected]
    if op_def(sample.kind).collects:
        for each in outputs:
            each.fill(0)
    dtypes = [DType.parse(each.dtype) for each in (*sample.inputs, *expected)]
    run = kernel or kernel_on(arrays, op_def(sample.kind), dtypes)
    with np.errstate(all="ignore"):
        run(context, [StrictArray(each.copy()) for each in sample.inputs], outputs)
    return [each.host for each in outputs], expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_op_gives_the_hosts_results(calls, dtype):
    for sample in calls[dtype]:
        actual, expected = run_on(StrictNamespace(), sample)
        for got, right in zip(actual, expected, strict=True):
            np.testing.assert_allclose(
                got.astype(float),
                right.astype(float),
                BOUNDS[dtype],
                BOUNDS[dtype],
                err_msg=str(sample),
            )


def test_kinds_that_run_as_they_are_do(calls):
    """Portable is what runs: no more, and all that is not written for devices anyway."""
    works, fails = set(), set()
    for sample in [*calls["float64"], *calls["float32"], *calls["float16"]]:
        if sample.kind in fails or sample.kind in DEVICE_KERNELS:
            continue
        try:
            run_on(StrictNamespace(), sample, op_def(sample.kind).kernel)
            works.add(sample.kind)
        except (TypeError, NotImplementedError, ValueError, AttributeError):
            fails.add(sample.kind)
    portable = {kind for kind, definition in op_table().items() if definition.portable}
    assert works - fails == portable - DEVICE_KERNELS.keys()


def test_kernels_are_of_known_kinds():
    assert op_table().keys() >= DEVICE_KERNELS.keys()


PUTS = {
    "float32": [1.5, np.nan, -2.0, 3.0, 0.5, -1.0],
    "int64": [5, -7, 1 << 40, -(1 << 62), 3, 9],
    "uint8": [200, 100, 7, 255, 1, 0],
    "int16": [-300, 200, 7, 9, -1, 0],
    "uint64": [1 << 63, 5, 7, 9, 1, 0],
}
"""Updates that meet at two of four places, by dtype."""


@pytest.mark.parametrize("dtype", PUTS)
@pytest.mark.parametrize("mode", ["set", "add", "mul", "max", "min"])
def test_updates_that_meet_are_put_as_on_the_host(dtype, mode):
    updates = np.array([PUTS[dtype], PUTS[dtype][::-1]], dtype)
    x = np.arange(8).reshape(2, 4).astype(dtype)
    indices = np.array([[3, 1, 3, 1, 1, 3], [0, 0, 2, 2, 2, 2]])
    sample = Sample("put_along_axis", (x, indices, updates), {"axis": 1, "mode": mode})
    with np.errstate(invalid="ignore"):
        (got,), (right,) = run_on(StrictNamespace(), sample)
    np.testing.assert_array_equal(got, right)


def test_what_is_out_of_range_is_not_a_number():
    def of(kind, inputs, shape, **attrs):
        context = context_of(Sample(kind, inputs, attrs))
        context.arrays = StrictNamespace()
        out = StrictArray(np.zeros(shape, np.float32))
        DEVICE_KERNELS.get(kind, op_def(kind).kernel)(context, [*map(StrictArray, inputs)], [out])
        return out.host

    x, places = np.ones((2, 3), np.float32), np.array([[0, 5], [1, 2]])
    put = of("put_along_axis", (x, places, x[:, :2]), (2, 3), axis=1, mode="set")
    assert np.isnan(put).all()
    logs = np.log(np.full((4, 2, 3), 1 / 3, np.float32))
    labels, lengths = np.array([[1, 2], [1, 7]]), np.array([4, 4])
    loss = of("ctc_loss", (logs, labels, lengths, np.array([2, 2])), (2,), blank=0)
    assert np.isfinite(loss[0])
    assert np.isnan(loss[1])


def test_a_wrong_label_makes_its_loss_not_a_number():
    logits = np.zeros((3, 4), np.float32)
    labels = np.array([1, 9, -100])
    context = context_of_call("cross_entropy", (logits, labels))
    loss = StrictArray(np.zeros(3, np.float32))
    DEVICE_KERNELS["cross_entropy"](context, [StrictArray(logits), StrictArray(labels)], [loss])
    np.testing.assert_allclose(loss.host, [np.log(4), np.nan, 0], rtol=1e-6)


def context_of_call(kind, inputs):
    context = context_of(Sample(kind, inputs))
    context.arrays = StrictNamespace()
    return context
