"""Arithmetic of elementwise programs as the text of loops, which numba compiles.

Instructions that follow each other and are arithmetic in one dtype become one loop, whose values
are kept in registers of the CPU. What lies between, such as tanh and exp, stays a call of NumPy,
whose functions use the CPU's vectors where numba's do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plancompiler.ir.dtype import DType

_EXPRESSIONS: dict[np.ufunc, str] = {
    np.absolute: "abs({0})",
    np.add: "{0} + {1}",
    np.divide: "{0} / {1}",
    # As NumPy's, these give NaN where either is.
    np.maximum: "{0} if {0} > {1} or {0} != {0} else {1}",
    np.minimum: "{0} if {0} < {1} or {0} != {0} else {1}",
    np.multiply: "{0} * {1}",
    np.negative: "-{0}",
    np.sqrt: "sqrt({0})",
    np.square: "{0} * {0}",
    np.subtract: "{0} - {1}",
}
_LEAST_INSTRUCTIONS = 2
"""Of one alone NumPy's own loop is as good."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One instruction of a loop: a NumPy function of values and numbers."""

    result: int
    function: np.ufunc
    operands: tuple[int | float, ...]
    """The numbers of values, which are whole, and the numbers that are constants, which are not."""


@dataclass(frozen=True, slots=True)
class LoopText:
    """A module with one function, `loop`, and the names of the arrays and numbers that it takes."""

    text: str
    arguments: tuple[str, ...]


def arithmetic(
    result: int,
    ufunc: tuple[np.ufunc, Sequence[object | None]] | None,
    operands: Sequence[int],
    dtypes: Sequence[DType],
) -> Arithmetic | None:
    """An instruction that can be part of a loop; None for others. `dtypes` are its operands' and
    its result's.
    """
    if ufunc is None or ufunc[0] not in _EXPRESSIONS:
        return None
    if dtypes[0] not in (DType.FLOAT32, DType.FLOAT64) or len(set(dtypes)) > 1:
        return None
    values = iter(operands)
    made: list[int | float] = []
    for argument in ufunc[1]:
        if argument is None:
            made.append(next(values))
        elif isinstance(argument, (int, float)) and math.isfinite(argument):
            made.append(float(argument))
        else:
            return None
    return Arithmetic(result, ufunc[0], tuple(made))


def runs(instructions: Sequence[Arithmetic | None]) -> list[range]:
    """The places of instructions that follow each other and are worth a loop."""
    runs, start = [], 0
    for place, instruction in enumerate((*instructions, None)):
        if instruction is None:
            if place - start >= _LEAST_INSTRUCTIONS:
                runs.append(range(start, place))
            start = place + 1
    return runs


def loop_text(
    instructions: Sequence[Arithmetic],
    names: Mapping[int, str],
    kept: Mapping[int, str],
    dtype: str,
    numbers: Collection[int] = (),
) -> LoopText:
    """A loop that reads values from the arrays `names` and writes those it is to keep; some values
    are `numbers`.
    """
    made = {each.result for each in instructions}
    read = {
        operand
        for each in instructions
        for operand in each.operands
        if isinstance(operand, int) and operand not in made
    }
    written = {kept[number] for number in made if number in kept}
    plain = sorted(read & set(numbers))
    read -= set(plain)
    arrays = sorted({names[number] for number in read} | written)
    head = [f"  t{number} = {names[number]}" for number in plain]
    lines = [f"    t{number} = {names[number]}[i]" for number in sorted(read)]
    for each in instructions:
        operands = [
            f"t{operand}" if isinstance(operand, int) else f"{dtype}({operand!r})"
            for operand in each.operands
        ]
        lines.append(f"    t{each.result} = {_EXPRESSIONS[each.function].format(*operands)}")
    lines += [f"    {kept[number]}[i] = t{number}" for number in sorted(made) if number in kept]
    arguments = [f"{name}: {'Out1' if name in written else 'In1'}" for name in arrays]
    arguments += [f"{names[number]}: float" for number in plain]
    head = [
        "from __future__ import annotations",
        f"from numpy import {dtype}, sqrt",
        f"def loop({', '.join(arguments)}) -> None:",
        *head,
        f"  for i in range({arrays[0]}.size):",
    ]
    taken = (*arrays, *(names[number] for number in plain))
    return LoopText("\n".join([*head, *lines, ""]), taken)
