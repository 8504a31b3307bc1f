"""`ImportedModule`: a `Module` whose forward runs the graph of an imported model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np

from plancompiler.errors import FeedError, ModelImportError, PlanCompilerError, UsageError
from plancompiler.frontend import functions
from plancompiler.frontend import methods as _methods  # noqa: F401  # tensors get theirs
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.frontend.nn.normalization import refuse_second_update
from plancompiler.frontend.trace import JobBuilder, constant, current_recorder
from plancompiler.hooks.eager_world import eager_world
from plancompiler.importers.graph import Array, Graph, Node, Ref, filled, refs_in
from plancompiler.importers.rules import Rule
from plancompiler.ir import (
    UNKNOWN_SOURCE,
    DType,
    NdSbp,
    Phase,
    Placement,
    SourceLine,
    TensorType,
    Value,
)
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.source import user_line


class ImportedModule(Module):
    """A module of an imported model. The whole model is the root; those below it hold parameters
    under the author's names, for `place`, `freeze` and `state_dict`.
    """

    def __init__(self, author_class: str) -> None:
        self.author_class = author_class
        """The name of the class that the author wrote."""

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, self.author_class, 1)


class ImportedModel(ImportedModule):
    """An imported model. Calling it takes the arguments of the example, by position or keyword, and
    returns what the original returns.
    """

    def __init__(
        self,
        author_class: str,
        graph: Graph,
        rules: Mapping[str, Rule],
        arguments: Arguments,
        tensors: Mapping[str, Parameter],
        training: bool,
    ) -> None:
        """`tensors` has parameters and buffers by the author's names; one that is tied comes under
        several.
        """
        super().__init__(author_class)
        self.graph = graph
        self.rules = rules
        self.arguments = arguments
        self.training = training
        self.tensors = dict(tensors)
        self.configurations: dict[str, bytes] = {}
        """Files that belong beside the weights, in the form of the author's library."""
        self.mesh: Placement | None = None
        """The mesh for which the author annotated the model."""
        self.layouts: dict[str, NdSbp] = {}
        """What these annotations ask for there, by the names of inputs and parameters."""
        self._exported = training
        self._traced: Callable[[int], Graph] | None = None
        self._graphs: dict[int, Graph] = {}
        """For other sizes of the batch than the example's."""
        for name, parameter in tensors.items():
            *path, last = name.split(".")
            module: Module = self
            for part in path:
                inner = vars(module).get(part)
                if not isinstance(inner, Module):
                    inner = ImportedModule("Module")
                    setattr(module, part, inner)
                module = inner
            if last in vars(module) and not isinstance(vars(module)[last], Parameter):
                raise ModelImportError(
                    "a parameter has the name of something else in the imported module",
                    got=repr(name),
                    hint="rename it in the model",
                )
            setattr(module, last, parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original computes, in training or evaluation mode as it was exported."""
        given, size = self.arguments.bound(args, kwargs)
        graph = self.graph
        if size is not None and self._traced is not None:
            if size not in self._graphs:
                self._graphs[size] = self._traced(size)
            graph = self._graphs[size]
        tensors = dict(self.named_parameters(remove_duplicate=False))
        if not isinstance(current_recorder(), JobBuilder):
            # Gradients need what buffers were before they change in place.
            given |= {name: tensors[graph.parameters[name]].value.clone() for name in graph.mutated}
        run = GraphRun(graph, self.rules, given, tensors)
        run.run()
        for value, new in graph.mutated.items():
            _assign(tensors[graph.parameters[value]].value, run.tensor(new.name))
        return filled(graph.output, lambda ref: run.tensor(ref.name))

    def annotate(self, mesh: Placement, layouts: Mapping[str, NdSbp]) -> None:
        """Keep the layouts that the author asks for on a mesh, and put the parameters there."""
        self.mesh, self.layouts = mesh, dict(layouts)
        asked = {name: sbp for name, sbp in layouts.items() if name in self.tensors}
        self.place(mesh, asked)

    def free(self, axes: Mapping[str, int], traced: Callable[[int], Graph]) -> None:
        """Let these axes of inputs have other sizes than in the example, for which `traced` makes
        graphs.
        """
        self.arguments.axes = dict(axes)
        self._traced = traced

    def call_with(self, tensors: Mapping[str, Any]) -> Any:
        """What the model returns for these tensors, by the names of `graph.inputs`, and the other
        arguments of the example.
        """
        return self(**filled(self.arguments.template, lambda ref: tensors[ref.name]))

    def train(self, training: bool = True) -> Self:
        """The mode in which the model was exported; UsageError for the other, as the graph has what
        that mode computes.
        """
        if training is not self._exported:
            mode = "training" if self._exported else "evaluation"
            raise UsageError(
                f"the model was imported in {mode} mode, and computes what it does in that mode",
                source=user_line(),
                got=f"train({training})",
                hint="call module.train() or module.eval() on the original and import it again",
            )
        return super().train(training)


def reserved_names() -> frozenset[str]:
    """Names that no parameter of an imported model can have, as its module has them already."""
    empty = ImportedModel("", Graph({}, {}, {}, (), ()), {}, Arguments({}, {}), {}, False)
    return frozenset([*dir(empty), *vars(empty)])


def _assign(state: Value, new: Value) -> None:
    """A buffer takes a new value at the end of the step."""
    recorder = current_recorder()
    if isinstance(recorder, JobBuilder):
        refuse_second_update(state, "assign")
        with recorder.phase(Phase.UPDATE):
            state._apply("assign", (state, new), {})  # noqa: SLF001  # what every tensor has
    else:
        with eager_world().no_grad():
            state.copy_(new)  # type: ignore[attr-defined]  # outside of jobs it is a DistTensor


class Arguments:
    """The arguments of a model: which tensors it takes, and the other values of the example."""

    def __init__(self, template: Mapping[str, Any], inputs: Mapping[str, TensorType]) -> None:
        """`template` has the arguments by name and in order, with `Ref`s for tensors."""
        self.template = dict(template)
        self.inputs = dict(inputs)
        self.axes: dict[str, int] = {}
        """Of inputs: the axis that may have another size, all of them the same."""

    def bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int | None]:
        """The tensors of a call by the names of inputs, and the size of their batch where it is not
        the example's; UsageError or FeedError for others than those of the example.
        """
        if len(args) > len(self.template):
            raise UsageError(
                "the model takes fewer arguments",
                source=user_line(),
                got=len(args),
                expected=f"({', '.join(self.template)})",
            )
        given = dict(zip(self.template, args, strict=False))
        twice = given.keys() & kwargs.keys()
        unknown = kwargs.keys() - self.template.keys()
        if twice or unknown:
            raise UsageError(
                "the model was not exported with these arguments",
                source=user_line(),
                got=", ".join(sorted(twice or unknown)),
                expected=f"({', '.join(self.template)}), each once",
                hint="" if twice else "import it again with an example that has them",
            )
        given |= kwargs
        tensors: dict[str, Any] = {}
        for name, wanted in self.template.items():
            if name in given:
                self._match(name, wanted, given[name], tensors)
            elif any(True for _ in refs_in(wanted)):
                raise FeedError(
                    f"the model needs its argument {name!r}",
                    source=user_line(),
                    expected=f"({', '.join(self.template)})",
                )
        return tensors, self._size(tensors)

    def _size(self, tensors: Mapping[str, Any]) -> int | None:
        sizes = {name: tensors[name].shape[axis] for name, axis in self.axes.items()}
        if len(set(sizes.values())) > 1:
            raise FeedError(
                "the inputs of the model have batches of different sizes",
                source=user_line(),
                got=", ".join(f"{name} {size}" for name, size in sizes.items()),
            )
        usual = any(
            self.inputs[name].shape[axis] == sizes[name] for name, axis in self.axes.items()
        )
        return None if usual or not sizes else next(iter(sizes.values()))

    def _match(self, name: str, wanted: Any, value: Any, tensors: dict[str, Any]) -> None:
        if isinstance(wanted, Ref):
            expected = self.inputs[wanted.name]
            axis = self.axes.get(wanted.name)
            if axis is not None and len(getattr(value, "shape", ())) > axis:
                free = (*expected.shape[:axis], value.shape[axis], *expected.shape[axis + 1 :])
                expected = TensorType(free, expected.dtype)
            if not isinstance(value, TensorOperators) or (
                (value.shape, value.dtype) != (expected.shape, expected.dtype)
            ):
                raise FeedError(
                    f"argument {name!r} of the model is not like that of the example",
                    source=user_line(),
                    got=f"{value.dtype}{list(value.shape)}"
                    if isinstance(value, TensorOperators)
                    else type(value).__name__,
                    expected=str(expected),
                    hint="import the model again with an example of this shape",
                )
            tensors[wanted.name] = value
        elif (
            isinstance(wanted, Mapping) and isinstance(value, Mapping) and set(wanted) == set(value)
        ):
            for key, each in wanted.items():
                self._match(f"{name}[{key!r}]", each, value[key], tensors)
        elif (
            isinstance(wanted, (list, tuple))
            and isinstance(value, (list, tuple))
            and len(wanted) == len(value)
        ):
            for number, (each, other) in enumerate(zip(wanted, value, strict=True)):
                self._match(f"{name}[{number}]", each, other, tensors)
        elif type(wanted) is not type(value) or wanted != value:
            raise UsageError(
                f"argument {name!r} has another value than in the example, and the imported model "
                "computes what the original does with that",
                source=user_line(),
                got=repr(value),
                expected=repr(wanted),
            )


class GraphRun:
    """One run of a graph on tensors, symbolic or eager."""

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[str, Rule],
        given: Mapping[str, Any],
        tensors: Mapping[str, Parameter],
    ) -> None:
        self._graph = graph
        self._rules = rules
        self._tensors = tensors
        self._values: dict[str, Any] = dict(given)
        self._constants: dict[tuple[str, DType, Placement, bool], Any] = {}
        self._order: dict[Placement, int] = {}
        """Placements in the order in which the model reaches them: a pipeline's stages. Inputs
        count when they are used: labels may live on the last stage."""
        self._recorder = current_recorder()

    def run(self, check: bool = False) -> None:
        """Compute all nodes; with `check`, ModelImportError where a result has another shape or
        dtype than the author's system says.
        """
        for node in self._graph.nodes:
            self.compute(node)
            if check:
                _check(node, self._values[node.name])

    def compute(self, node: Node) -> Any:
        """The result of one node, whose arguments are computed."""
        with self._lines_of(node.source):
            try:
                result = self._result(node)
            except PlanCompilerError as error:
                place = None if node.source is UNKNOWN_SOURCE else node.source
                raise error.at(op=f"{node.name} ({node.target})", source=place) from None
        self._values[node.name] = result
        return result

    def tensor(self, name: str) -> Any:
        """A value of the graph as a tensor."""
        value = self.value(name)
        if isinstance(value, np.ndarray):
            return self._constant(name, value, self._home(()), whole=True)
        return value

    def value(self, name: str) -> Any:
        """A value of the graph; of a constant its array."""
        if name in self._values:
            return self._values[name]
        if name in self._graph.parameters:
            parameter = self._tensors[self._graph.parameters[name]]
            value = self._values[name] = parameter.value
            self._order.setdefault(value.placement, len(self._order))
            return value
        return self._graph.constants[name]

    def _lines_of(self, source: SourceLine) -> AbstractContextManager[None]:
        if isinstance(self._recorder, JobBuilder) and source is not UNKNOWN_SOURCE:
            return self._recorder.lines_of(source)
        return nullcontext()

    def _home(self, tensors: Sequence[Any]) -> Placement:
        """Where an operation on these runs: at the latest of their places."""
        places: list[Placement] = [tensor.placement for tensor in tensors] or list(self._order)
        places = places or [value.placement for value in self._values.values()]
        return max(places, key=lambda place: self._order.setdefault(place, len(self._order)))

    def _result(self, node: Node) -> Any:
        rule = self._rules[node.target]
        if node.target == "getitem":
            part = self.value(node.args[0].name)[node.args[1]]
            if part is None and any(kind is not None for kind in node.types):
                raise ModelImportError(
                    "a rule leaves out a result that the model uses",
                    got=f"result {node.args[1]} of {node.args[0].name}",
                    hint="replace the rule by one that computes it",
                )
            return part
        named = {ref.name: self.value(ref.name) for ref in node.refs}
        tensors = [each for each in named.values() if isinstance(each, TensorOperators)]
        tensors += [one for each in named.values() if isinstance(each, tuple) for one in each]
        home = self._home(tensors)
        dtype = None
        if rule.promotes and len(node.types) == 1 and node.types[0] is not None:
            dtype = node.types[0].dtype
        shapes = [tensor.shape for tensor in tensors]

        def array(ref: Ref) -> Any:
            value = named[ref.name]
            if isinstance(value, np.ndarray):
                return value
            raise ModelImportError(
                "what a model computes cannot depend on the values of tensors here",
                got=f"{ref.name} {value}",
                expected="a constant of the model",
                hint="give it a value while importing, if the importer takes constants",
            )

        def operand(ref: Ref) -> Any:
            value = named[ref.name]
            if isinstance(value, np.ndarray):
                if rule.arrays:
                    return value
                whole = not rule.promotes or _needs_all(value, shapes, named.values())
                return self._constant(ref.name, value, home, whole, dtype)
            if isinstance(value, TensorOperators):
                return _moved(value, home, dtype)
            return value

        positional = [
            filled(argument, array if at in rule.known else operand)
            for at, argument in enumerate(node.args)
        ]
        by_name = filled(dict(node.kwargs), operand)
        if rule.typed:
            by_name["result"] = node.types[0]
        if rule.placed:
            by_name["placement"] = home
        return rule.function(*positional, **by_name)

    def _constant(
        self, name: str, array: Array, home: Placement, whole: bool, dtype: DType | None = None
    ) -> Any:
        """A constant as a tensor; unless it is wanted whole, with extent 1 where all is alike."""
        wanted = dtype or DType.parse(array.dtype)
        key = (name, wanted, home, whole)
        tensor = self._constants.get(key)
        if tensor is None:
            small = without_repeats(array)
            if small.size == 1 and array.size > 1 and whole:
                number = small.reshape(()).item()
                tensor = _full(array.shape, number, wanted, home)
            else:
                tensor = constant(small, wanted, home)
                if whole and small.shape != array.shape:
                    tensor = functions.expand(tensor, array.shape)
            self._constants[key] = tensor
        return tensor


def _full(shape: tuple[int, ...], number: float, dtype: DType, placement: Placement) -> Any:
    """A tensor full of one number of its dtype."""
    value = float(number) if dtype.is_floating else number
    return current_recorder().add(
        "fill", (), {"shape": shape, "dtype": str(dtype), "value": value}, placement
    )[0]


def without_repeats(array: Array) -> Array:
    """The array with extent 1 along each axis along which it repeats."""
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            first = array[(slice(None),) * axis + (slice(1),)]  # `take` would copy the array
            if (array.strides[axis] == 0) or bool(
                np.array_equal(array, np.broadcast_to(first, array.shape))
            ):
                array = first
    return array


def _needs_all(array: Array, shapes: Sequence[tuple[int, ...]], named: Any) -> bool:
    """Whether the result would have another shape, if the array came without repeats."""
    others = [
        *shapes,
        *(each.shape for each in named if isinstance(each, np.ndarray) and each is not array),
    ]
    small = without_repeats(array).shape
    return np.broadcast_shapes(array.shape, *others) != np.broadcast_shapes(small, *others)


def _moved(tensor: Any, home: Placement, dtype: DType | None) -> Any:
    if tensor.placement != home:
        tensor = tensor.redistribute(placement=home)
    return tensor if dtype is None or tensor.dtype is dtype else tensor.cast(dtype)


def _check(node: Node, result: Any) -> None:
    made = result if isinstance(result, (tuple, list)) else (result,)
    for tensor, expected in zip(made, node.types, strict=False):
        if expected is None or tensor is None or isinstance(tensor, (int, float)):
            continue
        if (tuple(tensor.shape), tensor.dtype) != (expected.shape, expected.dtype):
            raise ModelImportError(
                f"the rule of {node.target} gives another type than the original",
                op=node.name,
                source=node.source,
                got=f"{tensor.dtype}{list(tensor.shape)}",
                expected=str(expected),
                hint="report the model, or replace the rule with @pc.torch_rule or @pc.onnx_rule",
            )
