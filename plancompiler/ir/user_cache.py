"""plancompiler's folder in the user's cache, for things that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path | None:
    """The folder `plancompiler` below $XDG_CACHE_HOME or ~/.cache; None for an account without a
    home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification wants relative paths ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # an account without a home
            return None
    return base / "plancompiler"
