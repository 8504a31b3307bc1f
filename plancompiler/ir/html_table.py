"""Tables of the HTML pages that this package writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_TEXT = 300
"""Characters of a text that are shown."""


def table(title: str, caption: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title, from rows of cells; "None." where there are no rows.

    Heads that start with `>` are of numbers, which are aligned right. A table that is larger than
    the page scrolls, also by keyboard.
    """
    top = "".join(
        f'<th scope="col" class="number">{head[1:]}</th>'
        if head.startswith(">")
        else f'<th scope="col">{head}</th>'
        for head in heads
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    if not body:
        return f"<h2>{title}</h2><p>None.</p>"
    return (
        f'<h2>{title}</h2><div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f"<table><caption>{caption}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def number_cell(html: str) -> str:
    """A cell that is aligned right."""
    return f'<td class="number">{html}</td>'


def text_cell(html: str) -> str:
    """A cell that is aligned left."""
    return f"<td>{html}</td>"


def shown_text(text: str) -> str:
    """Text that users have written, escaped, and cut off where it is very long."""
    return escape(text if len(text) <= _TEXT else f"{text[:_TEXT]}…")
