"""StableHLO programs as graphs.

A program is interpreted once, with references in place of tensors that are not known. Functions are
inlined, loops whose condition is known are unrolled, and what depends on no argument is computed.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.errors import ModelImportError
from plancompiler.frontend.nn.module import Buffer, Initial, Parameter
from plancompiler.importers.constant_evaluation import evaluated
from plancompiler.importers.graph import Array, Graph, Node, Ref, live_nodes
from plancompiler.importers.imported_module import Arguments, ImportedModel
from plancompiler.importers.stablehlo import HloBlock, HloFunction, HloOp, HloProgram, Sharding
from plancompiler.importers.stablehlo_recognition import recognized
from plancompiler.importers.stablehlo_regions import described_region
from plancompiler.importers.stablehlo_rules import ELEMENTWISE, STABLEHLO_RULES
from plancompiler.importers.trial import require_rules, try_graph
from plancompiler.ir import UNKNOWN_SOURCE, Placement, SourceLine, TensorType
from plancompiler.ir.source import user_line

_MOST_NODES = 200_000
"""Unrolled loops may make graphs that nobody wants to wait for."""
_MOST_FOLDED = 1 << 27
"""Elements of a constant that is computed while a model is imported."""

Operand = Ref | Array
Values = MutableMapping[int, Operand]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments of a program."""

    name: str
    """Its path: of a parameter the author's name, of an input that by which it is fed."""
    parameter: bool
    initial: Array | None = None


def graph_of(
    program: HloProgram, leaves: Sequence[Leaf], output: Callable[[list[Any]], Any]
) -> Graph:
    """The graph of a program's main function; `output` puts the results into their structure.

    ModelImportError for what has no fixed shape, no known dtype, or no rule, and for loops and
    branches that depend on the values of tensors.
    """
    main = program.main
    if len(leaves) != len(main.types):
        raise ModelImportError(
            "a program takes another number of arrays than its example has",
            source=user_line(),
            got=f"{len(leaves)} arrays",
            expected=f"{len(main.types)} ({', '.join(filter(None, main.labels))})",
            hint="lower it with jax.jit(..., keep_unused=True), or import the function itself",
        )
    _require_known_types(program)
    reading = _Reading(program)
    inputs: dict[str, TensorType] = {}
    parameters: dict[str, str] = {}
    types: dict[str, TensorType] = {}
    given: list[Operand] = []
    for leaf, kind, sharding in zip(leaves, main.types, main.shardings, strict=True):
        assert isinstance(kind, TensorType)
        value = f"parameter {leaf.name}" if leaf.parameter else leaf.name
        given.append(Ref(value))
        if leaf.parameter:
            parameters[value], types[value] = leaf.name, kind
        else:
            inputs[value] = kind
            if sharding is not None:
                given[-1] = reading.constrained(Ref(value), kind, sharding)
    results = reading.run(main, given, UNKNOWN_SOURCE)
    returned = output([reading.named(each) for each in results])
    graph = Graph(inputs, parameters, {}, tuple(reading.nodes), returned, {}, types)
    graph = recognized(
        Graph(inputs, parameters, reading.constants, live_nodes(graph), returned, {}, types)
    )
    used = {ref.name for node in graph.nodes for ref in node.refs}
    used |= {ref.name for ref in graph.results()}
    constants = {name: array for name, array in graph.constants.items() if name in used}
    graph = Graph(inputs, parameters, constants, graph.nodes, returned, {}, types)
    require_rules(graph, STABLEHLO_RULES)
    return graph


def model_of(
    program: HloProgram,
    leaves: Sequence[Leaf],
    template: Mapping[str, Any],
    output: Callable[[list[Any]], Any],
    name: str,
) -> ImportedModel:
    """The module that computes what a program does. `template` has its arguments, without those
    that are parameters.
    """
    graph = graph_of(program, leaves, output)
    tensors: dict[str, Parameter] = {}
    for leaf, kind in zip(leaves, program.main.types, strict=True):
        if leaf.parameter:
            assert isinstance(kind, TensorType)
            initial: Initial = "missing" if leaf.initial is None else leaf.initial
            made = Parameter if kind.dtype.is_floating else Buffer
            tensors[leaf.name] = made(kind.shape, kind.dtype, initial)
    try_graph(graph, STABLEHLO_RULES, tensors)
    arguments = Arguments(template, graph.inputs)
    model = ImportedModel(name, graph, STABLEHLO_RULES, arguments, tensors, training=False)
    axes = max(program.meshes.values(), key=lambda mesh: math.prod(mesh.values()), default={})
    if axes:
        ranks = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        layouts = {
            leaf.name: sharding.on(tuple(axes))
            for leaf, sharding in zip(leaves, program.main.shardings, strict=True)
            if sharding is not None
        }
        model.annotate(Placement("cpu", ranks, tuple(axes)), layouts)
    return model


def _require_known_types(program: HloProgram) -> None:
    """ModelImportError with every type that has no counterpart, and where it occurs first."""
    unknown: dict[str, str] = {}

    def look(block: HloBlock) -> None:
        for op in block.ops:
            for kind in op.types:
                if isinstance(kind, str):
                    unknown.setdefault(kind, f"{op.name} at {op.source}")
            for region in op.regions:
                look(region)

    for function in program.functions.values():
        for kind, label in zip(function.types, function.labels, strict=True):
            if isinstance(kind, str):
                unknown.setdefault(kind, f"an argument {label} of {function.name}")
        look(function.body)
    if unknown:
        dynamic = any("?" in kind for kind in unknown)
        raise ModelImportError(
            "a program has tensors without a fixed shape"
            if dynamic
            else "a program has values of types that do not exist here",
            source=user_line(),
            got="; ".join(f"{kind} ({where})" for kind, where in unknown.items()),
            expected="tensors of fixed shape, of truth values or of real numbers of 8 to 64 bits",
            hint="export it with arrays of fixed shape"
            if dynamic
            else "complex numbers, keys of random numbers and tokens cannot be imported",
        )


class _Reading:
    """One interpretation of a program."""

    def __init__(self, program: HloProgram) -> None:
        self._program = program
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self._constant_names: dict[int, str] = {}
        self._types: dict[str, TensorType] = {}
        self._count = 0

    def named(self, operand: Operand) -> Ref:
        """A reference to an operand, which is kept if it is a constant."""
        if isinstance(operand, Ref):
            return operand
        name = self._constant_names.get(id(operand))
        if name is None:
            name = self._constant_names[id(operand)] = f"constant_{len(self.constants)}"
            self.constants[name] = operand
        return Ref(name)

    def constrained(self, ref: Ref, kind: TensorType, sharding: Sharding) -> Ref:
        """A value in the layout that an annotation asks for."""
        return self._node(
            "sdy.sharding_constraint",
            (ref,),
            {"axes": [list(each) for each in sharding.axes], "open": sharding.open},
            (kind,),
            UNKNOWN_SOURCE,
        )

    def run(
        self, function: HloFunction, given: Sequence[Operand], source: SourceLine
    ) -> list[Operand]:
        """The results of a function."""
        return self._block(function.body, given, {}, source)

    def _block(
        self, block: HloBlock, given: Sequence[Operand], outer: Values, source: SourceLine
    ) -> list[Operand]:
        """What a block returns; `source` is the line of operations that know none."""
        values: Values = ChainMap({}, outer) if outer else {}
        values.update(zip(block.arguments, given, strict=True))
        *ops, last = block.ops
        for op in ops:
            here = source if op.source is UNKNOWN_SOURCE else op.source
            operands = [values[each] for each in op.operands]
            special = _SPECIAL.get(op.name)
            results = (
                self._computed(op, operands, here)
                if special is None
                else special(self, op, operands, values, here)
            )
            values.update(zip(op.results, results, strict=True))
        return [values[each] for each in last.operands]

    # --- what is no computation of its own ---

    def constant(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        (kind,) = op.types
        assert isinstance(kind, TensorType)
        return [np.broadcast_to(op.attrs["value"], kind.shape)]

    def iota(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        (kind,) = op.types
        assert isinstance(kind, TensorType)
        axis = op.attrs["iota_dimension"]
        numbers = np.arange(kind.shape[axis]).astype(kind.dtype.numpy)
        along = [1] * len(kind.shape)
        along[axis] = -1
        return [np.broadcast_to(numbers.reshape(along), kind.shape)]

    def unchanged(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        return operands

    def call(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        name = op.attrs.get("callee") or op.attrs["decomposition"]
        function = self._program.functions[name]
        if _is_relu(function) and isinstance(operands[0], Ref) and _is_floating(op):
            # The gradient of jax.nn.relu is 0 at 0, and that of its formula is not.
            return [self._node("imported.relu", operands, {}, op.types, source)]
        return self.run(function, operands, source)

    def loop(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        condition, body = op.regions
        carried = operands
        turns = 0
        while True:
            (more,) = self._block(condition, carried, values, source)
            if isinstance(more, Ref):
                raise ModelImportError(
                    "how often a loop turns depends on the values of tensors",
                    op=op.name,
                    source=source,
                    got=f"a condition that is not known after {turns} turns",
                    expected="a number of turns that is known when the model is imported",
                    hint="use jax.lax.scan or fori_loop with fixed bounds, and jnp.where for what "
                    "ends early",
                )
            if not more:
                return carried
            carried = self._block(body, carried, values, source)
            turns += 1
            if len(self.nodes) > _MOST_NODES or turns > _MOST_NODES:
                raise ModelImportError(
                    "a loop becomes too long when it is unrolled",
                    op=op.name,
                    source=source,
                    got=f"{len(self.nodes)} operations after {turns} turns",
                    expected=f"at most {_MOST_NODES}",
                    hint="import a function with fewer turns, such as one step of the loop",
                )

    def branch(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        (index,) = operands
        if isinstance(index, Ref):
            raise ModelImportError(
                "which branch is taken depends on the values of tensors",
                op=op.name,
                source=source,
                expected="a choice that is known when the model is imported",
                hint="compute both branches and choose with jnp.where",
            )
        if op.name == "stablehlo.if":
            branch = 0 if index else 1
        else:
            branch = int(index)
            if not 0 <= branch < len(op.regions):
                branch = len(op.regions) - 1
        return self._block(op.regions[branch], (), values, source)

    def sharding_constraint(
        self, op: HloOp, operands: list[Operand], values: Values, source: SourceLine
    ) -> list[Operand]:
        sharding = op.attrs["sharding"]
        (operand,), (kind,) = operands, op.types
        if sharding is None or not isinstance(operand, Ref):
            return operands
        assert isinstance(kind, TensorType)
        axes = [list(each) for each in sharding.axes]
        attrs = {"axes": axes, "open": sharding.open}
        return [self._node(op.name, (operand,), attrs, (kind,), source)]

    # --- what a rule computes ---

    def _computed(self, op: HloOp, operands: list[Operand], source: SourceLine) -> list[Operand]:
        target, attrs = op.name, dict(op.attrs)
        types: Sequence[Any] = op.types
        if target == "stablehlo.custom_call":
            target = f"custom_call.{attrs.pop('call_target_name')}"
            attrs = {
                name: attrs[name] for name in ("mhlo.attributes", "backend_config") if name in attrs
            }
        elif op.regions:
            described = described_region(op)
            if described is None:
                target = f"{target} of a function of its own"
                attrs = {}
            else:
                attrs["region"] = described
        rule = STABLEHLO_RULES.get(target)
        if rule is not None and not any(isinstance(each, Ref) for each in operands):
            folded = self._folded(target, operands, attrs, types)
            if folded is not None:
                return folded
        unchanged = _unchanged(target, operands)
        if unchanged is not None:
            return [unchanged]
        if len(types) == 1:
            return [self._node(target, operands, attrs, types, source)]
        whole = self._node(target, operands, attrs, types, source)
        return [
            self._node("getitem", (whole, at), {}, (kind,), source) for at, kind in enumerate(types)
        ]

    def _folded(
        self,
        target: str,
        operands: Sequence[Any],
        attrs: Mapping[str, Any],
        types: Sequence[TensorType],
    ) -> list[Operand] | None:
        """The results of an operation on constants, unless they are too large to keep."""
        if target == "stablehlo.broadcast_in_dim":
            (x,), (kind,) = operands, types
            along = [1] * len(kind.shape)
            for extent, axis in zip(x.shape, attrs["broadcast_dimensions"], strict=True):
                along[axis] = extent
            return [np.broadcast_to(x.reshape(along), kind.shape)]
        if target == "stablehlo.bitcast_convert":
            (x,), (kind,) = operands, types
            return [np.ascontiguousarray(x).view(kind.dtype.numpy).reshape(kind.shape)]
        if sum(_size(kind) for kind in types) > _MOST_FOLDED:
            return None
        if target in ELEMENTWISE:
            # What is alike along an axis is computed once.
            operands = _without_common_repeats(operands)
            small = np.broadcast_shapes(*(each.shape for each in operands))
            made = evaluated(
                STABLEHLO_RULES[target], operands, attrs, [TensorType(small, types[0].dtype)]
            )
            return [
                np.broadcast_to(each, kind.shape) for each, kind in zip(made, types, strict=True)
            ]
        return list(evaluated(STABLEHLO_RULES[target], operands, attrs, types))

    def _node(
        self,
        target: str,
        operands: Sequence[Any],
        attrs: Mapping[str, Any],
        types: Sequence[Any],
        source: SourceLine,
    ) -> Ref:
        self._count += 1
        name = f"{target.rpartition('.')[2].partition(' ')[0]}_{self._count}"
        scalars = target in ELEMENTWISE
        args = []
        for each in operands:
            if isinstance(each, np.ndarray):
                number = _number(each) if scalars else None
                args.append(self.named(each) if number is None else number)
            else:
                args.append(each)
        self.nodes.append(Node(name, target, tuple(args), dict(attrs), tuple(types), source))
        return Ref(name)


_SPECIAL: Mapping[str, Callable[..., list[Operand]]] = {
    "stablehlo.constant": _Reading.constant,
    "stablehlo.iota": _Reading.iota,
    "stablehlo.optimization_barrier": _Reading.unchanged,
    "func.call": _Reading.call,
    "stablehlo.composite": _Reading.call,
    "stablehlo.while": _Reading.loop,
    "stablehlo.case": _Reading.branch,
    "stablehlo.if": _Reading.branch,
    "sdy.sharding_constraint": _Reading.sharding_constraint,
}


def _is_floating(op: HloOp) -> bool:
    (kind,) = op.types
    return isinstance(kind, TensorType) and kind.dtype.is_floating


def _is_relu(function: HloFunction) -> bool:
    """Whether a function is jax.nn.relu: max(x, 0) under this name."""
    ops = {op.name for op in function.body.ops}
    return (
        function.name.partition("_")[0] == "relu"
        and len(function.types) == 1
        and "stablehlo.maximum" in ops
        and ops
        <= {
            "stablehlo.constant",
            "stablehlo.broadcast_in_dim",
            "stablehlo.maximum",
            "sdy.sharding_constraint",
            "func.return",
        }
        and all(
            not np.any(op.attrs["value"])
            for op in function.body.ops
            if op.name == "stablehlo.constant"
        )
    )


def _unchanged(target: str, operands: Sequence[Operand]) -> Ref | None:
    """The operand that an operation gives as it is, as the other is full of a neutral number."""
    neutral = _NEUTRAL.get(target)
    if target == "stablehlo.select" and isinstance(operands[0], np.ndarray):
        chosen = operands[1] if operands[0].all() else operands[2]
        fits = bool(operands[0].all()) or not operands[0].any()
        return chosen if fits and isinstance(chosen, Ref) else None
    if neutral is None:
        return None
    number, either = neutral
    for x, other in (tuple(operands), tuple(reversed(operands))):
        if isinstance(x, Ref) and isinstance(other, np.ndarray) and _number(other) == number:
            return x
        if not either:
            break
    return None


_NEUTRAL = {
    "stablehlo.subtract": (0, False),
    "stablehlo.multiply": (1, True),
    "stablehlo.divide": (1, False),
    "stablehlo.maximum": (-math.inf, True),
    "stablehlo.minimum": (math.inf, True),
}
"""Numbers that change nothing, and whether they may come first."""


def _size(kind: TensorType) -> int:
    size = 1
    for extent in kind.shape:
        size *= extent
    return size


def _without_common_repeats(operands: Sequence[Array]) -> list[Array]:
    """Arrays of one shape, with extent 1 along axes along which none of them changes."""
    first = operands[0]
    if any(each.shape != first.shape for each in operands) or not first.ndim or not first.size:
        return list(operands)
    index = tuple(
        slice(0, 1) if all(each.strides[axis] == 0 for each in operands) else slice(None)
        for axis in range(first.ndim)
    )
    return [each[index] for each in operands]


def _number(array: Array) -> bool | int | float | None:
    """The number that an array is full of."""
    if array.size == 0:
        return None
    if array.size > 1 and any(array.strides) and not (array == array.flat[0]).all():
        return None
    first = array.flat[0]
    number: bool | int | float = first.item() if hasattr(first, "item") else first
    return number if isinstance(number, (bool, int, float)) else float(number)
