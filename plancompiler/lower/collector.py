"""Python's cycle collector, paused while plans are made.

A compiler makes very many small objects that all stay alive and have no cycles. The collector would
look at them again and again, a quarter of all time, and find nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
"""Bodies of `collector_paused` that run now, on all threads."""
_was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run the body without the cycle collector; may be nested, and entered by several threads.

    The last one to leave turns it on again, if it was on before the first came.
    """
    global _inside, _was_on
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_on:
                gc.enable()
