"""Random tensors. `placement` is where they are made; `sbp` demands their layout.

Values depend on the job's seed, the step, `key` and the element's global index, so they are the
same on every layout; by default each call of a job has its own key. Outside of jobs the generator
has seed and step, and counts the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.draws import key_of, takes_generator
from plancompiler.frontend.functions.creation import made
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.out import takes_out
from plancompiler.ir import AttrValue, DType, Placement, Value
from plancompiler.ir.operators import SbpLike, whole_numbers
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "permutation",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "uniform",
]


def _drawn(
    kind: str,
    shape: int | Sequence[int],
    dtype: DType | str,
    placement: Placement,
    sbp: SbpLike | None,
    key: int | None,
    **attrs: AttrValue,
) -> Value:
    extents = whole_numbers("extents", shape)
    attrs.update(shape=extents, dtype=str(DType.parse(dtype)), key=key_of(key))
    return made(kind, attrs, placement, sbp)


@takes_out
@takes_generator
def uniform(
    shape: int | Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """Numbers from `low` to `high`, all equally likely, new ones in each step."""
    return _drawn("uniform", shape, dtype, placement, sbp, key, low=float(low), high=float(high))


@takes_out
@takes_generator
def normal(
    shape: int | Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """Normally distributed numbers, new ones in each step."""
    return _drawn("normal", shape, dtype, placement, sbp, key, mean=float(mean), std=float(std))


@takes_out
@takes_generator
def bernoulli(
    shape: int | Sequence[int],
    p: float = 0.5,
    *,
    dtype: DType | str = "bool",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """1 (or True) with probability `p`, else 0, new ones in each step."""
    return _drawn("bernoulli", shape, dtype, placement, sbp, key, p=float(p))


@takes_out
@takes_generator
def randint(
    shape: int | Sequence[int],
    low: int,
    high: int,
    *,
    dtype: DType | str = "int64",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """Whole numbers from `low` to `high` - 1, all equally likely, new ones in each step."""
    return _drawn("randint", shape, dtype, placement, sbp, key, low=low, high=high)


@takes_out
@takes_generator
def permutation(
    count: int,
    *,
    dtype: DType | str = "int64",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """The numbers from 0 to `count` - 1 in a random order, a new one in each step."""
    return _drawn("permutation", (count,), dtype, placement, sbp, key)


@takes_out
@takes_generator
def exponential(
    shape: int | Sequence[int],
    rate: float = 1.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """Numbers x >= 0 of density rate · exp(-rate · x), new ones in each step."""
    return _drawn("exponential", shape, dtype, placement, sbp, key, rate=float(rate))


@takes_out
@takes_generator
def geometric(
    shape: int | Sequence[int],
    p: float,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """How many trials of probability `p` it takes to the first success: 1 or more."""
    return _drawn("geometric", shape, dtype, placement, sbp, key, p=float(p))


@takes_out
@takes_generator
def cauchy(
    shape: int | Sequence[int],
    median: float = 0.0,
    scale: float = 1.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """Numbers of a Cauchy distribution, half of them within `scale` of `median`."""
    return _drawn(
        "cauchy", shape, dtype, placement, sbp, key, median=float(median), scale=float(scale)
    )


@takes_out
@takes_generator
def log_normal(
    shape: int | Sequence[int],
    mean: float = 1.0,
    std: float = 2.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Value:
    """Numbers whose logarithms are normally distributed, new ones in each step."""
    return _drawn("log_normal", shape, dtype, placement, sbp, key, mean=float(mean), std=float(std))


# --- as NumPy and PyTorch name them ---------------------------------------------------------------


@takes_out
def rand(*shape: int | Sequence[int], placement: Placement, out: Any = None, **named: Any) -> Value:
    """`uniform` from 0 to 1: `pc.rand(2, 3, placement=mesh)`, with its keywords."""
    return uniform(_extents(shape), placement=placement, **named)


@takes_out
def randn(
    *shape: int | Sequence[int], placement: Placement, out: Any = None, **named: Any
) -> Value:
    """`normal` of mean 0 and deviation 1: `pc.randn(2, 3, placement=mesh)`, with its keywords."""
    return normal(_extents(shape), placement=placement, **named)


def _extents(shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    return whole_numbers("extents", shape[0] if len(shape) == 1 else shape)


@takes_out
def rand_like(x: Tensor, *, out: Any = None, **named: Any) -> Tensor:
    """`uniform` from 0 to 1 of the shape, dtype and placement of x, with its keywords."""
    return uniform(x.shape, **like(x, named))  # type: ignore[return-value]  # as x is


@takes_out
def randn_like(x: Tensor, *, out: Any = None, **named: Any) -> Tensor:
    """`normal` of mean 0 and deviation 1 of x's shape, dtype and placement, with its keywords."""
    return normal(x.shape, **like(x, named))  # type: ignore[return-value]  # as x is


@takes_out
def randint_like(x: Tensor, low: int, high: int, *, out: Any = None, **named: Any) -> Tensor:
    """`randint` of the shape, dtype and placement of x, with its keywords."""
    return randint(x.shape, low, high, **like(x, named))  # type: ignore[return-value]  # as x is


@takes_out
@takes_generator
def multinomial(
    x: Tensor,
    count: int,
    replacement: bool = False,
    *,
    key: int | None = None,
    generator: Any = None,
    out: Any = None,
) -> Tensor:
    """`count` int64 indices for each row of weights x [..., n], drawn with chances in proportion to
    the weights: [..., count]. Without `replacement` each index is drawn once at most, and there are
    `count` weights above zero; fewer give others after them.

    The index of the least of exponential numbers, each over its weight, is such a draw, and those
    of the least ones are draws without replacement (P. S. Efraimidis and P. G. Spirakis, 2006).
    """
    if x.ndim < 1 or not x.dtype.is_floating:
        raise AttributeValueError(
            "multinomial draws by floating weights",
            got=f"{x.dtype} {x.shape}",
            expected="[..., n]",
        )
    if not 1 <= count <= (x.shape[-1] if not replacement else count):
        raise AttributeValueError(
            "multinomial cannot draw this many", got=count, expected=f"1 to {x.shape[-1]}"
        )
    weights = apply_one("stop_gradient", x)
    rows = weights.reshape((*x.shape[:-1], 1, x.shape[-1])) if replacement else weights
    shape = (*x.shape[:-1], count, x.shape[-1]) if replacement else x.shape
    named = {**like(x, {}), "key": key}
    named.pop("sbp", None)
    draws: Any = exponential(shape, **named)
    chances: Tensor = rows / draws
    if replacement:
        return apply_one("argmax", chances, axis=chances.ndim - 1, keepdims=False)
    places: Tensor = apply("topk", chances, axis=x.ndim - 1, k=count, largest=True)[1]
    return places


def like(x: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a draw like a tensor; eager, in its layout as far as that is not partial."""
    spec = getattr(x, "spec", None)
    layout = {} if spec is None else {"sbp": spec.sbp.reduced()}
    return {"dtype": x.dtype, "placement": x.placement, **layout, **named}
