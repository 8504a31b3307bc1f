"""Sharding rules by factors: from an einsum-like line to every legal SBP signature.

A rule names a factor per tensor axis: `"... m k, k n -> ... m n"`. Splitting a factor along a mesh
axis splits every operand axis that carries it; outputs without it become partial. The idea is that
of Shardy's sharding rules, written as in einops.

Notation, per operand (operands separated by commas, inputs and outputs by `->`):

    name    an axis carrying this factor
    [name]  an axis that must stay whole
    1       an axis of extent 1 that carries no factor
    ...     the remaining leading axes, aligned from the right across operands as NumPy broadcasts;
            an axis of extent 1 that is stretched carries no factor
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from plancompiler.errors import AttributeValueError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST, PARTIAL_SUM, NdSbp, Partial, Reduction, Sbp, Split

Operand = tuple[str | None, ...]
"""A factor name per axis; None for an axis that is never split."""


@dataclass(frozen=True, slots=True)
class FactorRule:
    """A rule line with its ellipsis expanded for operands of known shapes."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @property
    def factors(self) -> tuple[str, ...]:
        """Splittable factors in order of first appearance."""
        operands = (*self.inputs, *self.outputs)
        return tuple(dict.fromkeys(name for operand in operands for name in operand if name))


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal layout of an op along one mesh axis."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class NdSignature:
    """One legal layout of an op on a whole mesh."""

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


_TOKEN = re.compile(r"\.\.\.|\[\w+\]|\w+")


@lru_cache(maxsize=4096)
def parse_rule_line(
    line: str,
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """The words of each input and of each output of a rule line."""
    left, arrow, right = line.partition("->")
    if not arrow:
        raise AttributeValueError("a sharding rule needs `->`", got=repr(line))

    def operands(side: str) -> tuple[tuple[str, ...], ...]:
        if not side.strip():
            return ()
        parsed = []
        for part in side.split(","):
            tokens = tuple(part.split())
            if any(_TOKEN.fullmatch(token) is None for token in tokens) or tokens.count("...") > 1:
                raise AttributeValueError("a sharding rule does not parse", got=repr(line))
            parsed.append(tokens)
        return tuple(parsed)

    return operands(left), operands(right)


def operand_line(ndim: int, whole: Iterable[int] = (), prefix: str = "a") -> str:
    """One operand's part of a rule line: a factor per axis, those in `whole` never split.

    `operand_line(3, whole=(1,))` is `"a0 [a1] a2"`; a scalar is `"..."`, which stands for no axis.
    """
    kept = set(whole)
    names = [f"[{prefix}{axis}]" if axis in kept else f"{prefix}{axis}" for axis in range(ndim)]
    return " ".join(names) or "..."


def expand_rule(
    line: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]
) -> FactorRule:
    """The rule for operands of these shapes."""
    input_tokens, output_tokens = parse_rule_line(line)
    tokens = (*input_tokens, *output_tokens)
    shapes = tuple(tensor.shape for tensor in (*inputs, *outputs))
    if len(input_tokens) != len(inputs) or len(output_tokens) != len(outputs):
        raise AttributeValueError(
            "a sharding rule has another number of operands than the op",
            got=repr(line),
            expected=f"{len(inputs)} inputs and {len(outputs)} outputs",
        )
    named: list[list[tuple[str, int]]] = []
    for operand, shape in zip(tokens, shapes, strict=True):
        spread = len(shape) - (len(operand) - operand.count("..."))
        if spread < 0 or ("..." not in operand and spread != 0):
            raise AttributeValueError(
                "a sharding rule has another number of axes than its operand",
                got=f"{line!r} for shape {shape}",
            )
        names: list[str] = []
        for token in operand:
            if token == "...":
                names.extend(f"...{spread - 1 - position}" for position in range(spread))
            else:
                names.append(token)
        named.append(list(zip(names, shape, strict=True)))
    extents: dict[str, int] = {}
    for axes in named:
        for name, extent in axes:
            extents[name] = max(extents.get(name, 0), extent) if extents.get(name) != 0 else 0
    whole = {name.strip("[]") for axes in named for name, _ in axes if name.startswith("[")}

    def factor(name: str, extent: int) -> str | None:
        if name == "1" or name.strip("[]") in whole:
            return None
        if name.startswith("...") and extent == 1 and extents[name] != 1:
            return None
        return name

    operands = tuple(tuple(factor(name, extent) for name, extent in axes) for axes in named)
    return FactorRule(operands[: len(inputs)], operands[len(inputs) :])


def signatures_of_line(
    line: str,
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...],
    linear: tuple[tuple[int, ...], ...],
    reduction: Reduction | None,
) -> tuple[Signature, ...]:
    """`signatures_of_rule` for operands of these shapes."""
    shapes = [
        tuple([extent if extent < 2 else 2 for extent in tensor.shape])
        for tensor in (*inputs, *outputs)
    ]
    try:
        return _signatures_of_extents(line, tuple(shapes), len(inputs), linear, reduction)
    except AttributeValueError:
        expand_rule(line, inputs, outputs)  # says so with the real shapes
        raise


@lru_cache(maxsize=16384)
def _signatures_of_extents(
    line: str,
    shapes: tuple[tuple[int, ...], ...],
    count_in: int,
    linear: tuple[tuple[int, ...], ...],
    reduction: Reduction | None,
) -> tuple[Signature, ...]:
    """The same for shapes in which 2 stands for all extents from 2 on: a rule asks no more."""
    types = tuple(TensorType(shape, DType.FLOAT32) for shape in shapes)
    rule = expand_rule(line, types[:count_in], types[count_in:])
    return signatures_of_rule(rule, linear, reduction)


def signatures_of_rule(
    rule: FactorRule,
    linear: tuple[tuple[int, ...], ...] = (),
    reduction: Reduction | None = Reduction.SUM,
) -> tuple[Signature, ...]:
    """All signatures along one mesh axis: whole first, then splits, then partial inputs.

    `linear` lists sets of inputs in which the op is linear together (the others stay broadcast).
    `reduction` combines what a split of a summed-away factor leaves; None forbids such splits.
    """
    count_in, count_out = len(rule.inputs), len(rule.outputs)
    signatures = [Signature((BROADCAST,) * count_in, (BROADCAST,) * count_out)]
    for name in rule.factors:
        inputs = tuple(_split_of(operand, name) for operand in rule.inputs)
        outputs = []
        for operand in rule.outputs:
            split = _split_of(operand, name)
            if split is BROADCAST:
                if reduction is None or all(entry is BROADCAST for entry in inputs):
                    break
                split = Partial(reduction)
            outputs.append(split)
        else:
            signatures.append(Signature(inputs, tuple(outputs)))
    for together in linear:
        inputs = tuple(
            PARTIAL_SUM if position in together else BROADCAST for position in range(count_in)
        )
        signatures.append(Signature(inputs, (PARTIAL_SUM,) * count_out))
    return tuple(dict.fromkeys(signatures))


def _split_of(operand: Operand, factor: str) -> Sbp:
    return Split(operand.index(factor)) if factor in operand else BROADCAST


def nd_signatures(
    per_axis: list[tuple[Signature, ...]], hierarchy: tuple[int, ...]
) -> tuple[NdSignature, ...]:
    """Products of 1-D signatures over the mesh axes; an axis of size 1 has only the first."""
    choices = [
        signatures if extent > 1 else signatures[:1]
        for signatures, extent in zip(per_axis, hierarchy, strict=True)
    ]
    return tuple(
        NdSignature(
            tuple(map(NdSbp, zip(*[one.inputs for one in combination], strict=True))),
            tuple(map(NdSbp, zip(*[one.outputs for one in combination], strict=True))),
        )
        for combination in product(*choices)
    )
