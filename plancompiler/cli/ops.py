"""`plancompiler ops`: the op table."""

from __future__ import annotations

from typing import Any

import click

from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_result, print_table
from plancompiler.ops.registry import OpDef, op_table


@click.command("ops")
@click.option("--markdown", is_flag=True, help="The reference page docs/ops.md.")
@json_option
def ops_command(as_json: bool, markdown: bool) -> None:
    """List every op: sharding rule, linear inputs, gradient, kernels, attributes.

    \b
    Example:
      plancompiler ops
      plancompiler ops --json
    """
    if markdown:
        print_result(op_reference())
        return
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


def op_reference() -> str:
    """The page docs/ops.md, which lists every op with its facts."""
    lines = ["# Ops", "", "Every op, as `plancompiler ops --markdown` writes this page: what it"]
    lines.append("computes, its sharding rule, its attributes, and whether it has a gradient.")
    for definition in op_table().values():
        row = describe_op(definition)
        facts = [
            f"rule `{row['rule']}`" if isinstance(definition.rule, str) else f"rule {row['rule']}",
            *(f"`{attribute}`" for attribute in row["attributes"]),
            "gradient" if row["gradient"] else "no gradient",
        ]
        lines += ["", f"## {row['kind']}", "", row["doc"], "", " · ".join(facts)]
    return "\n".join(lines)


def describe_op(definition: OpDef) -> dict[str, Any]:
    """An op's definition as plain data."""
    rule = definition.rule
    return {
        "kind": definition.kind,
        "rule": rule if isinstance(rule, str) else "by shapes and attributes",
        "linear": [list(inputs) for inputs in definition.linear],
        "reduction": None if definition.reduction is None else definition.reduction.value,
        "extra_signatures": (definition.extra or definition.windows) is not None,
        "gradient": definition.gradient is not None,
        "attributes": [str(attribute) for attribute in definition.attrs],
        "precision": "following" if definition.moves else definition.precision,
        "elementwise": definition.elementwise,
        "portable": definition.portable,
        "kernels": ["numpy"],
        "inplace": [list(pair) for pair in definition.inplace],
        "doc": " ".join(definition.doc.split()),
    }
