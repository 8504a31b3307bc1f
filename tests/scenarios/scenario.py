"""A scenario: a program on tensors in given layouts, and what NumPy makes of the whole arrays."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.ir import NdSbp

Array = np.ndarray[Any, np.dtype[Any]]
Maker = Callable[[np.random.Generator], Array]

MESHES = {
    "pair": pc.Placement("cpu", [0, 1]),
    "three": pc.Placement("cpu", [0, 1, 2]),
    "grid": pc.Placement("cpu", [[0, 1], [2, 3]]),
    "cube": pc.Placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
}
OTHER_PAIR = pc.Placement("cpu", [2, 3])
OVERLAPPING = pc.Placement("cpu", [1, 2, 3])
WORLDS = {"pair": 4, "three": 3, "grid": 4, "cube": 8}
"""Ranks of the world in which the scenarios of a mesh run: the pair has neighbours that look on."""


@dataclass(frozen=True)
class Scenario:
    """One program in one layout of its inputs."""

    name: str
    source: str
    """The file of the other project in which the idea is tested."""
    mesh: str
    layouts: tuple[NdSbp, ...]
    """Of each input."""
    makers: tuple[Maker, ...]
    program: Callable[..., Any]
    expected: Callable[..., Any]
    """What the program computes, in NumPy, on whole arrays."""
    out: NdSbp | None
    """The layout of the result, where one is promised."""
    eager_only: bool
    gradients: bool

    @property
    def label(self) -> str:
        return f"{self.name} [{', '.join(map(str, self.layouts))} on {self.mesh}]"

    @cached_property
    def inputs(self) -> list[Array]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [make(rng) for make in self.makers]

    @cached_property
    def results(self) -> list[Array]:
        made = self.expected(*(array.copy() for array in self.inputs))
        return [np.asarray(each) for each in (made if isinstance(made, (tuple, list)) else [made])]

    @cached_property
    def slopes(self) -> list[Array]:
        """What each result is multiplied by before the sum of all is differentiated."""
        rng = np.random.default_rng(5)
        return [rng.uniform(0.5, 1.5, each.shape) for each in self.results]

    @property
    def differentiated(self) -> list[int]:
        """The numbers of the inputs whose gradients are compared."""
        floating = [n for n, each in enumerate(self.inputs) if each.dtype.kind == "f"]
        return floating if self.gradients else []

    @cached_property
    def slopes_of_inputs(self) -> list[Array]:
        """Gradients of the weighted sum, by central differences of the NumPy function."""
        arrays = [array.copy() for array in self.inputs]

        def weighted() -> float:
            made = self.expected(*arrays)
            made = made if isinstance(made, (tuple, list)) else [made]
            return sum(float((y * w).sum()) for y, w in zip(made, self.slopes, strict=True))

        gradients = []
        for number in self.differentiated:
            flat = arrays[number].reshape(-1)
            gradient = np.empty_like(flat)
            for place in range(flat.size):
                kept, step = flat[place], 1e-5
                flat[place] = kept + step
                above = weighted()
                flat[place] = kept - step
                gradient[place] = (above - weighted()) / (2 * step)
                flat[place] = kept
            gradients.append(gradient.reshape(arrays[number].shape))
        return gradients


def layout(text: str) -> NdSbp:
    """`"S0 B Pmax"` as the layout `S(0), B, P(max)`."""
    entries = [re.sub(r"^([SP])([-\w]+)$", r"\1(\2)", entry) for entry in text.split()]
    return NdSbp.of(entries)


def rows(
    name: str,
    source: str,
    mesh: str,
    layouts: str,
    inputs: list[tuple[int, ...] | Maker],
    program: Callable[..., Any],
    expected: Callable[..., Any],
    out: str | None = None,
    *,
    eager_only: bool = False,
    gradients: bool = True,
) -> list[Scenario]:
    """The scenarios of one program.

    `layouts` is a text such as `"S0, B | B, S1"`: alternatives, in each one layout per input, in
    each one entry per axis of the mesh. `out` has as many alternatives, or one for all. An input
    is a shape, for normal numbers, or a function that makes an array.
    """
    made = []
    alternatives = layouts.split("|")
    outs = [each.strip() for each in out.split("|")] if out else [""]
    if len(outs) == 1:
        outs *= len(alternatives)
    for alternative, result in zip(alternatives, outs, strict=True):
        each = tuple(layout(text) for text in alternative.split(",") if text.strip())
        makers = tuple(normal(given) if isinstance(given, tuple) else given for given in inputs)
        assert len(each) == len(makers), name
        made.append(
            Scenario(
                name, source, mesh, each, makers, program, expected,
                layout(result) if result else None, eager_only, gradients,
            )
        )  # fmt: skip
    return made


def normal(shape: tuple[int, ...]) -> Maker:
    return lambda rng: rng.normal(size=shape)


def positive(*shape: int) -> Maker:
    return lambda rng: rng.uniform(0.5, 2.0, shape)


def ids(high: int, *shape: int) -> Maker:
    return lambda rng: rng.integers(0, high, shape)


def flags(*shape: int) -> Maker:
    return lambda rng: rng.random(shape) < 0.5
