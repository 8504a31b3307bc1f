# ruff: noqa: N999  # its command has this name
"""`plancompiler import`: models of other systems as folders, which other commands take as jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.job_file import call_of_file
from plancompiler.cli.options import json_option, output_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.errors import UsageError
from plancompiler.importers.hugging_face import from_folder
from plancompiler.importers.imported_module import ImportedModel
from plancompiler.importers.jax_reader import from_jax
from plancompiler.importers.model_folder import write_model
from plancompiler.importers.onnx_reader import from_onnx
from plancompiler.importers.torch_reader import from_torch
from plancompiler.ir.strict_json import parse_json
from plancompiler.ir.whole_file import naming_output

_out_option = output_option(
    "--out", "the folder of the model", "The folder to write.", folder=True, required=True
)


@click.group("import")
def import_command() -> None:
    """Make a folder of a model of another system.

    \b
    Example:
      plancompiler import torch model.py:make --out model --json
    """


@import_command.command("torch")
@click.argument("source", metavar="FILE[:FUNCTION]|hf:FOLDER")
@_out_option
@click.option(
    "--batch", type=click.IntRange(1), default=4, show_default=True, help="Examples, for hf:FOLDER."
)
@click.option(
    "--length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Tokens, for hf:FOLDER.",
)
@click.option(
    "--parts",
    is_flag=True,
    help="Hold layers that are query, key and value in one with an axis for these.",
)
@json_option
def torch_command(
    source: str, out: Path, batch: int, length: int, parts: bool, as_json: bool
) -> None:
    """Import a PyTorch model.

    FILE is a Python file whose FUNCTION (make, unless another is named) returns the module and an
    example of its arguments, or a .pt2 file. Both are code, and run. FOLDER has a config.json and
    safetensors files, as Hugging Face's libraries write them; they are data.

    \b
    Example:
      plancompiler import torch model.py:make --out model --json
      plancompiler import torch hf:Llama-3-8B --batch 8 --length 2048 --out model
      plancompiler import torch hf:gpt2 --parts --out model
      plancompiler run model -D optimizer=AdamW -D data=train.npz --steps 10
    """
    begin = time.perf_counter()
    if source.startswith(_FOLDER):
        model = from_folder(Path(source.removeprefix(_FOLDER)), batch, length, parts)
    else:
        module, example = _module_of(source, ".pt2")
        begin = time.perf_counter()
        model = from_torch(module, example, parts=parts)
    _write(model, out, time.perf_counter() - begin, as_json)


@import_command.command("jax")
@click.argument("source", metavar="FILE[:FUNCTION]")
@_out_option
@json_option
def jax_command(source: str, out: Path, as_json: bool) -> None:
    """Import a JAX function.

    FILE is a Python file whose FUNCTION (make, unless another is named) returns the function and a
    tuple with an example of its arguments, of which a first one that holds floating arrays becomes
    the model's parameters; such a file is code, and runs. Or FILE holds StableHLO (.mlir), or what
    jax.export has serialised (.jax).

    \b
    Example:
      plancompiler import jax model.py:make --out model --json
      plancompiler run model -D optimizer=AdamW -D data=train.npz --steps 10
    """
    function, example = _module_of(source, ".mlir", ".jax")
    begin = time.perf_counter()
    model = from_jax(function, *(example or ()))
    _write(model, out, time.perf_counter() - begin, as_json)


@import_command.command("onnx")
@click.argument("file", type=click.Path(path_type=Path))
@_out_option
@click.option(
    "--shape", "shapes", multiple=True, help="The shape of an input, such as input=1,3,224,224."
)
@click.option(
    "--constant", "constants", multiple=True, help="The value of an input, such as use_cache=false."
)
@click.option("--trainable", multiple=True, help="Pattern of parameters to train (default: all).")
@json_option
def onnx_command(
    file: Path,
    out: Path,
    shapes: tuple[str, ...],
    constants: tuple[str, ...],
    trainable: tuple[str, ...],
    as_json: bool,
) -> None:
    """Import an ONNX model. FILE is data: nothing of it is executed.

    \b
    Example:
      plancompiler import onnx model.onnx --out model --shape input=8,3,224,224 --json
      plancompiler compile model --ranks 2
    """
    sizes = {name: _shape(text) for name, text in map(_named, shapes)}
    values = {name: _value(text) for name, text in map(_named, constants)}
    begin = time.perf_counter()
    model = from_onnx(file, shapes=sizes, constants=values, trainable=trainable or None)
    _write(model, out, time.perf_counter() - begin, as_json)


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise UsageError("an input is given as NAME=VALUE", got=repr(text))
    return name, value


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(",") if each)
    except ValueError:
        raise UsageError(
            "a shape has whole numbers", got=repr(text), expected="such as 1,3,224,224"
        ) from None


def _value(text: str) -> Any:
    return parse_json(text.encode(), "the value of a constant", error=UsageError)


def _write(model: ImportedModel, out: Path, seconds: float, as_json: bool) -> None:
    """Write the folder, and say what is in it."""
    with naming_output("the model", out):
        write_model(model, out)
    targets = sorted({node.target for node in model.graph.nodes})
    numbers = sum(_size(each.shape) for each in model.parameters())
    if as_json:
        inputs = {name: str(each) for name, each in model.graph.inputs.items()}
        print_json(
            {
                "folder": str(out),
                "model": model.author_class,
                "operations": len(model.graph.nodes),
                "targets": targets,
                "parameters": numbers,
                "inputs": inputs,
                "seconds": seconds,
            }
        )
        return
    print_note(
        f"{model.author_class} with {numbers} parameters and {len(model.graph.nodes)} operations "
        f"of {len(targets)} kinds is in {out}, imported in {seconds:.1f} s"
    )


_FOLDER = "hf:"
"""How a source begins that is a folder of Hugging Face's form."""


def _module_of(source: str, *artefacts: str) -> tuple[Any, Any]:
    """What to import and an example of its arguments; files with these endings need none."""
    if source.endswith(artefacts):
        return Path(source), None
    made = call_of_file(source, "make", {})
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(
            "the function of an import returns what to import and an example of its arguments",
            got=type(made).__name__,
            expected="(module, example) or (function, example)",
        )
    return made


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
