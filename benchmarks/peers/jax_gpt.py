"""A peer of benchmarks/compile.py: JAX lowers and compiles the training step of a GPT.

    XLA_FLAGS=--xla_force_host_platform_device_count=64 \
        python benchmarks/peers/jax_gpt.py --layout dp_tp --devices 64 --batch 512

The model is that of examples/gpt.py: token and position embeddings, pre-norm blocks with biases, a
final norm, an output layer without bias, mean cross-entropy, AdamW with a cosine learning rate. One
process compiles once, so that nothing is cached. Prints one JSON line: seconds of tracing, of
lowering and of compiling, and the number of parameters. Needs only `jax`.

    dp_tp   mesh (devices / 8, 8): batch over the first axis; weights that read the residual stream
            split by outputs over the second, those that write to it by inputs
    fsdp    batch over all devices, and each parameter, with its moments, over all devices along
            its longest axis that divides. Where none does, a matrix is split along both axes;
            vectors are then split over as many devices as divide them
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Parameters = dict[str, Any]
TENSOR_PARALLEL = 8
STD = 0.02
EPSILON = 1e-5


def shapes(layers: int, dim: int, length: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter; matrices are [inputs, outputs]."""
    shapes: dict[str, tuple[int, ...]] = {"token": (vocabulary, dim), "position": (length, dim)}
    for layer in range(layers):
        for name in ("query", "key", "value", "projection"):
            shapes[f"{layer}.{name}.weight"] = (dim, dim)
            shapes[f"{layer}.{name}.bias"] = (dim,)
        shapes[f"{layer}.fc1.weight"], shapes[f"{layer}.fc1.bias"] = (dim, 4 * dim), (4 * dim,)
        shapes[f"{layer}.fc2.weight"], shapes[f"{layer}.fc2.bias"] = (4 * dim, dim), (dim,)
        for name in ("norm1", "norm2"):
            shapes[f"{layer}.{name}.scale"] = shapes[f"{layer}.{name}.shift"] = (dim,)
    shapes["norm.scale"] = shapes["norm.shift"] = (dim,)
    shapes["head"] = (dim, vocabulary)
    return shapes


def normed(parameters: Parameters, name: str, x: jax.Array) -> jax.Array:
    """Layer normalisation over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(variance + EPSILON)
    return scaled * parameters[f"{name}.scale"] + parameters[f"{name}.shift"]


def linear(parameters: Parameters, name: str, x: jax.Array) -> jax.Array:
    return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def attention(parameters: Parameters, layer: int, heads: int, x: jax.Array) -> jax.Array:
    """Causal attention on [batch, length, dim]."""
    batch, length, dim = x.shape

    def split(name: str) -> jax.Array:
        return linear(parameters, f"{layer}.{name}", x).reshape(batch, length, heads, dim // heads)

    scores = jnp.einsum("bqhd,bkhd->bhqk", split("query"), split("key"))
    mask = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(mask, scores / math.sqrt(dim // heads), -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), split("value"))
    return linear(parameters, f"{layer}.projection", mixed.reshape(batch, length, dim))


def loss_of(
    parameters: Parameters,
    tokens: jax.Array,
    targets: jax.Array,
    layers: int,
    heads: int,
    activations: NamedSharding,
) -> jax.Array:
    """Mean cross-entropy of [batch, length] tokens."""
    x = parameters["token"][tokens] + parameters["position"]
    x = jax.lax.with_sharding_constraint(x, activations)
    for layer in range(layers):
        x = x + attention(parameters, layer, heads, normed(parameters, f"{layer}.norm1", x))
        hidden = linear(parameters, f"{layer}.fc1", normed(parameters, f"{layer}.norm2", x))
        x = x + linear(parameters, f"{layer}.fc2", jax.nn.gelu(hidden))
        x = jax.lax.with_sharding_constraint(x, activations)
    logits = normed(parameters, "norm", x) @ parameters["head"]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return (log_sum - chosen).mean()


def rate_of(step: jax.Array) -> jax.Array:
    """Cosine from 6e-4 to a tenth of it over 400 steps, after 20 steps of warm-up."""
    warm = jnp.minimum(1.0, (step + 1) / 20)
    done = jnp.clip((step - 20) / 380, 0.0, 1.0)
    return warm * (6e-5 + 0.5 * (6e-4 - 6e-5) * (1 + jnp.cos(math.pi * done)))


def train_step(
    state: dict[str, Any], tokens: jax.Array, targets: jax.Array, **model: Any
) -> tuple[dict[str, Any], jax.Array]:
    """One AdamW step: parameters, two moments and the number of the step."""
    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"], tokens, targets, **model)
    first, second, decay = 0.9, 0.95, 0.01
    step = state["step"] + 1
    rate = rate_of(state["step"])
    updated: dict[str, Any] = {"parameters": {}, "first": {}, "second": {}, "step": step}
    for name, gradient in gradients.items():
        parameter = state["parameters"][name]
        mean = first * state["first"][name] + (1 - first) * gradient
        square = second * state["second"][name] + (1 - second) * gradient * gradient
        update = (mean / (1 - first**step)) / (jnp.sqrt(square / (1 - second**step)) + 1e-8)
        updated["parameters"][name] = parameter - rate * (update + decay * parameter)
        updated["first"][name], updated["second"][name] = mean, square
    return updated, loss


# --- layouts --------------------------------------------------------------------------------------


def tensor_parallel(name: str, _shape: tuple[int, ...]) -> PartitionSpec:
    """As TENSOR_PARALLEL of examples/gpt.py; matrices here are [inputs, outputs]."""
    part = name.split(".", 1)[-1]
    if part.startswith(("query", "key", "value", "fc1")):
        return PartitionSpec(None, "tp") if part.endswith("weight") else PartitionSpec("tp")
    if part in ("projection.weight", "fc2.weight"):
        return PartitionSpec("tp", None)
    return PartitionSpec()


def fully_sharded(mesh: Mesh, _name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Over all devices along the longest axis that divides; see the module's docstring."""
    outer, inner = mesh.shape["outer"], mesh.shape["inner"]
    parts: list[Any] = [None] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda each: -shape[each]):
        if shape[axis] % (outer * inner) == 0:
            parts[axis] = ("outer", "inner")
            return PartitionSpec(*parts)
    if len(shape) == 2 and shape[0] % outer == 0 and shape[1] % inner == 0:
        return PartitionSpec("outer", "inner")
    if shape[0] % outer == 0:
        parts[0] = "outer"
    return PartitionSpec(*parts)


def main() -> None:
    """Trace, lower and compile once; print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=("dp_tp", "fsdp"), required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    for name, default in (("layers", 4), ("dim", 256), ("heads", 8), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=256)
    options = parser.parse_args()
    devices = jax.devices()
    if len(devices) != options.devices:
        parser.error(f"{options.devices} devices wanted, JAX has {len(devices)}: set XLA_FLAGS")
    second = min(TENSOR_PARALLEL, options.devices)
    extents = (options.devices // second, second)
    axes = ("dp", "tp") if options.layout == "dp_tp" else ("outer", "inner")
    mesh = jax.make_mesh(extents, axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    if options.layout == "dp_tp":
        layout, rows = tensor_parallel, PartitionSpec("dp")
    else:
        layout, rows = partial(fully_sharded, mesh), PartitionSpec(("outer", "inner"))

    def abstract(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    sizes = shapes(options.layers, options.dim, options.length, options.vocabulary)
    parameters = {
        name: abstract(shape, jnp.float32, layout(name, shape)) for name, shape in sizes.items()
    }
    state = {
        **dict.fromkeys(("parameters", "first", "second"), parameters),
        "step": abstract((), jnp.int32, PartitionSpec()),
    }
    batch = abstract((options.batch, options.length), jnp.uint8, rows)
    results = (
        jax.tree.map(lambda each: each.sharding, state),
        NamedSharding(mesh, PartitionSpec()),
    )
    step = partial(
        train_step,
        layers=options.layers,
        heads=options.heads,
        activations=NamedSharding(mesh, rows),
    )
    times = [time.perf_counter()]
    traced = jax.jit(step, out_shardings=results, donate_argnums=0).trace(state, batch, batch)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    text = compiled.as_text() or ""
    print(
        json.dumps(
            {
                "version": jax.__version__,
                "parameters": sum(math.prod(shape) for shape in sizes.values()),
                "trace_seconds": times[1] - times[0],
                "lower_seconds": times[2] - times[1],
                "compile_seconds": times[3] - times[2],
                "collectives": {
                    kind: text.count(f" {kind}(")
                    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
                },
            }
        )
    )


if __name__ == "__main__":
    main()
