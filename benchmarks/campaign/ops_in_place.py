"""Changes in place of views of views of tensors in random layouts, eager and compiled: NumPy's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import plancompiler as pc
from benchmarks.campaign.case import Result
from plancompiler.eager import spawn

Array = np.ndarray[Any, np.dtype[Any]]
View = Callable[[Any], Any]
SHAPES = ((4, 6), (5, 3), (2, 3, 4), (7,), (1, 5), (0, 3))
MESHES = (
    pc.Placement("cpu", [0, 1]),
    pc.Placement("cpu", [0, 1, 2]),
    pc.Placement("cpu", [[0, 1], [2, 3]]),
)


@dataclass(frozen=True)
class Change:
    """A view of a tensor and what is done to it, for tensors and for arrays."""

    name: str
    view: View
    ours: Callable[[Any, Any], Any]
    numpy: Callable[[Array, Array], Any]


def _add(x: Any, _: Any) -> None:
    x += 1.5


def _scale(x: Any, _: Any) -> None:
    x *= -0.5


def _copy(x: Array, y: Array) -> None:
    x[...] = y


WAYS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Array, Array], Any]]] = {
    "+= 1.5": (_add, _add),
    "*= -0.5": (_scale, _scale),
    "fill_(7)": (lambda x, _: x.fill_(7.0), lambda x, _: x.fill(7.0)),
    "zero_()": (lambda x, _: x.zero_(), lambda x, _: x.fill(0.0)),
    "relu_()": (lambda x, _: x.relu_(), lambda x, _: np.maximum(x, 0.0, out=x)),
    "copy_(y)": (lambda x, y: x.copy_(y), _copy),
}


def random_view(choices: random.Random, shape: Sequence[int]) -> tuple[str, View]:
    """Up to three views, one of another."""
    name, views = "x", list[View]()
    example = np.empty(shape)
    for _ in range(choices.randint(1, 3)):
        text, view = _one_view(choices, example)
        example = view(example)
        name, views = name + text, [*views, view]

    def all_of_them(x: Any) -> Any:
        for view in views:
            x = view(x)
        return x

    return name, all_of_them


def _one_view(choices: random.Random, example: Array) -> tuple[str, View]:
    if example.ndim > 1 and choices.random() < 0.25:
        order = tuple(choices.sample(range(example.ndim), example.ndim))
        return f".transpose({order})", lambda x: x.transpose(order)
    index: list[Any] = []
    for extent in example.shape:
        start, stop = sorted((choices.randint(0, extent), choices.randint(0, extent)))
        kind = choices.random()
        if kind < 0.2 and extent:
            index.append(choices.randrange(extent))
        elif kind < 0.5:
            index.append(slice(None))
        else:
            index.append(slice(start, stop, choices.choice((None, 2, 3))))
    chosen = tuple(index)
    shown = ", ".join(
        str(each)
        if isinstance(each, int)
        else f"{'' if each.start is None else each.start}:{'' if each.stop is None else each.stop}"
        + (f":{each.step}" if each.step else "")
        for each in chosen
    )
    return f"[{shown}]", lambda x: x[chosen]


def run(result: Result, choices: random.Random) -> None:
    """Some changes of one tensor, each followed by a look at all of it."""
    mesh = choices.choice(MESHES)
    dtype = choices.choice(("float64", "float32", "float16"))
    shape = choices.choice(SHAPES)
    options = ["B", *(f"S({axis})" for axis in range(len(shape)))]
    sbp = [choices.choice(options) for _ in mesh.hierarchy]
    numbers = np.random.default_rng(choices.getrandbits(32))
    begin = numbers.normal(size=shape).astype(dtype)
    changes = []
    for _ in range(choices.randint(1, 3)):
        text, view = random_view(choices, shape)
        way = choices.choice(list(WAYS))
        value = numbers.normal(size=np.shape(view(begin))).astype(dtype)
        changes.append((text, way, view, value))
    result.group = f"changes in place, {dtype}"
    shown = "; ".join(f"{text} {way}" for text, way, _, _ in changes)
    mesh_text = "x".join(map(str, mesh.hierarchy))
    result.what = f"{list(shape)} {' '.join(sbp)} on {mesh_text}: {shown}"
    expected, array = [], begin.copy()
    for _, way, view, value in changes:
        target = view(array)
        if np.ndim(target) == 0:  # NumPy hands out a number, and no view of it
            target = _element(array, view)
        WAYS[way][1](target, value)
        expected.append(array.copy())

    def change_all(x: Any) -> tuple[Any, ...]:
        looks = []
        for _, way, view, value in changes:
            y = pc.tensor(value, mesh) if way.startswith("copy") else None
            WAYS[way][0](view(x), y)
            looks.append(x * 1.0)
        return tuple(looks)

    def change_compiled(x: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        looks = []
        for (_, way, view, _), y in zip(changes, values, strict=True):
            WAYS[way][0](view(x), y)
            looks.append(x * 1.0)
        return tuple(looks)

    def rank() -> tuple[list[Array], Array, list[Array], Array]:
        x, z = pc.tensor(begin, mesh, sbp), pc.tensor(begin, mesh, sbp)
        eager = [look.numpy() for look in change_all(x)]
        values = [pc.tensor(value, mesh) for *_, value in changes]
        compiled = [look.numpy() for look in pc.compile(change_compiled)(z, values)]
        return eager, x.numpy(), compiled, z.numpy()

    for eager, x, compiled, z in spawn(rank, mesh.size):
        for way, looks, last in (("eager", eager, x), ("compiled", compiled, z)):
            for number, (got, wanted) in enumerate(zip(looks, expected, strict=True)):
                if not np.allclose(got, wanted, rtol=2e-3, atol=1e-6):
                    result.problems.append(f"{way}: change {number} gives {got.tolist()}")
                    return
            if not np.allclose(last, expected[-1], rtol=2e-3, atol=1e-6):
                result.problems.append(f"{way}: the tensor is {last.tolist()} afterwards")
                return


def _element(array: Array, view: View) -> Array:
    """A view of one element as an array without axes."""
    numbers = np.arange(array.size).reshape(array.shape)
    place: tuple[Any, ...] = np.unravel_index(int(view(numbers)), array.shape)
    element: Array = array[(*place, ...)]
    return element
