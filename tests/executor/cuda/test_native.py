"""Kernels in CUDA C++ compared with the host's kernels: compiled for the host, and on a device."""

from __future__ import annotations

import numpy as np
import pytest

from plancompiler.executor.cuda.device import CudaDevice
from plancompiler.executor.cuda.kernels import kernel_on
from plancompiler.ir import DType
from plancompiler.ops import op_def
from tests.executor.cuda.emulated import COMPILER, Emulated
from tests.executor.cuda.real import on_real_devices
from tests.executor.cuda.strict import StrictArray
from tests.ops.sample import Sample
from tests.ops.sharding import run_dense
from tests.ops.test_kernels import context_of

pytestmark = pytest.mark.processes
rng = np.random.default_rng(0)


class OnHost:
    """The kernels compiled for the host."""

    def __init__(self, folder):
        self.arrays = Emulated(folder)
        self.launched = self.arrays.launched

    def put(self, array):
        """The array in memory from an address that suits packs."""
        memory = np.empty(array.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return StrictArray(copy)

    def get(self, array):
        return array.host


class OnDevice:
    """The kernels on a real device."""

    launched = None

    def __init__(self):
        self.arrays = CudaDevice(0).arrays

    def put(self, array):
        return self.arrays.asarray(array)

    def get(self, array):
        return self.arrays.asnumpy(array)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            "emulated", marks=pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
        ),
        pytest.param("device", marks=on_real_devices),
    ],
)
def where(request, tmp_path_factory):
    return OnDevice() if request.param == "device" else OnHost(tmp_path_factory.mktemp("kernels"))


def check(where, kind, inputs, attrs, names, bound, *, step=0):
    """Runs a call, which must be launches of kernels of these names, and compares its results."""
    expected = run_dense(kind, inputs, attrs, step=step)
    context = context_of(Sample(kind, tuple(inputs), attrs))
    context.arrays, context.step = where.arrays, step
    dtypes = [DType.parse(each.dtype) for each in (*inputs, *expected)]
    given = [where.put(each) for each in inputs]
    outputs = [where.put(np.full_like(each, 7)) for each in expected]
    kernel = kernel_on(where.arrays, op_def(kind), dtypes)
    for _ in range(2):  # the second time as it was prepared
        if where.launched is not None:
            where.launched.clear()
        kernel(context, given, outputs)
        assert where.launched in (None, names)
        assert bool(context.state.get("launches")) == bool(names)
    for output, right in zip(outputs, expected, strict=True):
        got = where.get(output)
        got, right = got.astype(float), right.astype(float)
        scale = np.abs(right[np.isfinite(right)]).max(initial=1e-3)
        np.testing.assert_allclose(got, right, bound, bound * scale, err_msg=kind)


def of(shape, dtype=np.float16, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(dtype)


HALVES = [DType.FLOAT16, DType.BFLOAT16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "attrs"),
    [
        pytest.param((1, 2, 80, 32), (1, 2, 80), {"causal": True}, id="causal"),
        pytest.param((1, 1, 130, 64), (1, 1, 130), {"causal": True}, id="several tiles"),
        pytest.param((2, 1, 64, 16), (2, 1, 70), {"causal": False}, id="all"),
        pytest.param((1, 4, 40, 32), (1, 2, 100), {"causal": "lower_right"}, id="shared keys"),
        pytest.param((1, 1, 70, 128), (1, 1, 70), {"causal": True}, id="wide"),
        pytest.param((1, 1, 5, 48), (1, 1, 3), {"causal": False}, id="few"),
    ],
)
def test_attention_and_its_gradient(where, dtype, queries, keys, attrs):
    if dtype is DType.BFLOAT16:
        pytest.importorskip("ml_dtypes")
        if queries != (1, 2, 80, 32):
            pytest.skip("bfloat16 once")
    number = dtype.numpy
    query = of(queries, number)
    key, value = (of((*keys, queries[3]), number) for _ in range(2))
    attrs = {"scale": queries[3] ** -0.5, **attrs}
    bound = 2e-2 if dtype is DType.BFLOAT16 else 4e-3
    check(where, "attention", [query, key, value], attrs, ["attention"], bound)
    result, normaliser = run_dense("attention", [query, key, value], attrs)
    passed = of(queries, number)
    inputs = [query, key, value, result, normaliser, passed]
    names = ["query_gradient", "key_gradient"]
    check(where, "attention_grad", inputs, attrs, names, 2 * bound)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("shape", [(9, 64), (3, 5, 264), (1, 768), (3, 2056)], ids=str)
def test_layer_norms(where, dtype, shape):
    x, dy = of(shape, dtype), of(shape, dtype)
    gamma, beta = of(shape[-1:], dtype), of(shape[-1:], dtype)
    bound = 4e-3 if dtype == np.float16 else 1e-4
    attrs = {"eps": 1e-5}
    check(where, "layer_norm", [x, gamma, beta], attrs, ["layer_norm"], bound)
    _, mean, rstd = run_dense("layer_norm", [x, gamma, beta], attrs)
    names = ["layer_norm_grad", "add_up", "add_up"]
    check(where, "layer_norm_grad", [x, gamma, mean, rstd, dy], {}, names, bound)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("shape", "axes", "names"),
    [
        ((3, 50, 16), (0, 1), ["column_sums", "add_up"]),
        ((700, 264), (0,), ["column_sums", "add_up"]),
        ((8, 64, 5), (0, 1, 2), ["column_sums", "total"]),
        ((6, 5), (0,), []),
        ((4, 8), (1,), []),
    ],
    ids=str,
)
def test_sums(where, dtype, shape, axes, names):
    bound = 2e-3 if dtype == np.float16 else 1e-5
    check(where, "sum", [of(shape, dtype)], {"axes": axes, "keepdims": False}, names, bound)


@pytest.mark.parametrize(
    ("shape", "axes", "names"),
    [
        ((2, 3, 5, 16), (0, 2, 1, 3), ["transpose"]),
        ((2, 3, 5, 8), (2, 0, 1, 3), ["transpose"]),
        ((4, 3, 8), (1, 0, 2), ["transpose"]),
        ((4, 3, 8), (0, 2, 1), []),
        ((4, 3, 5), (1, 0, 2), []),
    ],
    ids=str,
)
def test_transposes(where, shape, axes, names):
    check(where, "transpose", [of(shape)], {"axes": axes}, names, 0)


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs", "names"),
    [
        ("add", [(3, 5, 8), (3, 5, 8)], {}, ["packs"]),
        ("add", [(3, 5, 8), (8,)], {}, ["packs"]),
        ("add", [(3, 5, 8), (5, 8)], {}, ["packs"]),
        ("mul", [(3, 5, 8), ()], {}, ["packs"]),
        ("sub", [(3, 5, 8), (3, 5, 1)], {}, ["packs"]),
        ("gelu", [(40,)], {}, ["packs"]),
        ("gelu_grad", [(40,), (40,)], {}, ["packs"]),
        ("greater", [(4, 8), (4, 8)], {}, ["packs"]),
        ("mul_scalar", [(4, 8)], {"scalar": 0.3}, ["packs"]),
        ("cast", [(4, 8)], {"dtype": "float32"}, ["packs"]),
        ("add", [(3, 5), (3, 5)], {}, []),
        ("add", [(3, 1, 8), (1, 5, 8)], {}, []),
    ],
    ids=str,
)
def test_elementwise_ops(where, kind, shapes, attrs, names):
    inputs = [of(shape) for shape in shapes]
    check(where, kind, inputs, attrs, names, 2e-3)


ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "decoupled": True, "weight_decay": 0.01}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(("kind", "attrs"), [("sgd_update", {}), ("adam_update", ADAM)])
def test_updates(where, kind, attrs, dtype, step):
    moments = [of((5, 16), dtype) ** 2 for _ in range(2 if attrs else 0)]
    inputs = [of((5, 16), dtype), of((5, 16), dtype), *moments, np.array(0.1, np.float32)]
    bound = 3e-3 if dtype == np.float16 else 1e-4
    check(where, kind, inputs, attrs, ["update"], bound, step=step)


@on_real_devices
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("width", [4104, 8192, 16384, 16392])
def test_long_layer_norms_on_a_device(width, dtype):
    """Of up to 16 warps a row; the last is left to CuPy's functions."""
    where, native = OnDevice(), width <= 16384
    x, dy = of((40, width), dtype), of((40, width), dtype)
    gamma, beta = of((width,), dtype), of((width,), dtype)
    bound = 4e-3 if dtype == np.float16 else 1e-4
    names = ["layer_norm"] if native else []
    check(where, "layer_norm", [x, gamma, beta], {"eps": 1e-5}, names, bound)
    _, mean, rstd = run_dense("layer_norm", [x, gamma, beta], {"eps": 1e-5})
    names = ["layer_norm_grad", "add_up", "add_up"] if native else []
    check(where, "layer_norm_grad", [x, gamma, mean, rstd, dy], {}, names, bound)


@on_real_devices
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("mask", "more"),
    [
        pytest.param((2, 1, 300, 300), {}, id="mask"),
        pytest.param((2, 1, 1, 300), {"causal": True}, id="mask of keys, causal"),
        pytest.param(None, {"causal": True, "dropout": 0.2, "key": 3}, id="dropout"),
        pytest.param((1, 4, 300, 300), {"dropout": 0.2, "key": 3}, id="both"),
    ],
)
def test_attention_with_a_mask_or_dropout_on_a_device(mask, more, dtype):
    """Made of products and of CuPy's functions."""
    where, attrs = OnDevice(), {"scale": 0.125, **more}
    inputs = [of((2, 4, 300, 64), dtype) for _ in range(3)]
    masks = [] if mask is None else [np.where(rng.random(mask) < 0.2, -np.inf, of(mask))]
    masks = [each.astype(dtype) for each in masks]
    bound = 4e-3 if dtype == np.float16 else 1e-4
    check(where, "attention", [*inputs, *masks], attrs, [], bound)
    outputs = run_dense("attention", [*inputs, *masks], attrs)
    given = [*inputs, *outputs, of(inputs[0].shape, dtype), *masks]
    check(where, "attention_grad", given, attrs, [], 2 * bound)
    if masks:
        check(where, "attention_mask_grad", given, attrs, [], 2 * bound)


@on_real_devices
@pytest.mark.parametrize("width", [64, 128])
def test_long_attention_on_a_device(width):
    where = OnDevice()
    query, key, value = (of((2, 3, 1000, width)) for _ in range(3))
    attrs = {"scale": width**-0.5, "causal": True}
    check(where, "attention", [query, key, value], attrs, ["attention"], 4e-3)
    result, normaliser = run_dense("attention", [query, key, value], attrs)
    inputs = [query, key, value, result, normaliser, of(query.shape)]
    check(where, "attention_grad", inputs, attrs, ["query_gradient", "key_gradient"], 1e-2)
