"""ONNX models as graphs; the one file that imports onnx.

A model is read node by node, in its order. What depends on no parameter and no input is computed at
once, by the reference evaluator of the standard: shapes, masks, the numbers that say how to slice.
All else is traced with this package's functions, which gives every value a shape without waiting
for the file to say it, and compared with what the standard's own shape inference says. A file is
data: nothing of it is executed, and nothing outside of its folder is read.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import ModelImportError, PlanCompilerError, UsageError
from plancompiler.frontend.nn.module import Buffer, Parameter
from plancompiler.frontend.trace import JobBuilder, source_tensor
from plancompiler.importers.graph import Array, Fields, Graph, Node, Ref, live_nodes
from plancompiler.importers.imported_module import (
    Arguments,
    GraphRun,
    ImportedModel,
    reserved_names,
)
from plancompiler.importers.onnx_attention import recognized
from plancompiler.importers.onnx_control import STRUCTURE, Call
from plancompiler.importers.onnx_rules import ONNX_DTYPES
from plancompiler.importers.onnx_table import ONNX_RULES
from plancompiler.importers.rules import ONNX_DOMAIN
from plancompiler.importers.trial import try_graph
from plancompiler.ir import DType, NdSbp, Placement, SourceLine, TensorType
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER
from plancompiler.ir.whole_file import read_file

OLDEST_OPSET, NEWEST_OPSET = 7, 28
"""Opsets of the standard's operators whose meaning the rules have."""
_MAX_CONSTANT = 1 << 27
"""Elements of a value that is computed while a model is read."""
_MAX_DEVICES = 1 << 20
_MAX_INPUT = 1 << 36
"""Elements of an input."""
_MAX_NODES = 200_000
"""Nodes of a graph, its loops unrolled."""
_SMALL = 4096
"""Elements of constants that shape inference is told."""
_MASKED = -1e30
"""No parameter has such numbers; masks that are added to scores do."""
_HIDING = -1e3
"""What has only such numbers and zeros is a mask, too."""
_STANDARD = ("", "ai.onnx")
_DRAWS = frozenset(
    [
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ]
)
"""Operators whose results are not the same each time."""
_OF_VALUES = frozenset(
    [
        "BlackmanWindow",
        "ConstantOfShape",
        "HammingWindow",
        "HannWindow",
        "MelWeightMatrix",
        "NonMaxSuppression",
        "NonZero",
        "Range",
        "Unique",
    ]
)
"""Operators whose results have a shape that only the values of their inputs say."""
_STATISTICS = {"BatchNormalization": (3, 4)}
"""Inputs that are no parameters of a layer, but what it has seen."""


def from_onnx(
    model: Any,
    example: Any = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: str | Sequence[str] | None = None,
    constants: Mapping[str, Any] | None = None,
    trainable: str | Sequence[str] | None = None,
) -> ImportedModel:
    """An ONNX model as a module of this package, with the weights that it has.

    `model` is the path of an `.onnx` file, its bytes, or a `ModelProto`. Weights outside of the
    file must be in its folder, or below. Axes without a fixed size get one from `example`, arrays
    by the names of inputs or in their order, or from `shapes`: `{"input": (1, 3, 224, 224)}`.
    `batch` names axes that may have another size in later calls, such as `"input:0"`: all axes that
    the file gives the same name go with them, and for each size the model is read again.
    `constants` fixes inputs to these values, such as switches and shapes.

    Calling the result takes tensors for the inputs, by position or by name, and returns the output,
    or all of several by their names: `out["logits"]`, `out.logits`, `out[0]`.

    Floating initialisers become parameters with their names. Single numbers, masks and what an
    operator needs to know while reading are constants, and so are running statistics. With
    `trainable`, patterns such as `"*.weight"`, only parameters that match one of them are trained.

    ModelImportError for what is no such file, for opsets that the rules do not know, for operators
    without a rule (see `pc.onnx_rule`; one error lists them all), and where what is computed
    depends on the values of tensors. UsageError where onnx is not installed.
    """
    onnx = _onnx()
    proto, folder, label = _proto(onnx, model)
    with _reading(label):
        return _model(
            _Source(onnx, proto, folder, label), example, shapes, batch, constants, trainable
        )


@contextmanager
def _reading(label: str) -> Iterator[None]:
    """What a damaged file raises, as an error that says so."""
    try:
        yield
    except _MALFORMED as error:
        raise ModelImportError(
            "an ONNX model is not as the standard says",
            source=user_line(),
            got=f"{label}: {_first_lines(error)}",
        ) from None


def _model(
    source: _Source,
    example: Any,
    shapes: Mapping[str, Sequence[int]] | None,
    batch: str | Sequence[str] | None,
    constants: Mapping[str, Any] | None,
    trainable: str | Sequence[str] | None,
) -> ImportedModel:
    given = _given_shapes(source, example, shapes or {})
    free = _free_axes(source, batch, given)
    known = {name: np.asarray(value) for name, value in (constants or {}).items()}
    unknown = known.keys() - source.inputs.keys()
    if unknown:
        raise UsageError(
            "the model has no such input",
            source=user_line(),
            got=", ".join(sorted(unknown)),
            expected="one of " + ", ".join(source.inputs),
        )
    tensors, names = source.parameters(trainable)
    graph, training = _Reader(source, known, given, tensors, names).graph()
    template = {name: Ref(name) for name in graph.inputs}
    made = ImportedModel(
        source.proto.graph.name or "Model",
        graph,
        ONNX_RULES,
        Arguments(template, graph.inputs),
        tensors,
        training,
    )
    layouts = _annotated(source, tensors, names)
    if layouts is not None:
        made.annotate(*layouts)
    if free:

        def traced(size: int) -> Graph:
            resized = {
                name: tuple(size if free.get(name) == at else e for at, e in enumerate(shape))
                for name, shape in given.items()
            }
            with _reading(source.label):
                return _Reader(source, known, resized, tensors, names).graph()[0]

        made.free(dict(free), traced)
    return made


def _onnx() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx = importlib.import_module("onnx")
            for name in ("checker", "defs", "helper", "numpy_helper", "reference"):
                importlib.import_module(f"onnx.{name}")
            importlib.import_module("onnx.shape_inference")
            return onnx
    except ImportError as error:
        raise UsageError(
            "importing an ONNX model needs the package onnx",
            source=user_line(),
            got=str(error),
            hint="pip install 'plancompiler[onnx]'",
        ) from None


def _proto(onnx: Any, model: Any) -> tuple[Any, Path | None, str]:
    """The model, the folder of its weights, and how it is called in errors."""
    folder, label = None, "model"
    if isinstance(model, onnx.ModelProto):
        proto = model
    elif isinstance(model, (str, PathLike, bytes, bytearray, memoryview)):
        if isinstance(model, (str, PathLike)):
            file = Path(model)
            folder, label = file.parent, file.name
            content = read_file("an ONNX file", file, ModelImportError, user_line())
        else:
            content = bytes(model)
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(content)
        except Exception as error:
            raise ModelImportError(
                "these bytes are no ONNX model, or a part of one",
                source=user_line(),
                got=f"{label}, {len(content)} bytes: {error}"[:300],
                expected="an .onnx file as it was written",
            ) from None
    else:
        raise UsageError(
            "from_onnx takes an ONNX model",
            source=user_line(),
            got=type(model).__name__,
            expected="the path of an .onnx file, its bytes, or a ModelProto",
        )
    if not proto.HasField("graph") or not proto.opset_import or not proto.graph.output:
        raise ModelImportError(
            "these bytes are no ONNX model, or a part of one",
            source=user_line(),
            got=f"{label}: no graph with outputs and opsets",
            expected="an .onnx file as it was written",
        )
    return proto, folder, label


# --- what a file holds ----------------------------------------------------------------------------


class _Source:
    """A file: its inputs, initialisers and functions."""

    def __init__(self, onnx: Any, proto: Any, folder: Path | None, label: str) -> None:
        self.onnx = onnx
        self.proto = proto
        self.label = label
        self.opsets = _opsets(proto.opset_import)
        newest = min(NEWEST_OPSET, onnx.defs.onnx_opset_version())
        if not OLDEST_OPSET <= self.opsets.get("", OLDEST_OPSET) <= newest:
            raise ModelImportError(
                "the model is written in an opset that the importer does not know",
                source=user_line(),
                got=f"opset {self.opsets['']} in {label}",
                expected=f"{OLDEST_OPSET} to {newest}",
                hint="convert it with onnx.version_converter",
            )
        self.functions = {(each.domain, each.name, each.overload): each for each in proto.functions}
        self._folder = folder
        self._stored = {each.name: each for each in proto.graph.initializer}
        for node in proto.graph.node:  # where some systems put the weights of layers
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self._stored[node.output[0]] = node.attribute[0].t
        if proto.graph.sparse_initializer:
            raise ModelImportError(
                "the importer reads no sparse initialisers",
                got=f"{len(proto.graph.sparse_initializer)} in {label}",
            )
        self._arrays: dict[str, Array] = {}
        self.inputs = {
            each.name: each.type for each in proto.graph.input if each.name not in self._stored
        }
        """Types of what the caller gives, in order."""
        self.uses = _uses(self, proto.graph)

    @property
    def initializers(self) -> Iterable[str]:
        """Their names, in order."""
        return self._stored

    def holds(self, name: object) -> bool:
        """Whether there is an initialiser of this name."""
        return name in self._stored

    def array(self, name: str) -> Array:
        """The value of an initialiser."""
        if name not in self._arrays:
            self._arrays[name] = self.tensor(self._stored[name])
        return self._arrays[name]

    def type_of(self, name: str) -> tuple[tuple[int, ...], DType | None]:
        """Shape and dtype of an initialiser, None for a dtype that tensors do not have."""
        stored = self._stored[name]
        return tuple(stored.dims), ONNX_DTYPES.get(stored.data_type)

    def tensor(self, stored: Any) -> Array:
        """The array of a tensor in a file, or beside it."""
        name = stored.name or "a constant"
        wrong = ""
        try:
            kind = self.onnx.helper.tensor_dtype_to_np_dtype(stored.data_type)
        except (KeyError, TypeError):
            kind = None
            wrong = f"data type number {stored.data_type}"
        if any(extent < 0 for extent in stored.dims):
            wrong = f"shape {list(stored.dims)}"
        if not wrong:
            try:
                if stored.data_location == self.onnx.TensorProto.EXTERNAL:
                    return self._outside(stored, kind)
                array: Array = self.onnx.numpy_helper.to_array(stored)
                return array
            except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
                wrong = f"shape {list(stored.dims)} of {kind}: {error}"
        raise ModelImportError(
            "a tensor in an ONNX file is damaged",
            got=f"{name} in {self.label}: {wrong}"[:400],
            expected="as many numbers as its shape has",
        )

    def _outside(self, stored: Any, kind: Any) -> Array:
        """An array of a file in the model's folder, mapped and not read."""
        entries = {each.key: each.value for each in stored.external_data}
        location = entries.get("location", "")
        shape = tuple(stored.dims)
        if self._folder is None:
            raise ModelImportError(
                "the weights of the model are in another file",
                source=user_line(),
                got=f"{stored.name} in {location!r}",
                hint="give the path of the .onnx file, beside which they are",
            )
        folder = self._folder.resolve()
        file = (folder / location).resolve()
        if not location or not file.is_relative_to(folder):
            raise ModelImportError(
                "an ONNX file points to weights outside of its folder",
                source=user_line(),
                got=f"{stored.name} in {location!r}",
                expected="a file in the folder of the model, or below",
            )
        size = math.prod(shape) * kind.itemsize
        try:
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", size))
            present = file.stat().st_size
        except (OSError, ValueError) as error:
            raise ModelImportError(
                "weights of the model cannot be read",
                got=f"{stored.name} in {location!r}: {getattr(error, 'strerror', '') or error}",
            ) from None
        if offset < 0 or length != size or offset + length > present:
            raise ModelImportError(
                "weights of the model are not where it says",
                got=f"{stored.name}: {length} bytes from {offset} of {present} in {location!r}",
                expected=f"{size} bytes for {list(shape)} of {kind}",
            )
        if stored.data_type not in ONNX_DTYPES:
            raise ModelImportError(
                "weights outside of the file have a dtype that the importer does not read",
                got=f"{stored.name} of {kind}",
            )
        if not size:
            return np.zeros(shape, kind)
        return np.memmap(file, kind, "r", offset, shape)

    def parameters(
        self, trainable: str | Sequence[str] | None
    ) -> tuple[dict[str, Parameter], dict[str, str]]:
        """Parameters by their names, and these names by those of initialisers."""
        patterns = [trainable] if isinstance(trainable, str) else trainable
        chosen = [name for name in self.initializers if self._is_parameter(name)]
        names = _attribute_names(chosen)
        tensors: dict[str, Parameter] = {}
        matched: set[str] = set()
        for name in chosen:
            array = self.array(name)
            used = self.uses.get(name, ())
            statistics = all(at in _STATISTICS.get(op, ()) for op, at in used)
            init = np.array(array)  # an initialiser may lie in a file that changes
            dtype = DType.parse(array.dtype)
            if statistics:
                tensors[names[name]] = Buffer(array.shape, dtype, init)
                continue
            matching = [each for each in patterns or () if fnmatchcase(name, each)]
            matched.update(matching)
            tensors[names[name]] = Parameter(
                array.shape, dtype, init, trainable=patterns is None or bool(matching)
            )
        if set(patterns or ()) - matched:
            raise UsageError(
                "no parameter of the model matches a pattern",
                source=user_line(),
                got=", ".join(map(repr, sorted(set(patterns or ()) - matched))),
                expected="patterns of " + ", ".join(chosen),
            )
        return tensors, names

    def _is_parameter(self, name: str) -> bool:
        shape, dtype = self.type_of(name)
        uses = self.uses.get(name, ())
        if dtype is None or not dtype.is_floating or not uses or not math.prod(shape):
            return False
        if math.prod(shape) == 1 and not any(op in _LAYERS for op, _ in uses):
            return False
        if all(self._reads_value(op, at) for op, at in uses):
            return False
        if sum(e > 1 for e in shape) > 1 and all(op in _FACTORS for op, _ in uses):
            return False
        array = self.array(name)
        hides = array <= _HIDING
        mask = bool(hides.any() and (hides | (array == 0)).all())
        return not mask and bool(np.isfinite(array).all() and array.min() > _MASKED)

    def _reads_value(self, operator: str, at: int) -> bool:
        """Whether an operator needs to know this input while the model is read."""
        version = self.opsets.get("", OLDEST_OPSET)
        target = rule_of("", operator, version)
        return target is not None and at in ONNX_RULES[target].known


_LAYERS = frozenset(
    [
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "Einsum",
        "GRU",
        "Gather",
        "Gemm",
        "GroupNormalization",
        "InstanceNormalization",
        "LSTM",
        "LayerNormalization",
        "MatMul",
        "PRelu",
        "RMSNormalization",
        "RNN",
    ]
)
"""Operators that read weights. One number beside any other operator is no parameter."""


_FACTORS = frozenset(["Mul", "Div", "Sub", "Where", "Pow", "Max", "Min"])
"""Operators that read, with several axes, the angles of rotary positions and masks, not weights."""


def _opsets(imports: Iterable[Any]) -> dict[str, int]:
    return {"" if each.domain in _STANDARD else each.domain: each.version for each in imports}


def rule_of(domain: str, operator: str, version: int) -> str | None:
    """The rule for an operator in an opset: the newest that is not newer."""
    prefix = f"{ONNX_DOMAIN if domain in _STANDARD else domain}.{operator}."
    for since in range(version, 0, -1):
        if prefix + str(since) in ONNX_RULES:
            return prefix + str(since)
    return None


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _reads(node: Any) -> Iterator[str]:
    """The names that a node reads, with those that its graphs read and do not define."""
    yield from (name for name in node.input if name)
    for graph in _subgraphs(node):
        own = {each.name for each in (*graph.input, *graph.initializer)}
        own |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in own)
        yield from (each.name for each in graph.output if each.name not in own)


def _needed(nodes: Sequence[Any], outputs: Iterable[str]) -> list[Any]:
    """The nodes on which the outputs depend, in order."""
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(_reads(node))
            kept.append(node)
    return kept[::-1]


def _needed_in(graph: Any) -> list[Any]:
    return _needed(graph.node, (each.name for each in graph.output))


def _uses(source: _Source, graph: Any) -> dict[str, list[tuple[str, int]]]:
    """Which operators read a value, and as which input."""
    uses: dict[str, list[tuple[str, int]]] = {}
    for node in _needed_in(graph):
        for at, name in enumerate(node.input):
            uses.setdefault(name, []).append((node.op_type, at))
        for inner in _subgraphs(node):
            for name, places in _uses(source, inner).items():
                uses.setdefault(name, []).extend(places)
    for each in graph.output:
        uses.setdefault(each.name, []).append(("output", 0))
    return uses


def _attribute_names(names: Sequence[str]) -> dict[str, str]:
    """Names of parameters in a tree of modules: those of initialisers, where that is possible."""
    beginnings = {
        ".".join(name.split(".")[:count])
        for name in names
        for count in range(1, name.count(".") + 1)
    }
    made: dict[str, str] = {}
    taken, reserved = set(names), reserved_names()
    for name in names:
        parts = name.split(".")
        if all(parts) and name not in beginnings and not reserved.intersection(parts):
            made[name] = name
            continue
        flat = "initializer_" + name.replace(".", "_")
        while flat in taken:
            flat += "_"
        taken.add(flat)
        made[name] = flat
    return made


def _annotated(
    source: _Source, tensors: Mapping[str, Parameter], names: Mapping[str, str]
) -> tuple[Placement, dict[str, NdSbp]] | None:
    """The mesh of the file's device configuration, and how it splits parameters and inputs. Those
    that it does not split into as many equal parts as there are devices are not in the result; None
    where the file has not one configuration for all.
    """
    configurations: Any = getattr(source.proto, "configuration", ())
    if len(configurations) != 1 or configurations[0].num_devices < 1:
        return None
    devices = configurations[0].num_devices
    layouts: dict[str, NdSbp] = {}
    for node in source.proto.graph.node:
        for each in node.device_configurations:
            for spec in each.sharding_spec:
                name = spec.tensor_name
                known = name in names or name in source.inputs
                if not known or each.configuration_id != configurations[0].name:
                    continue
                split = [
                    (e.axis, part.num_shards)
                    for e in spec.sharded_dim
                    for part in e.simple_sharding
                ]
                if len(split) == 1 and split[0][1] == devices and len(spec.device) == devices:
                    axis = split[0][0]
                    if name in names:
                        axis %= len(tensors[names[name]].shape)
                    if axis >= 0:
                        layouts[names.get(name, name)] = NdSbp.of(f"S({axis})")
    if devices > _MAX_DEVICES:
        raise ModelImportError(
            "the model is for too many devices", got=devices, expected=f"at most {_MAX_DEVICES}"
        )
    return Placement("cpu", list(range(devices)), ("devices",)), layouts


# --- sizes of inputs ------------------------------------------------------------------------------


def _axes_of(source: _Source, name: str) -> list[int | str] | None:
    """Sizes and names of the axes of an input; None where the file does not say how many."""
    kind = source.inputs[name]
    if not kind.HasField("tensor_type"):
        raise ModelImportError(
            "the importer takes no inputs that are not tensors",
            got=f"{name}: {kind.WhichOneof('value')}",
            hint="give it a value: constants={...}",
        )
    if not kind.tensor_type.HasField("shape"):
        return None
    return [
        each.dim_value if each.HasField("dim_value") and each.dim_value >= 0 else each.dim_param
        for each in kind.tensor_type.shape.dim
    ]


def _given_shapes(
    source: _Source, example: Any, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The shapes that the caller gives."""
    given: dict[str, Any] = {}
    if example is not None:
        if not isinstance(example, Mapping):
            several = example if isinstance(example, (tuple, list)) else (example,)
            example = dict(zip(source.inputs, several, strict=False))
        given = {name: np.shape(value) for name, value in example.items()}
    given |= {name: tuple(int(e) for e in shape) for name, shape in shapes.items()}
    if given.keys() - source.inputs.keys():
        raise UsageError(
            "the model has no such input",
            source=user_line(),
            got=", ".join(sorted(given.keys() - source.inputs.keys())),
            expected="one of " + ", ".join(source.inputs),
        )
    return given


def _free_axes(
    source: _Source, batch: str | Sequence[str] | None, given: dict[str, tuple[int, ...]]
) -> dict[str, int]:
    """The axis of each input that may have other sizes; where nobody gives them one, it is 1."""
    free: dict[str, int] = {}
    symbols = set()
    for each in [] if batch is None else [batch] if isinstance(batch, str) else batch:
        name, _, number = each.rpartition(":")
        axes = _axes_of(source, name) if name in source.inputs else []
        if axes is None:
            axes = list(given.get(name, ()))
        if not number.isdecimal() or int(number) >= len(axes):
            raise UsageError(
                "there is no such axis of an input",
                source=user_line(),
                got=repr(each),
                expected="an input and an axis, such as 'input:0', of "
                + ", ".join(f"{name} {_axes_of(source, name)}" for name in source.inputs),
            )
        if isinstance(axes[int(number)], int) and name not in given:
            raise UsageError(
                "the axis has a fixed size in the model",
                source=user_line(),
                got=f"{each}, which is {axes[int(number)]}",
                expected="an axis without a size",
            )
        free[name] = int(number)
        symbols.add(axes[int(number)])
    for name in source.inputs:
        axes = _axes_of(source, name) or []
        for at, axis in enumerate(axes):
            if axis and axis in symbols:
                free.setdefault(name, at)
    sizes = {given[name][at] for name, at in free.items() if name in given}
    if len(sizes) > 1:
        raise UsageError(
            "the axes of a batch have different sizes",
            source=user_line(),
            got=", ".join(f"{name} {list(given[name])}" for name in free if name in given),
        )
    size = sizes.pop() if sizes else 1
    for name, at in free.items():
        axes = _axes_of(source, name) or []
        if name not in given and all(isinstance(e, int) or i == at for i, e in enumerate(axes)):
            given[name] = tuple(size if i == at else int(e) for i, e in enumerate(axes))
    return free


# --- reading --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scope:
    """Values by the names that one graph gives them."""

    values: dict[str, Any]
    """References, arrays of what is known, tuples of them for sequences, None for what is left
    out, and `MISSING` for what an operator without a rule would make."""
    opsets: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Of the call of a function whose body this is."""
    path: str = ""
    """Of the nodes around it, before the names of its own."""
    depth: int = 0
    """How many functions and graphs are around it."""
    outer: Scope | None = None

    def __getitem__(self, name: str) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise KeyError(name)


_MALFORMED = (
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    ZeroDivisionError,
)
"""What reading a node raises that has not the attributes and inputs of its operator."""
MISSING = object()
"""The value of an operator without a rule."""


class _Reader:
    """One reading of a file, for inputs of these shapes."""

    def __init__(
        self,
        source: _Source,
        known: Mapping[str, Array],
        given: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, Parameter],
        names: Mapping[str, str],
    ) -> None:
        self._source = source
        self._onnx = source.onnx
        self._known = known
        self._tensors = tensors
        self._nodes: list[Node] = []
        self._constants: dict[str, Array] = {}
        self._names: set[str] = set()
        self._missing: dict[str, Counter[str]] = {}
        self._types: dict[str, Any] = {}
        self._number = 0
        self._trains = False
        self._count = 0
        inputs = self._inputs(given)
        parameters = {self._new(name): author for name, author in names.items()}
        types = {
            value: TensorType(tensors[author].shape, tensors[author].dtype)
            for value, author in parameters.items()
        }
        self._graph = Graph(inputs, parameters, self._constants, (), (), {}, types)

    def _inputs(self, given: Mapping[str, tuple[int, ...]]) -> dict[str, TensorType]:
        inputs: dict[str, TensorType] = {}
        open_axes = {}
        for name in self._source.inputs:
            if name in self._known:
                continue
            axes = _axes_of(self._source, name)
            shape = given.get(name)
            number = self._source.inputs[name].tensor_type.elem_type
            if number not in ONNX_DTYPES:
                raise ModelImportError(
                    "an input of the model has a dtype that tensors do not have",
                    got=f"{name}: {self._onnx.TensorProto.DataType.Name(number)}",
                    expected=", ".join(map(str, ONNX_DTYPES.values())),
                )
            if shape is not None and axes is not None:
                fits = len(shape) == len(axes) and all(
                    isinstance(axis, str) or axis == extent
                    for axis, extent in zip(axes, shape, strict=True)
                )
                if not fits:
                    raise UsageError(
                        "the model has another shape for an input",
                        source=user_line(),
                        got=f"{name} {list(shape)}",
                        expected=str(axes),
                    )
            if shape is None and axes is not None and all(isinstance(e, int) for e in axes):
                shape = tuple(int(each) for each in axes)
            if shape is None:
                open_axes[name] = axes
            elif math.prod(shape) > _MAX_INPUT:
                raise ModelImportError(
                    "an input of the model is too large",
                    got=f"{name} {list(shape)}",
                    expected=f"at most {_MAX_INPUT} elements",
                )
            else:
                inputs[self._new(name)] = TensorType(shape, ONNX_DTYPES[number])
        if open_axes:
            shown = ", ".join(
                f"{name} {'of any shape' if axes is None else [e or '?' for e in axes]}"
                for name, axes in open_axes.items()
            )
            raise UsageError(
                "inputs of the model have axes without a size",
                source=user_line(),
                got=shown,
                hint="give their shapes, shapes={"
                + ", ".join(f"{name!r}: (...)" for name in open_axes)
                + "}, or an example, or name a free axis: batch='name:0'",
            )
        return inputs

    def _new(self, name: str) -> str:
        """A name that no other value of the graph has."""
        made, number = name, 2
        while made in self._names:
            made, number = f"{name}~{number}", number + 1
        self._names.add(made)
        return made

    def graph(self) -> tuple[Graph, bool]:
        """The graph, and whether it computes what a model in training does."""
        source, proto = self._source, self._source.proto
        here = Placement("cpu", [0])
        token = ACTIVE_TRACER.set(JobBuilder("import"))
        try:
            stand_ins = {
                name: type(each)(each.shape, each.dtype, "missing").place(here)
                for name, each in self._tensors.items()
            }
            given = {
                name: source_tensor(
                    "input",
                    {"name": name, "shape": each.shape, "dtype": str(each.dtype)},
                    here,
                    None,
                )
                for name, each in self._graph.inputs.items()
            }
            self._run = GraphRun(self._graph, ONNX_RULES, given, stand_ins)
            values: dict[str, Any] = {name: Ref(name) for name in self._graph.inputs}
            values |= {name: self._known_input(name) for name in self._known}
            values |= {name: Ref(name) for name in self._graph.parameters}
            scope = Scope(_Initializers(source, values), source.opsets)
            self.read(_needed_in(proto.graph), scope)
            self._require_rules()
            results = {each.name: self._value(each.name, scope) for each in proto.graph.output}
            if len(results) == 1:
                output = self._kept(next(iter(results.values())))
            else:
                output = Fields("Outputs", {name: self._kept(e) for name, e in results.items()})
        finally:
            ACTIVE_TRACER.reset(token)
        return self._finished(output), self._trains

    def _finished(self, output: Any) -> Graph:
        if not self._graph.inputs and not self._graph.parameters:
            raise ModelImportError(
                "the model has no inputs and no parameters: all that it returns is known",
                source=user_line(),
            )
        graph = replace(self._graph, nodes=tuple(self._nodes), output=output)
        graph = recognized(replace(graph, nodes=live_nodes(graph)))
        used = {ref.name for node in graph.nodes for ref in node.refs}
        used |= {ref.name for ref in graph.results()}
        constants = {name: each for name, each in graph.constants.items() if name in used}
        graph = replace(graph, constants=constants)
        try_graph(graph, ONNX_RULES, self._tensors)
        return graph

    def _known_input(self, name: str) -> Array:
        kind = self._source.inputs[name]
        if not kind.HasField("tensor_type"):
            raise ModelImportError("only tensors can be constants of a model", got=name)
        dtype = self._onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
        return np.asarray(self._known[name], dtype)

    # --- nodes ---

    def read(self, nodes: Iterable[Any], scope: Scope) -> None:
        """Compute or trace nodes, whose results become values of the scope."""
        for number, node in enumerate(nodes, 1):
            self._count += 1
            if node.op_type == "Constant" and node.output[0] in scope.values:
                continue
            where = scope.path + (node.name or f"{node.op_type}_{number}")
            line = SourceLine(f"{self._source.label}[{where}]", number)
            if self._count > _MAX_NODES:
                raise ModelImportError(
                    "the model has too many nodes, or loops that run too often",
                    source=line,
                    got=f"more than {_MAX_NODES}",
                )
            try:
                self._read(node, scope, where, line)
            except PlanCompilerError as error:
                if error.report.source is not None:
                    raise
                raise error.at(op=f"{where} ({node.op_type})", source=line) from None
            except _MALFORMED as error:
                raise ModelImportError(
                    "a node of the model is not as the standard says",
                    op=f"{where} ({node.op_type})",
                    source=line,
                    got=_first_lines(error),
                ) from None

    def _read(self, node: Any, scope: Scope, where: str, line: SourceLine) -> None:
        inputs = [self._value(name, scope) if name else None for name in node.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        domain = "" if node.domain in _STANDARD else node.domain
        attributes = {
            each.name: value
            for each in node.attribute
            if (value := self._attribute(each, scope)) is not None
        }
        if any(_is_missing(each) for each in inputs):
            self._require(node, domain, scope, line)
            scope.values.update(dict.fromkeys(filter(None, node.output), MISSING))
            return
        if not domain and node.op_type in STRUCTURE:
            self._checked(node, scope)
            call = Call(inputs, attributes, len(node.output), scope, where, line)
            results = STRUCTURE[node.op_type](self, call)
        elif not domain and node.op_type == "Identity":
            results = inputs
        else:
            results = self.results(
                domain, node.op_type, inputs, attributes, node.output, scope, where, line, node
            )
        for name, value in zip(node.output, results, strict=False):
            if name:
                scope.values[name] = value

    def results(
        self,
        domain: str,
        operator: str,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        outputs: Sequence[str],
        scope: Scope,
        where: str,
        line: SourceLine,
        node: Any = None,
    ) -> Sequence[Any]:
        """What an operator makes of these values: known, traced, or read from a function's body."""
        function = self._source.functions.get((domain, operator, getattr(node, "overload", "")))
        version = scope.opsets.get(domain)
        if version is None and function is None and not (domain == "" and not scope.opsets):
            raise ModelImportError(
                "the model uses operators of a domain whose opset it does not name",
                got=f"{domain or 'ai.onnx'} of {operator}",
            )
        if function is not None:
            opsets = _opsets(function.opset_import)
            return self._called(function, opsets, inputs, attributes, outputs, scope, where)
        assert version is not None
        if node is None:
            node = self._onnx.helper.make_node(
                operator,
                [f"input_{at}" if each is not None else "" for at, each in enumerate(inputs)],
                list(outputs),
                domain=domain,
                **attributes,
            )
        self._checked(node, scope)
        if not domain and operator in ("Shape", "Size"):
            return [self._extents(operator, inputs[0], attributes)]
        if not domain and operator == "Constant":
            return [self._constant(attributes)]
        if operator == "CastLike" and not domain and isinstance(inputs[0], np.ndarray):
            # Only the dtype of the other input counts, which is known.
            to = self.type_proto(inputs[1]).tensor_type.elem_type
            cast = ("Cast", inputs[:1], {"to": to}, outputs)
            return self.results("", *cast, scope, where, line)
        arrays = all(each is None or isinstance(each, np.ndarray) for each in inputs)
        if arrays and operator not in _DRAWS and not domain:
            types = self._inferred(node, domain, version, inputs, scope)
            return self._computed(node, inputs, scope, types)
        target = rule_of(domain, operator, version)
        if not domain and operator in _OF_VALUES:
            raise _of_values(inputs)
        if target is not None:
            made = self._traced(target, inputs, attributes, outputs, line)
            if made is not None:
                # Only now: the inference of types fails hard on axes that no tensor has.
                types = {}
                if operator not in _MISTOLD:
                    types = self._inferred(node, domain, version, inputs, scope)
                for output, value in zip(outputs, made, strict=True):
                    self._compare(output, value, types)
                return made
        body = self._body(node, domain, version, inputs, scope)
        if body is not None:
            opsets = {**scope.opsets, **_opsets(body.opset_import)}
            schema = self._onnx.defs.get_schema(operator, version, domain)
            defaults = {
                name: _plain(self._onnx.helper.get_attribute_value(each.default_value))
                for name, each in schema.attributes.items()
                if each.default_value.name
            }
            given = {**defaults, **attributes}
            return self._called(body, opsets, inputs, given, outputs, scope, where)
        self._require(node, domain, scope, line)
        return [MISSING] * len(outputs)

    def inner(self, scope: Scope, values: Mapping[str, Any], graph: Any, path: str) -> list[Any]:
        """The outputs of a graph inside of a node, which sees the values around it."""
        own = {each.name: self._source.tensor(each) for each in graph.initializer}
        depth = self._deeper(scope)
        inside = Scope({**own, **values}, scope.opsets, scope.attributes, path, depth, scope)
        self.read(_needed_in(graph), inside)
        return [self._value(each.name, inside) for each in graph.output]

    def added(
        self, operator: str, inputs: Sequence[Any], attributes: Mapping[str, Any], call: Call
    ) -> Any:
        """The result of an operator that the model does not have."""
        scope = Scope({}, {"": _ADDED_OPSET})
        name = f"{operator.lower()} of {call.where}"
        results = self.results(
            "", operator, inputs, attributes, [name], scope, call.where, call.line
        )
        return results[0]

    def _value(self, name: str, scope: Scope) -> Any:
        try:
            value = scope[name]
        except KeyError:
            raise ModelImportError(
                "a node of the model reads a value that nothing before it makes",
                got=name,
                expected="nodes in an order in which each reads what is made before",
            ) from None
        return value

    def _checked(self, node: Any, scope: Scope) -> None:
        """ModelImportError for a node that has not the attributes and inputs of its operator."""
        for attribute in node.attribute:
            if attribute.name in _AXES and any(
                not -_MAX_AXES <= each < _MAX_AXES for each in (attribute.i, *attribute.ints)
            ):
                raise ModelImportError(
                    "an operator has an axis that no tensor has",
                    got=f"{attribute.name} {list(attribute.ints) or attribute.i}",
                )
        if any(True for _ in _subgraphs(node)) or any(e.ref_attr_name for e in node.attribute):
            return
        checker = self._onnx.checker
        context = checker.C.CheckerContext()
        context.ir_version = self._source.proto.ir_version or 8
        context.opset_imports = dict(scope.opsets)
        try:
            checker.check_node(node, context)
        except checker.ValidationError as error:
            if "No Op registered" in str(error):
                return  # it is listed with all others that have no rule
            raise ModelImportError(
                "a node of the model is not as the standard says", got=_first_lines(error)
            ) from None

    def _attribute(self, attribute: Any, scope: Scope) -> Any:
        """The value of an attribute; None for one that a call of a function leaves out."""
        if attribute.ref_attr_name:
            return scope.attributes.get(attribute.ref_attr_name)
        value = self._onnx.helper.get_attribute_value(attribute)
        return _plain(value)

    def _constant(self, attributes: Mapping[str, Any]) -> Any:
        ((name, value),) = attributes.items()
        if name == "value":
            return self._source.tensor(value)
        kinds: dict[str, Any] = {"value_float": np.float32, "value_floats": np.float32}
        kinds |= {"value_int": np.int64, "value_ints": np.int64}
        if name in kinds:
            return np.asarray(value, kinds[name])
        if name in ("value_string", "value_strings"):
            return np.asarray(value, object)
        raise ModelImportError("the importer reads no such constants", got=name)

    def _extents(self, operator: str, value: Any, attributes: Mapping[str, Any]) -> Array:
        shape = self.shape_of(value)
        if operator == "Size":
            return np.array(math.prod(shape), np.int64)
        return np.array(shape[attributes.get("start", 0) : attributes.get("end")], np.int64)

    def shape_of(self, value: Any) -> tuple[int, ...]:
        """The shape of a value."""
        tensor = self._run.value(value.name) if isinstance(value, Ref) else value
        return tuple(tensor.shape)

    # --- what is known ---

    def _computed(
        self, node: Any, inputs: Sequence[Any], scope: Scope, types: Mapping[str, Any]
    ) -> list[Any]:
        """The results of an operator all of whose inputs are known."""
        for kind in types.values():
            extents = [each.dim_value for each in kind.tensor_type.shape.dim]
            if math.prod(extents) > _MAX_CONSTANT:
                raise ModelImportError(
                    "a constant that the model computes is too large",
                    got=f"{extents}",
                    expected=f"at most {_MAX_CONSTANT} elements",
                )
        if node.op_type == "Range":
            start, limit, step = (np.asarray(each).reshape(-1)[0] for each in inputs)
            if not step or (float(limit) - float(start)) / float(step) > _MAX_CONSTANT:
                raise ModelImportError(
                    "a constant that the model computes is too large",
                    got=f"Range({start}, {limit}, {step})",
                    expected=f"at most {_MAX_CONSTANT} elements",
                )
        if node.op_type == "GatherElements":  # the reference evaluator takes few shapes
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            return [_elements(inputs[0], inputs[1], axis)]
        onnx = self._onnx
        plain = onnx.NodeProto()
        plain.CopyFrom(node)
        del plain.attribute[:]
        for each in node.attribute:
            if not each.ref_attr_name:
                plain.attribute.append(each)
            elif each.ref_attr_name in scope.attributes:
                value = scope.attributes[each.ref_attr_name]
                plain.attribute.append(onnx.helper.make_attribute(each.name, value))
        values = {name: each for name, each in zip(node.input, inputs, strict=False) if name}
        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [plain],
            "constants",
            [info(name, 0, None) for name in values],
            [info(name, 0, None) for name in node.output if name],
        )
        imports = [onnx.helper.make_opsetid(*each) for each in scope.opsets.items()]
        model = onnx.helper.make_model(graph, opset_imports=imports)
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = iter(onnx.reference.ReferenceEvaluator(model).run(None, values))
        except Exception as error:
            raise ModelImportError(
                "a constant of the model cannot be computed", got=_first_lines(error)
            ) from None
        return [_known_result(next(made)) if name else None for name in node.output]

    def _inferred(
        self, node: Any, domain: str, version: int, inputs: Sequence[Any], scope: Scope
    ) -> dict[str, Any]:
        """Types of results as the standard says, as far as it does."""
        onnx = self._onnx
        try:
            schema = onnx.defs.get_schema(node.op_type, version, domain)
        except onnx.defs.SchemaError:
            return {}
        if any(each.ref_attr_name for each in node.attribute):
            return {}
        types, data = {}, {}
        for name, value in zip(node.input, inputs, strict=False):
            if name and value is not None:
                types[name] = self.type_proto(value)
                if isinstance(value, np.ndarray) and value.size <= _SMALL:
                    data[name] = onnx.numpy_helper.from_array(value, name)
        imports = [onnx.helper.make_opsetid(*each) for each in scope.opsets.items()]
        try:
            made: dict[str, Any] = onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=imports
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            if len(types) == len(data):  # it is computed, and not traced
                return {}
            raise ModelImportError(
                "a node of the model does not fit its inputs", got=_first_lines(error)
            ) from None
        return made

    def type_proto(self, value: Any) -> Any:
        """The type of a value as the standard describes it."""
        helper = self._onnx.helper
        if isinstance(value, tuple):
            first = self.type_proto(value[0]) if value else helper.make_tensor_type_proto(1, None)
            return helper.make_sequence_type_proto(first)
        tensor = self._run.value(value.name) if isinstance(value, Ref) else value
        if isinstance(tensor, np.ndarray):
            number = helper.np_dtype_to_tensor_dtype(tensor.dtype)
        else:
            number = next(key for key, each in ONNX_DTYPES.items() if each is tensor.dtype)
        return helper.make_tensor_type_proto(number, tuple(tensor.shape))

    # --- what is traced ---

    def _traced(
        self,
        target: str,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        outputs: Sequence[str],
        line: SourceLine,
    ) -> list[Any] | None:
        """The results of an operator with a rule; None where the rule leaves this form of it to the
        standard's own description."""
        rule = ONNX_RULES[target]
        kwargs = dict(attributes)
        if "outputs" in inspect.signature(rule.function).parameters:
            kwargs["outputs"] = len(outputs)
        for value in kwargs.values():
            if not _is_plain(value):
                raise ModelImportError(
                    "an attribute of a node has a value that the importer does not take",
                    got=f"{value!r}"[:200],
                )
        name = next(filter(None, outputs), target)
        args = tuple(None if each is None else self._kept(each) for each in inputs)
        first = Node(self._new(name), target, args, kwargs, (), line)
        try:
            result = self._run.compute(first)
        except _MALFORMED as error:
            raise ModelImportError(
                "the rule of an operator cannot take this form of it",
                got=f"{type(error).__name__}: {error}"[:300],
            ) from None
        if result is NotImplemented:
            return None
        if isinstance(result, tuple):
            kinds = tuple(None if each is None else _type(each) for each in result)
            self._nodes.append(replace(first, types=kinds))
            return self._parts(first, result, outputs, line)
        self._nodes.append(replace(first, types=(_type(result),)))
        return [Ref(first.name)]

    def _parts(
        self,
        node: Node,
        result: tuple[Any, ...],
        outputs: Sequence[str],
        line: SourceLine,
    ) -> list[Any]:
        parts: list[Any] = []
        for at, output in enumerate(outputs):
            if not output:
                parts.append(None)
                continue
            if at >= len(result) or result[at] is None:
                raise ModelImportError(
                    "the rule of an operator does not make this result", got=f"number {at + 1}"
                )
            part = Node(
                self._new(output), "getitem", (Ref(node.name), at), {}, (_type(result[at]),), line
            )
            self._run.compute(part)
            self._nodes.append(part)
            parts.append(Ref(part.name))
        return parts

    def _compare(self, output: str, value: Any, types: Mapping[str, Any]) -> None:
        """ModelImportError where the standard's inference says something else."""
        kind = types.get(output)
        if not isinstance(value, Ref) or kind is None or not kind.HasField("tensor_type"):
            return
        tensor = self._run.value(value.name)
        said = kind.tensor_type
        extents = [
            each.dim_value if each.HasField("dim_value") else None for each in said.shape.dim
        ]
        agree = ONNX_DTYPES.get(said.elem_type) is tensor.dtype
        if said.HasField("shape"):
            agree = agree and len(extents) == tensor.ndim
            agree = agree and all(
                e in (None, made) for e, made in zip(extents, tensor.shape, strict=False)
            )
        if not agree:
            shown = ONNX_DTYPES.get(said.elem_type, f"type {said.elem_type}")
            raise ModelImportError(
                "the rule of an operator gives another type than the standard says",
                got=f"{tensor.dtype}{list(tensor.shape)}",
                expected=f"{shown}{extents}",
                hint="report the model, or replace the rule with @pc.onnx_rule",
            )

    def _kept(self, value: Any) -> Any:
        """A value as an argument of nodes: arrays are constants of the graph."""
        if isinstance(value, (list, tuple)):
            return tuple(self._kept(each) for each in value)
        if isinstance(value, np.ndarray):
            DType.parse(value.dtype)
            name = self._new("constant")
            self._constants[name] = value
            return Ref(name)
        return value

    # --- functions, and what has no rule ---

    def _body(
        self, node: Any, domain: str, version: int, inputs: Sequence[Any], scope: Scope
    ) -> Any:
        """How the standard writes an operator with others; None for one that is not so written."""
        defs = self._onnx.defs
        try:
            schema = defs.get_schema(node.op_type, version, domain)
        except defs.SchemaError:
            return None
        if schema.has_function:
            return schema.function_body
        if not schema.has_context_dependent_function:
            return None
        kinds = [
            b"" if each is None else self.type_proto(each).SerializeToString() for each in inputs
        ]
        known = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        if not known:
            return None
        content = schema.get_context_dependent_function_with_opset_version(
            max(known), node.SerializeToString(), kinds
        )
        body = self._onnx.FunctionProto()
        body.ParseFromString(content)
        return body

    def _deeper(self, scope: Scope) -> int:
        if scope.depth >= _MAX_DEPTH:
            raise ModelImportError(
                "functions of the model call each other too often, or without an end",
                got=f"{scope.depth} in each other",
            )
        return scope.depth + 1

    def _called(
        self,
        function: Any,
        opsets: Mapping[str, int],
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        outputs: Sequence[str],
        scope: Scope,
        where: str,
    ) -> list[Any]:
        """The results of a function's body."""
        given = [*inputs, *[None] * (len(function.input) - len(inputs))]
        defaults = {each.name: self._attribute(each, scope) for each in function.attribute_proto}
        inner = Scope(
            dict(zip(function.input, given, strict=False)),
            opsets,
            {**defaults, **attributes},
            f"{where}/",
            self._deeper(scope),
        )
        pairs = list(zip(function.output, outputs, strict=False))
        self.read(_needed(function.node, (name for name, wanted in pairs if wanted)), inner)
        return [self._value(name, inner) if wanted else None for name, wanted in pairs]

    def _require(self, node: Any, domain: str, scope: Scope, line: SourceLine) -> None:
        """Remember an operator without a rule, also those in graphs of the node."""
        version = scope.opsets.get(domain, 0)
        known = rule_of(domain, node.op_type, version) is not None or (
            not domain and (node.op_type in STRUCTURE or node.op_type in _READ)
        )
        if not known and (domain, node.op_type, node.overload) not in self._source.functions:
            try:
                schema = self._onnx.defs.get_schema(node.op_type, version, domain)
                known = schema.has_function or schema.has_context_dependent_function
            except self._onnx.defs.SchemaError:
                known = False
            if not known:
                name = f"{domain}.{node.op_type}" if domain else node.op_type
                self._missing.setdefault(name, Counter())[str(line)] += 1
        for graph in _subgraphs(node):
            for inner in graph.node:
                domain = "" if inner.domain in _STANDARD else inner.domain
                self._require(inner, domain, scope, line)

    def _require_rules(self) -> None:
        if not self._missing:
            return
        described = []
        for name, places in self._missing.items():
            shown = ", ".join(list(places)[:_LISTED])
            more = f" and {len(places) - _LISTED} more" * (len(places) > _LISTED)
            described.append(f"{name} ({sum(places.values())} times, at {shown}{more})")
        raise ModelImportError(
            f"the importer has no rule for {len(self._missing)} of the model's operators",
            source=user_line(),
            got="; ".join(described),
            hint='write each with functions of this package: @pc.onnx_rule("domain.Operator") '
            "decorates a function of the operator's inputs and attributes",
        )


_ADDED_OPSET = 18
"""Of operators that a reading adds."""
_MISTOLD = frozenset(["STFT"])
"""Operators of which the inference of types says something else than the standard."""
_AXES = frozenset(
    [
        "axes",
        "axis",
        "batch_axis",
        "batch_dims",
        "perm",
        "scan_input_axes",
        "scan_output_axes",
        "time_axis",
    ]
)
"""Attributes that name axes."""
_MAX_AXES = 64
_MAX_DEPTH = 50
"""Functions that call functions."""
_LISTED = 3
"""Places that an error shows for each operator without a rule."""
_READ = ("Constant", "Shape", "Size")
"""Operators that need no rule, as their results are known while reading."""


class _Initializers(dict[str, Any]):
    """Values of a graph, and its initialisers, which are read when somebody asks for them."""

    def __init__(self, source: _Source, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._source = source

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._source.holds(name)

    def __missing__(self, name: str) -> Array:
        return self._source.array(name)


def _of_values(inputs: Sequence[Any]) -> ModelImportError:
    return ModelImportError(
        "the shape of what an operator makes depends on the values of tensors, and a plan is made "
        "without them",
        got=", ".join(each.name for each in inputs if isinstance(each, Ref)),
        expected="values that are known while the model is read",
        hint="if an input of the model decides it, fix that: constants={'name': value}",
    )


def _is_missing(value: Any) -> bool:
    return value is MISSING or (isinstance(value, tuple) and any(map(_is_missing, value)))


def _plain(value: Any) -> Any:
    """An attribute as data: texts are decoded."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)) or type(value).__name__.startswith("Repeated"):
        return [_plain(each) for each in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _elements(x: Array, indices: Array, axis: int) -> Array:
    """The elements at indices of an axis, whose other axes may be shorter."""
    axis %= x.ndim
    reached = tuple(
        slice(None if each == axis else extent) for each, extent in enumerate(indices.shape)
    )
    made: Array = np.take_along_axis(x[reached], indices % x.shape[axis], axis)
    return made


def _known_result(value: Any) -> Any:
    return tuple(map(np.asarray, value)) if isinstance(value, list) else np.asarray(value)


def _type(tensor: Any) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _first_lines(error: Exception, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:count])}"[:400]
