"""The table of docs/search.md: layouts that the search finds beside those that people write.

    python -m benchmarks.search_layouts [--machine h100-sxm]

Each row is one layout of a GPT: how its batches and the weights of a block lie, what a device holds
for the whole step, what a step takes by the search's objective, and the collectives of the compiled
step. Known layouts are those of `examples/gpt.py`, with the passes that split sequences and, as
FSDP does, parameters (ZeRO-3).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import plancompiler as pc
from examples import gpt
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.frontend.open_layouts import with_config
from plancompiler.ir import NdSbp
from plancompiler.ir.task import TaskKind
from plancompiler.lower.compile import build_graph
from plancompiler.ops.rule import NdSignature
from plancompiler.passes import run_passes
from plancompiler.search.layout_search import keep_layouts, objective_seconds, search_layouts
from plancompiler.search.linear_program import layout_problem
from plancompiler.search.mesh_shapes import with_mesh
from plancompiler.search.tied_ops import tie_ops

Mesh = tuple[int, ...]
SIZES: Mapping[str, Any] = {"preset": "gpt3-175b", "layers": 8, "batch": 64}
LAYOUTS = {
    "activations": "activations",  # as a norm in the middle reads them
    "query, key, value": "blocks.3.attention.query.weight",
    "projection": "blocks.3.attention.projection.weight",
    "fc1": "blocks.3.mlp.fc1.weight",
    "fc2": "blocks.3.mlp.fc2.weight",
}
KNOWN: Mapping[Mesh, Mapping[str, Mapping[str, Any]]] = {
    (8,): {
        "data-parallel": {"dp": 8},
        "FSDP (ZeRO-3)": {"dp": 8, "zero": 3},
        "Megatron": {"tp": 8, "dp": 1},
        "Megatron, sequences split": {"tp": 8, "dp": 1, "sequence_parallel": True},
    },
    (4, 8): {
        "2-D: data, Megatron": {"dp": 4, "tp": 8},
        "2-D, sequences split": {"dp": 4, "tp": 8, "sequence_parallel": True},
    },
}


@dataclass(frozen=True)
class Row:
    """One layout."""

    name: str
    mesh: Mesh
    job: pc.Job
    """As traced."""
    searched: pc.Job
    """After passes."""
    signatures: tuple[NdSignature, ...]

    def cells(self) -> list[str]:
        """As the table has them."""
        chosen = list(zip(self.searched.ops, self.signatures, strict=True))
        layouts = {
            str(op.attr("name")): each.outputs[0] for op, each in chosen if op.kind == "variable"
        }
        norms = [each.inputs[0] for op, each in chosen if op.kind == "layer_norm"]
        layouts["activations"] = norms[len(norms) // 2]
        opened = replace(
            self.searched, ops=tuple(replace(op, sbp=None) for op in self.searched.ops)
        )
        problem = layout_problem(tie_ops(opened, 2), with_dominated=True)
        held = sum(
            float(each.held_bytes[each.signatures.index(signature)])
            for number, signature in zip(problem.tied.class_of, self.signatures, strict=True)
            for each in [problem.candidates[number]]
        )
        return [
            " x ".join(map(str, self.mesh)),
            self.name,
            *(self._short(layouts[name]) for name in LAYOUTS.values()),
            f"{held / 2**30:.1f} GiB",
            f"{objective_seconds(problem, self.signatures):.4g} s",
            self._collectives(),
        ]

    def _short(self, layout: NdSbp) -> str:
        """Without mesh axes of one device."""
        extents = self.searched.ops[0].placement.hierarchy
        return " ".join(
            str(entry) for entry, extent in zip(layout, extents, strict=True) if extent > 1
        )

    def _collectives(self) -> str:
        graph = build_graph(self.job, prod(self.mesh))
        counts = Counter(
            family.transfer.primitive.name.lower().replace("_", "-")
            for family in graph.families
            if family.transfer is not None and family.kind is TaskKind.COLLECTIVE_BOXING
        )
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def known_row(name: str, mesh: Mesh, settings: Mapping[str, Any], machine: str) -> Row:
    """A layout that people write."""
    traced = gpt.build(**SIZES, **settings)
    traced = replace(traced, config=replace(cast(pc.Config, traced.config), machine=machine))
    job, _ = run_passes(traced)
    return Row(name, mesh, traced, job, infer_sbp(job).signatures)


def searched_row(mesh: Mesh, machine: str) -> Row:
    """What the search finds."""
    config = pc.Config(layout="auto", machine=machine)
    traced = with_mesh(with_config(gpt.build(**SIZES, dp=prod(mesh), layout="auto"), config), mesh)
    result = search_layouts(run_passes(traced)[0])
    keep_layouts(result, None)
    return Row("**searched**", mesh, traced, result.job, result.signatures)


def rows(machine: str) -> Iterator[Row]:
    """Known and searched layouts, mesh by mesh."""
    for mesh, known in KNOWN.items():
        for name, settings in known.items():
            yield known_row(name, mesh, settings, machine)
        yield searched_row(mesh, machine)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h100-sxm")
    options = parser.parse_args()
    head = ["mesh", "layout", *LAYOUTS, "held", "objective", "collectives"]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for each in rows(options.machine):
        print("| " + " | ".join(each.cells()) + " |", flush=True)


if __name__ == "__main__":
    main()
