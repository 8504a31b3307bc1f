"""Counts the Python tokens of the product, per package: `python -m tests.structure.tokens [ROOT]`.

Comments, docstrings, line breaks, indentation and generated files do not count, so that neither
prose nor the formatter changes the figure.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FOLDERS = ("plancompiler", "master", "worker", "executor")


def docstring_lines(text: str) -> set[int]:
    """The lines of strings that are statements, as docstrings are."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def count(path: Path) -> int:
    """How many tokens of a file count."""
    docstrings = docstring_lines(path.read_text())
    with path.open("rb") as file:
        return sum(
            token.type not in _NOT_COUNTED
            and not (token.type == tokenize.STRING and token.start[0] in docstrings)
            for token in tokenize.tokenize(file.readline)
        )


def count_packages(root: Path) -> Counter[str]:
    """Tokens per package; files at the package root count as `(root)`."""
    totals: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            if "proto" in parts or any((root / Path(*parts[:n])).is_symlink() for n in (1, 2)):
                continue
            package = parts[1] if folder == "plancompiler" else folder
            totals["(root)" if package.endswith(".py") else package] += count(path)
    return totals


if __name__ == "__main__":
    totals = count_packages(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
    for package, tokens in sorted(totals.items()):
        print(f"{package:12} {tokens:8,}")
    print(f"{'all':12} {totals.total():8,}")
