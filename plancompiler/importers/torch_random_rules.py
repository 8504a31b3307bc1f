"""The rules of PyTorch's random numbers: those of `pc`, and not the same ones as PyTorch draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.frontend import functions as f
from plancompiler.importers.rules import torch_rule
from plancompiler.ir import Placement, TensorType

# Generators, devices and layouts are PyTorch's, and do not count here.


def _draws(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return torch_rule(*targets, typed=True, placed=True)


@_draws("aten.rand.default", "aten.rand_like.default")
def _rand(*given: Any, result: TensorType, placement: Placement, **named: Any) -> Any:
    return f.uniform(result.shape, dtype=result.dtype, placement=placement)


@_draws("aten.randn.default", "aten.randn_like.default")
def _randn(*given: Any, result: TensorType, placement: Placement, **named: Any) -> Any:
    return f.normal(result.shape, dtype=result.dtype, placement=placement)


@_draws("aten.uniform.default")
def _uniform(
    x: Any,
    low: float = 0.0,
    high: float = 1.0,
    *,
    result: TensorType,
    placement: Placement,
    **_: Any,
) -> Any:
    return f.uniform(result.shape, low, high, dtype=result.dtype, placement=placement)


@_draws("aten.normal_functional.default")
def _normal(
    x: Any,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    result: TensorType,
    placement: Placement,
    **_: Any,
) -> Any:
    return f.normal(result.shape, mean, std, dtype=result.dtype, placement=placement)


@_draws("aten.exponential.default")
def _exponential(
    x: Any, rate: float = 1.0, *, result: TensorType, placement: Placement, **named: Any
) -> Any:
    return f.exponential(result.shape, rate, dtype=result.dtype, placement=placement)


@_draws("aten.bernoulli.default", "aten.bernoulli.p")
def _bernoulli(
    x: Any, p: float | None = None, *, result: TensorType, placement: Placement, **named: Any
) -> Any:
    """1 with the chances that x holds, or with the chance p."""
    drawn = f.uniform(result.shape, placement=placement)
    return f.less(drawn, x if p is None else p).cast(result.dtype)


@_draws("aten.randint.default", "aten.randint.low")
def _randint(*given: Any, result: TensorType, placement: Placement, **named: Any) -> Any:
    *bounds, _ = given
    low, high = bounds if len(bounds) > 1 else (0, *bounds)
    return f.randint(result.shape, low, high, dtype=result.dtype, placement=placement)


@_draws("aten.randint_like.default", "aten.randint_like.low_dtype")
def _randint_like(x: Any, *bounds: int, result: TensorType, placement: Placement, **_: Any) -> Any:
    return _randint(*bounds, None, result=result, placement=placement)


@_draws("aten.randperm.default")
def _randperm(count: int, *, result: TensorType, placement: Placement, **named: Any) -> Any:
    return f.permutation(count, dtype=result.dtype, placement=placement)


@torch_rule("aten.multinomial.default")
def _multinomial(x: Any, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    return f.multinomial(x, count, replacement)
