"""PyTorch models as graphs; the one file that imports PyTorch.

The graph is the one that the author wrote: `torch.export` traces the module, and a decomposition
with an empty table makes in-place operations functional and inlines submodules. The usual table
would tear attention, layer norm and the loss apart. What depends on no parameter and no input, such
as masks and the angles of rotary positions, is computed here, once.
"""

from __future__ import annotations

import importlib
import re
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from plancompiler.errors import ModelImportError, PlanCompilerError, UsageError
from plancompiler.frontend.nn.module import Buffer, Parameter
from plancompiler.importers.constant_masks import masks_as_places, refuse_changing_masks
from plancompiler.importers.flat_program import author_line, flat_program
from plancompiler.importers.fused_linear import with_parts
from plancompiler.importers.graph import Array, Fields, Graph, Node, Ref, live_nodes
from plancompiler.importers.imported_module import Arguments, ImportedModel
from plancompiler.importers.meta_buffers import computed_buffers
from plancompiler.importers.own_gradients import own_gradients_refused
from plancompiler.importers.recognition import recognized
from plancompiler.importers.running_averages import averages_of_all_batches
from plancompiler.importers.shared_memory import refuse_shared_memory
from plancompiler.importers.torch_rules import TORCH_RULES
from plancompiler.importers.trial import require_rules, try_graph
from plancompiler.ir import DType, SourceLine, TensorType
from plancompiler.ir.source import shown_path, user_line
from plancompiler.ir.whole_file import regular_file

_ASSERTIONS = ("aten._assert", "aten.sym_constrain", "aten._print", "aten.sym_size")
"""Beginnings of targets that compute nothing."""


def from_torch(
    module: Any,
    example: Any = None,
    *,
    batch: str | Sequence[str] | None = None,
    parts: bool = False,
) -> ImportedModel:
    """A PyTorch model as a module of this package, with the weights that it has.

    `module` is an `nn.Module`, an `ExportedProgram`, or the path of a `.pt2` file. `example` has
    the arguments with which it is traced: a tuple, or a dict of keywords; an exported program has
    its own. The module is traced in the mode that it is in, and the result stays in it. Calling the
    result takes the arguments of the example and returns the structure that the original returns.
    Weights are copied; those on the `meta` device are missing until they are loaded. Tied weights
    stay one parameter.

    `batch` names axes that may have another size in later calls, such as `"input_ids:0"`: all
    inputs whose axis of that number is as long have the same size. For each size the module, which
    is kept, is traced once again.

    With `parts`, the weight of a linear layer whose outputs are only cut into equal parts, such as
    GPT-2's query, key and value, has an axis for the parts: [in, 3, out / 3] instead of [in, out],
    its bias [3, out / 3]. So a layout can split each part. Files of weights have the author's
    shapes.

    Loading a `.pt2` file runs PyTorch's loader: treat such a file as code.

    Raises ModelImportError where PyTorch cannot export the module, or operations have no rule (see
    `pc.torch_rule`): one error lists them all.
    """
    torch = _torch()
    program = _exported(torch, module, example)
    is_module = isinstance(module, torch.nn.Module)
    name = type(module).__name__ if is_module else "Module"
    known = computed_buffers(torch, module) if is_module else {}
    reader = _Reader(torch, program, known, parts)
    model = reader.model(name, module.training if is_module else None)
    model.configurations = _configurations(module)
    if batch is not None:
        if not is_module:
            raise UsageError(
                "only a module can be traced for other sizes of its batch",
                source=user_line(),
                got=type(module).__name__,
                hint="import the nn.Module",
            )
        axes = _free_axes(batch, model.graph.inputs)

        def traced(size: int) -> Graph:
            resized = _resized(torch, model, example, axes, size)
            program = _exported(torch, module, resized)
            return _Reader(torch, program, known, parts).graph(dict(model.tensors))

        model.free(axes, traced)
    return model


def _configurations(module: Any) -> dict[str, bytes]:
    """The configurations of a model of transformers, as its `save_pretrained` writes them."""
    texts = {}
    for name in ("config", "generation_config"):
        to_text = getattr(getattr(module, name, None), "to_json_string", None)
        if callable(to_text):
            texts[f"{name}.json"] = str(to_text()).encode()
    return texts


def _free_axes(batch: str | Sequence[str], inputs: Mapping[str, TensorType]) -> dict[str, int]:
    """Which axis of each input is the batch: those that are named, and those like them."""
    named: dict[str, int] = {}
    for each in (batch,) if isinstance(batch, str) else batch:
        name, _, axis = each.rpartition(":")
        known = inputs.get(name)
        if known is None or not axis.isdecimal() or int(axis) >= len(known.shape):
            raise UsageError(
                "there is no such axis of an input",
                source=user_line(),
                got=repr(each),
                expected="an input and an axis, such as 'input_ids:0', of "
                + ", ".join(f"{name} {known}" for name, known in inputs.items()),
            )
        named[name] = int(axis)
    batched = {(axis, inputs[name].shape[axis]) for name, axis in named.items()}
    for name, tensor in inputs.items():
        for at, size in batched:
            if len(tensor.shape) > at and tensor.shape[at] == size:
                named.setdefault(name, at)
    if len({size for _, size in batched}) > 1:
        raise UsageError(
            "the axes of a batch have different sizes in the example",
            source=user_line(),
            got=", ".join(f"{name} {inputs[name]}" for name in named),
        )
    return named


def _resized(
    torch: Any, model: ImportedModel, example: Any, axes: Mapping[str, int], size: int
) -> Any:
    """The example with batches of another size, whose rows are those that it has, over and over."""
    args, kwargs = _arguments(torch, example)
    named = dict(zip(model.arguments.template, args, strict=False)) | kwargs

    def resize(structure: Any, value: Any) -> Any:
        if isinstance(structure, Ref):
            axis = axes.get(structure.name)
            if axis is None:
                return value
            rows = torch.arange(size, device=value.device) % value.shape[axis]
            return value.index_select(axis, rows)
        if isinstance(structure, Mapping):
            return {name: resize(each, value[name]) for name, each in structure.items()}
        if isinstance(structure, (list, tuple)):
            return type(structure)(map(resize, structure, value))
        return value

    template = model.arguments.template
    made = {name: resize(template[name], value) for name, value in named.items()}
    return tuple(made.values()) if args else made  # an example has one kind of arguments


def _torch() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(
            "importing a PyTorch model needs PyTorch",
            source=user_line(),
            got=str(error),
            hint="pip install 'plancompiler[torch]'",
        ) from None


def _exported(torch: Any, module: Any, example: Any) -> Any:
    """The exported program with functional operations, and no submodules."""
    own = not isinstance(module, torch.export.ExportedProgram)
    masks: Collection[str] = ()
    read = not isinstance(module, torch.nn.Module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(module, (str, PathLike)):
            try:
                with regular_file(fspath(module)) as file:
                    module = torch.export.load(file)
            except Exception as error:
                raise ModelImportError(
                    "PyTorch cannot load an exported program",
                    source=user_line(),
                    got=f"{module}: {_first_lines(error)}",
                    expected="a .pt2 file that torch.export.save wrote",
                ) from None
        if isinstance(module, torch.nn.Module):
            args, kwargs = _arguments(torch, example)
            tensors = [*module.parameters(), *module.buffers()]
            if tensors and all(each.device.type == "meta" for each in tensors):
                args, kwargs = torch.utils._pytree.tree_map_only(  # noqa: SLF001  # see `_arguments`
                    torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs)
                )
            try:
                with (
                    averages_of_all_batches(torch),
                    masks_as_places(torch, module) as masks,
                    own_gradients_refused(torch, module),
                ):
                    module = torch.export.export(module, args, kwargs, strict=False)
            except ModelImportError:
                raise
            except Exception as error:
                raise ModelImportError(
                    f"PyTorch cannot export {type(module).__name__}",
                    source=_author_line(torch, error) or user_line(),
                    got=_first_lines(error),
                    hint="what a model computes may depend on shapes, and not on the values of "
                    "tensors",
                ) from error
        elif not isinstance(module, torch.export.ExportedProgram):
            raise UsageError(
                "from_torch takes a PyTorch module",
                source=user_line(),
                got=type(module).__name__,
                expected="an nn.Module, an ExportedProgram or the path of a .pt2 file",
            )
        try:
            flat = flat_program(torch, module, TORCH_RULES, own)
        except PlanCompilerError:
            raise
        except Exception as error:
            # PyTorch fails for some buffers that share memory, too.
            buffers = module.graph_signature.buffers
            refuse_shared_memory(torch, module, buffers, read)
            raise ModelImportError(
                "PyTorch cannot write an exported program with operations that change nothing",
                source=user_line(),
                got=_first_lines(error),
                expected="tensors that change in place to be buffers, inputs or made in forward",
            ) from error
    changing = flat.graph_signature.buffers_to_mutate.values()
    refuse_shared_memory(torch, flat, changing, read)
    refuse_changing_masks(masks, changing)
    return flat


def _author_line(torch: Any, error: Exception) -> SourceLine | None:
    """The innermost line of the model at which an export failed."""
    own = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if frame.lineno and not frame.filename.startswith((*own, "<")):
            place = shown_path(frame.filename) or frame.filename
            line = SourceLine(place, frame.lineno)
            return None if line == user_line() else line
    return None


def _arguments(torch: Any, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        raise UsageError(
            "an example is needed to trace a module",
            source=user_line(),
            expected="its arguments: a tuple, or a dict of keywords",
        )
    seen: set[int] = set()

    def apart(value: Any) -> Any:
        # The export takes one tensor that is given twice for one input, whatever it gets later.
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                value = value.detach().clone().requires_grad_(value.requires_grad)
            seen.add(id(value))
        return value

    example = torch.utils._pytree.tree_map(apart, example)  # noqa: SLF001  # what the export uses
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, torch.Tensor):
        return (example,), {}
    return tuple(example), {}


def _first_lines(error: Exception, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:count])}"[:600]


class _Reader:
    """One exported program."""

    def __init__(self, torch: Any, program: Any, computed: Mapping[str, Any], parts: bool) -> None:
        """`computed` has values of buffers that are on the meta device, see `computed_buffers`;
        `parts` asks for an axis of parts, see `fused_linear`.
        """
        self._torch = torch
        self._program = program
        self._computed = computed
        self._parts = parts
        self._unknown: dict[str, str] = {}
        """Constants that have no value: graph node → the author's name."""
        self._constants: dict[str, Any] = {}
        """Tensors that are known, by the names of graph nodes."""
        self._numbers: dict[str, Any] = {}
        """What is no tensor."""
        self._user_inputs: list[Any] = []
        """What the caller gives, in order: references, and values that are no tensors."""

    def model(self, name: str, training: bool | None) -> ImportedModel:
        """The module that computes what the program does, of this name and mode."""
        tensors = self._tensors()
        graph = self.graph(tensors)
        return ImportedModel(
            name,
            graph,
            TORCH_RULES,
            self._called_with(graph.inputs),
            tensors,
            self._training() if training is None else training,
        )

    def graph(self, tensors: Mapping[str, Parameter]) -> Graph:
        """The graph of what the program computes of these parameters and buffers."""
        torch = self._torch
        program, signature = self._program, self._program.graph_signature
        parameters: dict[str, str] = {}
        inputs: dict[str, TensorType] = {}
        user_inputs = self._user_inputs
        mutated = set(signature.buffers_to_mutate.values())
        for spec in signature.input_specs:
            kind, argument = spec.kind.name, spec.arg
            if kind in ("PARAMETER", "BUFFER") and spec.target in tensors:
                known = program.state_dict.get(spec.target)
                fixed = kind == "BUFFER" and spec.target not in mutated
                if fixed and not known.is_floating_point() and known.device.type != "meta":
                    self._constants[argument.name] = known.clone()
                else:
                    parameters[argument.name] = spec.target
            elif kind in ("BUFFER", "CONSTANT_TENSOR"):
                self._keep_known(argument.name, spec.target)
            elif kind == "USER_INPUT":
                if hasattr(argument, "value"):
                    self._numbers[argument.name] = argument.value
                    user_inputs.append(argument.value)
                else:
                    user_inputs.append(Ref(argument.name))
            else:
                raise ModelImportError(
                    "the importer knows no input of this kind", got=f"{kind} {argument}"
                )
        nodes = []
        output: Sequence[Any] = ()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                if any(isinstance(each, Ref) and each.name == node.name for each in user_inputs):
                    inputs[node.name] = self._type(node.meta["val"])
            elif node.op == "get_attr":
                self._constants[node.name] = _attribute(program.graph_module, node.target)
            elif node.op == "output":
                output = node.args[0]
            elif not str(node.target).startswith(_ASSERTIONS) and not self._fold(node):
                try:
                    nodes.append(self._node(node))
                except PlanCompilerError as error:
                    raise error.at(op=node.name, source=author_line(self._torch, node)) from None
        returned, changed = self._outputs(output, signature)
        stored = {**program.constants, **program.state_dict}
        types = {value: self._type(stored[each]) for value, each in parameters.items()}
        graph = Graph(inputs, parameters, {}, tuple(nodes), returned, changed, types)
        graph = recognized(replace(graph, nodes=live_nodes(graph)))
        if self._parts:
            graph = with_parts(graph, tensors)
        used = {ref.name for node in graph.nodes for ref in node.refs}
        used |= {ref.name for ref in graph.results()}
        self._require_known(used)
        constants = {
            value: _array(torch, tensor)
            for value, tensor in self._constants.items()
            if value in used
        }
        graph = replace(graph, constants=constants)
        require_rules(graph, TORCH_RULES)
        try_graph(graph, TORCH_RULES, tensors)
        return graph

    def _tensors(self) -> dict[str, Parameter]:
        """Parameters and buffers by the author's names; those that are tied are one."""
        torch, program = self._torch, self._program
        made: dict[Any, Parameter] = {}
        tensors: dict[str, Parameter] = {}
        names = {spec.target for spec in program.graph_signature.input_specs}
        stored = dict(program.state_dict)
        unsaved = self._changing_unsaved()
        for name in unsaved:
            given = program.constants[name]
            known = given if given.device.type != "meta" else self._computed.get(name, given)
            stored[name] = known
        for name, tensor in stored.items():
            if name not in names:
                continue
            key: Any = id(tensor)
            if tensor.device.type != "meta" and tensor.numel():
                key = tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), type(tensor)
            if key not in made:
                kind = self._type(tensor)
                init = "missing" if tensor.device.type == "meta" else _array(torch, tensor).copy()
                if isinstance(tensor, torch.nn.Parameter):
                    trainable = tensor.requires_grad and kind.dtype.is_floating
                    made[key] = Parameter(kind.shape, kind.dtype, init, trainable=trainable)
                else:
                    made[key] = Buffer(kind.shape, kind.dtype, init, saved=name not in unsaved)
            tensors[name] = made[key]
        return tensors

    def _changing_unsaved(self) -> list[str]:
        """Buffers that change and are not in state dicts, such as caches."""
        signature = self._program.graph_signature
        mutated = set(signature.buffers_to_mutate.values())
        return [name for name in signature.non_persistent_buffers if name in mutated]

    def _keep_known(self, value: str, name: str) -> None:
        """Keep a constant of the program, or a buffer that is not saved."""
        tensor = self._program.constants.get(name, self._program.state_dict.get(name))
        if tensor is None or tensor.device.type == "meta":
            tensor = self._computed.get(name)
        if tensor is None:
            self._unknown[value] = name
        else:
            self._constants[value] = tensor.clone()

    def _require_known(self, used: Collection[str]) -> None:
        """ModelImportError where values that the graph needs are not known."""
        missing = [name for value, name in self._unknown.items() if value in used]
        if missing:
            raise ModelImportError(
                "tensors that are part of the model, and not of its weights, have no value",
                source=user_line(),
                got=", ".join(missing) + " on the meta device",
                expected="values, or a method that computes them (reset_parameters, or "
                "_init_weights of transformers)",
                hint="make these buffers on the CPU; parameters may stay on meta",
            )

    def _training(self) -> bool:
        """Whether the program was exported in training mode, as its batch norms and dropouts say;
        the module's own flag is not kept by the export.
        """
        for node in self._program.graph.nodes:
            target = str(node.target)
            if "batch_norm" in target and "no_training" not in target and True in node.args:
                return True
            if "dropout" in target and True in node.args:
                return True
        return False

    def _fold(self, node: Any) -> bool:
        """Compute a node now if all that it reads is known."""
        torch = self._torch
        known = all(
            each.name in self._constants or each.name in self._numbers
            for each in node.all_input_nodes
        )
        tags = getattr(node.target, "tags", ())
        if not known or torch.Tag.nondeterministic_seeded in tags or not callable(node.target):
            return False

        def value(argument: Any) -> Any:
            if isinstance(argument, torch.fx.Node):
                name = argument.name
                return self._constants[name] if name in self._constants else self._numbers[name]
            if isinstance(argument, torch.device):
                return torch.device("cpu")
            return argument

        args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), value)
        with torch.no_grad():
            if torch.Tag.pointwise in tags:
                result = _pointwise(torch, node.target, args, kwargs)
            else:
                try:
                    result = node.target(*args, **kwargs)
                except RuntimeError:  # a view of what lies otherwise in memory than in the export
                    result = node.target(*_in_order(torch, args), **kwargs)
        if isinstance(result, torch.Tensor):
            self._constants[node.name] = _without_copies(result)
        else:
            self._numbers[node.name] = result
        return True

    def _node(self, node: Any) -> Node:
        target = str(node.target)
        if "getitem" in target:
            target = "getitem"
        if target.startswith("aten.as_strided") and not _lies_in_order(node.args[0].meta["val"]):
            raise ModelImportError(
                "a view by strides of a tensor whose elements do not lie in order in memory",
                got=f"{target} of {node.args[0]}",
                source=author_line(self._torch, node),
                hint="call contiguous() first, or use view, transpose and slices",
            )
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        operands = [each.meta.get("val") for each in node.all_input_nodes]
        if any(map(self._is_complex, (*values, *operands))):
            # Complex numbers are pairs: rules of their own read the last axis.
            pairs = all(map(self._is_complex, operands)) or target.startswith("aten.view_as")
            target = target.replace("aten.", "complex." if pairs else "complex_and_real.", 1)
        return Node(
            node.name,
            target,
            self._plain(node.args),
            self._plain(dict(node.kwargs)),
            tuple(
                self._type(each, pairs=True) if isinstance(each, self._torch.Tensor) else None
                for each in values
            ),
            author_line(self._torch, node),
        )

    def _plain(self, value: Any) -> Any:
        """Arguments as data: references, numbers, texts, nested lists."""
        torch = self._torch
        if isinstance(value, torch.fx.Node):
            if value.name in self._numbers:
                return self._plain(self._numbers[value.name])
            return Ref(value.name)
        if isinstance(value, Mapping):
            return {name: self._plain(each) for name, each in value.items()}
        if isinstance(value, tuple):
            return tuple(self._plain(each) for each in value)
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        if isinstance(value, torch.SymInt):
            raise _no_fixed_size(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.Tensor):
            return _array(torch, value)
        return str(value)  # devices, layouts and memory formats, which no rule reads

    def _is_complex(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor) and bool(value.is_complex())

    def _type(self, tensor: Any, pairs: bool = False) -> TensorType:
        """The type of a tensor. With `pairs` complex numbers are pairs along one more axis, as they
        are between the nodes of the graph; nothing else may be complex.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self._is_complex(tensor):
            if not pairs:
                raise ModelImportError(
                    "parameters, buffers, inputs and results of a model cannot be complex",
                    source=user_line(),
                    got=f"{dtype}{list(tensor.shape)}",
                    hint="give it torch.view_as_real of them, and call view_as_complex in forward",
                )
            tensor = self._torch.view_as_real(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
        if any(isinstance(extent, self._torch.SymInt) for extent in tensor.shape):
            raise _no_fixed_size(tuple(tensor.shape))
        return TensorType(tuple(tensor.shape), DType.parse(dtype))

    def _outputs(self, output: Sequence[Any], signature: Any) -> tuple[Any, dict[str, Ref]]:
        """The structure that is returned, and what changed buffers become."""
        returned, changed = [], {}
        by_target = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target}
        for spec, value in zip(signature.output_specs, output, strict=True):
            kind = spec.kind.name
            if kind == "BUFFER_MUTATION":
                changed[by_target[spec.target]] = Ref(value.name)
            elif kind in ("USER_OUTPUT", "LOSS_OUTPUT"):
                if self._is_complex(getattr(value, "meta", {}).get("val")):
                    self._type(value.meta["val"])
                returned.append(self._plain(value))
            else:
                raise ModelImportError(
                    "the model changes something besides its buffers",
                    got=f"{kind} of {spec.target}",
                    hint="return the new value instead",
                )
        return _unflattened(self._program.call_spec.out_spec, iter(returned)), changed

    def _called_with(self, inputs: Mapping[str, TensorType]) -> Arguments:
        args, kwargs = _unflattened(self._program.call_spec.in_spec, iter(self._user_inputs))
        template = {
            each.name if isinstance(each, Ref) else f"args_{number}": each
            for number, each in enumerate(args)
        }
        return Arguments({**template, **kwargs}, inputs)


def _no_fixed_size(sizes: Any) -> ModelImportError:
    """Of an axis whose size is a symbol: u0 and the like depend on values of tensors."""
    if re.search(r"\bu\d", str(sizes)):
        return ModelImportError(
            "an axis has a size that depends on the values of tensors",
            got=str(sizes),
            expected="sizes that follow from those of the inputs",
            hint="multiply by a mask, or use torch.where; of experts that choose their tokens "
            'compute all, as experts_implementation="batched_mm" of transformers does',
        )
    return ModelImportError(
        "the exported program has an axis without a fixed size",
        got=str(sizes),
        hint="export it without dynamic_shapes",
    )


def _without_copies(tensor: Any) -> Any:
    """The tensor with one element in memory for those that are equal along an axis."""
    shape = tensor.shape
    for axis, size in enumerate(shape):
        if size > 1 and tensor.numel() > size:
            first = tensor.narrow(axis, 0, 1)
            if tensor.stride(axis) == 0 or bool((tensor == first).all()):
                tensor = first
    return tensor.expand(shape)


def _pointwise(torch: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """A function of each element, computed once for elements that are one in memory: a mask that
    is expanded over a large batch stays as small as it was.
    """
    shapes = []

    def small(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        shapes.append(argument.shape)
        for axis, stride in enumerate(argument.stride()):
            if stride == 0 and argument.shape[axis] > 1:
                argument = argument.narrow(axis, 0, 1)
        return argument

    result = target(*map(small, args), **{name: small(each) for name, each in kwargs.items()})
    return result.expand(torch.broadcast_shapes(*shapes)) if shapes else result


def _in_order(torch: Any, args: Any) -> Any:
    """Arguments whose elements lie in order in memory."""
    tensor = torch.Tensor
    return [each.contiguous() if isinstance(each, tensor) else each for each in args]


def _lies_in_order(tensor: Any) -> bool:
    return bool(tensor.is_contiguous()) and tensor.storage_offset() == 0


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _array(torch: Any, tensor: Any) -> Array:
    """A tensor as an array that shares its memory; complex numbers as pairs."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype is torch.bfloat16:
        shared: Array = tensor.view(torch.int16).numpy().view(DType.BFLOAT16.numpy)
        return shared
    array: Array = tensor.numpy()
    return array


def _unflattened(spec: Any, leaves: Iterator[Any]) -> Any:
    """Values in the structure of a tree of PyTorch's."""
    if spec.is_leaf():
        return next(leaves)
    if spec.type is None:
        return None
    children = [_unflattened(each, leaves) for each in spec.children()]
    kind, context = spec.type, spec.context
    if kind is list:
        return children
    names = list(getattr(kind, "_fields", ()))
    if (
        not names
        and isinstance(context, (list, tuple))
        and all(isinstance(e, str) for e in context)
    ):
        names = list(context)
    if isinstance(kind, type) and issubclass(kind, dict) and len(names) != len(children):
        names = [str(each) for each in context]
    if kind is not dict and (not names or len(names) != len(children)):
        return tuple(children)
    named = dict(zip(names, children, strict=True))
    return named if kind is dict else Fields(kind.__name__, named)
