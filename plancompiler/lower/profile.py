"""Wall time of the compiler by stage: what `compile --profile` shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

RANK_STAGES = ("read", "expand", "rebuild", "emit", "verify", "write")
"""What is done for each rank: `read` and `write` are the wire forms of slice and plan, in the mode
`rank_per_process`; `expand` is a rank's share of the one graph that the mode `naive` makes of all.
"""


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the wall time of the body to a stage, in seconds."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin
