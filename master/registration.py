"""Which slot of the cluster a worker that offers itself takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from plancompiler.cluster.messages import Register
from plancompiler.errors import RankError, RegistrationError, VersionError


class OnHost(Protocol):
    """Whoever runs on a host."""

    @property
    def host(self) -> str: ...


def check_worker_version(version: str, own: str) -> None:
    """VersionError for a worker that cannot join a master of version `own`."""
    if version.split(".")[:2] != own.split(".")[:2]:
        raise VersionError(
            f"a worker of version {version} cannot join a master of version {own}",
            got=f"worker {version}",
            expected=f"the master's major and minor version, {own}",
            hint="install the same version on both sides",
        )


def free_slot(
    message: Register, workers: Mapping[int, OnHost], world_size: int, version: str
) -> int:
    """The slot for a new worker; `workers` are those that have registered, by slot.

    Raises VersionError, RankError or RegistrationError where there is none.
    """
    check_worker_version(message.version, version)
    if message.slot is None:
        free = [slot for slot in range(world_size) if slot not in workers]
        if not free:
            raise RegistrationError(
                "every rank of this master has its worker already",
                got=f"one more worker on host {message.host!r}",
                expected=f"{world_size} workers",
            )
        return free[0]
    if not 0 <= message.slot < world_size:
        raise RankError(
            "a worker claims a rank outside the world",
            got=message.slot,
            expected=f"0 to {world_size - 1}",
            hint="start the master with more --ranks, or the worker without --rank",
        )
    taken = workers.get(message.slot)
    if taken is not None:
        raise RegistrationError(
            f"rank {message.slot} is taken by another worker",
            rank=message.slot,
            got=f"a second worker for rank {message.slot}, on host {message.host!r}",
            expected=f"only the one on host {taken.host!r}",
            hint="give each worker its own --rank, or none",
        )
    return message.slot
