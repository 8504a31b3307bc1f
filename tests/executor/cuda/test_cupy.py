"""What kernels and the device ask of CuPy, held against CuPy itself. Needs it, but no device."""

from __future__ import annotations

import contextlib
import inspect
from operator import attrgetter

import numpy as np
import pytest

from plancompiler.errors import DTypeError
from plancompiler.executor.cuda.device import _NOT_READY
from plancompiler.executor.cuda.kernels import flash, fused, products, rows
from plancompiler.executor.cuda.kernels.fused import PREAMBLE, source_of
from plancompiler.executor.cuda.kernels.launch import COMMON
from plancompiler.executor.cuda.kernels.native import update_text
from plancompiler.executor.cuda.kernels.packs import pack_text, place_of
from plancompiler.ir import DType
from plancompiler.ops import op_def, op_table
from plancompiler.ops.fused import parse_program
from plancompiler.ops.update import UPDATES
from tests.executor.cuda.strict import ASKED, FUNCTIONS, StrictArray, StrictNamespace
from tests.executor.cuda.test_fused import WITHOUT_A_LINE, calls
from tests.executor.cuda.test_kernels import BOUNDS, HOST_ONLY, run_on
from tests.ops.samples import samples

cupy = pytest.importorskip("cupy", "14", reason="CuPy is not installed")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_these_parameters(name):
    try:
        parameters = inspect.signature(attrgetter(name)(cupy)).parameters.values()
    except ValueError:
        pytest.skip("compiled without a signature")
    allowed = {each.name for each in parameters}
    # What is passed by place needs no name.
    by_place = {"arr", "a", "b", "prototype", "array", "condition", "x", "y", "operands", "arrays"}
    flexible = any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters)
    assert flexible or set(FUNCTIONS[name]) - by_place <= allowed


def test_ufuncs_have_these_loops(tmp_path):
    ASKED.clear()
    for dtype in BOUNDS:
        for sample in samples(tmp_path, dtype):
            if sample.kind not in HOST_ONLY and not op_def(sample.kind).source:
                with contextlib.suppress(TypeError):  # a finding of test_kernels.py
                    run_on(StrictNamespace(), sample)
    missing = {asked for asked in ASKED if not _has_loop(*asked)}
    assert not missing
    assert len(ASKED) > 100


def _has_loop(name, method, inputs, out):
    ufunc = getattr(cupy, name, None)
    if ufunc is None:
        import cupyx.scipy.special as special

        ufunc = getattr(special, name, None)
    if ufunc is None or (method != "__call__" and not hasattr(ufunc, method)):
        return False
    if method != "__call__" or not isinstance(ufunc, cupy.ufunc):
        return True
    # CuPy's letter for bfloat16, which NumPy does not know.
    for loop in (each for each in ufunc.types if "E" not in each):
        taken, _, made = loop.partition("->")
        # Numbers of the host take the loop of the arrays.
        arrays = len(inputs) == len(taken)
        if all(np.can_cast(each, kind) for each, kind in zip(inputs, taken, strict=False)) and (
            arrays or np.can_cast(inputs[0], taken[-1])
        ):
            return not out or np.can_cast(made, out, "same_kind")
    return False


def test_names_that_the_device_uses_are_there():
    cuda = cupy.cuda
    for name in (
        *("Device", "Event", "Memory", "MemoryPointer", "PinnedMemory", "PinnedMemoryPointer"),
        *("Stream", "get_cublas_handle", "get_current_stream", "get_elapsed_time"),
    ):
        assert callable(getattr(cuda, name)), name
    for name in ("arange", "asarray", "asnumpy", "empty", "full", "zeros"):
        assert callable(getattr(cupy, name)), name
    for name in ("astype", "copy", "reshape", "set", "transpose"):
        assert callable(getattr(cupy.ndarray, name)), name
    for name in ("done", "record", "synchronize"):
        assert hasattr(cuda.Event, name), name
    for name in (
        *("CUDARuntimeError", "eventQuery", "getDeviceCount", "getDeviceProperties"),
        "hostRegister",
        *("hostUnregister", "memGetInfo", "memcpyAsync"),
    ):
        assert callable(getattr(cuda.runtime, name)), name
    assert callable(cuda.driver.launchKernel)
    assert callable(cupy.RawModule)
    assert hasattr(cupy.RawKernel, "max_dynamic_shared_size_bytes")
    assert callable(cuda.pinned_memory.is_memory_pinned)
    assert "NotReady" in str(cuda.runtime.CUDARuntimeError(_NOT_READY))
    assert (cuda.runtime.memcpyHostToDevice, cuda.runtime.memcpyDeviceToHost) == (1, 2)
    # Numbers of cudaDataType, cublasOperation_t and cublasComputeType_t.
    types = {name: getattr(cuda.runtime, number) for name, number in products._TYPES.items()}
    assert types == {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}


def test_cublas_numbers():
    try:
        cublas = cupy.cuda.cublas
    except ImportError as error:
        pytest.skip(str(error))
    assert (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T, cublas.CUBLAS_GEMM_DEFAULT) == (0, 1, -1)
    assert cublas.CUBLAS_COMPUTE_32F == 68
    assert cublas.CUBLAS_COMPUTE_32F_FAST_TF32 == 77
    assert cublas.CUBLAS_COMPUTE_64F == 70
    assert callable(cublas.gemmEx)
    assert callable(cublas.gemmStridedBatchedEx)


@pytest.mark.parametrize("dtype", fused._TYPES)
def test_fused_kernels_are_taken(dtype):
    program = ("mul 0,0",) if dtype is not DType.BOOL else ("logical_not 0",)
    source = source_of(parse_program(program), [dtype])
    assert source is not None
    kernel = cupy.ElementwiseKernel(
        source.inputs, source.outputs, source.body, "test", preamble=PREAMBLE
    )
    assert kernel.nin == 1
    assert kernel.nout == 1


def test_nccls_numbers():
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("NCCL is not installed")
    from plancompiler.executor.cuda import device

    communicator = device.NcclCommunicator(nccl, None)
    expected = {
        "uint8": 1,
        "int8": 0,
        "int32": 2,
        "int64": 4,
        "float16": 6,
        "bfloat16": 9,
        "float32": 7,
        "float64": 8,
        "sum": 0,
        "prod": 1,
        "max": 2,
        "min": 3,
    }
    assert {name: communicator._number(name) for name in expected} == expected
    for name in (
        *("allReduce", "reduceScatter", "reduce", "allGather", "broadcast", "send", "recv"),
        *("check_async_error", "abort", "destroy"),
    ):
        assert callable(getattr(nccl.NcclCommunicator, name)), name
    assert callable(nccl.groupStart)
    assert callable(nccl.groupEnd)
    assert len(bytes(nccl.get_unique_id())) == 128


def test_strict_arrays_have_no_methods_that_cupy_has_not():
    own = {name for name in vars(StrictArray) if not name.startswith("_")} - {"host", "data"}
    assert own - set(dir(cupy.ndarray)) == set()


HEADERS = """
#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cupy/math_constants.h>
#include <cupy/float16.cuh>
#include <cupy/bfloat16.cuh>
"""


def _as_cupy_writes_it(number, source):
    """The function that `cupy.ElementwiseKernel` makes of a body (`cupy/_core/_kernel.pyx`)."""
    declared = [*source.inputs.split(", "), source.outputs]
    in_c = {"float32": "float", "float64": "double"}
    names = [(in_c.get(kind, kind), name) for kind, name in map(str.split, declared)]
    parameters = ", ".join(f"CArray<{kind}, 1, 1, 1> _raw_{name}" for kind, name in names)
    elements = [
        f"{'' if name == 'y' else 'const '}{kind} &{name} = _raw_{name}[_ind.get()];"
        for kind, name in names
    ]
    return (
        f'extern "C" __global__ void f{number}({parameters}, CIndexer<1, 1> _ind) {{\n'
        "CUPY_FOR(i, _ind.size()) {\n_ind.set(i);\n"
        + "\n".join(elements)
        + f"\n{source.body};\n}}\n}}\n"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_text_of_fused_kernels_is_cuda(tmp_path, dtype):
    """NVRTC takes what CuPy would hand it, for every op that has a line; on no device."""
    try:
        cupy.cuda.nvrtc.getVersion()
        options = cupy._core.core.assemble_cupy_compiler_options(())
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    functions, kinds = [], set()
    # What a sample of float32 computes, in another dtype.
    for inputs, program in calls(tmp_path, "float32"):
        types = [
            DType.parse(dtype) if array.dtype == np.float32 else DType.parse(array.dtype)
            for array in inputs
        ]
        program = tuple(text.replace('"float32"', f'"{dtype}"') for text in program)
        try:
            source = source_of(parse_program(program), types)
        except DTypeError:  # not every op takes halves
            kinds |= {text.split()[0] for text in program}
            continue
        if source is not None:
            functions.append(_as_cupy_writes_it(len(functions), source))
            kinds |= {text.split()[0] for text in program}
    elementwise = {kind for kind, each in op_table().items() if each.elementwise}
    assert kinds >= elementwise - WITHOUT_A_LINE
    compiled(HEADERS + PREAMBLE + "\n".join(functions), options, "sm_80")


def compiled(text, options, device):
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(text, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-arch={device}"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def native_texts():
    """Texts of kernels in CUDA C++, for the device that compiles them."""
    for kind, width, causal, device in (
        ("__half", 64, True, "sm_90"),
        ("__nv_bfloat16", 32, False, "sm_80"),
    ):
        text = flash.definitions(kind, width, causal) + flash.TENSOR_CORES + flash.TEXT
        yield device, text
    for kind, device in (("__half", "sm_80"), ("__nv_bfloat16", "sm_90"), ("float", "sm_90")):
        yield device, rows.norm_text(kind, 768)
        yield device, rows.sum_text(kind)
    yield "sm_80", rows.TRANSPOSE_TEXT
    for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32):
        source = source_of(parse_program(("add 0,1",)), [dtype] * 2)
        yield "sm_80", pack_text(source, [place_of(each, (2, 8)) for each in ((2, 8), (8,))])
    attrs = op_def("adam_update").complete({"beta1": 0.9, "beta2": 0.99, "eps": 1e-8})
    program = UPDATES["adam_update"].program(attrs, DType.FLOAT32)
    for on_device in ([True] * 4, [False] * 4):
        kinds = ["__half", "__half", "float", "float"], ["__half", "float", "float"]
        yield "sm_90", update_text(program, *kinds, on_device)


def test_the_text_of_native_kernels_is_cuda():
    try:
        cupy.cuda.nvrtc.getVersion()
        options = cupy._core.core.assemble_cupy_compiler_options(())
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    for device, text in native_texts():
        compiled(COMMON + text, options, device)
