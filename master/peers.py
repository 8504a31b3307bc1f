"""How the ranks of a job reach each other: which are on one host, and where the others are."""

from __future__ import annotations

from collections.abc import Mapping

from plancompiler.cluster.messages import PeerAddress, Register
from plancompiler.errors import ClusterError


def host_of(offer: Register) -> str:
    """What workers that share memory have in common."""
    return offer.host_id or offer.host


def far_peers(rank: int, offers: Mapping[int, Register]) -> tuple[PeerAddress, ...]:
    """The ranks on other hosts than this one; `offers` are what workers registered with."""
    own = host_of(offers[rank])
    return tuple(
        PeerAddress(peer, offer.peer_address)
        for peer, offer in sorted(offers.items())
        if host_of(offer) != own
    )


def check_reachable(offers: Mapping[int, Register]) -> None:
    """Raise ClusterError where a worker has no address that all others can use."""
    for rank, offer in sorted(offers.items()):
        for peer, other in sorted(offers.items()):
            if host_of(other) == host_of(offer):
                continue
            near = not offer.is_loopback or offer.network == other.network
            if offer.peer_address and near:
                continue
            raise ClusterError(
                f"rank {peer} on host {other.host!r} cannot reach rank {rank} on host "
                f"{offer.host!r}",
                rank=rank,
                got=f"a worker that listens at {offer.peer_address}"
                if offer.peer_address
                else "a worker that listens nowhere",
                expected="an address that the other hosts can reach",
                hint="start each worker with --listen HOST:0, where HOST is its address there",
            )
