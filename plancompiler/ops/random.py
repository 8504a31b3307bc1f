"""Counter-based random numbers: every element's number follows from its global index alone.

The generator is SplitMix64 (G. L. Steele, D. Lea, C. H. Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014): word i of a stream is `mix(stream + (i + 1) * GOLDEN)`. A stream is named
by (seed, key, step). Any device can compute any box of a random tensor, so results depend neither
on the number of devices nor on who holds which box.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from plancompiler.ir.shard import Region, region_shape
from plancompiler.ops.kernel import is_numpy
from plancompiler.ops.registry import Array, KernelContext

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_WORDS_AT_ONCE = 1 << 15
"""Words that are made at once: a quarter of a MiB, so that the mixing stays in cache."""

Words = np.ndarray[Any, np.dtype[np.uint64]]


def mix(value: int) -> int:
    """The mixing function of SplitMix64 on one 64-bit word."""
    value &= _MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> _SHIFTS[2])


def mix_words(words: Words, work: Words) -> None:
    """`mix` on every word in place; `work` is a buffer of the same shape."""
    np.right_shift(words, np.uint64(_SHIFTS[0]), out=work)
    np.bitwise_xor(words, work, out=words)
    np.multiply(words, np.uint64(_MULTIPLIERS[0]), out=words)
    np.right_shift(words, np.uint64(_SHIFTS[1]), out=work)
    np.bitwise_xor(words, work, out=words)
    np.multiply(words, np.uint64(_MULTIPLIERS[1]), out=words)
    np.right_shift(words, np.uint64(_SHIFTS[2]), out=work)
    np.bitwise_xor(words, work, out=words)


@lru_cache(maxsize=4096)
def _key_number(key: int | str) -> int:
    """A key as 64 bits: the same in every process, unlike `hash`."""
    if isinstance(key, str):
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return key & _MASK


def stream(seed: int, key: int | str, step: int = 0) -> int:
    """The 64-bit start of the stream named by these three."""
    state = 0
    for part in (seed, _key_number(key), step):
        state = mix(state + GOLDEN ^ mix(part + GOLDEN))
    return state


def stream_of(context: KernelContext) -> int:
    """The start of the stream of a kernel with the attribute `key`, in its step."""
    return stream(context.seed, context.attrs["key"], context.step)


def _pieces(region: Region) -> Iterator[Region]:
    """The box cut into boxes of at most about `_WORDS_AT_ONCE` elements, in row-major order."""
    if prod(region_shape(region)) <= _WORDS_AT_ONCE:
        yield region
        return
    # Cut the first axis of extent above 1; what is left over is cut again.
    axis = next(axis for axis, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[axis]
    inner = prod(region_shape(region[axis + 1 :]))
    step = max(1, _WORDS_AT_ONCE // inner)
    for low in range(start, stop, step):
        piece = (*region[:axis], (low, min(low + step, stop)), *region[axis + 1 :])
        if inner > _WORDS_AT_ONCE:
            yield from _pieces(piece)
        else:
            yield piece


def offsets(shape: tuple[int, ...], region: Region, arrays: Any = np) -> Words:
    """`GOLDEN * index` (modulo 2**64) of each element of a box, by its row-major global index."""
    total: Words = arrays.zeros((), np.uint64)
    stride = 1
    for extent, (start, stop) in zip(reversed(shape), reversed(region), strict=True):
        steps = arrays.arange(start, stop, dtype=np.uint64)
        np.multiply(steps, np.uint64(stride * GOLDEN & _MASK), out=steps)
        total = np.add(steps.reshape(-1, *[1] * total.ndim), total)
        stride *= extent
    return total


def words(start: int, shape: tuple[int, ...], region: Region, arrays: Any = np) -> Words:
    """The stream's words of a box of a tensor with this global shape, one per element."""
    mixed: Words = arrays.asarray(offsets(shape, region, arrays))
    np.add(mixed, np.uint64((start + GOLDEN) & _MASK), out=mixed)
    mix_words(mixed, np.empty_like(mixed))
    return mixed


def _fill(
    start: int,
    shape: tuple[int, ...],
    region: Region,
    dtype: np.dtype[Any],
    convert: Any,
    arrays: Any,
) -> Array:
    if not is_numpy(arrays):  # no cache is worth pieces there
        made: Array = convert(words(start, shape, region, arrays)).astype(dtype)
        return made
    numbers: Array = arrays.empty(region_shape(region), dtype)
    for piece in _pieces(region):
        index = tuple(
            slice(low - origin, high - origin)
            for (low, high), (origin, _) in zip(piece, region, strict=True)
        )
        numbers[index] = convert(words(start, shape, piece, arrays))
    return numbers


def _uniform_of(bits: Words) -> Array:
    numbers: Array = (bits >> np.uint64(11)) * 2.0**-53
    return numbers


def _normal_of(bits: Words) -> Array:
    # Two uniform numbers of 32 bits from each word; the first is never 0, for its logarithm.
    radius = ((bits >> np.uint64(32)) + np.uint64(1)) * 2.0**-32
    angle = (bits & np.uint64(0xFFFFFFFF)) * (2.0 * np.pi * 2.0**-32)
    numbers: Array = np.sqrt(-2.0 * np.log(radius)) * np.cos(angle)
    return numbers


def uniform(
    seed: int,
    key: int | str,
    step: int,
    shape: tuple[int, ...],
    region: Region,
    dtype: np.dtype[Any] | str = "float64",
    arrays: Any = np,
) -> Array:
    """Numbers in [0, 1), computed with 53 bits, of a box of a tensor with global `shape`.

    In a narrower dtype the greatest of them may round to 1.
    """
    return _fill(stream(seed, key, step), shape, region, np.dtype(dtype), _uniform_of, arrays)


def normal(
    seed: int,
    key: int | str,
    step: int,
    shape: tuple[int, ...],
    region: Region,
    dtype: np.dtype[Any] | str = "float64",
    arrays: Any = np,
) -> Array:
    """Standard normal numbers of a box of a tensor with global `shape`.

    G. E. P. Box, M. E. Muller: A Note on the Generation of Random Normal Deviates, 1958.
    """
    return _fill(stream(seed, key, step), shape, region, np.dtype(dtype), _normal_of, arrays)


def permutation(
    seed: int, key: int | str, n: int, arrays: Any = np
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers 0 to n - 1 in a random order: the order of n random words."""
    keys = words(stream(seed, key), (n,), ((0, n),), arrays)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
