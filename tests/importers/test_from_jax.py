"""JAX functions as modules: single functions, models, layouts, artefacts, and what is refused."""

from __future__ import annotations

import json
import os
import sys

# JAX reads this once, when it is imported first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import plancompiler as pc
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.cli.program import cli
from plancompiler.errors import FeedError, ModelImportError, PlanCompilerError, UsageError
from plancompiler.importers.model_folder import read_model
from plancompiler.importers.rules import STABLEHLO_RULES
from plancompiler.ir.task import TaskKind
from plancompiler.passes import run_passes
from tests.importers.jax_functions import ATTENTION, FUNCTIONS, REFUSED, UNLIKE, jax, jnp, lax
from tests.importers.jax_models import IDS, LABELS, RATE, of_linen, of_nnx, optax, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]

ONE = pc.Placement("cpu", [0])


def leaves(structure: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(structure)


def with_gradients(function: Any, arguments: Any) -> tuple[Any, list[np.ndarray]]:
    """Results of a function of JAX, and gradients of a weighted sum of the floating ones for the
    floating arguments; none where JAX has none.
    """
    moving = [at for at, each in enumerate(arguments) if each.dtype == np.float32]

    def weighted(*some: Any) -> Any:
        every = list(arguments)
        for at, each in zip(moving, some, strict=True):
            every[at] = each
        out = function(*every)
        floating = [each for each in leaves(out) if each.dtype == jnp.float32]
        total = sum((each * weights(each)).sum() for each in floating)
        return jnp.float32(total), out

    try:
        both = jax.jit(jax.value_and_grad(weighted, tuple(range(len(moving))), has_aux=True))
        (_, out), gradients = both(*(arguments[at] for at in moving))
    except (NotImplementedError, TypeError, ValueError):
        return jax.jit(function)(*arguments), []
    return out, [np.asarray(each) for each in gradients]


def weights(x: Any) -> np.ndarray:
    return np.cos(np.arange(x.size) + 1.0).reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in REFUSED])
def test_a_function_computes_what_it_does_in_jax(name):
    function, arguments = FUNCTIONS[name]
    expected, gradients = with_gradients(function, arguments)
    model = pc.from_jax(function, *arguments, parameters=())
    given = [pc.tensor(each, ONE) for each in arguments]
    moving = [each for each in given if each.dtype is pc.DType.FLOAT32]
    for each in moving:
        each.requires_grad = True
    made = leaves(model(*given))
    total: Any = None
    for mine, theirs in zip(made, leaves(expected), strict=True):
        array, wanted = mine.numpy(), np.asarray(theirs)
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(array, wanted, rtol=UNLIKE.get(name, 2e-5), atol=2e-6)
        if wanted.dtype == np.float32 and mine.requires_grad:
            part = (mine * pc.tensor(weights(wanted), ONE)).sum()
            total = part if total is None else total + part
    if name in UNLIKE or not gradients:
        return
    if total is not None:
        total.backward()
    for each, wanted in zip(moving, gradients, strict=True):
        gradient = np.zeros_like(wanted) if each.grad is None else each.grad.numpy()
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_is_refused_with_a_reason(name):
    function, arguments = FUNCTIONS[name]
    with pytest.raises(PlanCompilerError, match=REFUSED[name]):
        pc.from_jax(function, *arguments, parameters=())


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_one_operation(name):
    function, arguments = ATTENTION[name]
    nodes = pc.from_jax(function, *arguments, parameters=()).graph.nodes
    (node,) = [each for each in nodes if each.target == "imported.attention"]
    assert not {"imported.softmax", "stablehlo.exponential"} & {each.target for each in nodes}
    queries, keys, *_ = node.kwargs["shapes"]
    if "grouped" in name or "copied" in name:
        assert (queries[1], keys[1]) == (4, 2)


@pytest.mark.parametrize(
    "name", ["attention that returns its weights", "attention with a row that sees nothing"]
)
def test_attention_that_is_more_stays_as_it_is(name):
    function, arguments = FUNCTIONS[name]
    nodes = pc.from_jax(function, *arguments, parameters=()).graph.nodes
    assert "imported.attention" not in {each.target for each in nodes}


def test_attention_whose_heads_are_split_needs_no_collective():
    """Forward and backward, with two heads of keys for four of queries."""
    function, given = ATTENTION["grouped"]
    model = pc.from_jax(function, *given, parameters=())
    place = pc.Placement("cpu", [0, 1], ("tp",))
    with pc.job("heads") as job:
        inputs = [
            pc.input(n, e.shape, "float32", place, ["S(2)"])
            for n, e in zip("qk", given, strict=True)
        ]
        made = model(*inputs)
        pc.output("y", made)
        for name, each in zip("qk", pc.gradients((made * made).sum(), inputs), strict=True):
            pc.output(f"gradient {name}", each)
    graph = build_boxing_task_graph(infer_sbp(run_passes(job)[0]), 2)
    made = [each.name for each in graph.families if each.kind is TaskKind.COLLECTIVE_BOXING]
    assert len(made) == 3, made  # the outputs are gathered
    with pc.run(job, ranks=2, cache=False) as session:
        out = session.step(**dict(zip("qk", given, strict=True)))
    slopes = jax.grad(lambda *each: (function(*each) ** 2).sum(), argnums=(0, 1))(*given)
    np.testing.assert_allclose(out["y"], function(*given), rtol=1e-4, atol=1e-5)
    for name, each in zip("qk", slopes, strict=True):
        np.testing.assert_allclose(out[f"gradient {name}"], each, rtol=1e-4, atol=1e-5)


# --- what a function says about gradients ---------------------------------------------------------


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda kept, g: (g,))


@jax.custom_vjp
def reversed_gradient(x, y):
    return x * y


reversed_gradient.defvjp(lambda x, y: (x * y, (x, y)), lambda kept, g: (-g * kept[1], -g * kept[0]))


@jax.custom_jvp
def own_slope(x):
    return jnp.sin(x)


own_slope.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 5 * tangents[0] * primals[0]))


@jax.custom_vjp
def clipped_gradient(x):
    return x * 1.0


clipped_gradient.defvjp(lambda x: (x * 1.0, None), lambda kept, g: (jnp.clip(g, -0.1, 0.1),))

TIES = np.array([[-1.0, 0.0, 0.0, 2.3], [0.5, 0.5, -0.5, 1.0]], np.float32)
OTHERS = np.array([[-1.0, 0.0, 0.0, 2.3], [0.5, 0.7, -0.5, -1.0]], np.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: straight_through(x * 3) * x,
        lambda x: reversed_gradient(x, x + 1),
        lambda x: own_slope(x * 2),
        lambda x: lax.scan(lambda c, r: (c + straight_through(r) * r, c), jnp.zeros(4), x)[0],
        lambda x: jax.jit(lambda y: lax.stop_gradient(y) * x)(x),
        jax.nn.relu,
        lambda x: jax.nn.relu6(x * 6),
        lambda x: jnp.maximum(x, 0),
        lambda x: jnp.maximum(x, OTHERS),
        lambda x: jnp.clip(x, -0.5, 0.5),
        lambda x: lax.clamp(-0.5, x, 0.5),
        lambda x: x.max(1),
        lambda x: jnp.logaddexp(x, OTHERS),
        jnp.abs,
        lambda x: jnp.prod(x, 1),
    ],
)
def test_gradients_are_those_of_jax_where_the_formula_has_others(function):
    expected = function(TIES)
    wanted = jax.grad(lambda x: (function(x) * weights(expected)).sum())(TIES)
    x = pc.tensor(TIES, ONE)
    x.requires_grad = True
    y = pc.from_jax(function, TIES)(x)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)
    (y * pc.tensor(weights(expected), ONE)).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_a_derivative_that_is_not_linear_is_refused():
    with pytest.raises(ModelImportError, match="clipped_gradient"):
        pc.from_jax(lambda x: clipped_gradient(x) * 2, TIES)


# --- models and layouts ---------------------------------------------------------------------------

STEPS = 10
MESHES = {
    "one rank": (pc.Placement("cpu", [[0]], ("dp", "tp")), ["B", "B"], {}),
    "batches": (pc.Placement("cpu", [[0], [1]], ("dp", "tp")), ["S(0)", "B"], {}),
    "batches and heads": (
        pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp")),
        ["S(0)", "B"],
        {
            **{f"*.{name}.kernel": ["B", "S(1)"] for name in ("query", "key", "value", "Dense_0")},
            **{f"*.{name}.bias": ["B", "S(0)"] for name in ("query", "key", "value", "Dense_0")},
            **{f"*.{name}.kernel": ["B", "S(0)"] for name in ("out", "Dense_1")},
        },
    ),
}


def job_of(model: Any, mesh: pc.Placement, sbp: Any, optimizer: Any) -> pc.Job:
    """A training job that reports the loss and every gradient."""
    with pc.job("imported") as job:
        loss = model(
            *(pc.input(name, IDS.shape, "int32", mesh, sbp) for name in model.arguments.template)
        )
        named_parameters = dict(model.named_parameters())
        gradients = pc.gradients(loss, [each.value for each in named_parameters.values()])
        for name, gradient in zip(named_parameters, gradients, strict=True):
            pc.output(f"gradient {name}", gradient)
        optimizer.minimize(loss)
        pc.output("loss", loss)
    return job


def compare(outputs: list[Any], losses: list[float], gradients: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose([float(each["loss"]) for each in outputs], losses, rtol=1e-5)
    floor = 1e-2 * max(np.abs(each).max() for each in gradients.values())
    for name, wanted in gradients.items():
        error = np.abs(outputs[0][f"gradient {name}"] - wanted).max()
        assert error <= 1e-5 * max(np.abs(wanted).max(), floor), name


@pytest.mark.parametrize(
    ("made", "layouts"),
    [
        (of_linen, ["one rank", "batches", "batches and heads"]),
        (lambda: of_linen(rms=True, depth=1), ["one rank"]),
        (of_nnx, ["one rank", "batches"]),
    ],
)
def test_a_transformer_of_flax_trains_as_in_jax(made, layouts):
    loss, params = made()
    wanted = trained(loss, params, optax.adamw(RATE, weight_decay=0.01), STEPS)
    model = pc.from_jax(loss, params, IDS, LABELS)
    assert set(dict(model.named_parameters())) == set(wanted[1])
    kinds = {node.target for node in model.graph.nodes}
    assert kinds >= {"imported.softmax", "imported.rms_norm"} or "imported.layer_norm" in kinds
    for layout in layouts:
        mesh, sbp, places = MESHES[layout]
        model.place(mesh, places)
        job = job_of(model, mesh, sbp, pc.optim.AdamW(RATE, weight_decay=0.01))
        with pc.run(job, ranks=mesh.size, cache=False) as session:
            outputs = [session.step(ids=IDS, labels=LABELS) for _ in range(STEPS)]
        compare(outputs, *wanted)


def test_a_layer_split_over_ranks_has_four_reductions():
    loss, params = of_linen()
    model = pc.from_jax(loss, params, IDS, LABELS)
    mesh = pc.Placement("cpu", [[0, 1]], ("dp", "tp"))
    model.place(mesh, MESHES["batches and heads"][2])
    with pc.job("imported") as job:
        ids, labels = (pc.input(name, IDS.shape, "int32", mesh) for name in ("ids", "labels"))
        value = model(ids, labels)
        pc.optim.SGD(RATE).minimize(value)
        pc.output("loss", value)
    graph = build_boxing_task_graph(infer_sbp(run_passes(job)[0]), 2)
    reductions = [each for each in graph.families if each.kind is TaskKind.COLLECTIVE_BOXING]
    assert len(reductions) == 4 * 2, [each.name for each in reductions]


# --- shard_map ------------------------------------------------------------------------------------

DEVICES = ("rows", "columns")


def on_each_device(x, w, v):
    """A layer split by hand, with one collective of each kind."""
    hidden = jax.nn.relu(x @ w) + 2.0
    y = lax.psum(jnp.tanh(hidden) @ v, "columns")
    every = lax.all_gather(y, "rows", tiled=True)
    here = lax.psum_scatter(every, "rows", tiled=True) * lax.axis_index("rows")
    turned = lax.ppermute(y, "rows", [(0, 1), (1, 0)])
    swapped = lax.all_to_all(hidden, "columns", 1, 0, tiled=True)
    largest = lax.pmax(lax.stop_gradient(jnp.abs(y).max()), DEVICES[0])
    return y + turned + here, lax.pmean((y**2).mean(), "rows") / largest, swapped


def of_devices(checked=True, inner=on_each_device):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        inner,
        mesh=jax.make_mesh((2, 2), DEVICES, axis_types=kinds),
        in_specs=(spec("rows"), spec(None, "columns"), spec("columns", None)),
        out_specs=(spec("rows"), spec(), spec(("rows", "columns"), None)),
        check_vma=checked,
    )

    def loss(x, w, v):
        y, mean, swapped = mapped(x, w, v)
        return (y**2).mean() + mean + (swapped * jnp.arange(2.0)).sum(), y, swapped

    return loss


@pytest.mark.parametrize("checked", [True, False])
def test_what_each_device_computes_is_imported_for_whole_arrays(checked):
    random = np.random.default_rng(3)
    given = [random.normal(size=each).astype("float32") for each in ((8, 6), (6, 8), (8, 3))]
    loss = of_devices(checked)
    model = pc.from_jax(loss, *given, parameters=())
    mesh = model.mesh
    assert (mesh.axes, mesh.size) == (DEVICES, 4)
    wanted = loss(*given)
    slopes = jax.grad(lambda *each: loss(*each)[0], argnums=(0, 1, 2))(*given)
    split = {"x": ["S(0)", "B"], "w": ["B", "S(1)"], "v": ["B", "S(0)"]}
    for place in (pc.Placement("cpu", [[0]], DEVICES), mesh):
        with pc.job("devices") as job:
            inputs = [
                pc.input(name, each.shape, "float32", place, split[name])
                for name, each in zip(split, given, strict=True)
            ]
            made = model(*inputs)
            for number, each in enumerate(made):
                pc.output(f"result {number}", each)
            for name, each in zip(split, pc.gradients(made[0], inputs), strict=True):
                pc.output(f"gradient {name}", each)
        with pc.run(job, ranks=place.size, cache=False) as session:
            out = session.step(**dict(zip(split, given, strict=True)))
        for number, each in enumerate(wanted):
            np.testing.assert_allclose(out[f"result {number}"], each, rtol=1e-5, atol=1e-5)
        for name, each in zip(split, slopes, strict=True):
            np.testing.assert_allclose(out[f"gradient {name}"], each, rtol=1e-4, atol=1e-4)


def test_a_product_split_by_shard_map_has_the_collective_that_it_asks_for():
    """One all-reduce of psum, as each rank computes what its device would."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x, w, v: lax.psum(jnp.tanh(x @ w) @ v, "tp"),
        mesh=mesh,
        in_specs=(spec(), spec(None, "tp"), spec("tp")),
        out_specs=spec(),
    )
    given = [np.ones(each, "float32") for each in ((4, 6), (6, 8), (8, 3))]
    model = pc.from_jax(mapped, *given, parameters=())
    place = pc.Placement("cpu", [0, 1], ("tp",))
    with pc.job("devices") as job:
        inputs = [
            pc.input(name, each.shape, "float32", place, sbp)
            for name, each, sbp in zip("xwv", given, (["B"], ["S(1)"], ["S(0)"]), strict=True)
        ]
        pc.output("y", model(*inputs))
    graph = build_boxing_task_graph(infer_sbp(run_passes(job)[0]), 2)
    made = [each for each in graph.families if each.kind is TaskKind.COLLECTIVE_BOXING]
    assert len(made) == 1, [each.name for each in made]


def test_devices_inside_of_devices():
    """Each row of devices splits a product over its columns."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, 2), DEVICES, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def of_a_row(x, w):
        inner = jax.shard_map(
            lambda x, w: lax.psum(x @ w, "columns") + lax.axis_index("columns").astype("float32"),
            in_specs=(spec(None, "columns"), spec("columns")),
            out_specs=spec("columns"),
            axis_names={"columns"},
        )
        y = inner(jnp.tanh(x), w)
        return y * (lax.axis_index("rows") + 1), lax.psum((y**2).sum(), "rows")

    mapped = jax.jit(
        jax.shard_map(
            of_a_row,
            mesh=mesh,
            in_specs=(spec("rows"), spec()),
            out_specs=(spec("rows"), spec()),
            axis_names={"rows"},
            check_vma=False,
        )
    )
    random = np.random.default_rng(4)
    given = [random.normal(size=each).astype("float32") for each in ((8, 6), (6, 3))]
    model = pc.from_jax(mapped, *given, parameters=())
    y, total = mapped(*given)
    slopes = jax.grad(lambda *each: mapped(*each)[1], argnums=(0, 1))(*given)
    assert (model.mesh.axes, model.mesh.size) == (DEVICES, 4)
    for place in (pc.Placement("cpu", [[0]], DEVICES), model.mesh):
        with pc.job("nested") as job:
            inputs = [
                pc.input(name, each.shape, "float32", place, sbp)
                for name, each, sbp in zip(
                    "xw", given, (["S(0)", "S(1)"], ["B", "S(0)"]), strict=True
                )
            ]
            made = model(*inputs)
            pc.output("y", made[0])
            pc.output("total", made[1])
            for name, each in zip("xw", pc.gradients(made[1], inputs), strict=True):
                pc.output(f"gradient {name}", each)
        with pc.run(job, ranks=place.size, cache=False) as session:
            out = session.step(**dict(zip("xw", given, strict=True)))
        np.testing.assert_allclose(out["y"], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out["total"], total, rtol=1e-5)
        for name, each in zip("xw", slopes, strict=True):
            np.testing.assert_allclose(out[f"gradient {name}"], each, rtol=1e-4, atol=1e-4)


# --- linear algebra -------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [True, False])
def test_eigh_reads_one_triangle(lower):
    """JAX itself makes the matrix symmetric where it takes a gradient."""
    x = np.random.default_rng(5).normal(size=(4, 4)).astype("float32")

    def function(x):
        return lax.linalg.eigh(x, lower=lower, symmetrize_input=False)[1]

    made = pc.from_jax(function, x, parameters=())(pc.tensor(x, ONE))
    np.testing.assert_allclose(made.numpy(), function(x), rtol=1e-5, atol=1e-5)
    other = np.linalg.eigvalsh(x, "U" if lower else "L")
    assert np.abs(made.numpy() - other).max() > 0.1


def operation(line: str, *kinds: str) -> str:
    """A program of one operation, whose last kind is that of the result."""
    given = ", ".join(f"%arg{at}: tensor<{kind}>" for at, kind in enumerate(kinds[:-1]))
    function = f"func.func public @main({given}) -> tensor<{kinds[-1]}>"
    return f"module {{ {function} {{\n%0 = {line}\nreturn %0 : tensor<{kinds[-1]}> }} }}"


def values_and_slopes(program: str, given: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a program computes, and the gradients of a weighted sum."""
    tensors = [pc.tensor(each, ONE, requires_grad=True) for each in given]
    made = pc.from_jax(program, parameters=())(*tensors)
    (made * pc.tensor(weights(made), ONE)).sum().backward()
    return made.numpy(), [each.grad.numpy() for each in tensors]


def slopes_of(function: Any, given: list[np.ndarray]) -> list[np.ndarray]:
    def weighted(*some: Any) -> Any:
        made = function(*some)
        return (made * weights(made)).sum()

    return jax.grad(weighted, tuple(range(len(given))))(*given)


@pytest.mark.parametrize("lower", [True, False])
def test_cholesky_of_stablehlo_reads_one_triangle(lower):
    random = np.random.default_rng(6)
    x = random.normal(size=(4, 4)).astype("float32") + 8 * np.eye(4, dtype="float32")
    line = f"stablehlo.cholesky %arg0, lower = {str(lower).lower()} : tensor<4x4xf32>"

    def wanted(x):
        part = jnp.tril(x) if lower else jnp.triu(x).T
        factor = jnp.linalg.cholesky(part + jnp.tril(part, -1).T)
        return factor if lower else factor.T

    value, (slope,) = values_and_slopes(operation(line, "4x4xf32", "4x4xf32"), [x])
    np.testing.assert_allclose(value, wanted(x), rtol=1e-5, atol=1e-6)
    (expected,) = slopes_of(wanted, [x])
    np.testing.assert_allclose(slope + slope.T, expected + expected.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
@pytest.mark.parametrize("left", [True, False])
def test_triangular_solve_of_stablehlo_reads_one_triangle(left, turned):
    random = np.random.default_rng(7)
    a = random.normal(size=(3, 3)).astype("float32") + 4 * np.eye(3, dtype="float32")
    b = random.normal(size=(3, 2) if left else (2, 3)).astype("float32")
    shape = "3x2xf32" if left else "2x3xf32"
    for lower, unit in ((True, False), (True, True), (False, False), (False, True)):
        line = (
            f'"stablehlo.triangular_solve"(%arg0, %arg1) <{{left_side = {str(left).lower()}, '
            f"lower = {str(lower).lower()}, unit_diagonal = {str(unit).lower()}, "
            f"transpose_a = #stablehlo<transpose {turned}>}}> "
            f": (tensor<3x3xf32>, tensor<{shape}>) -> tensor<{shape}>"
        )

        def wanted(a, b, lower=lower, unit=unit):
            part = jnp.tril(a) if lower else jnp.triu(a)
            part = part - jnp.diag(jnp.diag(part)) + jnp.eye(3) if unit else part
            part = part if turned == "NO_TRANSPOSE" else part.T
            return jnp.linalg.solve(part, b) if left else jnp.linalg.solve(part.T, b.T).T

        value, slopes = values_and_slopes(operation(line, "3x3xf32", shape, shape), [a, b])
        np.testing.assert_allclose(value, wanted(a, b), rtol=1e-5, atol=1e-6)
        for slope, expected in zip(slopes, slopes_of(wanted, [a, b]), strict=True):
            np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-5)


# --- shardings ------------------------------------------------------------------------------------


def sharded(explicit: bool) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """A loss, parameters and inputs with shardings on a mesh of 2 x 2 devices."""
    kinds = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kinds, kinds))

    def split(*axes: Any) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def loss(params, x, y):
        hidden = jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
        if not explicit:
            hidden = lax.with_sharding_constraint(hidden, split("data", "model"))
        out = {"out_sharding": split("data", None)} if explicit else {}
        logits = jnp.matmul(hidden, params["last"]["kernel"], **out)
        logarithms = jax.nn.log_softmax(logits)
        return -(logarithms * jax.nn.one_hot(y, 4, dtype=jnp.float32)).sum(1).mean()

    random = np.random.default_rng(0)

    def array(shape: tuple[int, ...], *axes: Any) -> Any:
        return jax.device_put(random.normal(size=shape).astype(np.float32), split(*axes))

    params = {
        "first": {
            "kernel": array((8, 16), None, "model"),
            "bias": array((16,), "model"),
        },
        "last": {"kernel": array((16, 4), "model", None)},
    }
    x = array((8, 8), "data", None)
    y = jax.device_put((np.arange(8) % 4).astype(np.int32), split("data"))
    return loss, params, x, y


def sharded_job(model: Any, mesh: pc.Placement, layouts: Any) -> pc.Job:
    with pc.job("sharded") as job:
        x = pc.input("x", (8, 8), "float32", mesh, layouts.get("x"))
        y = pc.input("y", (8,), "int32", mesh, layouts.get("y"))
        value = model(x, y)
        pc.optim.SGD(2.0**-4).minimize(value)
        pc.output("loss", value)
    return job


@pytest.fixture(scope="module")
def annotated() -> tuple[Any, dict[str, np.ndarray], list[float]]:
    """A model with shardings, what it is fed, and losses of ten steps of SGD in JAX."""
    loss, params, x, y = sharded(explicit=False)
    model = pc.from_jax(loss, params, x, y)
    step, losses = jax.jit(jax.value_and_grad(loss)), []
    for _ in range(STEPS):
        value, gradients = step(params, x, y)
        params = jax.tree_util.tree_map(lambda p, g: p - 2.0**-4 * g, params, gradients)
        losses.append(float(value))
    return model, {"x": np.asarray(x), "y": np.asarray(y)}, losses


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_annotated_layouts_are_taken(annotated, backend):
    model, given, losses = annotated
    assert (model.mesh.axes, model.mesh.hierarchy) == (("data", "model"), (2, 2))
    layouts = {name: str(sbp) for name, sbp in model.layouts.items()}
    assert layouts == {
        "first.bias": "[B, S(0)]",
        "first.kernel": "[B, S(1)]",
        "last.kernel": "[B, S(0)]",
        "x": "[S(0), B]",
        "y": "[S(0), B]",
    }
    model.annotate(model.mesh, model.layouts)
    job = sharded_job(model, model.mesh, model.layouts)
    asked = [op.sbp for op in job.ops if op.kind == "redistribute" and op.sbp is not None]
    assert pc.NdSbp.parse("[S(0), S(1)]") in asked
    with pc.run(job, ranks=4, backend=backend, cache=False) as session:
        made = [float(session.step(**given)["loss"]) for _ in range(STEPS)]
    np.testing.assert_allclose(made, losses, rtol=1e-5)


def test_annotated_models_run_on_other_meshes_and_in_all_modes(annotated):
    model, given, losses = annotated
    one = pc.Placement("cpu", [0])
    model.place(one)
    with pc.run(sharded_job(model, one, {}), ranks=1, cache=False) as session:
        made = [float(session.step(**given)["loss"]) for _ in range(STEPS)]
    np.testing.assert_allclose(made, losses, rtol=1e-5)
    model.annotate(model.mesh, model.layouts)
    digests = set()
    for mode in ("naive", "rank_per_iter", "rank_per_thread", "rank_per_process"):
        job = sharded_job(model, model.mesh, model.layouts)
        with pc.run(job, ranks=4, mode=mode, cache=False) as session:
            digests.add(session.digest)
    assert len(digests) == 1


def test_a_mesh_with_explicit_axes():
    loss, params, x, y = sharded(explicit=True)
    with jax.set_mesh(x.sharding.mesh):
        expected = float(loss(params, x, y))
        model = pc.from_jax(loss, params, x, y)
    job = sharded_job(model, model.mesh, model.layouts)
    with pc.run(job, ranks=4, cache=False) as session:
        made = session.step(x=np.asarray(x), y=np.asarray(y))["loss"]
    np.testing.assert_allclose(made, expected, rtol=1e-5)


# --- artefacts and structures ---------------------------------------------------------------------


def small(params, x, y):
    hidden = jax.nn.relu(x @ params["a"]["kernel"] + params["a"]["bias"])
    return {"loss": jnp.mean((hidden - y) ** 2), "hidden": (hidden, hidden.sum())}


PARAMS = {"a": {"kernel": np.ones((3, 2), np.float32), "bias": np.zeros(2, np.float32)}}
FED = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory) -> dict[str, Any]:
    exported = jax.export.export(jax.jit(small))(PARAMS, *FED)
    text = jax.jit(small).lower(PARAMS, *FED).as_text(debug_info=True)
    file = tmp_path_factory.mktemp("artefacts") / "small.mlir"
    file.write_text(text)
    return {
        "exported": exported,
        "bytes": exported.serialize(),
        "text": text,
        "bytecode": exported.mlir_module_serialized,
        "file": file,
    }


@pytest.mark.parametrize("kind", ["exported", "bytes", "text", "bytecode", "file"])
def test_artefacts_have_the_names_of_the_function(artefacts, kind):
    model = pc.from_jax(artefacts[kind])
    shapes = {name: (each.shape, each.init) for name, each in model.named_parameters()}
    assert shapes == {"a.bias": ((2,), "missing"), "a.kernel": ((3, 2), "missing")}
    assert list(model.arguments.template) == ["x", "y"]
    model = pc.from_jax(artefacts[kind], PARAMS, *FED)
    model.place(ONE)
    out = model(*(pc.tensor(each, ONE) for each in FED))
    # Text and bytecode have no structures: their results are a tuple.
    flat = leaves(out) if kind in ("exported", "bytes") else list(out)
    assert [float(each.numpy().sum()) for each in flat] == [24.0, 24.0, 9.0]


def test_structures_of_arguments_and_results():
    def function(params, batch, scale, key=None):
        assert key is None
        return [batch["x"] @ params[0] * scale, {"sum": batch["x"].sum(), "same": batch["x"]}]

    batch = {"x": FED[0]}
    model = pc.from_jax(function, [np.ones((3, 2), np.float32)], batch, 2)
    model.place(ONE)
    assert list(dict(model.named_parameters())) == ["0"]
    first, rest = model({"x": pc.tensor(FED[0], ONE)}, 2)
    assert (first.numpy() == 6).all()
    assert rest["sum"].numpy() == 12
    assert rest["same"].shape == (4, 3)
    with pytest.raises(UsageError, match="another value than in the example"):
        model({"x": pc.tensor(FED[0], ONE)}, 3)
    with pytest.raises(FeedError, match="not like that of the example"):
        model({"x": pc.tensor(FED[1], ONE)}, 2)
    named_as = pc.from_jax(
        lambda a, x, b: x @ a["w"] @ b["w"],
        {"w": np.ones((3, 2), np.float32)},
        FED[0],
        {"w": jax.ShapeDtypeStruct((2, 2), np.float32)},
        parameters=(0, 2),
    )
    inits = {name: each.init for name, each in named_as.named_parameters()}
    assert inits == {"a.w": "stored", "b.w": "missing"}


def test_errors_and_ops_have_the_authors_lines():
    def function(x):
        return jnp.sin(x)

    line = function.__code__.co_firstlineno + 1
    x = pc.from_jax(function, TIES)
    (node,) = x.graph.nodes
    assert node.source.line == line
    assert node.source.file.endswith("test_from_jax.py")


# --- bad input ------------------------------------------------------------------------------------

UNKNOWN = """module { func.func public @main(%arg0: tensor<3xf32>) -> tensor<3xf32> {
 %0 = "foo.bar"(%arg0) : (tensor<3xf32>) -> tensor<3xf32>
 %1 = "foo.bar"(%0) : (tensor<3xf32>) -> tensor<3xf32>
 %2 = stablehlo.custom_call @mine(%1) : (tensor<3xf32>) -> tensor<3xf32>
 return %2 : tensor<3xf32> } }
"""


def test_operations_without_a_rule_are_listed_at_once():
    with pytest.raises(ModelImportError) as raised:
        pc.from_jax(UNKNOWN)
    assert "foo.bar (2 times, at -:2, -:3); custom_call.mine (1 times" in str(raised.value)
    try:
        pc.stablehlo_rule("foo.bar")(lambda x: x + 1)
        pc.stablehlo_rule("custom_call.mine")(lambda x, **attrs: x * 2)
        x = pc.tensor(np.zeros(3, np.float32), ONE)
        assert (pc.from_jax(UNKNOWN)(x).numpy() == 4).all()
    finally:
        del STABLEHLO_RULES["foo.bar"], STABLEHLO_RULES["custom_call.mine"]


@pytest.mark.parametrize("kind", ["bytes", "text", "bytecode"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_truncated_artefacts_are_refused(artefacts, kind, share, capfd):
    content = artefacts[kind]
    cut = content[: int(len(content) * share)]
    with pytest.raises(ModelImportError):
        pc.from_jax(cut + "\n" if kind == "text" else bytes(cut))
    assert capfd.readouterr().err == ""


def test_other_bad_input(artefacts, tmp_path):
    symbolic = jax.export.symbolic_shape("n, 3")
    free = jax.export.export(jax.jit(lambda x: x * 2))(jax.ShapeDtypeStruct(symbolic, np.float32))
    with pytest.raises(ModelImportError, match=r"without a fixed shape.*tensor<\?x3xf32>"):
        pc.from_jax(free)
    with pytest.raises(ModelImportError, match="cannot trace"):
        pc.from_jax(lambda x: x if x.sum() > 0 else -x, TIES)
    with pytest.raises(ModelImportError, match="cannot be read"):
        pc.from_jax(tmp_path / "missing.mlir")
    with pytest.raises(UsageError, match="another structure"):
        pc.from_jax(artefacts["exported"], *FED)
    with pytest.raises(UsageError, match="no argument of this number"):
        pc.from_jax(jnp.sin, TIES, parameters=3)
    with pytest.raises(UsageError, match="function of arrays"):
        pc.from_jax(3, TIES)


# --- folders --------------------------------------------------------------------------------------


def command(*words: Any) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_folder_is_trained_where_its_shardings_say(tmp_path, monkeypatch):
    (tmp_path / "make.py").write_text(
        "from tests.importers.test_from_jax import sharded\n\n\n"
        "def make():\n"
        "    loss, *example = sharded(False)\n"
        "    return loss, tuple(example)\n"
    )
    random = np.random.default_rng(1)
    x = random.normal(size=(16, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x.argmax(1) % 4).astype(np.int32))
    folder = tmp_path / "model"
    made = command("import", "jax", f"{tmp_path / 'make.py'}:make", "--out", folder)
    assert made["parameters"] == 8 * 16 + 16 + 16 * 4
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "jaxlib", None)
    settings = ("-D", "optimizer=SGD", "-D", "lr=0.1", "-D", f"data={tmp_path / 'data.npz'}")
    run = ("run", folder, "--steps", 6, "--no-cache", *settings)
    one = command(*run, "--ranks", 1)["losses"]
    assert one[-1] < one[0]
    np.testing.assert_allclose(command(*run, "--ranks", 4)["losses"], one, rtol=1e-5)
    np.testing.assert_allclose(command(*run)["losses"], one, rtol=1e-5)
    command("compile", folder, "--out", tmp_path / "plans", *settings)
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "plans"), "--rank", "3"])
    assert "first.kernel" in shown.output
    assert "test_from_jax.py:" in shown.output


def test_a_file_of_stablehlo_becomes_a_folder(artefacts, tmp_path):
    made = command("import", "jax", artefacts["file"], "--out", tmp_path / "model")
    assert made["inputs"] == {"x": "float32[4, 3]", "y": "float32[4, 2]"}
    again = read_model(tmp_path / "model", STABLEHLO_RULES)
    assert [name for name, _ in again.named_parameters()] == ["a.bias", "a.kernel"]
