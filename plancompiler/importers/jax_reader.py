"""JAX functions as StableHLO programs; the one file that imports JAX and its parser of MLIR."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import ModelImportError, UsageError
from plancompiler.importers.graph import Array, Fields, Ref
from plancompiler.importers.imported_module import ImportedModel
from plancompiler.importers.jax_gradients import with_gradients_marked
from plancompiler.importers.jax_linear_algebra import with_linear_algebra_called
from plancompiler.importers.jax_shard_map import SPLIT, without_shard_map
from plancompiler.importers.jaxpr_rewriting import Rewriting
from plancompiler.importers.stablehlo import (
    DTYPES,
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    Sharding,
    parsed_attribute,
    parsed_mesh,
    parsed_sharding,
)
from plancompiler.importers.stablehlo_reader import Leaf, model_of
from plancompiler.ir import UNKNOWN_SOURCE, DType, SourceLine, TensorType
from plancompiler.ir.source import shown_path, user_line
from plancompiler.ir.whole_file import read_file

_LINE = re.compile(r'"([^"]+)":(\d+):\d+')
_BYTECODE = b"ML\xefR"
"""How bytecode of MLIR begins."""
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def from_jax(
    function: Any, *example: Any, parameters: int | Sequence[int] | None = None
) -> ImportedModel:
    """A JAX function as a module of this package.

    `function` is a function of arrays, as `jax.jit` takes it, an `Exported` of `jax.export` or its
    serialised bytes, or StableHLO as a text, as bytecode or as the path of a file with one of
    these. `example` has the arguments with which it is traced: arrays, or `jax.ShapeDtypeStruct`s,
    in any structure. Calling the result takes these arguments and returns the structure that the
    function returns. What is no array, such as a number or None, keeps the value that it has here.

    The arrays of the arguments whose numbers are `parameters` become parameters of the module, with
    the values that they have, and are no arguments any more: by default those of the first argument
    if it is a structure of floating arrays only. `parameters=()` is for none.

    Shardings of arguments and `with_sharding_constraint` become layouts on a mesh whose axes have
    their names; parameters are placed there.

    Raises ModelImportError for operations without a rule (see `pc.stablehlo_rule`), all of them in
    one error; for arrays without a fixed shape, and for loops and branches that depend on the
    values of arrays.
    """
    reader = _Jax()
    if isinstance(function, (str, PathLike)) and "\n" not in str(function):
        function = _file(Path(function))
    if isinstance(function, (bytes, bytearray)) and not function.startswith(_BYTECODE):
        function = reader.exported(bytes(function))
    if hasattr(function, "mlir_module_serialized"):
        return reader.of_exported(function, example, parameters)
    if isinstance(function, (str, bytes, bytearray)):
        content = function if isinstance(function, str) else bytes(function)
        return reader.of_module(content, example, parameters)
    if not callable(function):
        raise UsageError(
            "from_jax takes a function of arrays",
            source=user_line(),
            got=type(function).__name__,
            expected="a function, an Exported or its bytes, or StableHLO as text, bytecode or file",
        )
    return reader.traced(function, example, parameters)


class _Jax:
    """JAX, and what is asked of it."""

    def __init__(self) -> None:
        try:
            self.ir = importlib.import_module("jaxlib.mlir.ir")
        except ImportError as error:
            raise ModelImportError(
                "JAX functions can only be imported where JAX is installed",
                source=user_line(),
                got=str(error),
                hint="pip install 'plancompiler[jax]'",
            ) from None

    @property
    def jax(self) -> Any:
        """JAX itself, which artefacts of a compiler do not need."""
        return importlib.import_module("jax")

    def traced(self, function: Any, example: Sequence[Any], parameters: Any) -> ImportedModel:
        """The module of a function."""
        jax = self.jax
        names = _argument_names(function, len(example))
        leaves, structure = jax.tree_util.tree_flatten_with_path(tuple(example))
        arrays = [at for at, (_, leaf) in enumerate(leaves) if _is_array(leaf)]

        def of_arrays(*given: Any) -> Any:
            every = [leaf for _, leaf in leaves]
            for at, each in zip(arrays, given, strict=True):
                every[at] = each
            return function(*jax.tree_util.tree_unflatten(structure, every))

        of_arrays.__name__ = of_arrays.__qualname__ = _name_of(function)
        try:
            given = [leaves[at][1] for at in arrays]
            traced = jax.jit(of_arrays, keep_unused=True).trace(*given)
            core = importlib.import_module("jax.extend.core")
            rewriting = Rewriting(jax, core, _custom_call)
            closed = traced.jaxpr
            for rewrite in (without_shard_map, with_gradients_marked, with_linear_algebra_called):
                closed = rewrite(rewriting, closed)
            lowered = jax.jit(core.jaxpr_as_fun(closed), keep_unused=True).trace(*given).lower()
        except ModelImportError:
            raise
        except Exception as error:
            raise ModelImportError(
                f"JAX cannot trace {_name_of(function)}",
                source=user_line(),
                got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:600],
            ) from error
        program = self.program(lowered.compiler_ir("stablehlo"))
        program = replace(program, meshes={**rewriting.meshes, **program.meshes})
        return self._model(program, names, example, parameters, traced.out_tree, _name_of(function))

    def exported(self, content: bytes) -> Any:
        """The `Exported` that these bytes hold."""
        self.jax  # noqa: B018  # where it is missing, this says so
        export = importlib.import_module("jax.export")
        try:
            return export.deserialize(bytearray(content))
        except Exception as error:
            raise ModelImportError(
                "bytes hold no function that jax.export has serialised",
                source=user_line(),
                got=f"{len(content)} bytes: {type(error).__name__}: {error}"[:300],
                expected="what Exported.serialize() gives, or bytecode of StableHLO",
            ) from None

    def of_exported(self, exported: Any, example: Sequence[Any], parameters: Any) -> ImportedModel:
        """The module of what `jax.export` has exported."""
        jax = self.jax
        program = _with_unused(self.parsed(exported.mlir_module_serialized), exported)
        kinds = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in exported.in_avals]
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, kinds)
        if example and jax.tree_util.tree_structure((tuple(example), {})) != exported.in_tree:
            raise UsageError(
                "the example has another structure than the exported function's arguments",
                source=user_line(),
                got=str(jax.tree_util.tree_structure((tuple(example), {}))),
                expected=str(exported.in_tree),
            )
        every = [*(example or args), *kwargs.values()]
        sizes = [len(jax.tree_util.tree_leaves(each)) for each in every]
        labels = program.main.labels
        names, at = [], 0
        for number, size in enumerate(sizes):
            base = re.match(r"\w+", next(filter(None, labels[at : at + size]), ""))
            names.append(base[0] if base else f"argument_{number}")
            at += size
        names[len(names) - len(kwargs) :] = list(kwargs)
        name = str(exported.fun_name)
        return self._model(program, names, every, parameters, exported.out_tree, name)

    def of_module(
        self, module: str | bytes, example: Sequence[Any], parameters: Any
    ) -> ImportedModel:
        """The module of StableHLO as text or bytecode."""
        program = self.parsed(module)
        main = program.main

        def output(results: list[Any]) -> Any:
            return results[0] if len(results) == 1 else tuple(results)

        if example:
            names = [f"argument_{at}" for at in range(len(example))]
            return self._model(program, names, example, parameters, output, "Module")
        paths = [
            re.findall(r"\w+", label) or [f"argument_{at}"] for at, label in enumerate(main.labels)
        ]
        bases = list(dict.fromkeys(path[0] for path in paths))
        if parameters is None:
            first = [at for at, path in enumerate(paths) if path[0] == bases[0]]
            floating = all(
                isinstance(kind, TensorType) and kind.dtype.is_floating and len(paths[at]) > 1
                for at, kind in enumerate(main.types)
                if at in first
            )
            parameters = (0,) if bases and floating else ()
        chosen = {bases[at] for at in _numbers(parameters, bases)}
        leaves, template = [], {}
        for path in paths:
            is_parameter = path[0] in chosen
            name = ".".join(path[1:] if is_parameter and len(chosen) == 1 and path[1:] else path)
            leaves.append(Leaf(name, is_parameter))
            if not is_parameter:
                template[name] = Ref(name)
        return model_of(program, leaves, template, output, "Module")

    def parsed(self, module: str | bytes) -> HloProgram:
        """A module of MLIR, as text or bytecode."""
        ir = self.ir
        libraries = importlib.import_module("jaxlib.mlir._mlir_libs._jax_mlir_ext")
        registry = ir.DialectRegistry()
        libraries.register_dialects(registry)
        context = ir.Context()
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        # Operations of other dialects are listed with those that have no rule.
        context.allow_unregistered_dialects = True
        stablehlo = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
        for name in ("chlo", "sdy"):
            importlib.import_module(f"jaxlib.mlir.dialects.{name}").register_dialect(context)
        stablehlo.register_dialect(context)
        # What it says of broken programs is part of the error that is raised.
        context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            if isinstance(module, str):
                return self.program(ir.Module.parse(module, context))
            try:
                return self.program(stablehlo.deserialize_portable_artifact(context, module))
            except (ir.MLIRError, ValueError):
                return self.program(ir.Module.parse(module, context))
        except (ir.MLIRError, ValueError) as error:
            raise ModelImportError(
                "a program is not StableHLO that can be parsed",
                source=user_line(),
                got=" ".join(str(error).split())[:400],
                expected="a whole module, as jax.jit(f).lower(...).as_text() gives it",
            ) from None

    def _model(
        self,
        program: HloProgram,
        names: Sequence[str],
        example: Sequence[Any],
        parameters: Any,
        out_tree: Any,
        name: str,
    ) -> ImportedModel:
        jax = self.jax
        chosen = _parameters(jax, names, example, parameters)
        made: list[Leaf] = []
        template: dict[str, Any] = {}
        seen: set[str] = set()
        for number, (argument, value) in enumerate(zip(names, example, strict=True)):
            leaves, structure = jax.tree_util.tree_flatten_with_path(value)
            stand_ins: list[Any] = []
            for path, leaf in leaves:
                if not _is_array(leaf):
                    stand_ins.append(leaf)
                    continue
                inner = _dotted(path)
                if number in chosen:
                    prefix = "" if len(chosen) == 1 and inner else argument
                    full = ".".join(filter(None, (prefix, inner)))
                    made.append(Leaf(full, True, _initial(jax, leaf)))
                else:
                    full = ".".join(filter(None, (argument, inner)))
                    made.append(Leaf(full, False))
                    stand_ins.append(Ref(full))
                if full in seen:
                    raise ModelImportError(
                        "two arrays of the arguments have one name", source=user_line(), got=full
                    )
                seen.add(full)
            if number not in chosen:
                template[argument] = _plain(jax, jax.tree_util.tree_unflatten(structure, stand_ins))

        def output(results: list[Any]) -> Any:
            return _plain(jax, jax.tree_util.tree_unflatten(out_tree, results))

        given = out_tree if callable(out_tree) else output
        return model_of(program, made, template, given, name)

    def program(self, module: Any) -> HloProgram:
        """A module of MLIR as data."""
        return _ModuleReading(self.ir).program(module)


def _custom_call(target: str, *operands: Any, kinds: Any = None, config: str = "") -> Any:
    """See `jaxpr_rewriting.CustomCall`."""
    made = _call_primitive(target).bind(*operands, kinds=kinds, config=config)
    return made[0] if kinds is None else made


@lru_cache
def _call_primitive(target: str) -> Any:
    primitive = importlib.import_module("jax.extend.core").Primitive(target)
    primitive.multiple_results = True
    shaped = importlib.import_module("jax.core").ShapedArray

    def typed(*given: Any, kinds: Any, config: str) -> Any:
        return list(given) if kinds is None else [shaped(each.shape, each.dtype) for each in kinds]

    primitive.def_abstract_eval(typed)
    stablehlo = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
    mlir = importlib.import_module("jax.interpreters.mlir")
    ir = importlib.import_module("jaxlib.mlir.ir")

    def lowered(context: Any, *given: Any, kinds: Any, config: str) -> Any:
        types = [
            ir.RankedTensorType.get(each.shape, mlir.dtype_to_ir_type(each.dtype))
            for each in context.avals_out
        ]
        text = ir.StringAttr.get(config)
        return stablehlo.CustomCallOp(types, list(given), target, backend_config=text).results

    mlir.register_lowering(primitive, lowered)
    if target.endswith(SPLIT):
        batching = importlib.import_module("jax.interpreters.batching")

        def mapped(over: Any, given: Any, axes: Any, *, kinds: Any, config: str) -> Any:
            # Devices inside of devices: those around come first.
            if axes[0] is None:  # all of those have the same
                return primitive.bind(*given, kinds=kinds, config=config), axes
            x = importlib.import_module("jax.numpy").moveaxis(*given, *axes, 0)
            return primitive.bind(x, kinds=kinds, config=f"{over.name} {config}"), [0]

        batching.fancy_primitive_batchers[primitive] = mapped
    return primitive


def _with_unused(program: HloProgram, exported: Any) -> HloProgram:
    """The program with the arguments that JAX has left out, as it does not use them."""
    main, kept = program.main, exported.module_kept_var_idx
    count = len(exported.in_avals)
    numbers = [-1 - at for at in range(count)]
    types: list[Any] = [
        TensorType(tuple(each.shape), DType.parse(str(each.dtype))) if at not in kept else None
        for at, each in enumerate(exported.in_avals)
    ]
    labels = [""] * count
    shardings: list[Sharding | None] = [None] * count
    for at, place in enumerate(kept):
        numbers[place], types[place] = main.body.arguments[at], main.types[at]
        labels[place], shardings[place] = main.labels[at], main.shardings[at]
    body = HloBlock(tuple(numbers), main.body.ops)
    whole = HloFunction(main.name, body, tuple(types), tuple(labels), tuple(shardings))
    return HloProgram({**program.functions, main.name: whole}, program.meshes)


def _is_array(value: Any) -> bool:
    """Whether JAX takes it for an array; Python's numbers keep their values."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _argument_names(function: Any, count: int) -> list[str]:
    """Names of positional arguments, as the function has them."""
    names: list[str] = []
    try:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
    except (TypeError, ValueError):
        pass
    return [*names[:count], *(f"argument_{at}" for at in range(len(names), count))]


def _parameters(
    jax: Any, names: Sequence[str], example: Sequence[Any], parameters: Any
) -> frozenset[int]:
    """The numbers of the arguments that hold parameters."""
    if parameters is None:
        leaves = jax.tree_util.tree_leaves(example[0]) if example else []
        floating = all(
            _is_array(each) and jax.numpy.issubdtype(each.dtype, np.floating) for each in leaves
        )
        return frozenset({0} if leaves and floating and not _is_array(example[0]) else ())
    return _numbers(parameters, names)


def _numbers(parameters: Any, names: Sequence[str]) -> frozenset[int]:
    """Numbers of arguments; UsageError for others than there are."""
    numbers = (parameters,) if isinstance(parameters, int) else tuple(parameters)
    if any(not isinstance(each, int) or not 0 <= each < len(names) for each in numbers):
        raise UsageError(
            "there is no argument of this number",
            source=user_line(),
            got=f"parameters={parameters!r}",
            expected=", ".join(f"{at} ({name})" for at, name in enumerate(names)),
        )
    return frozenset(numbers)


def _file(path: Path) -> bytes | str:
    """The content of a file: StableHLO as text, or bytes."""
    content = read_file("a file with a program", path, ModelImportError, user_line())
    try:
        return content if content.startswith(_BYTECODE) else content.decode() + "\n"
    except UnicodeDecodeError:
        return content


def _dotted(path: Sequence[Any]) -> str:
    """A path into a structure as a name: `Dense_0.kernel`."""
    keys = []
    for at, key in enumerate(path):
        name = next(
            getattr(key, each)
            for each in ("key", "name", "idx")
            if getattr(key, each, None) is not None
        )
        # Flax's variables hold their array as an attribute.
        if (
            at
            and at == len(path) - 1
            and name in ("value", "raw_value")
            and not hasattr(key, "key")
        ):
            continue
        keys.append(str(name).replace(".", "_"))
    return ".".join(keys)


def _initial(jax: Any, leaf: Any) -> Array | None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    return np.array(leaf)


def _plain(jax: Any, structure: Any) -> Any:
    """A structure of JAX's as dicts, lists, tuples and fields."""
    if isinstance(structure, Mapping) and type(structure) is dict:
        return {str(name): _plain(jax, each) for name, each in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(_plain(jax, each) for each in structure)
    children = jax.tree_util.tree_flatten_with_path(
        structure, is_leaf=lambda each: each is not structure
    )[0]
    if len(children) == 1 and children[0][1] is structure:
        return structure
    if structure is None:
        return None
    named = {_dotted(path): _plain(jax, each) for path, each in children}
    return Fields(type(structure).__name__, named)


# --- MLIR -----------------------------------------------------------------------------------------


class _ModuleReading:
    """One module of MLIR on its way to data."""

    def __init__(self, ir: Any) -> None:
        self._ir = ir
        self._numbers: dict[Any, int] = {}
        self._shown: dict[str, str] = {}
        self._sources: dict[str, SourceLine] = {}

    def program(self, module: Any) -> HloProgram:
        functions: dict[str, HloFunction] = {}
        meshes: dict[str, dict[str, int]] = {}
        for op in module.body.operations:
            operation = op.operation
            attrs = operation.attributes
            if operation.name == "sdy.mesh":
                meshes[attrs["sym_name"].value] = parsed_mesh(str(attrs["mesh"]))
            elif operation.name == "func.func":
                function = self._function(operation)
                functions[function.name] = function
        if "main" not in functions:
            raise ModelImportError(
                "a module of StableHLO has no function main",
                source=user_line(),
                got=", ".join(functions) or "no functions",
            )
        return HloProgram(functions, meshes)

    def _function(self, operation: Any) -> HloFunction:
        (block,) = operation.regions[0].blocks
        described: list[dict[str, Any]] = [{} for _ in block.arguments]
        if "arg_attrs" in operation.attributes:
            described = [
                {name: each[name] for name in ("sdy.sharding",) if name in each}
                for each in operation.attributes["arg_attrs"]
            ]
        labels = []
        for argument in block.arguments:
            label = re.fullmatch(r'loc\("([^"]*)"\)', str(argument.location))
            labels.append(label[1] if label else "")
        return HloFunction(
            operation.attributes["sym_name"].value,
            self._block(block),
            tuple(self._type(each.type) for each in block.arguments),
            tuple(labels),
            tuple(
                parsed_sharding(str(each["sdy.sharding"])) if each else None for each in described
            ),
        )

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _block(self, block: Any) -> HloBlock:
        arguments = tuple(self._number(each) for each in block.arguments)
        return HloBlock(arguments, tuple(self._op(op.operation) for op in block.operations))

    def _op(self, operation: Any) -> HloOp:
        regions = []
        for region in operation.regions:
            blocks = list(region.blocks)
            regions += [self._block(each) for each in blocks]
        attributes = operation.attributes
        attrs = {}
        for name in attributes:
            try:
                attrs[name] = self._attribute(attributes[name])
            except TypeError:  # of complex numbers, whose type is refused
                attrs[name] = None
        if operation.name == "sdy.sharding_constraint":
            attrs["sharding"] = parsed_sharding(str(attributes["sharding"]))
        return HloOp(
            operation.name,
            tuple(self._number(each) for each in operation.operands),
            tuple(self._number(each) for each in operation.results),
            tuple(self._type(each.type) for each in operation.results),
            attrs,
            tuple(regions),
            self._source(operation.location),
        )

    def _type(self, kind: Any) -> TensorType | str:
        if isinstance(kind, self._ir.RankedTensorType) and kind.has_static_shape:
            dtype = DTYPES.get(str(kind.element_type))
            if dtype is not None:
                return TensorType(tuple(kind.shape), dtype)
        return str(kind)

    def _attribute(self, attribute: Any) -> Any:
        ir = self._ir
        if isinstance(attribute, ir.DenseElementsAttr):
            return self._array(attribute)
        if isinstance(
            attribute, (ir.DenseI64ArrayAttr, ir.DenseI32ArrayAttr, ir.DenseBoolArrayAttr)
        ):
            return list(attribute)
        if isinstance(attribute, (ir.ArrayAttr,)):
            return [self._attribute(each) for each in attribute]
        if isinstance(
            attribute,
            (ir.BoolAttr, ir.IntegerAttr, ir.FloatAttr, ir.StringAttr, ir.FlatSymbolRefAttr),
        ):
            return attribute.value
        return parsed_attribute(str(attribute))

    def _array(self, attribute: Any) -> Any:
        kind = self._type(attribute.type)
        if isinstance(kind, str):
            return np.zeros(())  # its type is refused
        if kind.dtype is DType.BFLOAT16:
            # The parser gives no access to numbers of this type, but they can be read as bits.
            text = str(attribute)
            return _bfloat16(text[len("dense<") : text.rindex("> : ")], kind)
        array: Array = np.array(attribute)
        if attribute.is_splat:
            return np.broadcast_to(array.ravel()[:1].reshape(()), kind.shape)
        return array.reshape(kind.shape)

    def _source(self, location: Any) -> SourceLine:
        """The innermost line outside of installed packages, else the innermost one."""
        text = str(location)
        if text in self._sources:
            return self._sources[text]
        lines = _LINE.findall(text)
        for file, _ in lines:
            if file not in self._shown:
                self._shown[file] = shown_path(file)
        lines = [each for each in lines if self._shown[each[0]]]
        own = [each for each in lines if not _LIBRARIES.search(each[0])]
        source = UNKNOWN_SOURCE
        for file, line in (own or lines)[:1]:
            source = SourceLine(self._shown[file], int(line))
        self._sources[text] = source
        return source


def _bfloat16(text: str, kind: TensorType) -> Array:
    dtype = kind.dtype.numpy
    if text.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(text[3:-1]), dtype).reshape(kind.shape)
    parts = [each for each in re.split(r"[\[\], ]+", text) if each]
    numbers = [
        np.array(int(each, 16), np.uint16).view(dtype)
        if each.startswith("0x")
        else np.array(float(each)).astype(dtype)
        for each in parts
    ]
    if len(numbers) == 1:
        return np.broadcast_to(numbers[0], kind.shape)
    return np.array(numbers, dtype).reshape(kind.shape)
