"""docs/glossary.md: each term is used, and words that were given up do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TERMS = re.findall(
    r"^\| (?!term|-)([^|]+) \| (.*) \|$", (ROOT / "docs/glossary.md").read_text(), re.M
)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "executor/README.md",
    ROOT / "plancompiler/boxing/README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "glossary.md"),
]
PRODUCT = ("plancompiler", "executor", "master", "worker")


@pytest.fixture(scope="module")
def words() -> str:
    """All documents and all product code, as lower-case text with single spaces."""
    sources = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    text = "\n".join(path.read_text() for path in (*PAGES, *sources))
    return re.sub(r"[\s_]+", " ", text.lower())


def test_every_term_is_used(words: str) -> None:
    assert len(TERMS) > 50
    unused = [term for term, _ in TERMS if not re.search(rf"\b{re.escape(term.lower())}", words)]
    assert unused == []


def test_every_term_has_one_sentence_and_one_place() -> None:
    names = [term for term, _ in TERMS]
    assert len(names) == len(set(names))
    assert [name for name, text in TERMS if not re.fullmatch(r"[^.]+(\.\w[^.]*)*\.", text)] == []


GIVEN_UP = ("rooms", "doors", "outlet", "outlets", "departures", "placer", "overdue")
"""Words of ours for which the field has others: they are not used in documents any more."""


def test_words_that_were_given_up_do_not_come_back() -> None:
    pattern = re.compile(rf"\b({'|'.join(GIVEN_UP)})\b", re.I)
    back = [
        f"{page.relative_to(ROOT)}: {line.strip()[:80]}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if pattern.search(re.sub(r"`[^`]*`", "", line))
    ]
    assert back == []
