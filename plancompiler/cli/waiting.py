"""What is said of a job that waits for workers."""

from __future__ import annotations

from plancompiler.cli.output import print_note
from plancompiler.cluster.messages import Waiting


def say_waiting(waiting: Waiting) -> None:
    """Which ranks have no worker, on stderr."""
    ranks = ", ".join(map(str, waiting.ranks))
    more = waiting.count - len(waiting.ranks)
    print_note(
        f"waiting for a worker of rank {ranks}{f' and {more} more' if more else ''} "
        f"({waiting.seconds:.0f} s)"
    )
    for text in waiting.stopped:
        print_note(text)
