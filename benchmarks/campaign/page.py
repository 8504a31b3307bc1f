"""Results of campaigns as tables of docs/reliability.md."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.campaign.case import Result

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def table(results: Sequence[Result]) -> str:
    """One row per group: cases, how they ended, the slowest, and how many went wrong."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda each: each.group):
        groups.setdefault(result.group, []).append(result)
    rows = ["| what | cases | endings | slowest, s | went wrong |", "|---|---|---|---|---|"]
    for group, of_group in groups.items():
        endings = Counter(each.ending or "as it must" for each in of_group if not each.problems)
        text = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
        slowest = max(each.seconds for each in of_group)
        wrong = sum(bool(each.problems) for each in of_group)
        rows.append(f"| {group} | {len(of_group)} | {text} | {slowest:.1f} | {wrong} |")
    return "\n".join(rows)


def write(kind: str, results: Sequence[Result]) -> None:
    """Put the table of a kind between its marks on the page."""
    text = PAGE.read_text()
    wrong = sum(bool(each.problems) for each in results)
    seeds = ", ".join(map(str, sorted({each.case.seed for each in results})))
    note = f"{len(results):,} cases with seed {seeds}; {wrong} went wrong."
    inside = f"<!-- {kind} -->\n{table(results)}\n\n{note}\n<!-- end -->"
    marked = re.search(rf"<!-- {kind} -->.*?<!-- end -->", text, flags=re.S)
    if marked is None:
        sys.exit(f"{PAGE} has no place for {kind}")
    PAGE.write_text(text[: marked.start()] + inside + text[marked.end() :])
