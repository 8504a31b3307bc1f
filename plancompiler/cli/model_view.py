"""The folder of an imported model, to read: its parameters, inputs, operations and their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plancompiler.cli.output import print_result, print_table
from plancompiler.frontend.nn.module import Buffer
from plancompiler.importers.model_folder import read_model
from plancompiler.importers.model_job import RULES


def model_data(folder: Path) -> dict[str, Any]:
    """What `inspect --json` prints of a model. ModelImportError for a damaged folder."""
    model = read_model(folder, RULES)
    graph = model.graph
    return {
        "class": model.author_class,
        "inputs": {name: str(each) for name, each in graph.inputs.items()},
        "parameters": [
            {
                "name": name,
                "dtype": each.dtype.value,
                "shape": list(each.shape),
                "trainable": each.trainable,
                "buffer": isinstance(each, Buffer),
            }
            for name, each in model.named_parameters(remove_duplicate=False)
        ],
        "operations": [
            {
                "name": node.name,
                "target": node.target,
                "results": [str(each) for each in node.types if each is not None],
                "reads": [
                    graph.parameters.get(value, value)
                    for value in dict.fromkeys(ref.name for ref in node.refs)
                ],
                "source": str(node.source),
            }
            for node in graph.nodes
        ],
    }


def print_model(described: dict[str, Any]) -> None:
    """The same as tables."""
    print_result(f"{described['class']}")
    for name, kind in described["inputs"].items():
        print_result(f"input {name}: {kind}")
    print_result("")
    print_table(
        ("parameter", "dtype", "shape", ""),
        (
            (each["name"], each["dtype"], tuple(each["shape"]), _kind(each))
            for each in described["parameters"]
        ),
    )
    print_result("")
    print_table(
        ("operation", "target", "results", "reads", "source"),
        (
            (
                each["name"],
                each["target"],
                ", ".join(each["results"]),
                ", ".join(each["reads"]),
                each["source"],
            )
            for each in described["operations"]
        ),
    )


def _kind(parameter: dict[str, Any]) -> str:
    if parameter["buffer"]:
        return "buffer"
    return "" if parameter["trainable"] else "not trained"
