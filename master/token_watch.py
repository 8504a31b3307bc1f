"""A master's token file is read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from plancompiler.cluster.token import Challenger, read_token_file
from plancompiler.errors import SecurityError
from plancompiler.limits import time_limits

_log = logging.getLogger(__name__)


class TokenWatch:
    """Looks at a token file once a second. `on_change` is called when it holds other secrets."""

    def __init__(self, path: Path, challenger: Challenger, on_change: Callable[[], None]) -> None:
        self._path = path
        self._challenger = challenger
        self._on_change = on_change
        self._seen = _state_of(path)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(time_limits.TOKEN_LOOK)
            self.look()

    def look(self) -> None:
        """Take what the file holds now. One that cannot be read changes nothing: its old secrets
        go on counting, and the log says so.
        """
        state = _state_of(self._path)
        if state == self._seen:
            return
        self._seen = state
        try:
            credentials = read_token_file(self._path)
        except SecurityError as error:
            _log.error("the token file has changed and counts as it was before: %s", error)
            return
        self._challenger.replace(credentials)
        _log.warning("the token file was read again: it has %d secrets", len(credentials))
        self._on_change()


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes with a file's content, owner or mode."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
