"""Custom ops: everything an op has, every mistake refused, and nothing imported without leave."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import (
    AttributeValueError,
    CustomOpError,
    DTypeError,
    ExecutionError,
    GradientError,
    ShapeError,
    TracingError,
    UnknownOpError,
)
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import DType
from plancompiler.lower.compile import compile_plans
from plancompiler.ops import axis_signatures, op_def, op_table, registry
from plancompiler.ops.registry import allow_custom_ops, register_custom
from tests.dense import run_dense
from tests.ops.dense import gradients_of
from tests.ops.sample import Sample
from tests.ops.sharding import ShardedCall, type_of
from tests.ops.sharding import run_dense as run_dense_op
from tests.ops.test_sharding import signatures_on

ROOT = Path(__file__).resolve().parents[2]
MESH = pc.Placement("cpu", [0, 1, 2])
RANDOM = np.random.default_rng(2)
X, W = RANDOM.normal(size=(2, 5, 3)), RANDOM.normal(size=(3, 4))


@pc.op(rule="... k, k n -> ... n", linear=(0, 1), flops=lambda inputs, outputs, attrs: 7)
def project(x, w, *, scale=1.0):
    """scale * x w"""
    return scale * (x @ w)


@project.gradient
def project_gradient(inputs, outputs, grads, *, scale):
    x, w = inputs
    (dy,) = grads
    return (
        pc.matmul(dy, w, transpose_b=True) * scale,
        pc.matmul(x.reshape(-1, 3), dy.reshape(-1, 4), transpose_a=True) * scale,
    )


@pc.op(rule="n [d], n -> n [d], n", dtype=("float64", "int64"))
def ranks_of_rows(x, weight, *, power=2, context):
    low, high = context.input_regions[0][0]
    assert len(x) == high - low
    return (x**power) * weight[:, None], np.arange(low, high)


@pc.op(rule="n d -> n d")
def halved(x):
    assert x.dtype == np.float32
    return x * np.float32(0.5)


def test_a_function_sees_float32_in_place_of_bfloat16():
    with pc.job("narrow") as job:
        x = pc.input("x", (5, 3), "bfloat16", MESH, "S(0)")
        pc.output("y", halved(x))
    feeds = {"x": np.arange(15).reshape(5, 3).astype(DType.BFLOAT16.numpy)}
    with LocalWorld(compile_plans(job, 3, "rank_per_iter").plans) as world:
        y = world.step(feeds)["y"]
    assert y.dtype == DType.BFLOAT16.numpy
    np.testing.assert_array_equal(y.astype(float), np.arange(15).reshape(5, 3) / 2)


@pc.op(rule="a b -> a", reduction="max")
def greatest(x):
    return x.max(1, initial=-np.inf)


@pc.op(rule="n d, d, n -> n d", flops=lambda inputs, outputs, attrs: 1 + (inputs[1] is None))
def scaled_and_shifted(x, scale=None, shift=None, *, power=1):
    y = x**power
    y = y if scale is None else y * scale
    return y if shift is None else y + shift[:, None]


@scaled_and_shifted.gradient
def scaled_and_shifted_gradient(inputs, outputs, grads, *, power):
    x, scale, shift = inputs
    (dy,) = grads
    slope = x ** (power - 1) * power if power > 1 else 1.0
    dx = dy * slope if scale is None else dy * scale * slope
    return (
        dx,
        None if scale is None else (dy * x**power).sum(0),
        None if shift is None else dy.sum(1),
    )


def same_type(x):
    return x


# --- what a custom op has -------------------------------------------------------------------------


def test_a_custom_op_is_an_op_like_any_other():
    definition = op_def("tests.ops.test_custom:project")
    assert project.kind == definition.kind
    assert definition.doc == "scale * x w"
    assert definition.flops((), (), {}) == 7
    assert definition.kind not in op_table()
    types = (type_of(X), type_of(W))
    outputs = definition.infer(types, {"scale": 1.0})
    assert outputs == (pc.TensorType((2, 5, 4), pc.DType.FLOAT64),)
    signatures = {str(one) for one in axis_signatures(project.kind, types, outputs, (), 2)}
    assert signatures == {
        "B, B -> B",
        "S(0), B -> S(0)",
        "S(1), B -> S(1)",
        "S(2), S(0) -> P",
        "B, S(1) -> S(2)",
        "P, B -> P",
        "B, P -> P",
    }


@pytest.mark.parametrize(
    ("custom", "inputs", "attrs"),
    [
        (project, (X, W), {"scale": 0.5}),
        (ranks_of_rows, (X[0], X[0, :, 0]), {"power": 3}),
        (greatest, (X[0],), {}),
    ],
)
@pytest.mark.parametrize("hierarchy", [(2,), (3,), (2, 2)])
def test_every_signature_gives_the_dense_result(custom, inputs, attrs, hierarchy):
    dense = custom.function(*inputs, **attrs) if custom is not ranks_of_rows else None
    for signature in signatures_on(Sample(custom.kind, inputs, attrs), hierarchy):
        results = ShardedCall(custom.kind, inputs, attrs).run(signature, hierarchy, RANDOM)
        if dense is None:
            np.testing.assert_allclose(results[0], inputs[0] ** 3 * inputs[1][:, None])
            np.testing.assert_array_equal(results[1], range(5))
        else:
            np.testing.assert_allclose(results[0], dense, 1e-12, 1e-12, err_msg=str(signature))


def test_the_gradient_is_that_of_the_function():
    dy = RANDOM.normal(size=(2, 5, 4))
    dx, dw = gradients_of(project.kind, [X, W], {"scale": 0.5}, [dy])
    np.testing.assert_allclose(dx, 0.5 * dy @ W.T)
    np.testing.assert_allclose(dw, 0.5 * np.einsum("bik,bin->kn", X, dy))


SCALE, SHIFT = RANDOM.normal(size=3), RANDOM.normal(size=5)


@pytest.mark.parametrize("given", [(), (SCALE,), (SCALE, SHIFT), (None, SHIFT)])
def test_an_array_whose_default_is_none_may_be_left_out(given):
    x = X[0]
    expected = scaled_and_shifted(x, *given, power=3)

    def total(*tensors):
        rest = iter(tensors[1:])
        inputs = [None if each is None else next(rest) for each in given]
        return scaled_and_shifted(tensors[0], *inputs, power=3)

    arrays = [x, *(each for each in given if each is not None)]

    def program(sbp):
        tensors = [pc.tensor(each, MESH, sbp) for each in arrays]
        for each in tensors:
            each.requires_grad = True
        y = total(*tensors)
        (y * y).sum().backward()
        return [y.numpy(), *(each.grad.numpy() for each in tensors)]

    with pc.job("optional") as job:
        inputs = [
            pc.input(f"x{at}", each.shape, "float64", MESH, "S(0)")
            for at, each in enumerate(arrays)
        ]
        y = total(*inputs)
        pc.output("y", y)
        for at, each in enumerate(pc.gradients((y * y).sum(), inputs)):
            pc.output(f"d{at}", each)
    with pc.run(job) as session:
        made = session.step(**{f"x{at}": each for at, each in enumerate(arrays)})
    wanted = [made["y"], *(made[f"d{at}"] for at in range(len(arrays)))]
    np.testing.assert_allclose(wanted[0], expected)
    step = 1e-6
    for at, array in enumerate(arrays):
        moved = array + step * (np.arange(array.size) == 1).reshape(array.shape)
        there = iter([*arrays[:at], moved, *arrays[at + 1 :]])
        first = next(there)
        after = scaled_and_shifted(
            first, *(None if e is None else next(there) for e in given), power=3
        )
        slope = ((after**2).sum() - (expected**2).sum()) / step
        np.testing.assert_allclose(wanted[1 + at].reshape(-1)[1], slope, 1e-4)
    for sbp in ("S(0)", "B", "P"):
        for got in spawn(program, 3, sbp):
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, 1e-10)


def test_optional_inputs_are_named_and_counted():
    x, shift = (pc.tensor(each, pc.Placement("cpu", [0])) for each in (X[0], SHIFT))
    np.testing.assert_allclose(scaled_and_shifted(x, shift=shift).numpy(), X[0] + SHIFT[:, None])
    with pytest.raises(TracingError, match=r"needs a tensor here.*None as input 0"):
        scaled_and_shifted(None, shift)
    assert op_def(scaled_and_shifted.kind).flops((1, 2), (), {"absent": (1,)}) == 2
    with pytest.raises(AttributeValueError, match="no input has that is always there"):
        pc.op(rule="n, d -> n d")(lambda x, y=None: x)


def test_it_runs_in_a_job_on_several_ranks():
    with pc.job("custom") as job:
        x = pc.input("x", X.shape, "float64", MESH, "S(1)")
        w = pc.input("w", W.shape, "float64", MESH, "S(1)")
        y = project(x, w, scale=2.0)
        for name, value in zip(("dx", "dw"), pc.gradients((y * y).sum(), [x, w]), strict=True):
            pc.output(name, value)
        pc.output("y", y)
        pc.output("top", greatest(x.reshape(10, 3)))
    assert [op.name for op in job.ops if op.kind == project.kind] == ["project_0"]
    (dense,) = run_dense(job, 1, {"x": X, "w": W})
    np.testing.assert_allclose(dense["y"], 2 * X @ W)
    with LocalWorld(compile_plans(job, 3, "rank_per_iter").plans) as world:
        outputs = world.step({"x": X, "w": W})
    for name, value in dense.items():
        np.testing.assert_allclose(outputs[name], value, 1e-10, 1e-10, err_msg=name)


def test_called_with_arrays_it_is_the_function():
    np.testing.assert_array_equal(project(X, W, scale=3.0), 3.0 * (X @ W))


def test_the_types_may_come_from_the_user():
    @pc.op(
        rule="n -> n k",
        infer=lambda x, *, count: pc.TensorType((*x.shape, count), pc.DType.INT64),
    )
    def powers(x, *, count):
        return np.stack([x.astype(np.int64) ** k for k in range(count)], 1)

    inputs, attrs = (np.arange(4.0),), {"count": 3}
    for hierarchy in ((2,), (3,)):
        signatures = signatures_on(Sample(powers.kind, inputs, attrs), hierarchy)
        assert {str(one.inputs[0]) for one in signatures} == {"[B]", "[S(0)]"}
        # k splits by the rule, but the function always makes all powers.
        split = next(one for one in signatures if str(one.outputs[0]) == "[S(1)]")
        with pytest.raises(ExecutionError, match="returned a wrong output"):
            ShardedCall(powers.kind, inputs, attrs).run(split, hierarchy, RANDOM)


def test_a_gradient_that_nothing_flows_into_is_zero():
    @pc.op(rule="n -> n, n", gradient=lambda inputs, outputs, grads: grads[0] + grads[1] * 5.0)
    def twice(x):
        return x, 5 * x

    (dx,) = gradients_of(twice.kind, [np.ones(3)], {}, [np.ones(3), None])
    np.testing.assert_array_equal(dx, 1)


def test_ops_made_by_a_function_are_told_apart():
    def make(factor):
        @pc.op(rule="... -> ...")
        def scaled(x):
            return factor * x

        return scaled

    first, second = make(2.0), make(3.0)
    assert first.kind != second.kind
    with pc.job("two") as job:
        x = pc.input("x", (2,), "float64", MESH)
        pc.output("y", second(first(x)))
    np.testing.assert_array_equal(run_dense(job, 1, {"x": np.ones(2)})[0]["y"], 6)


def test_a_module_that_is_loaded_again_defines_its_ops_anew():
    def define(rule):
        return pc.op(rule=rule, kind="some_module:again")(same_type)

    types = (pc.TensorType((4,), pc.DType.FLOAT32),)
    for rule, count in (("n -> n", 2), ("[n] -> [n]", 1)):
        define(rule)
        assert len(axis_signatures("some_module:again", types, types, (), 2)) == count


# --- mistakes in a definition ---------------------------------------------------------------------


def two(x, y):
    return x + y


def greedy(x, **more):
    return x


def odd(x, *, how=None):
    return x


def refused(error, function, *args, **options):
    """The report of a definition that is refused; it names the op and this file."""
    with pytest.raises(error) as caught:
        pc.op(*args, **options)(function)
    report = caught.value.report
    assert report.op == f"tests.ops.test_custom:{function.__name__}"
    assert report.source == f"tests/ops/test_custom.py:{function.__code__.co_firstlineno}"
    assert report.got is not None
    return report


DEFINITIONS = [
    (two, "a, a -> b", {}, "'b' in 'a, a -> b'"),
    (two, "a -> a", {}, "2 arrays"),
    (two, "a, a, a -> a", {}, "2 arrays"),
    (two, "a, a", {}, "'a, a'"),
    (two, "a!, a -> a", {}, "a!"),
    (two, "a, a ->", {}, "'a, a ->'"),
    (two, "a a, a -> a", {}, "a a"),
    (two, 3, {}, "3"),
    (greedy, "a -> a", {}, "**more"),
    (odd, "a -> a", {}, "None"),
    (same_type, "a -> a", {"linear": (1,)}, "(1,)"),
    (same_type, "a -> a", {"reduction": "mean"}, "'mean'"),
    (same_type, "a -> a", {"dtype": ("int8", "int8")}, "2"),
]


@pytest.mark.parametrize(("function", "rule", "options", "got"), DEFINITIONS)
def test_a_wrong_definition_is_refused(function, rule, options, got):
    report = refused(AttributeValueError, function, rule, **options)
    assert got in report.got


def test_an_unknown_dtype_is_refused():
    refused(DTypeError, same_type, "a -> a", dtype="float8")


def test_a_kind_is_an_import_path():
    with pytest.raises(AttributeValueError, match="import path"):
        pc.op(rule="a -> a", kind="same")(same_type)


def test_a_custom_op_takes_no_name_of_a_built_in_one():
    with pytest.raises(AttributeValueError, match="built-in"):
        register_custom(op_table()["add"])


# --- mistakes in a call ---------------------------------------------------------------------------


def traced(function, *shapes, dtype="float64"):
    """Trace a call in a job of its own; the report of its error."""
    with pytest.raises(pc.PlanCompilerError) as caught, pc.job("j"):
        function(*(pc.input(f"x{n}", shape, dtype, MESH) for n, shape in enumerate(shapes)))
    report = caught.value.report
    assert report.source.startswith("tests/ops/test_custom.py:")
    return caught.value


CALLS = [
    (project, [(2, 3)], ShapeError, "1 (float64[2, 3])"),
    (project, [(2, 3)] * 3, ShapeError, "3 (float64[2, 3]"),
    (project, [(2, 3), (3,)], AttributeValueError, "shape (3,)"),
    (project, [(), (3, 2)], AttributeValueError, "shape ()"),
    (project, [(2, 3), (4, 5)], ShapeError, "4 for 'k' in input 1"),
    (lambda x, w: project(x, w, factor=2), [(2, 3), (3, 4)], AttributeValueError, "factor=2"),
    (lambda x, w: project(x, w, scale="big"), [(2, 3), (3, 4)], AttributeValueError, "'big'"),
    (lambda x, w: project(x, w, scale=[1.0]), [(2, 3), (3, 4)], AttributeValueError, "(1.0,)"),
    (lambda x: project(x, W), [(2, 3)], TracingError, "Value, ndarray"),
    (lambda x: project(), [(2, 3)], TracingError, "nothing"),
]


@pytest.mark.parametrize(("function", "shapes", "error", "got"), CALLS)
def test_a_wrong_call_is_refused(function, shapes, error, got):
    caught = traced(function, *shapes)
    assert type(caught) is error
    assert got in caught.report.got
    assert "project" in caught.report.op


def test_a_missing_attribute_is_named():
    @pc.op(rule="a -> a")
    def powered(x, *, power):
        return x**power

    caught = traced(powered, (2,))
    assert isinstance(caught, AttributeValueError)
    assert "'power'" in str(caught)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (lambda x: ((2,), "float64"), "(2,)"),
        (lambda x: (x, x), "2"),
        (lambda x: pc.TensorType((2, 2), pc.DType.INT8), "shape (2, 2)"),
    ],
)
def test_wrong_types_from_the_user_are_refused(given, got):
    caught = traced(pc.op(rule="a -> a", infer=given)(same_type), (2,))
    assert isinstance(caught, AttributeValueError)
    assert got in caught.report.got


@pytest.mark.parametrize(
    ("gradient", "got", "expected"),
    [
        (lambda inputs, outputs, grads: (grads[0],), "1", "2"),
        (lambda inputs, outputs, grads: [grads[0]] * 3, "3", "2"),
        (lambda inputs, outputs, grads: grads[0], "1", "2"),
        (lambda inputs, outputs, grads: 1.0, "float", "2 inputs"),
        (lambda inputs, outputs, grads: (grads[0].sum(), None), "float64[]", "float64[3]"),
    ],
)
def test_a_wrong_gradient_is_refused(gradient, got, expected):
    custom = pc.op(rule="a, a -> a", gradient=gradient)(two)
    caught = traced(lambda x, y: pc.gradients(custom(x, y).sum(), [x, y]), (3,), (3,))
    assert isinstance(caught, GradientError)
    report = caught.report
    assert "two" in report.op
    assert got in report.got
    assert expected in report.expected


def test_an_op_without_a_gradient_is_not_differentiated():
    custom = pc.op(rule="a -> a")(same_type)
    caught = traced(lambda x: pc.gradients(custom(x).sum(), [x]), (3,))
    assert isinstance(caught, GradientError)
    assert "has no gradient" in str(caught)


# --- mistakes in a run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x: x[:-1], "float32 of shape (1,)"),
        (lambda x: x.sum(), "float32 of shape ()"),
        (lambda x: x.astype(np.float64), "float64 of shape (2,)"),
        (lambda x: None, "NoneType"),
        (lambda x: "x", "str"),
        (lambda x: (x, x), "2"),
        (lambda x: (), "0"),
    ],
)
def test_a_wrong_output_fails_the_run(function, got):
    function.__name__ = "made_wrong"
    custom = pc.op(rule="a -> a", kind="tests.ops.test_custom:made_wrong")(function)
    with pc.job("j") as job:
        pc.output("y", custom(pc.input("x", (4,), "float32", pc.Placement("cpu", [0, 1]), "S(0)")))
    with (
        pytest.raises(ExecutionError) as caught,
        LocalWorld(compile_plans(job, 2, "rank_per_iter").plans) as world,
    ):
        world.step({"x": np.ones(4, np.float32)})
    report = caught.value.report
    assert report.op == "made_wrong_0"
    assert report.source.startswith("tests/ops/test_custom.py:")
    assert report.rank in (0, 1)
    assert got in report.got
    assert report.expected is not None
    assert "made_wrong" in report.what


def test_plain_numbers_are_scalars():
    @pc.op(rule="[a] -> ...")
    def count(x):
        return len(x)

    assert run_dense_op(count.kind, [np.ones(3, np.float32)], {})[0] == 3


def test_what_the_function_raises_names_the_op():
    @pc.op(rule="a -> a")
    def fails(x):
        raise KeyError("no such thing")

    with pc.job("j") as job:
        pc.output("y", fails(pc.input("x", (4,), "float32", pc.Placement("cpu", [0]))))
    with (
        pytest.raises(ExecutionError, match="no such thing") as caught,
        LocalWorld(compile_plans(job, 1, "rank_per_iter").plans) as world,
    ):
        world.step({"x": np.ones(4, np.float32)})
    assert caught.value.report.op == "fails_0"


BROKEN = {
    "kernel": {},
    "infer": {"infer": lambda x: 1 // 0},
    "gradient": {"gradient": lambda inputs, outputs, grads: {}["no"]},
    "flops": {"flops": lambda inputs, outputs, attrs: 1 // 0},
}


def broken(part):
    """An op of which one function raises an exception that is none of ours."""

    def function(x):
        if part == "kernel":
            raise ZeroDivisionError("no luck")
        return x * 2.0

    return pc.op(rule="a -> a", **BROKEN[part])(function)


def use(op, x, part):
    y = op(x)
    if part == "gradient":
        y.sum().backward()
    return y


PARTS = ["kernel", "infer", "gradient"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wrap", [lambda f: f, pc.compile], ids=["eager", "compiled"])
def test_exceptions_of_users_functions_are_errors_with_a_cause(part, wrap):
    op = broken(part)

    def function(x):
        return use(op, x, part)

    x = pc.tensor(np.ones(4), pc.Placement("cpu", [0]), requires_grad=True)
    with pytest.raises(CustomOpError, match="of the custom op") as caught:
        wrap(function)(x)
    report = caught.value.report
    assert "test_custom.py" in report.source
    assert report.op == op.kind or re.fullmatch(r"function(#\d+)?_0", report.op)
    assert report.rank == 0
    assert "test_custom.py" in report.got
    cause = caught.value.__cause__
    assert isinstance(cause, (ZeroDivisionError, KeyError))
    assert type(cause).__name__ in report.got


@pytest.mark.parametrize("part", PARTS)
def test_exceptions_of_users_functions_in_jobs(part):
    op = broken(part)
    line = 0

    def build():
        nonlocal line
        with pc.job("j") as job:
            x = pc.input("x", (4,), "float64", pc.Placement("cpu", [0]))
            line = inspect.currentframe().f_lineno + 1
            y = op(x)
            if part == "gradient":
                (y,) = pc.gradients(y.sum(), [x])
            pc.output("y", y)
        return job

    with pytest.raises(CustomOpError, match="of the custom op") as caught:  # noqa: SIM117
        with pc.run(build(), cache=False) as session:
            session.step(x=np.ones(4))
    report = caught.value.report
    assert report.source.endswith(f"test_custom.py:{line}")
    assert re.fullmatch(r"function(#\d+)?_0", report.op)
    assert part != "kernel" or report.rank == 0
    assert isinstance(caught.value.__cause__, (ZeroDivisionError, KeyError))


# --- where the code is ----------------------------------------------------------------------------


@pytest.fixture
def allowed(monkeypatch):
    """The allow-list, empty, and forgotten afterwards."""
    names: set[str] = set()
    monkeypatch.setattr(registry, "_ALLOWED", names)
    return names


def module(directory, monkeypatch, name, text):
    (directory / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(directory))


OPS = 'import plancompiler as pc\n\n@pc.op(rule="a -> a")\ndef same(x):\n    return x\n'


def test_ops_are_imported_only_with_leave(tmp_path, monkeypatch, allowed):
    module(tmp_path, monkeypatch, "ops_with_leave", OPS)
    with pytest.raises(UnknownOpError) as caught:
        op_def("ops_with_leave:same")
    assert "--allow-ops ops_with_leave" in caught.value.report.hint
    assert "ops_with_leave" not in sys.modules
    allow_custom_ops("ops_with_leave")
    assert op_def("ops_with_leave:same").rule == "a -> a"
    with pytest.raises(UnknownOpError, match="does not define"):
        op_def("ops_with_leave:other")
    assert allowed == {"ops_with_leave"}


def test_leave_is_for_whole_top_level_modules(allowed):
    with pytest.raises(AttributeValueError, match="top-level"):
        allow_custom_ops("package.module")
    assert not allowed
    allow_custom_ops("ops")
    with pytest.raises(UnknownOpError, match="may not import"):
        op_def("ops_more:same")


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch, allowed):
    module(tmp_path, monkeypatch, "ops_broken", "raise RuntimeError('no luck')\n")
    allow_custom_ops("ops_broken", "ops_missing")
    with pytest.raises(UnknownOpError) as caught:
        op_def("ops_broken:same")
    assert "RuntimeError: no luck" in caught.value.report.got
    with pytest.raises(UnknownOpError, match="cannot be imported"):
        op_def("ops_missing.part:same")


@pytest.mark.parametrize(
    "kind",
    ["nothing", "__main__:same", "m:f.<locals>.g", "../m:f", "m :f", "m:f()", ":f", "m:"],
)
def test_what_is_no_import_path_is_never_imported(kind, allowed):
    allow_custom_ops("m", "__main__")
    with pytest.raises(UnknownOpError, match="no such op") as caught:
        op_def(kind)
    assert caught.value.report.hint is not None


@pytest.mark.processes
def test_the_documented_example_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/custom-ops.md").read_text(), re.S)
    file = tmp_path / "scaled.py"
    file.write_text(code[1])
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
