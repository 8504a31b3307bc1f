"""Workers that a signal stops before they have registered, as the processes beside them say."""

from __future__ import annotations

from collections.abc import Collection

from plancompiler.limits import time_limits

_MOST = 1000
"""Of which is known at once."""


class StoppedEarly:
    """What a master hears of them, again and again while they are stopped. Pure."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, str], float] = {}
        """By rank (-1: any) and host: when."""

    def note(self, rank: int, host: str, now: float) -> bool:
        """One is stopped; whether that is news."""
        known = self._current(now)
        is_new = (rank, host) not in known
        if not is_new or len(known) < _MOST:
            known[rank, host] = now
        self._heard = known
        return is_new

    def texts(self, ranks: Collection[int], now: float) -> tuple[str, ...]:
        """What whoever waits for workers of these ranks is to hear."""
        return tuple(
            f"{f'rank {rank}: its worker' if rank >= 0 else 'a worker'} on host {host} is stopped "
            "(state T)"
            for rank, host in sorted(self._current(now))
            if rank < 0 or rank in ranks
        )

    def _current(self, now: float) -> dict[tuple[int, str], float]:
        silence = time_limits.WORKER_SILENCE
        return {key: when for key, when in self._heard.items() if now - when < silence}
