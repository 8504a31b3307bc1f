"""What is decided while an ONNX model is read: branches, loops and sequences.

A plan is static. So a branch is chosen when the model is read, which needs a condition that is
known then; a loop becomes its body as often as it runs, and a sequence the tensors that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from plancompiler.errors import ModelImportError
from plancompiler.ir import SourceLine

_MAX_ROUNDS = 10_000


class Reading(Protocol):
    """The reading of a model, as these functions need it."""

    def inner(self, scope: Any, values: Mapping[str, Any], graph: Any, path: str) -> Sequence[Any]:
        """The outputs of a graph inside of a node, which sees the values around it."""

    def added(
        self, operator: str, inputs: Sequence[Any], attributes: Mapping[str, Any], call: Call
    ) -> Any:
        """The result of an operator that the model does not have."""

    def shape_of(self, value: Any) -> tuple[int, ...]:
        """The shape of a value."""


class Call:
    """A node that is read."""

    __slots__ = ("attributes", "inputs", "line", "outputs", "scope", "where")

    def __init__(
        self,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        outputs: int,
        scope: Any,
        where: str,
        line: SourceLine,
    ) -> None:
        self.inputs = inputs
        self.attributes = attributes
        self.outputs = outputs
        """How many results the node names."""
        self.scope = scope
        self.where = where
        self.line = line

    def input(self, at: int) -> Any:
        """An input, None for one that is left out."""
        return self.inputs[at] if at < len(self.inputs) else None

    def known(self, at: int, what: str) -> Any:
        """An input that must be known, as an array; ModelImportError for another."""
        value = self.input(at)
        if value is not None and not isinstance(value, np.ndarray):
            raise ModelImportError(
                f"{what} depends on the values of tensors, and a plan is made without them",
                got=str(getattr(value, "name", value)),
                expected="a value that is known while the model is read",
                hint="if an input of the model decides it, fix that: constants={'name': value}",
            )
        return value


Structure = Callable[[Reading, Call], Sequence[Any]]


def _if(reading: Reading, call: Call) -> Sequence[Any]:
    condition = bool(np.asarray(call.known(0, "which branch is taken")).reshape(()))
    branch = call.attributes["then_branch" if condition else "else_branch"]
    return reading.inner(call.scope, {}, branch, f"{call.where}/")


def _loop(reading: Reading, call: Call) -> Sequence[Any]:
    limit, going = call.known(0, "how often a loop runs"), call.known(1, "whether a loop goes on")
    body, carried = call.attributes["body"], list(call.inputs[2:])
    names = [each.name for each in body.input]
    rows: list[list[Any]] = [[] for _ in body.output[1 + len(carried) :]]
    rounds = 0
    going = np.array(True) if going is None else going
    while bool(np.asarray(going).reshape(())) and (limit is None or rounds < int(limit)):
        if rounds >= _MAX_ROUNDS:
            raise ModelImportError("a loop runs too often to be unrolled", got=f"over {rounds}")
        values = dict(zip(names, [np.array(rounds, np.int64), going, *carried], strict=True))
        made = reading.inner(call.scope, values, body, f"{call.where}/{rounds}/")
        round_call = Call(made[:1], {}, 1, call.scope, call.where, call.line)
        going = round_call.known(0, "whether a loop goes on")
        carried = list(made[1 : 1 + len(carried)])
        for row, value in zip(rows, made[1 + len(carried) :], strict=True):
            row.append(value)
        rounds += 1
    return [*carried, *(_stacked(reading, row, 0, call) for row in rows)]


def _scan(reading: Reading, call: Call) -> Sequence[Any]:
    body, attributes = call.attributes["body"], call.attributes
    if "directions" in attributes or call.scope.opsets.get("", 9) < 9:
        raise ModelImportError(
            "the importer reads no Scan with a batch", got="opset 8", expected="opset 9 or later"
        )
    count = attributes["num_scan_inputs"]
    carried = list(call.inputs[: len(call.inputs) - count])
    scanned = call.inputs[len(call.inputs) - count :]
    results = len(body.output) - len(carried)
    axes = attributes.get("scan_input_axes", [0] * count)
    backwards = attributes.get("scan_input_directions", [0] * count)
    length = reading.shape_of(scanned[0])[axes[0]]
    rows: list[list[Any]] = [[] for _ in range(results)]
    for step in range(length):
        places = [length - 1 - step if back else step for back in backwards]
        items = [
            reading.added("Gather", [each, np.array(place)], {"axis": axis}, call)
            for each, place, axis in zip(scanned, places, axes, strict=True)
        ]
        values = dict(zip((each.name for each in body.input), [*carried, *items], strict=True))
        made = reading.inner(call.scope, values, body, f"{call.where}/{step}/")
        carried = list(made[: len(carried)])
        for row, value in zip(rows, made[len(carried) :], strict=True):
            row.append(value)
    out_axes = attributes.get("scan_output_axes", [0] * results)
    out_backwards = attributes.get("scan_output_directions", [0] * results)
    stacked = [
        _stacked(reading, row[::-1] if back else row, axis, call)
        for row, axis, back in zip(rows, out_axes, out_backwards, strict=True)
    ]
    return [*carried, *stacked]


def _stacked(reading: Reading, row: Sequence[Any], axis: int, call: Call) -> Any:
    if not row:
        raise ModelImportError(
            "a loop that runs no time makes a result of unknown shape",
            hint="leave the loop out of the model",
        )
    apart = [reading.added("Unsqueeze", [each, np.array([axis])], {}, call) for each in row]
    return reading.added("Concat", apart, {"axis": axis}, call)


def _sequence(call: Call) -> list[Any]:
    value = call.input(0)
    if not isinstance(value, tuple):
        raise ModelImportError("an operator for sequences needs one", got=str(value)[:100])
    return list(value)


def _place(call: Call, at: int, count: int) -> int:
    position = call.known(at, "a place in a sequence")
    place = count if position is None else int(position)
    if not -count <= place <= count:
        raise ModelImportError(
            "a sequence has no such place", got=place, expected=f"from {-count} to {count}"
        )
    return place


def _insert(reading: Reading, call: Call) -> Sequence[Any]:
    items = _sequence(call)
    items.insert(_place(call, 2, len(items)), call.inputs[1])
    return [tuple(items)]


def _erase(reading: Reading, call: Call) -> Sequence[Any]:
    items = _sequence(call)
    place = _place(call, 1, len(items))
    del items[-1 if call.input(1) is None else place]
    return [tuple(items)]


def _element(reading: Reading, call: Call) -> Sequence[Any]:
    items = _sequence(call)
    place = _place(call, 1, len(items))
    if place == len(items):
        raise ModelImportError("a sequence has no such place", got=place)
    return [items[place]]


def _cut(reading: Reading, call: Call) -> Sequence[Any]:
    axis, sizes = call.attributes.get("axis", 0), call.known(1, "the parts of a tensor")
    extent = reading.shape_of(call.inputs[0])[axis]
    if sizes is None or sizes.ndim == 0:
        size = 1 if sizes is None else int(sizes)
        sizes = np.array([min(size, extent - at) for at in range(0, extent, size)])
    parts = []
    start = 0
    for size in sizes.tolist():
        bounds = [np.array([start]), np.array([start + size]), np.array([axis])]
        part = reading.added("Slice", [call.inputs[0], *bounds], {}, call)
        if call.input(1) is None and not call.attributes.get("keepdims", 1):
            part = reading.added("Squeeze", [part, np.array([axis])], {}, call)
        parts.append(part)
        start += size
    return [tuple(parts)]


def _joined(reading: Reading, call: Call) -> Sequence[Any]:
    axis = call.attributes["axis"]
    if call.attributes.get("new_axis", 0):
        return [_stacked(reading, _sequence(call), axis, call)]
    return [reading.added("Concat", _sequence(call), {"axis": axis}, call)]


STRUCTURE: dict[str, Structure] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceConstruct": lambda reading, call: [tuple(call.inputs)],
    "SequenceEmpty": lambda reading, call: [()],
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _element,
    "SequenceLength": lambda reading, call: [np.array(len(_sequence(call)), np.int64)],
    "SplitToSequence": _cut,
    "ConcatFromSequence": _joined,
    "Optional": lambda reading, call: [call.input(0)],
    "OptionalGetElement": lambda reading, call: [call.input(0)],
    "OptionalHasElement": lambda reading, call: [np.array(call.input(0) is not None)],
}
"""Operators that a reading resolves."""
