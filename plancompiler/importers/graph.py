"""The graph of an imported model: what its author wrote, as data, whatever system it comes from.

A reader (`torch_reader`) makes it, `recognition` rewrites it, and `ImportedModule` runs it with the
rules of that system. Values have names; a node's arguments are plain data with `Ref`s to values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plancompiler.ir import SourceLine, TensorType

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of this name: an input, a parameter, a constant, or what a node makes."""

    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """One operation."""

    name: str
    target: str
    """What is computed: the key of a rule."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    types: tuple[TensorType | None, ...]
    """Of its results, as the author's system has them; None for what is no tensor."""
    source: SourceLine
    """The author's line."""

    @property
    def refs(self) -> Iterator[Ref]:
        """The values that it reads."""
        yield from refs_in((self.args, self.kwargs))


@dataclass(frozen=True, slots=True)
class Graph:
    """A model's computation, nodes in order."""

    inputs: Mapping[str, TensorType]
    """Tensors that the caller gives, in the order of the example."""
    parameters: Mapping[str, str]
    """Parameters and buffers: value → the author's name for it."""
    constants: Mapping[str, Array]
    nodes: tuple[Node, ...]
    output: Any
    """The structure that the model returns, with `Ref`s for tensors."""
    mutated: Mapping[str, Ref] = field(default_factory=dict)
    """Buffers that the model changes: value → what it becomes."""
    types: Mapping[str, TensorType] = field(default_factory=dict)
    """Of parameters and buffers, by value."""

    def results(self) -> Iterator[Ref]:
        """The values that must be computed."""
        yield from refs_in(self.output)
        yield from self.mutated.values()


def refs_in(structure: Any) -> Iterator[Ref]:
    """All references in nested arguments."""
    if isinstance(structure, Ref):
        yield structure
    elif isinstance(structure, Mapping):
        for each in structure.values():
            yield from refs_in(each)
    elif isinstance(structure, (list, tuple)):
        for each in structure:
            yield from refs_in(each)
    elif isinstance(structure, Fields):
        yield from refs_in(structure.values)


def filled(structure: Any, value_of: Callable[[Ref], Any]) -> Any:
    """The structure with values in place of references."""
    if isinstance(structure, Ref):
        return value_of(structure)
    if isinstance(structure, Fields):
        return Fields(structure.kind, filled(structure.values, value_of))
    if isinstance(structure, Mapping):
        return {name: filled(each, value_of) for name, each in structure.items()}
    if isinstance(structure, tuple):
        return tuple(filled(each, value_of) for each in structure)
    if isinstance(structure, list):
        return [filled(each, value_of) for each in structure]
    return structure


def live_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes on which the results depend, in order."""
    wanted = {ref.name for ref in graph.results()}
    kept = []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(ref.name for ref in node.refs)
            kept.append(node)
    return tuple(reversed(kept))


class Fields:
    """Values with names, as a model returns them: `out.loss`, `out["loss"]`, `out[0]`."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: str, values: Mapping[str, Any]) -> None:
        self.kind = kind
        self.values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:
            raise AttributeError(f"{self.kind} has {', '.join(self.values)} and no {name!r}")
        return self.values[name]

    def __getitem__(self, key: str | int | slice) -> Any:
        return self.values[key] if isinstance(key, str) else tuple(self.values.values())[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.values())

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def keys(self) -> Iterator[str]:
        """The names."""
        return iter(self.values)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={v}' for name, v in self.values.items())})"
