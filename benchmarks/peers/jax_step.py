"""A peer of benchmarks/step.py: a training step in JAX, data-parallel over devices of one process.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 \
        python benchmarks/peers/jax_step.py --model mlp --devices 2

On each line of stdin, a number of steps, it runs so many and prints one JSON line with the seconds
per step. The first line it prints, once it has compiled, says what it is: version, number of
parameters, loss before any step. Models, batches and optimizers are those of step.py; state is
donated, and batches are on their devices already. Needs only `jax`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_gpt import STD, shapes, train_step

WIDTHS = (784, 2048, 2048, 10)


def mlp_loss(parameters: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross-entropy of rows [batch, 784]."""
    for layer in range(len(WIDTHS) - 1):
        x = x @ parameters[f"{layer}.weight"] + parameters[f"{layer}.bias"]
        if layer < len(WIDTHS) - 2:
            x = jax.nn.relu(x)
    chosen = jnp.take_along_axis(x, y[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(x, axis=-1) - chosen).mean()


def mlp_step(
    state: dict[str, jax.Array], x: jax.Array, y: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of plain gradient descent."""
    loss, gradients = jax.value_and_grad(mlp_loss)(state, x, y)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, state, gradients), loss


def mlp_state(random: np.random.Generator) -> dict[str, Any]:
    state = {}
    for layer, (inputs, outputs) in enumerate(pairwise(WIDTHS)):
        bound = 1 / math.sqrt(inputs)
        state[f"{layer}.weight"] = random.uniform(-bound, bound, (inputs, outputs))
        state[f"{layer}.bias"] = random.uniform(-bound, bound, outputs)
    return {name: value.astype(np.float32) for name, value in state.items()}


def gpt_state(random: np.random.Generator, layers: int, dim: int) -> dict[str, Any]:
    parameters = {}
    for name, shape in shapes(layers, dim, 128, 256).items():
        if name.endswith((".bias", ".shift")):
            value = np.zeros(shape)
        elif name.endswith(".scale"):
            value = np.ones(shape)
        else:
            value = random.normal(scale=STD, size=shape)
        parameters[name] = value.astype(np.float32)
    zeros = {name: np.zeros_like(value) for name, value in parameters.items()}
    return {"parameters": parameters, "first": zeros, "second": zeros, "step": np.int32(0)}


def main() -> None:
    """Compile, then run what stdin asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("mlp", "gpt"), required=True)
    parser.add_argument("--devices", type=int, required=True)
    options = parser.parse_args()
    devices = jax.devices()
    if len(devices) != options.devices:
        parser.error(f"{options.devices} devices wanted, JAX has {len(devices)}: set XLA_FLAGS")
    mesh = Mesh(np.array(devices), ("dp",))
    split, whole = NamedSharding(mesh, PartitionSpec("dp")), NamedSharding(mesh, PartitionSpec())
    random = np.random.default_rng(0)
    if options.model == "mlp":
        x = random.normal(size=(512, 784)).astype(np.float32)
        y = random.integers(0, 10, 512)
        start, function = mlp_state(random), mlp_step
    else:
        x, y = random.integers(0, 256, (2, 16, 128), dtype=np.uint8)
        layers = 4
        start = gpt_state(random, layers, 256)
        function = partial(train_step, layers=layers, heads=4, activations=split)
    # Copies: donating what JAX shares with NumPy is not possible.
    state = jax.tree.map(lambda each: jax.device_put(np.array(each), whole), start)
    rows = jax.device_put(x, split), jax.device_put(y, split)
    results = jax.tree.map(lambda _: whole, state), whole
    step = jax.jit(function, out_shardings=results, donate_argnums=0)
    state, loss = step(state, *rows)
    parameters = state if options.model == "mlp" else state["parameters"]
    count = sum(value.size for value in jax.tree.leaves(parameters))
    say({"version": jax.__version__, "parameters": count, "loss": float(loss)})
    for line in sys.stdin:
        steps = int(line)
        begin = time.perf_counter()
        for _ in range(steps):
            state, loss = step(state, *rows)
            float(loss)
        jax.block_until_ready(state)
        say({"seconds": (time.perf_counter() - begin) / steps})


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
