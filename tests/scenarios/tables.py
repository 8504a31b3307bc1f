"""The tables of scenarios by the system whose tests gave the ideas, and how many there are.

python -m tests.scenarios.tables [--page FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.scenarios import dtensor, oneflow, paddle

TABLES = {
    "DTensor": dtensor.SCENARIOS,
    "Paddle": paddle.SCENARIOS,
    "OneFlow": oneflow.SCENARIOS,
}
BEGIN, END = "<!-- scenarios: begin -->", "<!-- scenarios: end -->"


def counts() -> str:
    """Rows of a Markdown table: programs, these in a layout, also as jobs, with gradients."""
    lines = [
        "| ideas from tests of | files | programs | scenarios | also as jobs | with gradients |",
        "|---|---|---|---|---|---|",
    ]
    for table, scenarios in TABLES.items():
        figures = (
            len({each.source for each in scenarios}),
            len({(each.name, each.mesh) for each in scenarios}),
            len(scenarios),
            sum(not each.eager_only for each in scenarios),
            sum(bool(each.differentiated) for each in scenarios),
        )
        lines.append(f"| {table} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the scenarios of other systems' tests.")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    options = parser.parse_args()
    print(counts())
    if options.page:
        head, _, rest = options.page.read_text().partition(BEGIN)
        tail = rest.partition(END)[2]
        options.page.write_text(f"{head}{BEGIN}\n{counts()}\n{END}{tail}")


if __name__ == "__main__":
    main()
