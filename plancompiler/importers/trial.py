"""The checks of a graph before anybody runs it: there is a rule for every operation, and the rules
give the types that the author's system gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from plancompiler.errors import ModelImportError
from plancompiler.frontend.nn.module import Buffer, Parameter
from plancompiler.frontend.trace import JobBuilder, source_tensor
from plancompiler.importers.graph import Graph
from plancompiler.importers.imported_module import GraphRun
from plancompiler.importers.rules import Rule
from plancompiler.ir import Placement
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER

_LISTED_LINES = 3
"""Lines that an error shows for each target without a rule."""


def require_rules(graph: Graph, rules: Mapping[str, Rule]) -> None:
    """ModelImportError with every target that has no rule, how often and where it occurs."""
    missing = [node for node in graph.nodes if node.target not in rules]
    if not missing:
        return
    lines: dict[str, Counter[str]] = {}
    for node in missing:
        lines.setdefault(node.target, Counter())[str(node.source)] += 1
    described = []
    for target, places in lines.items():
        shown = ", ".join(list(places)[:_LISTED_LINES])
        more = f" and {len(places) - _LISTED_LINES} more lines" * (len(places) > _LISTED_LINES)
        described.append(f"{target} ({sum(places.values())} times, at {shown}{more})")
    raise ModelImportError(
        f"the importer has no rule for {len(lines)} of the model's operations",
        source=user_line(),
        got="; ".join(described),
        hint='write each with functions of this package: @pc.torch_rule("namespace.op.overload"), '
        '@pc.onnx_rule("domain.Operator") or @pc.stablehlo_rule("dialect.operation") decorates a '
        "function of the operation's arguments",
    )


def try_graph(graph: Graph, rules: Mapping[str, Rule], tensors: Mapping[str, Parameter]) -> None:
    """Trace the graph once, and compare the type of every result with the original's."""
    here = Placement("cpu", [0])
    stand_ins: dict[Parameter, Parameter] = {}
    for each in tensors.values():
        kind = Buffer if isinstance(each, Buffer) else Parameter
        stand_ins.setdefault(each, kind(each.shape, each.dtype, "missing").place(here))
    builder = JobBuilder("import")
    token = ACTIVE_TRACER.set(builder)
    try:
        given = {
            name: source_tensor(
                "input",
                {"name": name, "shape": tensor.shape, "dtype": str(tensor.dtype)},
                here,
                None,
            )
            for name, tensor in graph.inputs.items()
        }
        named = {name: stand_ins[each] for name, each in tensors.items()}
        run = GraphRun(graph, rules, given, named)
        run.run(check=True)
        for ref in graph.results():
            run.tensor(ref.name)
    finally:
        ACTIVE_TRACER.reset(token)
