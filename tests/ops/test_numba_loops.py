"""Loops that numba compiles: what NumPy's kernels give, as plain Python and compiled."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plancompiler.blas import loaded_library, numba_choice
from plancompiler.ir.dtype import DType
from plancompiler.ops import numba_loops, row_loops
from plancompiler.ops.elementwise_program import BoundProgram, Instructions, program_of
from plancompiler.ops.program_loops import Arithmetic, loop_text
from plancompiler.ops.registry import KernelContext, op_def

F32 = np.dtype(np.float32)
ROWS, WIDTH = 24, 40


def arrays(*shapes: tuple[int, ...], dtype: Any = F32) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.normal(size=shape).astype(dtype) for shape in shapes]


def bound(program: Instructions, count: int) -> BoundProgram:
    return BoundProgram(program, (DType.FLOAT32,) * count, KernelContext({}, (), (), (), ()))


def run(kind: str, inputs: list[np.ndarray], outputs: list[np.ndarray], **attrs: Any) -> None:
    shapes = [tuple(each.shape for each in group) for group in (inputs, outputs)]
    regions = [tuple(tuple((0, n) for n in shape) for shape in group) for group in shapes]
    definition = op_def(kind)
    context = KernelContext(definition.complete(attrs), *shapes, *regions)
    definition.kernel(context, inputs, outputs)


def of_kernels(dtype: Any = F32) -> dict[str, tuple[str, list[np.ndarray], list[np.ndarray], dict]]:
    """Op kinds that have loops, with inputs, empty outputs and attributes."""
    x, dy, m, gamma, beta = arrays(*[(ROWS, WIDTH)] * 3, *[(WIDTH,)] * 2, dtype=dtype)
    column = np.empty((ROWS, 1), dtype)
    mean, rstd = x.mean(1, keepdims=True), 1 / x.std(1, keepdims=True)
    rate = np.array(0.01, dtype)
    attention: dict[str, Any] = {"scale": 0.3, "causal": True}
    q, k, v, dz = arrays(*[(2, 3, 12, 8)] * 4, dtype=dtype)
    z, top = np.empty_like(q), np.empty((2, 3, 12), dtype)
    run("attention", [q, k, v], [z, top], **attention)
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "grad_scale": 0.5}
    state = [x, dy, m, np.abs(m), rate]
    return {
        "layer_norm": ("layer_norm", [x, gamma, beta], [x * 0, column, column * 0], {"eps": 1e-5}),
        "layer_norm_grad": (
            "layer_norm_grad",
            [x, gamma, mean, rstd, dy],
            [x * 0, gamma * 0, beta * 0],
            {},
        ),
        "softmax_grad": ("softmax_grad", [np.abs(x), dy], [x * 0], {"axis": 1}),
        "adam": ("adam_update", state, [x * 0, x * 0, x * 0], adam),
        "lion": ("lion_update", [x, dy, m, rate], [x * 0, x * 0], {"beta1": 0.9, "beta2": 0.99}),
        "adamw": ("adam_update", state, [x * 0, x * 0, x * 0], {**adam, "decoupled": True}),
        "attention": ("attention_grad", [q, k, v, z, top, dz], [q * 0, k * 0, v * 0], attention),
        "attention without causal": (
            "attention_grad",
            [q, k, v, z, top, dz],
            [q * 0, k * 0, v * 0],
            {"scale": 0.3},
        ),
    }


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops run for arrays of any size, as the plain Python that they are."""

    def plain(source: str, name: str, dtype: np.dtype) -> Callable[..., None]:
        names: dict[str, Any] = {}
        exec(source, names)  # noqa: S102  # the text is ours
        return names[name]

    monkeypatch.setattr(numba_loops, "compiled", plain)
    monkeypatch.setattr("plancompiler.ops.elementwise_program.compiled", plain)
    monkeypatch.setattr(numba_loops, "numba_version", lambda: "plain")
    monkeypatch.setattr(numba_loops, "LEAST", 1)


@pytest.fixture
def numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """numba compiles loops for arrays of any size, into a cache of its own; skips without it."""
    pytest.importorskip("numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(numba_choice.VARIABLE, "1")
    monkeypatch.setattr(numba_loops, "LEAST", 1)
    numba_choice.numba_version.cache_clear()
    loaded_library.numeric_kernels.cache_clear()
    numba_loops.compiled.cache_clear()
    yield tmp_path / "plancompiler" / "loops"
    numba_choice.numba_version.cache_clear()
    loaded_library.numeric_kernels.cache_clear()
    numba_loops.compiled.cache_clear()


NUMPY = of_kernels()
for _kind, _inputs, _outputs, _attrs in NUMPY.values():
    run(_kind, _inputs, _outputs, **_attrs)


def check_kernel(name: str) -> None:
    kind, inputs, outputs, attrs = of_kernels()[name]
    run(kind, inputs, outputs, **attrs)
    for got, expected in zip(outputs, NUMPY[name][2], strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=4e-6)
    if op_def(kind).inplace or op_def(kind).mutates:
        # The first output over what it may lie over.
        kind, inputs, again, attrs = of_kernels()[name]
        pairs = (*op_def(kind).inplace[:1], *op_def(kind).mutates)
        for output, place in pairs:
            inputs[place] = again[output] = inputs[place].copy()
        run(kind, inputs, again, **attrs)
        for got, expected in zip(again, outputs, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", NUMPY)
def test_loops_give_what_numpys_kernels_give(name: str) -> None:
    check_kernel(name)


def test_compiled_loops_give_what_numpys_kernels_give(numba: Path) -> None:
    for name in NUMPY:
        check_kernel(name)
    # What is kept is loaded and run by others: the folder is the user's alone.
    assert stat.S_IMODE(numba.stat().st_mode) == 0o700
    assert list(numba.glob("__pycache__/*.nbc"))
    before = {path: path.stat().st_mtime_ns for path in numba.glob("__pycache__/*.nbc")}
    numba_loops.compiled.cache_clear()
    check_kernel("layer_norm")
    assert {path: path.stat().st_mtime_ns for path in numba.glob("__pycache__/*.nbc")} == before


def test_a_folder_that_others_may_write_to_is_not_used(numba: Path) -> None:
    numba.mkdir(parents=True)
    numba.chmod(0o770)
    check_kernel("softmax_grad")
    assert not list(numba.iterdir())


def check_programs() -> None:
    generator = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 20.0, -20.0]
    for kind, count in (("gelu", 1), ("gelu_grad", 2), ("silu_grad", 2), ("softplus", 1)):
        inputs = [
            np.concatenate([np.roll(special, 3 * each), generator.normal(size=200)]).astype(F32)
            for each in range(count)
        ]
        formula = op_def(kind).formula
        assert formula is not None
        program = program_of(formula, (), (DType.FLOAT32,) * count)
        out, expected = np.empty_like(inputs[0]), np.empty_like(inputs[0])
        with np.errstate(all="ignore"):
            bound(program, count)(inputs, out)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(numba_loops, "numba_version", lambda: None)
                bound(program, count)(inputs, expected)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
            # Over its input, and over a part of it.
            shared = np.concatenate([inputs[0], inputs[0][:5]])
            bound(program, count)([shared[: out.size], *inputs[1:]], shared[: out.size])
        np.testing.assert_array_equal(shared[: out.size], out)


@pytest.mark.usefixtures("uncompiled")
def test_programs_with_loops_give_what_numpy_gives() -> None:
    check_programs()


def test_programs_with_compiled_loops_give_what_numpy_gives(numba: Path) -> None:
    check_programs()
    assert list(numba.glob("__pycache__/*.nbc"))


def test_a_loop_keeps_between_instructions_what_only_it_reads() -> None:
    made = loop_text(
        [Arithmetic(2, np.multiply, (0, 1)), Arithmetic(3, np.add, (2, 0.5))],
        {0: "x0", 1: "w0"},
        {3: "w0"},
        "float32",
    )
    assert made.arguments == ("w0", "x0")
    assert made.text.splitlines()[2:] == [
        "def loop(w0: Out1, x0: In1) -> None:",
        "  for i in range(w0.size):",
        "    t0 = x0[i]",
        "    t1 = w0[i]",
        "    t2 = t0 * t1",
        "    t3 = t2 + float32(0.5)",
        "    w0[i] = t3",
    ]


def test_small_and_scattered_arrays_stay_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_loops, "numba_version", lambda: "plain")
    large = np.zeros((128, 128), F32)
    assert numba_loops.loops_suit(large, large[0])
    assert not numba_loops.loops_suit(large[:127])
    assert not numba_loops.loops_suit(large, large[:, 0])
    assert not numba_loops.loops_suit(large, large.astype(np.float64))
    assert not numba_loops.loops_suit(large.astype(np.float16))
    assert not numba_loops.loops_suit(large.astype(np.int32))
    monkeypatch.setattr(numba_loops, "numba_version", lambda: None)
    assert numba_loops.row_loop(row_loops.layer_norm, large) is None


def test_ranks_say_whether_numba_compiles(numba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = numba_choice.numba_version()
    assert version is not None
    assert loaded_library.numeric_kernels().endswith(f"loops by numba {version}")
    monkeypatch.setenv(numba_choice.VARIABLE, "0")
    numba_choice.numba_version.cache_clear()
    loaded_library.numeric_kernels.cache_clear()
    assert "numba" not in loaded_library.numeric_kernels()
