"""Fused programs: what joins, what stays apart, and that nobody can tell by values or transport."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plancompiler as pc
from plancompiler.errors import AttributeValueError, DTypeError, ShapeError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import DType, Job, TensorType
from plancompiler.ops import apply, infer_types, op_def, op_table
from plancompiler.ops.elementwise_program import Instruction
from plancompiler.ops.fused import KIND, parse_program
from plancompiler.passes import run_passes
from tests.dense import run_dense
from tests.ops.sample import Maker
from tests.ops.samples_elementwise import samples as elementwise_samples
from tests.ops.sharding import run_dense as run_op
from tests.passes.worlds import collectives, compiled, configured, mesh, record_of

Array = np.ndarray
PASSES = ("fuse_elementwise",)
EVERY = ("fold", "cse", "fuse_elementwise", "dce")


def job_of(
    body: Callable[[pc.Value, pc.Value], pc.Value],
    ranks: int = 1,
    sbps: tuple[str, str] = ("S(0)", "S(0)"),
    shape: tuple[int, ...] = (6, 4),
) -> Job:
    with pc.job("elementwise") as job:
        x, y = (
            pc.input(name, shape, "float32", mesh(ranks), sbp)
            for name, sbp in zip("xy", sbps, strict=True)
        )
        pc.output("z", body(x, y))
    return job


def fused(job: Job, passes: tuple[str, ...] = PASSES) -> Job:
    rewritten, _ = run_passes(configured(job, passes=passes))
    return rewritten


def programs(job: Job) -> list[tuple[str, ...]]:
    return [tuple(map(str, op.attr("program"))) for op in fused(job).ops if op.kind == KIND]  # type: ignore[arg-type]


def feeds(job: Job) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        name: rng.uniform(0.5, 2, value.shape).astype("float32")
        for name, value in job.inputs.items()
    }


def dense(job: Job) -> Array:
    return run_dense(job, 1, feeds(job))[0]["z"]


# --- what joins -----------------------------------------------------------------------------------


def test_a_chain_becomes_one_program() -> None:
    job = job_of(lambda x, y: ((x * 0.5).tanh() * y).exp())
    assert programs(job) == [('mul_scalar 0 {"scalar":0.5}', "tanh 2", "mul 3,1", "exp 4")]
    assert record_of(job, "fuse_elementwise", passes=PASSES).summary == "fused 4 ops into 1"
    np.testing.assert_array_equal(dense(fused(job)), dense(job))


def test_a_value_used_twice_inside_joins() -> None:
    job = job_of(lambda x, y: (u := x.exp()) * u.tanh() / y)
    assert len(programs(job)) == 1
    np.testing.assert_array_equal(dense(fused(job)), dense(job))


def test_old_and_new_values_of_a_variable_do_not_mix() -> None:
    with pc.job("updates") as job:
        weight = pc.nn.Parameter((4,), "float32", "ones")
        weight.name = "w"
        weight.place(mesh(1))
        doubled = weight.value * 2.0
        grad = weight.value * 0.5
        updated = apply("sgd_update", weight.value, grad, pc.full((), 1.0, "float32", mesh(1)))
        pc.output("z", doubled * updated.exp())
    assert programs(job) == []
    with pc.run(configured(job, passes=PASSES)) as session:
        assert session.step()["z"][0] == pytest.approx(2.0 * np.exp(0.5))


# --- nobody can tell ------------------------------------------------------------------------------

BODIES: dict[str, Callable[[pc.Value, pc.Value], pc.Value]] = {
    "linear": lambda x, y: (x.sum(0) * 3.0 + y.sum(0)) * 0.5,
    "gated": lambda x, y: (x @ y.T).tanh() * (x @ y.T),
    "a residual": lambda x, y: (x @ y.T).gelu() * 0.5 + (x @ x.T),
    "extremes": lambda x, y: pc.maximum(x.max(0), y.max(0)) * 2.0,
    "all": lambda x, y: ((x.exp() * y - 1.0).sigmoid() / (y + 1.0)).sum(),
}


@pytest.mark.parametrize("sbps", [("S(0)", "S(0)"), ("S(1)", "S(1)"), ("B", "S(0)")])
@pytest.mark.parametrize("name", BODIES)
def test_transport_does_not_change(name: str, sbps: tuple[str, str]) -> None:
    job = job_of(BODIES[name], 2, sbps, shape=(6, 6))
    plain, ours = compiled(job, passes=()), compiled(job, passes=PASSES)
    assert collectives(ours).total() <= collectives(plain).total()
    assert collectives(ours)["all_gather"] <= collectives(plain)["all_gather"]
    with LocalWorld(ours.plans) as world:
        outputs = world.step(feeds(job))["z"]
    np.testing.assert_allclose(outputs, dense(job), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 1 << 17, (1 << 17) + 5])
def test_blocks_cover_every_element(count: int) -> None:
    x = np.linspace(-3, 3, count)
    attrs = {"program": ("tanh 0", "mul 1,0", 'add_scalar 2 {"scalar":1.0}')}
    (actual,) = run_op(KIND, [x], attrs)
    np.testing.assert_array_equal(actual, np.tanh(x) * x + 1.0)


def test_every_fusible_kind_does_not_care_where_a_block_is() -> None:
    """A block of the result is the result of a block, for the kinds whose calls are listed."""
    seen = set()
    for sample in elementwise_samples(Maker("float64")):
        shapes = {array.shape for array in sample.inputs}
        if not op_def(sample.kind).elementwise or len(shapes) != 1 or not shapes.pop():
            continue
        (whole,) = run_op(sample.kind, sample.inputs, sample.attrs)
        block = [array[1:] for array in sample.inputs]
        (part,) = run_op(sample.kind, block, sample.attrs)
        np.testing.assert_array_equal(part, whole[1:], err_msg=str(sample))
        seen.add(sample.kind)
    assert len(seen) > 40
    for definition in op_table().values():
        assert not (definition.elementwise and (definition.mutates or definition.source))


# --- random programs ------------------------------------------------------------------------------

UNARY = ("exp", "tanh", "neg", "abs", "sigmoid", "relu", "square")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
SCALARS = ("mul_scalar", "add_scalar", "sub_scalar", "maximum_scalar")
Choice = tuple[str, int, int, float]


def build(choices: list[Choice], ranks: int) -> Job:
    """A job of random elementwise ops on two inputs, a fill and what came before."""

    def body(x: pc.Value, y: pc.Value) -> pc.Value:
        made = [x, y, pc.full_like(x, 1.0)]
        for kind, first, second, number in choices:
            a, b = made[first % len(made)], made[second % len(made)]
            if kind in BINARY:
                made.append(a._binary(kind, b))
            elif kind in SCALARS:
                made.append(a._binary(kind.removesuffix("_scalar"), number))
            else:
                made.append(a._unary(kind))
            made[-1] = made[-1] if kind in ("tanh", "sigmoid") else made[-1].tanh()
        total = made[-1] + x * 0.25
        return total if len(made) < 6 else total * made[-2]

    return job_of(body, ranks)


choices = st.lists(
    st.tuples(
        st.sampled_from(UNARY + BINARY + SCALARS),
        st.integers(0, 7),
        st.integers(0, 7),
        st.sampled_from([0.0, 1.0, -1.0, 0.5]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(choices)
def test_random_programs_keep_their_values(chosen: list[Choice]) -> None:
    job = build(chosen, 1)
    rewritten = fused(job, EVERY)
    assert len(rewritten.ops) <= len(job.ops)
    np.testing.assert_allclose(dense(rewritten), dense(job), rtol=1e-5, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(choices)
def test_random_programs_run_on_two_ranks(chosen: list[Choice]) -> None:
    job = build(chosen, 2)
    with LocalWorld(compiled(job, passes=EVERY).plans) as world:
        outputs = world.step(feeds(job))["z"]
    np.testing.assert_allclose(outputs, dense(job), rtol=1e-5, atol=1e-6)


# --- the text of programs -------------------------------------------------------------------------

F32, F64 = TensorType((2, 3), DType.FLOAT32), TensorType((2, 3), DType.FLOAT64)


def test_instructions_are_read_back() -> None:
    made = Instruction("clip", (3,), (("high", float("inf")), ("low", -0.5)))
    assert parse_program((str(made),)) == (made,)


@pytest.mark.parametrize(
    ("inputs", "program", "error", "part"),
    [
        ((F32,), (), AttributeValueError, "needs a program"),
        ((F32,), ("matmul 0,0",), AttributeValueError, "cannot run this kind"),
        ((F32,), ("exp",), AttributeValueError, "does not parse"),
        ((F32,), ("exp x",), AttributeValueError, "does not parse"),
        ((F32,), ("exp 0 {",), AttributeValueError, "does not parse"),
        ((F32,), ("exp 1",), AttributeValueError, "not there yet"),
        ((F32,), ("exp 0", "tanh 0"), AttributeValueError, "does not read"),
        ((F32, F32), ("exp 0",), AttributeValueError, "does not read"),
        ((), ("exp 0",), AttributeValueError, "0 inputs"),
        ((F32,) * 7, ("exp 0",), AttributeValueError, "7 inputs"),
        ((F32, TensorType((2,), DType.FLOAT32)), ("mul 0,1",), ShapeError, "one shape"),
        ((F32, F64), ("mul 0,1",), DTypeError, "one dtype"),
    ],
)
def test_wrong_programs_are_refused(
    inputs: tuple[TensorType, ...], program: tuple[str, ...], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        infer_types(KIND, inputs, {"program": program})
