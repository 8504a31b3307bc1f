"""The whole static import graph of the package: `python -m tests.structure.graph`.

Imports count wherever they stand: at the top of a file, in a function, under TYPE_CHECKING, and as
`import_module("plancompiler.…")`. It prints the packages in the layers that the imports give, and
the cycles among modules, and fails where there are any.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[2]


def files() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its file; linked folders are followed."""
    for folder, _, names in os.walk(ROOT / "plancompiler", followlinks=True):
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_by_name(path: Path) -> Iterator[str]:
    """The modules that a file imports by a constant string."""
    text = path.read_text()
    if "import_module" not in text and "__import__" not in text:
        return  # so that few files are parsed
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if name in ("import_module", "__import__"):
                yield str(node.args[0].value)


def module_graph() -> nx.DiGraph:
    """An edge for each import of one module of the package by another."""
    direct = grimp.build_graph("plancompiler", cache_dir=None)
    graph = nx.DiGraph()
    graph.add_nodes_from(direct.modules)
    for module in direct.modules:
        imported = direct.find_modules_directly_imported_by(module)
        graph.add_edges_from((module, other) for other in imported)
    for module, path in files():
        named = (name for name in imports_by_name(path) if name in graph)
        graph.add_edges_from((module, name) for name in named)
    return graph


def package_of(module: str) -> str:
    """`boxing` of `plancompiler.boxing.build`; the root's own modules stand for themselves."""
    return ".".join(module.split(".")[1:2]) or "(root)"


def cycles(graph: nx.DiGraph) -> list[list[str]]:
    """Modules that reach each other, the largest circle first."""
    circles = [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1]
    return sorted(circles, key=len, reverse=True)


def packages(modules: nx.DiGraph) -> nx.DiGraph:
    """An edge for each package that imports another one."""
    graph = nx.DiGraph()
    graph.add_nodes_from(map(package_of, modules))
    pairs = ((package_of(one), package_of(other)) for one, other in modules.edges)
    graph.add_edges_from((one, other) for one, other in pairs if one != other)
    return graph


def main() -> int:
    """Print what there is; 1 where a cycle is left."""
    modules = module_graph()
    print(f"{len(modules)} modules, {modules.number_of_edges()} imports")
    circles = cycles(modules)
    circles += [each for each in cycles(packages(modules)) if each not in circles]
    for circle in circles:
        print(f"cycle of {len(circle)}: {', '.join(circle)}")
    if circles:
        return 1
    print("no cycle")
    layers = list(nx.topological_generations(packages(modules).reverse()))
    for number, names in reversed(list(enumerate(layers))):
        print(f"layer {number:2}: {', '.join(sorted(names))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
