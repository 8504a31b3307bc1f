"""`plancompiler ops`: the op table."""

from __future__ import annotations

from typing import Any

import click

from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_table
from plancompiler.ops.registry import OpDef, op_table


@click.command("ops")
@json_option
def ops_command(as_json: bool) -> None:
    """List every op: sharding rule, linear inputs, gradient, kernels.

    \b
    Example:
      plancompiler ops
      plancompiler ops --json
    """
    rows = [describe_op(definition) for definition in op_table().values()]
    if as_json:
        print_json({"ops": rows})
        return
    print_table(
        ("op", "rule", "linear in", "gradient", "kernels"),
        (
            (
                row["kind"],
                row["rule"],
                " ".join(f"({', '.join(map(str, inputs))})" for inputs in row["linear"]) or "-",
                "yes" if row["gradient"] else "no",
                ", ".join(row["kernels"]),
            )
            for row in rows
        ),
    )


def describe_op(definition: OpDef) -> dict[str, Any]:
    """An op's definition as plain data."""
    rule = definition.rule
    return {
        "kind": definition.kind,
        "rule": rule if isinstance(rule, str) else "by shapes and attributes",
        "linear": [list(inputs) for inputs in definition.linear],
        "reduction": None if definition.reduction is None else definition.reduction.value,
        "extra_signatures": definition.extra is not None,
        "gradient": definition.gradient is not None,
        "kernels": ["numpy"],
        "inplace": [list(pair) for pair in definition.inplace],
        "doc": " ".join(definition.doc.split()),
    }
