"""The text of fused kernels, compiled as C++ and compared with the host's kernels."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess

import numpy as np
import pytest

from plancompiler.executor.cuda.kernels import kernel_on
from plancompiler.executor.cuda.kernels.fused import PREAMBLE, source_of
from plancompiler.ir import DType
from plancompiler.ops import infer_types, op_def, op_table
from plancompiler.ops.fused import KIND, parse_program
from plancompiler.ops.registry import KernelContext
from tests.ops.samples import samples
from tests.ops.sharding import run_dense, type_of

COMPILER = shutil.which("g++") or shutil.which("clang++")
C_TYPES = {"float32": "float", "float64": "double", "bool": "bool"}
WITHOUT_A_LINE = {
    # Whole numbers only, or too long for a line: programs with these run op by op.
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"),
    *("nan_to_num", "fmod", "remainder", "floor_divide", "logaddexp", "logaddexp2", "isclose"),
    *("fmax", "fmin", "gcd", "lcm", "heaviside", "ravel_index", "xlog1py", "xlogy"),
    # Series and approximations: the host's, or those of libraries.
    *("digamma", "i0e", "i1e", "log_ndtr", "polygamma", "zeta"),
    *("modified_bessel_k0", "modified_bessel_k1"),
    *("scaled_modified_bessel_k0", "scaled_modified_bessel_k1"),
}


CUDA_MATH = """
template <class T> T erfcx(T x) { return exp((double)x * x) * erfc((double)x); }
template <class T> T normcdf(T x) { return erfc(-(double)x / sqrt(2.0)) / 2; }
template <class T> T erfinv(T x) {
  if (fabs((double)x) >= 1) return x * INFINITY;
  double y = 0;
  for (int i = 0; i < 200; ++i) {
    double step = (erf(y) - x) * sqrt(acos(-1.0)) / 2 * exp(y * y);
    y -= fmax(-0.5, fmin(0.5, step));
  }
  return y;
}
template <class T> T normcdfinv(T x) { return sqrt(2.0) * erfinv(2.0 * x - 1); }
template <class T> T cyl_bessel_i0(T x) { return cyl_bessel_i(0.0, fabs((double)x)); }
template <class T> T cyl_bessel_i1(T x) {
  return copysign(cyl_bessel_i(1.0, fabs((double)x)), (double)x);
}
"""
"""What CUDA's mathematical library has beyond C's."""


def calls(folder, dtype):
    """Samples of fused programs and of all ops that can be in one, as programs of one op."""
    calls = []
    for sample in samples(folder, dtype):
        names = {str(array.dtype) for array in sample.inputs}
        if not sample.inputs or not names <= C_TYPES.keys():
            continue
        if sample.kind == KIND:
            calls.append((sample.inputs, sample.attrs["program"]))
        elif op_def(sample.kind).elementwise:
            attrs = f" {json.dumps(sample.attrs)}" if sample.attrs else ""
            numbers = ",".join(map(str, range(len(sample.inputs))))
            inputs = tuple(map(np.copy, np.broadcast_arrays(*sample.inputs)))
            calls.append((inputs, (f"{sample.kind} {numbers}{attrs}",)))
    return calls


@pytest.mark.processes
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_text_computes_what_the_host_computes(tmp_path, dtype):
    functions, tested, kinds = [], [], set()
    for inputs, program in calls(tmp_path, dtype):
        if inputs[0].size == 0:
            continue
        types = infer_types(KIND, tuple(map(type_of, inputs)), {"program": program})
        source = source_of(parse_program(program), [DType.parse(each.dtype) for each in inputs])
        if source is None or str(types[0].dtype) not in C_TYPES:
            continue
        kinds |= {each.split()[0] for each in program}
        parameters = [C_TYPES[str(each.dtype)] for each in inputs]
        out = C_TYPES[str(types[0].dtype)]
        arguments = "".join(f", const {name}* a{at}" for at, name in enumerate(parameters))
        loads = "".join(f"const {name} x{at} = a{at}[i];" for at, name in enumerate(parameters))
        functions.append(
            f'extern "C" void f{len(tested)}(long n, {out}* out{arguments}) {{\n'
            f"for (long i = 0; i < n; ++i) {{ {loads} {out} y;\n{source.body}\nout[i] = y; }}\n}}\n"
        )
        tested.append((inputs, program, types[0].dtype.numpy))
    text = "#include <cmath>\nusing namespace std;\n#define __device__\n" + CUDA_MATH
    (tmp_path / "kernels.cpp").write_text(text + PREAMBLE + "\n".join(functions))
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", "kernels.so", "kernels.cpp"],
        cwd=tmp_path,
        check=True,
    )
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    for number, (inputs, program, result) in enumerate(tested):
        arrays = [np.ascontiguousarray(each) for each in inputs]
        out = np.zeros(arrays[0].shape, result)
        getattr(library, f"f{number}")(
            ctypes.c_long(out.size), *(ctypes.c_void_p(a.ctypes.data) for a in (out, *arrays))
        )
        with np.errstate(all="ignore"):
            (expected,) = run_dense(KIND, inputs, {"program": program})
        np.testing.assert_allclose(
            out.reshape(expected.shape).astype(float),
            expected.astype(float),
            rtol=1e-5 if dtype == "float32" else 1e-11,
            atol=1e-6 if dtype == "float32" else 1e-12,
            err_msg=str(program),
        )
    elementwise = {kind for kind, each in op_table().items() if each.elementwise}
    assert sorted(elementwise - WITHOUT_A_LINE - kinds) == []


@pytest.mark.parametrize("half", [DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_halves_are_computed_in_float_and_rounded_once(half):
    program = ('mul_scalar 0 {"scalar":0.5}', "add 1,2")
    source = source_of(parse_program(program), [half, half])
    assert source is not None
    assert (source.inputs, source.outputs) == (f"{half} x0, {half} x1", f"{half} y")
    assert source.body.splitlines() == [
        "const float v0 = x0;",
        "const float v1 = x1;",
        "const float v2 = (v0 * float(0.5));",
        "const float v3 = (v1 + v2);",
        "y = v3;",
    ]


@pytest.mark.parametrize(
    ("program", "dtype"),
    [(("add 0,0",), DType.INT32), (("logaddexp 0,0",), DType.FLOAT32), (("neg 0",), DType.INT16)],
)
def test_what_has_no_line_has_no_text(program, dtype):
    assert source_of(parse_program(program), [dtype]) is None


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16], ids=str)
def test_an_op_that_numpy_has_not_is_a_program_of_its_own(dtype):
    made = []

    class Namespace:
        @staticmethod
        def ElementwiseKernel(*arguments, **named):  # noqa: N802  (CuPy's name)
            made.append((arguments, named))
            return lambda *arrays: made.append(arrays)

    kernel = kernel_on(Namespace(), op_def("gelu_exact_grad"), [dtype] * 3)
    kernel(KernelContext({}, (), (), (), ()), ["x", "dy"], ["dx"])
    (inputs, outputs, body, name), named = made[0]
    assert (inputs, outputs) == (f"{dtype} x0, {dtype} x1", f"{dtype} y")
    assert "erf(" in body
    assert name == "plancompiler_gelu_exact_grad"
    assert named == {"preamble": PREAMBLE}
    assert made[1] == ("x", "dy", "dx")


def test_numbers_that_are_not_finite():
    program = ('mul_scalar 0 {"scalar":Infinity}', 'add_scalar 1 {"scalar":-Infinity}')
    source = source_of(parse_program(program), [DType.FLOAT64])
    assert source is not None
    assert "double(INFINITY)" in source.body
    assert "double(-INFINITY)" in source.body
