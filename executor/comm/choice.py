"""Which kind of link connects a rank to others: for workers, compiled functions and worlds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from plancompiler.errors import TransportError
from plancompiler.executor.comm.host import HostLink
from plancompiler.executor.comm.host_rendezvous import HostWorldLink
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.local import LocalHub, LocalLink
from plancompiler.executor.comm.local_rendezvous import LocalWorldLink
from plancompiler.executor.comm.message_rendezvous import MessageWorldLink
from plancompiler.executor.comm.messages import MessageLink
from plancompiler.executor.comm.rendezvous import WorldLink
from plancompiler.executor.comm.routed import RoutedLink

Remote = Callable[[str], Link]
"""Makes a rank's link of a run, by its token, to ranks whose memory it cannot read."""


def open_link(
    token: str,
    rank: int,
    size: int,
    *,
    far: Collection[int] = (),
    remote: Remote | None = None,
    hub: LocalHub | None = None,
    find: Callable[[int], Sequence[int]] | None = None,
) -> Link:
    """The link of one of `size` ranks of a run, whose secret is `token`.

    All are threads of this process where there is a `hub`. Else those in `far` are on other hosts,
    where `remote` reaches them, and all others share memory with this rank; `find` is that of
    `HostLink`.
    """
    if hub is not None:
        return hub.link(rank)
    if not far:
        return HostLink(token, rank, find)
    if remote is None:
        raise TransportError(
            "ranks are on several hosts, and what connects them knows one only",
            rank=rank,
            got=f"ranks {sorted(far)} are not on the host of rank {rank}",
            hint="start the world with the transport grpc or mpi",
        )
    link = remote(token)
    if len(far) == size - 1 or not isinstance(link, MessageLink):
        return link
    return RoutedLink(HostLink(token, rank, find), link, far)


def join_world(
    link: Link,
    size: int,
    deadline: float,
    start_deadline: float,
    remote: Remote | None = None,
) -> WorldLink:
    """A rank's link as that to all ranks of a world, on which communicators stand.

    `deadline` (seconds) is how long those that are waited for may stand still, `start_deadline` how
    long they may take to be there; `remote` makes links of later runs.
    """
    if isinstance(link, LocalLink):
        return LocalWorldLink(link, deadline)
    if isinstance(link, HostLink):
        return HostWorldLink(link, size, deadline, start_deadline)
    if isinstance(link, MessageLink):
        return MessageWorldLink(link, size, deadline, start_deadline, remote)
    raise TransportError("a world has links of one kind", rank=link.rank)
