"""docs/glossary.md: each term is used, and words and names that were given up do not come back."""

from __future__ import annotations

import ast
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
BESIDE = ("tests", "benchmarks", "examples", "scripts")
"""Folders of code that is no part of the product."""


def read_sources(folders: tuple[str, ...]) -> dict[Path, str]:
    """The Python files below the folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: path.read_text() for path in paths}


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    """All product code."""
    return read_sources(PRODUCT)


@pytest.fixture(scope="module")
def words(sources: dict[Path, str]) -> str:
    """All documents and all product code, as lower-case text with single spaces."""
    text = "\n".join((*(page.read_text() for page in PAGES), *sources.values()))
    return re.sub(r"[\s_]+", " ", text.lower())


def test_every_term_is_used(words: str) -> None:
    assert len(TERMS) > 50
    unused = [term for term, _ in TERMS if not re.search(rf"\b{re.escape(term.lower())}", words)]
    assert unused == []


def test_every_term_has_one_sentence_and_one_place() -> None:
    names = [term for term, _ in TERMS]
    assert len(names) == len(set(names))
    assert [name for name, text in TERMS if not re.fullmatch(r"[^.]+(\.\w[^.]*)*\.", text)] == []


GIVEN_UP = (
    *("board", "boards", "departures", "door", "doors", "house", "meeting", "meetings", "mirrors"),
    *("outlet", "outlets", "overdue", "placer", "refusal", "refusals", "rooms", "takeover"),
)
"""Words of ours for which the field has others: they are not used in documents any more."""
GIVEN_UP_NAMES = {
    *GIVEN_UP,
    *("alike", "departure", "found", "mirror", "room", "standing", "takeovers"),
}
"""Nor in names in code, tests included. A result is called what it is, not `found`."""


def test_words_that_were_given_up_do_not_come_back() -> None:
    pattern = re.compile(rf"\b({'|'.join(GIVEN_UP)})\b", re.I)
    back = [
        f"{page.relative_to(ROOT)}: {line.strip()[:80]}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if pattern.search(re.sub(r"`[^`]*`", "", line))
    ]
    assert back == []


def given_up_names(source: str) -> list[str]:
    """`line: name` of each variable, parameter, function or attribute that has such a word in it;
    of `found`, only where it is the whole name (`found_inf` is what others call it, too). The name
    of a test is a sentence, in which the words have their ordinary meaning.
    """
    back = []
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "arg", "attr", "name"):
            name = getattr(node, field, None)
            if not isinstance(name, str) or isinstance(node, ast.alias):
                continue
            words = {name.strip("_")} | (set(name.lower().split("_")) - {"found"})
            if words & GIVEN_UP_NAMES and not name.startswith("test_"):
                back.append(f"{node.lineno}: {name}")
    return back


def test_names_that_were_given_up_do_not_come_back(sources: dict[Path, str]) -> None:
    # Most files have none of these words, not even in sentences, and need not be parsed.
    anywhere = re.compile("|".join(sorted(GIVEN_UP_NAMES)))
    back = {
        str(path.relative_to(ROOT)): names
        for path, source in (sources | read_sources(BESIDE)).items()
        if anywhere.search(source) and (names := given_up_names(source))
    }
    assert back == {}


def test_a_name_that_was_given_up_is_seen() -> None:
    source = """
def take_room(found):
    for _found in found.found_inf:
        self.alike = lambda placer: found_inf
def test_rooms_are_alike(): ...
"""
    assert sorted(given_up_names(source)) == [
        "2: found",
        "2: take_room",
        "3: _found",
        "3: found",
        "4: alike",
        "4: placer",
    ]
