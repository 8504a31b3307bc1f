"""Imported models as folders: the graph as JSON, and a safetensors file with weights and constants.

Both are data: reading a folder runs none of its content, and needs no other system than this one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import ModelImportError
from plancompiler.frontend.nn.module import Buffer, Parameter
from plancompiler.frontend.stored import Stored
from plancompiler.importers.graph import Array, Fields, Graph, Node, Ref
from plancompiler.importers.imported_module import Arguments, ImportedModel, without_repeats
from plancompiler.importers.rules import Rule
from plancompiler.importers.trial import require_rules, try_graph
from plancompiler.ir import DType, NdSbp, Placement, SourceLine, TensorType
from plancompiler.ir.strict_json import parse_json
from plancompiler.ir.whole_file import read_file, write_whole
from plancompiler.ops.stored import stored_tensor
from plancompiler.plan.arrays import array_pieces
from plancompiler.plan.compiled_plans import MODEL_FILE

WEIGHTS_FILE = "weights.safetensors"
_FORMAT = 1
_MAX_BYTES = 1 << 30
_MAX_DEPTH = 64


def write_model(model: ImportedModel, folder: Path) -> None:
    """Write a model with its initial weights into a folder, which is made. OSErrors of writing."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Array] = {}
    first: dict[Parameter, str] = {}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = first.setdefault(parameter, name)
        initial = parameter.initial
        if isinstance(initial, Stored):
            initial = stored_tensor(initial.file, initial.key)
        if initial is not None:
            arrays[key] = np.ascontiguousarray(initial).reshape(
                parameter.file_shape or parameter.shape
            )
        tensors[name] = {
            "key": key,
            "type": _type(TensorType(parameter.shape, parameter.dtype)),
            "buffer": isinstance(parameter, Buffer),
            "saved": not isinstance(parameter, Buffer) or parameter.saved,
            "trainable": parameter.trainable,
            "missing": initial is None,
            "file_shape": list(parameter.file_shape),
        }
    graph = model.graph
    constants = {}
    for name, array in graph.constants.items():
        small = without_repeats(array)
        constants[name] = {"key": f"constant {name}", "shape": list(array.shape)}
        arrays[f"constant {name}"] = np.ascontiguousarray(small).reshape(small.shape)
    described = {
        "format": _FORMAT,
        "class": model.author_class,
        "training": model.training,
        "tensors": tensors,
        "constants": constants,
        "arguments": _plain(model.arguments.template),
        "inputs": {name: _type(each) for name, each in graph.inputs.items()},
        "parameters": dict(graph.parameters),
        "types": {name: _type(each) for name, each in graph.types.items()},
        "nodes": [
            {
                "name": node.name,
                "target": node.target,
                "args": _plain(node.args),
                "kwargs": _plain(dict(node.kwargs)),
                "types": [None if each is None else _type(each) for each in node.types],
                "line": [node.source.file, node.source.line],
            }
            for node in graph.nodes
        ],
        "output": _plain(graph.output),
        "mutated": {name: ref.name for name, ref in graph.mutated.items()},
    }
    mesh = model.mesh
    if mesh is not None and mesh.axes is not None:
        described["mesh"] = dict(zip(mesh.axes, mesh.hierarchy, strict=True))
        described["layouts"] = {name: str(sbp) for name, sbp in model.layouts.items()}
    write_whole(folder / WEIGHTS_FILE, array_pieces(arrays, {}))
    for name, content in model.configurations.items():
        write_whole(folder / name, [content])
    # The description last: a folder with one is whole.
    write_whole(folder / MODEL_FILE, [json.dumps(described, allow_nan=False).encode()])


def read_model(folder: Path, rules: Mapping[str, Rule]) -> ImportedModel:
    """The model of a folder. ModelImportError for what is no such folder, or needs other rules."""
    file = folder / MODEL_FILE
    text = read_file("the folder of an imported model", file, ModelImportError)
    described = parse_json(
        text,
        f"the model in {file}",
        error=ModelImportError,
        max_bytes=_MAX_BYTES,
        max_depth=_MAX_DEPTH,
    )
    try:
        model = _model(described, str(folder / WEIGHTS_FILE), rules)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelImportError(
            "a file does not describe an imported model",
            got=f"{file}: {type(error).__name__}: {error}",
            expected="what `plancompiler import` wrote with this version",
        ) from None
    return model


def _model(described: dict[str, Any], weights: str, rules: Mapping[str, Rule]) -> ImportedModel:
    if described["format"] != _FORMAT:
        raise ModelImportError(
            "an imported model has another format", got=described["format"], expected=_FORMAT
        )
    made: dict[str, Parameter] = {}
    tensors: dict[str, Parameter] = {}
    for name, each in described["tensors"].items():
        key = str(each["key"])
        if key not in made:
            kind = _read_type(each["type"])
            init = "missing" if each["missing"] else Stored(weights, key)
            made[key] = (
                Buffer(kind.shape, kind.dtype, init, saved=bool(each.get("saved", True)))
                if each["buffer"]
                else Parameter(kind.shape, kind.dtype, init, trainable=bool(each["trainable"]))
            )
            made[key].file_shape = tuple(int(each) for each in each["file_shape"])
        tensors[str(name)] = made[key]
    constants = {
        name: np.broadcast_to(stored_tensor(weights, each["key"]), tuple(each["shape"]))
        for name, each in described["constants"].items()
    }
    nodes = tuple(
        Node(
            node["name"],
            node["target"],
            _read(node["args"]),
            _read(node["kwargs"]),
            tuple(None if each is None else _read_type(each) for each in node["types"]),
            SourceLine(str(node["line"][0]), int(node["line"][1])),
        )
        for node in described["nodes"]
    )
    inputs = {name: _read_type(each) for name, each in described["inputs"].items()}
    graph = Graph(
        inputs,
        dict(described["parameters"]),
        constants,
        nodes,
        _read(described["output"]),
        {name: Ref(value) for name, value in described["mutated"].items()},
        {name: _read_type(each) for name, each in described["types"].items()},
    )
    require_rules(graph, rules)
    try_graph(graph, rules, tensors)
    arguments = Arguments(_read(described["arguments"]), inputs)
    author_class, training = str(described["class"]), bool(described["training"])
    model = ImportedModel(author_class, graph, rules, arguments, tensors, training)
    if described.get("mesh"):
        axes = {str(name): int(size) for name, size in described["mesh"].items()}
        ranks = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        layouts = {name: NdSbp.parse(each) for name, each in described["layouts"].items()}
        model.annotate(Placement("cpu", ranks, tuple(axes)), layouts)
    return model


def _type(tensor: TensorType) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape)]


def _read_type(described: list[Any]) -> TensorType:
    dtype, shape = described
    return TensorType(tuple(int(extent) for extent in shape), DType.parse(str(dtype)))


def _plain(value: Any) -> Any:
    """Nested arguments as JSON: what has no form there is an object with one name."""
    if isinstance(value, Ref):
        return {"value": value.name}
    if isinstance(value, Fields):
        return {"fields": [value.kind, _plain(value.values)]}
    if isinstance(value, Mapping):
        return {"dict": [[name, _plain(each)] for name, each in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ModelImportError("an argument of an operation cannot be written", got=repr(value)[:200])


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "value":
        return Ref(str(content))
    if kind == "fields":
        return Fields(str(content[0]), _read(content[1]))
    if kind == "dict":
        return {name: _read(each) for name, each in content}
    if kind == "tuple":
        return tuple(_read(each) for each in content)
    if kind == "float":
        return float(content)
    raise ValueError(f"nothing is described by {kind!r}")
