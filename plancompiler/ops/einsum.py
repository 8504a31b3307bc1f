"""einsum: sums of products by an equation, which is its sharding rule at the same time.

The attribute `equation` is spelled out: `"bij,bjk->bik"`, one letter per axis, with `->`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST, PARTIAL_SUM
from plancompiler.ops.attributes import Text
from plancompiler.ops.check import (
    NUMBERS,
    describe,
    expect_dtype,
    expect_same_dtype,
)
from plancompiler.ops.gradient import expand_to
from plancompiler.ops.kernel import in_float32
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)
from plancompiler.ops.rule import Signature

Equation = tuple[tuple[str, ...], str]
"""Letters of each input, and of the output."""


@lru_cache(maxsize=4096)
def parse_equation(equation: str) -> Equation:
    """`"ij,jk->ik"` as `(("ij", "jk"), "ik")`; an AttributeValueError says what is wrong."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = tuple(left.split(","))

    def refuse(what: str, hint: str | None = None) -> AttributeValueError:
        return AttributeValueError(what, got=repr(equation), hint=hint)

    if not arrow or not all(
        part == "" or (part.isascii() and part.isalpha()) for part in (*inputs, output)
    ):
        raise refuse("an einsum equation is letters, commas and one `->`", "as in 'ij,jk->ik'")
    if any(len(set(part)) != len(part) for part in inputs):
        raise refuse(
            "a letter is repeated within one input of an einsum", "take pc.diagonal of it first"
        )
    if len(set(output)) != len(output):
        raise refuse("a letter is repeated in the output of an einsum", "name each letter once")
    if not set(output) <= set("".join(inputs)):
        raise refuse(
            "the output of an einsum has a letter that no input has",
            "leave out " + ", ".join(sorted(set(output) - set("".join(inputs)))),
        )
    return inputs, output


def _extents(letters: tuple[str, ...], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Extent by letter; a ShapeError where two inputs disagree."""
    extents: dict[str, int] = {}
    for part, shape in zip(letters, shapes, strict=True):
        for letter, extent in zip(part, shape, strict=True):
            if extents.setdefault(letter, extent) != extent:
                raise ShapeError(
                    f"letter {letter!r} of an einsum stands for different extents",
                    got=f"{','.join(letters)} for {' and '.join(map(str, shapes))}",
                    expected=f"{extents[letter]} everywhere, for example",
                )
    return extents


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    letters, output = parse_equation(attrs["equation"])
    if len(letters) != len(inputs) or any(
        len(part) != len(tensor.shape) for part, tensor in zip(letters, inputs, strict=False)
    ):
        raise ShapeError(
            "an einsum needs one input per part of its equation, one letter per axis",
            got=f"{attrs['equation']!r} for {describe(inputs)}",
        )
    for tensor in inputs:
        expect_dtype("einsum", tensor, NUMBERS)
    dtype = expect_same_dtype("einsum", inputs)
    extents = _extents(letters, [tensor.shape for tensor in inputs])
    return (TensorType(tuple(extents[letter] for letter in output), dtype),)


def _rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    letters, output = parse_equation(attrs["equation"])
    left = ", ".join(" ".join(part) or "..." for part in letters)
    return f"{left} -> {' '.join(output) or '...'}"


def _extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    """Linear in each input alone."""
    return tuple(
        Signature(
            tuple(PARTIAL_SUM if each == position else BROADCAST for each in range(len(inputs))),
            (PARTIAL_SUM,),
        )
        for position in range(len(inputs))
    )


# --- kernel ---------------------------------------------------------------------------------------


def _without(array: Array, letters: str, kept: set[str]) -> tuple[Array, str]:
    """Axes of letters outside `kept` summed away."""
    axes = tuple(axis for axis, letter in enumerate(letters) if letter not in kept)
    if not axes:
        return array, letters
    total: Array = np.add.reduce(array, axis=axes, dtype=array.dtype)
    return total, "".join(letter for letter in letters if letter in kept)


def _ordered(array: Array, letters: str, groups: Sequence[str]) -> Array:
    """Axes in the order of the groups of letters, each group as one axis."""
    moved = array.transpose([letters.index(letter) for group in groups for letter in group])
    extents = iter(moved.shape)
    shape = [prod(next(extents) for _ in group) for group in groups]
    return moved.reshape(shape)


def _product(a: Array, left: str, b: Array, right: str, wanted: set[str]) -> tuple[Array, str]:
    """The sum of products of two arrays with the letters in `wanted`, as one matrix product."""
    a, left = _without(a, left, wanted | set(right))
    b, right = _without(b, right, wanted | set(left))
    shared = [letter for letter in left if letter in right]
    batch = "".join(letter for letter in shared if letter in wanted)
    inner = "".join(letter for letter in shared if letter not in wanted)
    rows = "".join(letter for letter in left if letter not in right)
    columns = "".join(letter for letter in right if letter not in left)
    extents = dict(zip(left + right, a.shape + b.shape, strict=True))
    product = np.matmul(
        _ordered(a, left, (batch, rows, inner)), _ordered(b, right, (batch, inner, columns))
    )
    letters = batch + rows + columns
    return product.reshape([extents[letter] for letter in letters]), letters


def _path(equation: str, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Which operands to combine, step by step; the result of a step goes to the end."""
    if len(shapes) <= 2:
        return [tuple(range(len(shapes)))]
    stand_ins = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    steps: list[tuple[int, ...]] = np.einsum_path(equation, *stand_ins, optimize="greedy")[0][1:]
    return steps


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    equation = context.attrs["equation"]
    letters, output = parse_equation(equation)
    path = context.state.get("path")
    if path is None:
        path = context.state["path"] = _path(equation, context.input_shapes)
    operands = list(zip(inputs, letters, strict=True))
    for step in path:
        chosen = [operands.pop(position) for position in sorted(step, reverse=True)]
        wanted = set(output).union(*(part for _, part in operands))
        combined, part = chosen[-1]
        if len(chosen) == 1:
            combined, part = _without(combined, part, wanted)
        for array, other in reversed(chosen[:-1]):
            kept = wanted.union(*(rest for _, rest in chosen[:-1])) if len(chosen) > 2 else wanted
            combined, part = _product(combined, part, array, other, kept)
        operands.append((combined, part))
    ((combined, part),) = operands
    combined, part = _without(combined, part, set(output))
    np.copyto(outputs[0], combined.transpose([part.index(letter) for letter in output]))


# --- gradient -------------------------------------------------------------------------------------


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    letters, output = parse_equation(attrs["equation"])
    passed = []
    for position, part in enumerate(letters):
        others = [each for each in range(len(letters)) if each != position]
        parts = [output, *(letters[each] for each in others)]
        # A letter that this input alone has was summed away: its gradient is the same all along.
        known = set("".join(parts))
        kept = "".join(letter for letter in part if letter in known)
        grad = apply(
            "einsum",
            grads[0],
            *(inputs[each] for each in others),
            equation=f"{','.join(parts)}->{kept}",
        )
        if kept != part:
            shape = inputs[position].shape
            spread = tuple(
                extent if letter in known else 1 for letter, extent in zip(part, shape, strict=True)
            )
            grad = expand_to(grad.reshape(spread), shape)
        passed.append(grad)
    return passed


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    letters, _ = parse_equation(attrs["equation"])
    extents = _extents(letters, [tensor.shape for tensor in inputs])
    return max(1, len(inputs)) * prod(extents.values())


define_op(
    "einsum",
    infer=_infer,
    rule=_rule,
    attrs=(Text("equation"),),
    kernel=in_float32(_kernel),
    gradient=_gradient,
    extra=_extra,
    flops=_flops,
    precision="low",
    doc="Sums of products by `equation`, whose letters name axes: 'bij,bjk->bik'. A letter "
    "that the output lacks is summed away; splitting it leaves a partial.",
)
