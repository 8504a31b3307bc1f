# ruff: noqa: N999  # its command has this name
"""`plancompiler import`: models of other systems as folders, which other commands take as jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.job_file import call_of_file
from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.errors import UsageError
from plancompiler.importers.hugging_face import from_folder
from plancompiler.importers.model_folder import write_model
from plancompiler.importers.torch_reader import from_torch


@click.group("import")
def import_command() -> None:
    """Make a folder of a model of another system.

    \b
    Example:
      plancompiler import torch model.py:make --out model --json
    """


@import_command.command("torch")
@click.argument("source", metavar="FILE[:FUNCTION]|hf:FOLDER")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
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
@json_option
def torch_command(source: str, out: Path, batch: int, length: int, as_json: bool) -> None:
    """Import a PyTorch model.

    FILE is a Python file whose FUNCTION (make, unless another is named) returns the module and an
    example of its arguments, or a .pt2 file. Both are code, and run. FOLDER has a config.json and
    safetensors files, as Hugging Face's libraries write them; they are data.

    \b
    Example:
      plancompiler import torch model.py:make --out model --json
      plancompiler import torch hf:Llama-3-8B --batch 8 --length 2048 --out model
      plancompiler run model -D optimizer=AdamW -D data=train.npz --steps 10
    """
    begin = time.perf_counter()
    if source.startswith(_FOLDER):
        model = from_folder(Path(source.removeprefix(_FOLDER)), batch, length)
    else:
        module, example = _module_of(source)
        begin = time.perf_counter()
        model = from_torch(module, example)
    seconds = time.perf_counter() - begin
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


def _module_of(source: str) -> tuple[Any, Any]:
    if source.endswith(".pt2"):
        return Path(source), None
    made = call_of_file(source, "make", {})
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(
            "the function of an import returns a module and an example of its arguments",
            got=type(made).__name__,
            expected="(module, example)",
        )
    return made


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
