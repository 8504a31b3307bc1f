"""What a worker does that uses no processor to speak of: it waits for its disk, or transfers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from plancompiler.executor.process_status import waits_for_disk

_LOOK_SECONDS = 0.5
"""Between two looks, which cost a little for each thread."""


class QuietWork:
    """Looks now and then whether this process gets on. `moved` grows with what it transfers."""

    def __init__(self, moved: Callable[[], int]) -> None:
        self._moved = moved
        self._before = moved()
        self._next = 0.0

    def was_seen(self) -> bool:
        """Whether it has transferred something since the last look, or a thread of it waits for a
        disk, which may take long over one write.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOOK_SECONDS
        moved, before = self._moved(), self._before
        self._before = moved
        return moved != before or waits_for_disk(os.getpid())
