"""Products of stacks as calls of cuBLAS, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.executor.cuda.kernels import kernel_on
from plancompiler.executor.cuda.kernels.products import TF32_VARIABLE, gemm_of, product
from plancompiler.ir import DType
from plancompiler.ops import op_def
from plancompiler.ops.registry import KernelContext
from tests.executor.cuda.blas import COMPUTE_32F, COMPUTE_32F_FAST_TF32, COMPUTE_64F, HostCuda
from tests.executor.cuda.strict import StrictArray, StrictNamespace
from tests.ops.samples import samples
from tests.ops.sharding import run_dense
from tests.ops.test_kernels import context_of

DTYPES = {
    "float16": (np.dtype(np.float16), COMPUTE_32F, 2e-3),
    "bfloat16": (DType.BFLOAT16.numpy, COMPUTE_32F, 2e-2),
    "float32": (np.dtype(np.float32), COMPUTE_32F, 1e-5),
    "float64": (np.dtype(np.float64), COMPUTE_64F, 1e-12),
}


def on_device(cuda):
    return KernelContext({}, (), (), (), (), arrays=StrictNamespace(cuda))


def numbers(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


LAYOUTS = {
    "by rows": lambda a: a,
    "by columns": lambda a: np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    "with gaps": lambda a: np.repeat(np.repeat(a, 3, axis=-2), 2, axis=-3)[..., ::2, ::3, :],
    "one matrix wide": lambda a: np.concatenate([a, a], axis=-1)[..., : a.shape[-1]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("sizes", [(3, 4, 5, 2), (1, 4, 5, 3), (4, 1, 1, 2), (2, 3, 1, 1)])
def test_a_product_is_one_call(dtype, left, right, sizes):
    m, k, n, count = sizes
    kind, compute, bound = DTYPES[dtype]
    a = LAYOUTS[left](numbers((count, m, k), kind))
    b = LAYOUTS[right](numbers((count, k, n), kind, 1))
    cuda = HostCuda()
    actual = product(on_device(cuda), StrictArray(a), StrictArray(b))
    assert cuda.calls == [(str(kind), compute)]
    right_one = np.matmul(a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(actual.host.astype(np.float64), right_one, bound, bound)


def test_tf32_is_asked_for_by_cupys_variable(monkeypatch):
    cuda = HostCuda()
    a = StrictArray(numbers((2, 3, 3)))
    monkeypatch.setenv(TF32_VARIABLE, "1")
    product(on_device(cuda), a, a)
    monkeypatch.setenv(TF32_VARIABLE, "0")
    product(on_device(cuda), a, a)
    assert [compute for _, compute in cuda.calls] == [COMPUTE_32F_FAST_TF32, COMPUTE_32F]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(numbers((3, 4)), numbers((4, 5)), id="two matrices"),
        pytest.param(numbers((2, 3, 4)), numbers((4, 5)), id="one matrix for a stack"),
        pytest.param(numbers((2, 3, 4)), numbers((1, 4, 5)), id="a stack of one for a stack"),
        pytest.param(
            np.broadcast_to(numbers((3, 4)), (2, 3, 4)), numbers((2, 4, 5)), id="the same twice"
        ),
        pytest.param(numbers((2, 3, 4))[..., ::-1], numbers((2, 4, 5)), id="backwards"),
        pytest.param(
            numbers((2, 3, 8))[..., ::2], numbers((2, 4, 5)), id="neither rows nor columns"
        ),
        pytest.param(
            numbers((4, 3, 3, 4))[::2], numbers((2, 3, 4, 5)), id="two distances in a stack"
        ),
        pytest.param(numbers((2, 3, 0)), numbers((2, 0, 5)), id="nothing to add up"),
        pytest.param(numbers((2, 3, 4)).astype(int), numbers((2, 4, 5)).astype(int), id="integers"),
    ],
)
def test_what_is_not_one_call_goes_to_the_arrays_own_product(a, b):
    cuda = HostCuda()
    out = np.empty((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), 3, 5), a.dtype)
    product(on_device(cuda), StrictArray(a), StrictArray(b), StrictArray(out))
    assert not cuda.calls
    np.testing.assert_allclose(out, np.matmul(a, b), rtol=1e-5)


def test_stacks_of_stacks_are_one_stack():
    a, b = numbers((2, 3, 4, 5)), numbers((2, 3, 5, 6))
    gemm = gemm_of(a, b, np.empty((2, 3, 4, 6), np.float32))
    assert gemm is not None
    assert (gemm.count, gemm.left.apart, gemm.right.apart, gemm.out.apart) == (6, 20, 30, 24)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention_multiplies_through_it(dtype, tmp_path):
    cuda, seen = HostCuda(), set()
    for sample in samples(tmp_path, dtype):
        if sample.kind not in ("attention", "attention_grad"):
            continue
        expected = run_dense(sample.kind, sample.inputs, sample.attrs)
        context = context_of(sample)
        context.arrays = StrictNamespace(cuda)
        outputs = [StrictArray(np.full_like(each, 7)) for each in expected]
        dtypes = [DType.parse(each.dtype) for each in (*sample.inputs, *expected)]
        before = len(cuda.calls)
        kernel = kernel_on(context.arrays, op_def(sample.kind), dtypes)
        with np.errstate(all="ignore"):
            kernel(context, [StrictArray(each.copy()) for each in sample.inputs], outputs)
        if len(cuda.calls) > before:
            seen.add(sample.kind)
        bound = 2e-2 if dtype == "float16" else 1e-4
        for actual, right in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(
                actual.host.astype(float), right.astype(float), bound, bound, err_msg=str(sample)
            )
    assert seen == {"attention", "attention_grad"}
    assert all(name == dtype for name, _ in cuda.calls)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("flags", [{}, {"transpose_a": True}, {"transpose_b": True}], ids=str)
def test_matmul_multiplies_halves_as_they_are(dtype, flags):
    cuda = HostCuda()
    a, b = (numbers(shape, dtype.numpy) for shape in ((2, 3, 4), (2, 4, 5)))
    context = on_device(cuda)
    context.attrs = {"transpose_a": False, "transpose_b": False, **flags}
    out = StrictArray(np.zeros((2, 3, 5), a.dtype))
    given = [
        np.ascontiguousarray(each.swapaxes(1, 2)) if flags.get(flag) else each
        for each, flag in ((a, "transpose_a"), (b, "transpose_b"))
    ]
    kernel = kernel_on(context.arrays, op_def("matmul"), [dtype] * 3)
    kernel(context, list(map(StrictArray, given)), [out])
    assert cuda.calls == [(str(dtype), COMPUTE_32F)]
    right = np.matmul(a.astype(np.float32), b.astype(np.float32))
    np.testing.assert_allclose(out.host.astype(np.float32), right, 2e-2, 2e-2)
