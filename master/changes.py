"""How coroutines of the master wait for each other."""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes everyone who waits for a change of something."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        """Set once, by the next change, and then replaced."""

    async def wait(self) -> None:
        """Return after the next change."""
        await self._next.wait()

    def tell(self) -> None:
        """Something has changed."""
        told, self._next = self._next, asyncio.Event()
        told.set()
