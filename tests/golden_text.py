"""Golden texts: what a stage printed once and must print again.

`PLANCOMPILER_UPDATE_GOLDEN=1` writes the files anew; read the difference before keeping it.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """`text` is that of `tests/golden/<name>`."""
    path = FOLDER / name
    if os.environ.get("PLANCOMPILER_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
