"""Random programs of public functions, in random layouts and dtypes, against NumPy in float64.

Five kinds of cases in turn: one function on values at the edges (0, -0.0, inf, nan, ties, nothing
at all); a program of several functions, eager and compiled, every value of it compared; the
gradients of a program, against differences; changes in place; and a sample of any op kind. The
references are NumPy's own functions, none of ours, but for the last.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import plancompiler as pc
from benchmarks.campaign import ops_in_place, ops_samples
from benchmarks.campaign.case import Case, Result
from benchmarks.campaign.ops_steps import (
    BINARY_EDGES,
    COMPARISONS,
    PARTLY,
    PLAIN,
    REDUCTIONS,
    TENSOR_FACTORS,
    Array,
    Step,
    quiet,
    random_layout,
    random_step,
)
from plancompiler.eager import spawn
from plancompiler.errors import PlanCompilerError

COUNT = 3_000
MESHES = (
    pc.Placement("cpu", [0, 1]),
    pc.Placement("cpu", [0, 1, 2]),
    pc.Placement("cpu", [[0, 1], [2, 3]]),
)
DTYPES = ("float64", "float32", "float16")
ROUNDINGS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}
ULPS = 48
"""Roundings that one function may make, of the size of what goes in and comes out."""
SHAPES = ((4, 6), (5, 3), (2, 3, 4), (7,), (1, 5), (3, 1), ())
EMPTY = ((0,), (0, 3), (4, 0))
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0, 0.5)
DIFFERENCE = 1e-6
KINDS = ("edge values", "programs", "gradients", "changes in place", "op samples")


@dataclass(frozen=True)
class Program:
    """Inputs in their layouts, and steps."""

    mesh: pc.Placement
    dtype: str
    inputs: tuple[Array, ...]
    parts: tuple[dict[int, Array], ...]
    """Of each input the part of each rank."""
    layouts: tuple[list[str], ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        shown = ", ".join(
            f"{list(array.shape)} {' '.join(sbp)}"
            for array, sbp in zip(self.inputs, self.layouts, strict=True)
        )
        mesh = "x".join(map(str, self.mesh.hierarchy))
        return f"{self.dtype} on {mesh}: {shown}: {', '.join(map(str, self.steps))}"

    def tensors(self, rank: int, requires_grad: bool = False) -> list[pc.DistTensor]:
        """The inputs on a rank."""
        tensors = [
            pc.from_local(parts[rank], self.mesh, sbp, shape=array.shape)
            for array, parts, sbp in zip(self.inputs, self.parts, self.layouts, strict=True)
        ]
        for tensor in tensors:
            tensor.requires_grad = requires_grad
        return tensors

    def ours(self, tensors: Sequence[Any]) -> list[Any]:
        """All values, the inputs first."""
        values = list(tensors)
        for step in self.steps:
            values.append(step.ours(*(values[each] for each in step.inputs)))
        return values

    def references(self, inputs: Sequence[Array]) -> list[Array]:
        """The same by NumPy in float64."""
        values = [np.asarray(each, np.float64) for each in inputs]
        for step in self.steps:
            values.append(quiet(step.reference, *(values[each] for each in step.inputs)))
        return values


def split(
    choices: random.Random, array: Array, sbp: list[str], mesh: pc.Placement, edges: bool
) -> dict[int, Array]:
    """The part of each rank; partial values as random parts, or at the edges beside zeros."""
    numbers = np.random.default_rng(choices.getrandbits(32))
    shares: dict[tuple[int, ...], Array] = {(): array}
    # Parts are made before splits, and those before copies: copies must be equal.
    order = sorted(range(len(sbp)), key=lambda axis: {"P": 0, "S": 1, "B": 2}[sbp[axis][0]])
    for axis in order:
        entry, count = sbp[axis], mesh.hierarchy[axis]
        shards = {}
        for place, share in shares.items():
            if entry == "P":
                size = 0.0 if edges else 1.0
                rest = [
                    np.asarray(size * numbers.normal(size=share.shape), share.dtype)
                    for _ in range(count - 1)
                ]
                pieces = [np.asarray(share - sum(rest), share.dtype), *rest]
            elif entry.startswith("S"):
                pieces = np.array_split(share, count, int(entry[2:-1]))
            else:
                pieces = [share] * count
            for index, piece in enumerate(pieces):
                shards[(*place, index)] = np.ascontiguousarray(piece).reshape(piece.shape)
        shares = shards
    result = {}
    for place, share in shares.items():
        by_axis = dict(zip(order, place, strict=True))
        coordinates = tuple(by_axis[axis] for axis in range(len(sbp)))
        result[mesh.rank_list[int(np.ravel_multi_index(coordinates, mesh.hierarchy))]] = share
    return result


def random_inputs(
    choices: random.Random,
    mesh: pc.Placement,
    dtype: str,
    shapes: Sequence[tuple[int, ...]],
    edges: bool = False,
    partial: bool = True,
) -> tuple[tuple[Array, ...], tuple[dict[int, Array], ...], tuple[list[str], ...]]:
    """Arrays, their parts, and their layouts."""
    numbers = np.random.default_rng(choices.getrandbits(32))
    arrays, parts, layouts = [], [], []
    for shape in shapes:
        array = np.asarray(numbers.normal(size=shape), dtype)
        if edges:
            chosen = np.asarray(numbers.choice(EDGES, size=shape), dtype)
            array = np.where(numbers.random(shape) < 0.7, chosen, array).astype(dtype)
        sbp = random_layout(choices, shape, mesh, partial)
        parts.append(split(choices, array, sbp, mesh, edges))
        # What the parts add up to, and not what they were made of.
        arrays.append(_whole(parts[-1], sbp, mesh))
        layouts.append(sbp)
    return tuple(arrays), tuple(parts), tuple(layouts)


def _whole(parts: dict[int, Array], sbp: list[str], mesh: pc.Placement) -> Array:
    """The array in float64."""
    grid = np.empty(mesh.hierarchy, object)
    for position, rank in enumerate(mesh.rank_list):
        grid[np.unravel_index(position, mesh.hierarchy)] = parts[rank].astype(np.float64)
    for axis in reversed(range(len(sbp))):
        joined = np.empty(mesh.hierarchy[:axis], object)
        for place in np.ndindex(*mesh.hierarchy[:axis]):
            pieces = [grid[(*place, index)] for index in range(mesh.hierarchy[axis])]
            if sbp[axis] == "P":
                joined[place] = functools.reduce(np.add, pieces)  # a 0 to begin with has a sign
            elif sbp[axis] == "B":
                joined[place] = pieces[0]
            else:
                joined[place] = np.concatenate(pieces, int(sbp[axis][2:-1]))
        grid = joined
    return np.asarray(grid[()], np.float64)


def random_program(choices: random.Random, length: int) -> Program:
    """Of real numbers without edges."""
    mesh, dtype = choices.choice(MESHES), choices.choice(DTYPES)
    shape = choices.choice(SHAPES)
    shapes = [shape, choices.choice((shape, (), shape[-1:]))]
    inputs, parts, layouts = random_inputs(choices, mesh, dtype, shapes)
    steps: list[Step] = []
    values = list(inputs)
    for _ in range(length):
        step = random_step(choices, values, mesh)
        steps.append(step)
        values.append(quiet(step.reference, *(values[each] for each in step.inputs)))
    return Program(mesh, dtype, inputs, parts, layouts, tuple(steps))


def random_edge(choices: random.Random) -> Program:
    """One function on values at the edges."""
    mesh, dtype = choices.choice(MESHES), choices.choice(DTYPES)
    kind = choices.choice(("plain", "partly", "binary", "compare", "reduce"))
    shape = choices.choice(SHAPES + EMPTY)
    if kind in ("binary", "compare"):
        table = BINARY_EDGES if kind == "binary" else COMPARISONS
        name, (ours, reference) = choices.choice(list(table.items()))
        inputs = random_inputs(
            choices, mesh, dtype, [shape, shape], True, name not in TENSOR_FACTORS
        )
        return Program(mesh, dtype, *inputs, (Step(name, (0, 1), ours, reference),))
    if kind == "reduce" and 0 not in shape and shape:
        inputs = random_inputs(choices, mesh, dtype, [shape], True)
        name, (ours, reference) = choices.choice(list(REDUCTIONS.items()))
        axis = choices.randrange(len(shape))
        step = Step(
            f"{name} axis {axis}",
            (0,),
            lambda x: ours(x, axis=axis),
            lambda x: reference(x, axis=axis),
        )
        return Program(mesh, dtype, *inputs, (step,))
    name, (ours, reference) = choices.choice(list({**PLAIN, **PARTLY}.items()))
    inputs = random_inputs(choices, mesh, dtype, [shape], True)
    return Program(mesh, dtype, *inputs, (Step(name, (0,), ours, reference),))


# --- what must hold -------------------------------------------------------------------------------


def difference(name: str, got: Array, wanted: Array, dtype: str, size: float) -> str | None:
    """How two arrays differ beyond rounding; `size` is the largest number that went in."""
    if got.shape != wanted.shape:
        return f"{name}: shape {got.shape}, not {wanted.shape}"
    if wanted.dtype == bool:
        return None if (got == wanted).all() else f"{name}: {got.tolist()}, not {wanted.tolist()}"
    kind = np.dtype(dtype)
    with np.errstate(all="ignore"):
        rounded = wanted.astype(kind).astype(np.float64)  # beyond the dtype's range it is infinite
        finite = np.isfinite(rounded)
        scale = np.maximum(np.abs(rounded), min(size, 1e4) if math.isfinite(size) else 1.0)
        near = np.abs(got.astype(np.float64) - rounded) <= ULPS * ROUNDINGS[dtype] * np.maximum(
            scale, np.finfo(kind).tiny
        )
        # Where rounding goes beyond the largest number the neighbours are right as well.
        largest = np.finfo(kind).max
        near |= (np.abs(wanted) > 0.9 * largest) & (np.abs(got) > 0.9 * largest)
        same = np.where(finite, near, (got == rounded) | (np.isnan(got) & np.isnan(rounded)) | near)
    if same.all():
        return None
    at = tuple(int(each[0]) for each in np.nonzero(~same))
    return f"{name}: {got[at]!r} at {at}, not {wanted[at]!r}"


class Ops:
    """Runs cases."""

    def run(self, case: Case) -> Result:
        """One case."""
        choices = case.choices
        name = KINDS[case.index % len(KINDS)]
        result = Result(case, name, "")
        begin = time.monotonic()
        try:
            if name == "changes in place":
                ops_in_place.run(result, choices)
            elif name == "op samples":
                ops_samples.run(result, choices)
            else:
                self._run_program(name, result, choices)
        except PlanCompilerError as error:
            result.problems.append(f"refused: {error}")
        except Exception as error:
            result.problems.append(f"a bare {type(error).__name__}: {error}")
        result.ending = "equal"
        result.seconds = time.monotonic() - begin
        return result

    def _run_program(self, name: str, result: Result, choices: random.Random) -> None:
        if name == "edge values":
            program = random_edge(choices)
        else:
            program = random_program(choices, choices.randint(2, 6 if name == "programs" else 4))
        result.group = f"{name}, {program.dtype}"
        result.what = str(program)
        {"edge values": self._values, "programs": self._both, "gradients": self._gradients}[name](
            result, program
        )

    def _values(self, result: Result, program: Program) -> list[list[Array]]:
        """Every value of the program, each step judged on what it really got."""

        def rank() -> list[Array]:
            tensors = program.tensors(pc.eager.current_world().rank)
            return [value.numpy() for value in program.ours(tensors)]

        by_rank = spawn(rank, program.mesh.size)
        for other in by_rank[1:]:
            for number, (a, b) in enumerate(zip(by_rank[0], other, strict=True)):
                result.require(a.tobytes() == b.tobytes(), f"ranks disagree about value {number}")
        self._judge(result, program, by_rank[0], "")
        return by_rank

    def _judge(self, result: Result, program: Program, values: list[Array], way: str) -> None:
        begin = len(program.inputs)
        for number, step in enumerate(program.steps):
            arrays = [values[each].astype(np.float64) for each in step.inputs]
            if number == 0:
                arrays = [program.inputs[each] for each in step.inputs]
            wanted = quiet(step.reference, *arrays)
            # Random parts of partial values are of size one to three.
            size = max((_largest(each) for each in arrays), default=0.0) + 4.0 * any(
                "P" in sbp or step.name.startswith("redistribute") for sbp in program.layouts
            )
            problem = difference(
                f"{way}{step}", values[begin + number], wanted, program.dtype, max(size, 1.0)
            )
            if problem is not None:
                result.problems.append(problem)
                return

    def _both(self, result: Result, program: Program) -> None:
        """Eager and compiled."""
        eager = self._values(result, program)[0]

        def rank() -> list[Array]:
            tensors = program.tensors(pc.eager.current_world().rank)
            function = pc.compile(lambda *given: tuple(program.ours(given)[len(given) :]))
            return [value.numpy() for value in (*tensors, *function(*tensors))]

        compiled = spawn(rank, program.mesh.size)[0]
        self._judge(result, program, compiled, "compiled ")
        for number, (a, b) in enumerate(zip(eager, compiled, strict=True)):
            result.require(
                a.dtype == b.dtype, f"value {number}: {a.dtype} eager, {b.dtype} compiled"
            )

    def _gradients(self, result: Result, program: Program) -> None:
        """Of the weighted sum of the last value, for every input that is not partial."""
        values = program.references(program.inputs)
        weights: Array = np.asarray(np.random.default_rng(3).normal(size=values[-1].shape))

        def rank() -> list[Array | None]:
            tensors = program.tensors(pc.eager.current_world().rank, requires_grad=True)
            last = program.ours(tensors)[-1]
            if last.requires_grad:
                given = np.asarray(weights, program.dtype)
                last.backward(pc.tensor(given, program.mesh))
            return [None if each.grad is None else each.grad.numpy() for each in tensors]

        grads = spawn(rank, program.mesh.size)[-1]
        tolerance = {"float64": 1e-5, "float32": 2e-3, "float16": 0.15}[program.dtype]
        for number, grad in enumerate(grads):
            expected, reliable = differences(program, weights, number)
            got = np.zeros_like(expected) if grad is None else grad.astype(np.float64)
            if got.shape != expected.shape:
                result.problems.append(f"gradient {number}: shape {got.shape}")
                continue
            scale = np.maximum(np.abs(expected), max(1.0, _largest(expected)))
            bad = reliable & ~(np.abs(got - expected) <= tolerance * scale)
            if bad.any():
                at = tuple(int(each[0]) for each in np.nonzero(bad))
                result.problems.append(
                    f"gradient of input {number} at {at}: {got[at]!r}, not {expected[at]!r}"
                )


def differences(program: Program, weights: Array, number: int) -> tuple[Array, Array]:
    """The gradient by differences of two widths, and where the two agree: elsewhere is a kink."""

    def loss(array: Array) -> float:
        inputs = [*program.inputs]
        inputs[number] = array
        return float((program.references(inputs)[-1] * weights).sum())

    array = program.inputs[number]
    slopes = np.zeros((2, *array.shape))
    for place in np.ndindex(*array.shape):
        for row, width in enumerate((DIFFERENCE, 3 * DIFFERENCE)):
            up, down = np.array(array), np.array(array)
            up[place] += width
            down[place] -= width
            slopes[(row, *place)] = (loss(up) - loss(down)) / (2 * width)
    near = np.abs(slopes[0] - slopes[1]) <= 1e-4 * (1 + np.abs(slopes[0]))
    return slopes[0], near & np.isfinite(slopes[0])


def _largest(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


@contextlib.contextmanager
def opened() -> Iterator[Ops]:
    """Runs cases. Infinities and numbers that are none are meant, and warned of by NumPy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield Ops()
