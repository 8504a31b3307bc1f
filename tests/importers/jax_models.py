"""A small transformer in both of Flax's forms, and its training in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed: scripts/test --importers installs it")
optax = pytest.importorskip(
    "optax", reason="Optax is not installed: scripts/test --importers installs it"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx  # noqa: E402

WORDS, WIDTH, HEADS, BATCH, LENGTH = 16, 16, 4, 4, 8
RATE = 2.0**-10
"""Exact in float32, which learning rates are."""
IDS = (np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH) * 5 + 1) % WORDS
LABELS = ((IDS * 3 + 1) % WORDS).astype(np.int32)

Loss = Callable[..., Any]


class Block(linen.Module):
    """Attention and a feed-forward part, each behind a norm."""

    rms: bool

    @linen.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        norm = linen.RMSNorm if self.rms else linen.LayerNorm
        inner = norm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=HEADS)(inner, inner, mask=mask)
        inner = linen.gelu(linen.Dense(4 * WIDTH)(norm()(x)))
        return x + linen.Dense(WIDTH)(inner)


class Transformer(linen.Module):
    """A causal language model."""

    rms: bool = False
    depth: int = 2

    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(WORDS, WIDTH, name="embed")(ids)
        x = x + self.param("positions", linen.initializers.normal(0.1), (LENGTH, WIDTH))
        mask = linen.make_causal_mask(ids)
        for number in range(self.depth):
            x = Block(self.rms, name=f"block_{number}")(x, mask)
        return linen.Dense(WORDS, name="head")(linen.LayerNorm(name="norm")(x))


def of_linen(**options: Any) -> tuple[Loss, Any]:
    """A loss of parameters, words and labels, and parameters."""
    model = Transformer(**options)

    def loss(params: Any, ids: Any, labels: Any) -> Any:
        logits = model.apply({"params": params}, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, jax.jit(model.init)(jax.random.key(0), IDS)["params"]


class NnxBlock(nnx.Module):
    """The same with modules that hold their arrays."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.down(nnx.silu(self.up(self.second(x))))


class NnxTransformer(nnx.Module):
    """A causal language model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def of_nnx() -> tuple[Loss, Any]:
    """The same as `of_linen`; parameters are the state of a module."""
    definition, state = nnx.split(nnx.jit(lambda: NnxTransformer(nnx.Rngs(0)))(), nnx.Param)[:2]

    def loss(state: Any, ids: Any, labels: Any) -> Any:
        logits = nnx.merge(definition, state)(ids)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    return loss, state


def named(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by the names that their parameters have."""
    made = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(getattr(key, "key", getattr(key, "idx", None))) for key in path]
        made[".".join(key for key in keys if key != "None")] = np.asarray(leaf)
    return made


def trained(loss: Loss, params: Any, optimizer: Any, steps: int) -> tuple[list[float], Any]:
    """Losses of steps, and gradients of the first, by name."""

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, IDS, LABELS)
        updates, state = optimizer.update(gradients, state, params)
        return value, gradients, optax.apply_updates(params, updates), state

    state, losses, first = jax.jit(optimizer.init)(params), [], None
    for _ in range(steps):
        value, gradients, params, state = step(params, state)
        first = gradients if first is None else first
        losses.append(float(value))
    return losses, named(first)
