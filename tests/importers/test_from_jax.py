"""JAX functions as modules: single functions, models, layouts, artefacts, and what is refused."""

from __future__ import annotations

import os

# JAX reads this once, when it is imported first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import PlanCompilerError
from tests.importers.jax_functions import FUNCTIONS, REFUSED, UNLIKE, jax, jnp

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
