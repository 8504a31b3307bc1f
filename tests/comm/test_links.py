"""The suite of all links, on every kind; over MPI in `ranks.py`."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from plancompiler.executor.comm.choice import open_link
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.comm.remote import PeerServer, remote_link
from tests.comm import link_suite

RANKS = 3


def on_all(links: dict[int, Link], work: Callable[[Link], None]) -> None:
    """Do something on all ranks, each in a thread of its own."""
    failures: list[BaseException] = []

    def run(link: Link) -> None:
        try:
            work(link)
        except BaseException as error:
            failures.append(error)
        finally:
            link.close()

    threads = [threading.Thread(target=run, args=(link,)) for link in links.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# Which ranks share memory: by number of their host; None for threads of one process.
@pytest.mark.parametrize(
    "hosts", [None, (0, 0, 0), (0, 1, 2), (0, 0, 1)], ids=["threads", "host", "apart", "routed"]
)
def test_every_kind(hosts: tuple[int, ...] | None) -> None:
    token, hub = secrets.token_hex(8), LocalHub() if hosts is None else None
    with ExitStack() as stack:
        servers = {}
        for rank in range(RANKS):
            servers[rank] = PeerServer("127.0.0.1:0")
            stack.callback(servers[rank].close)
        addresses = {rank: f"127.0.0.1:{server.port}" for rank, server in servers.items()}
        links = {}
        for rank in range(RANKS):
            far = [other for other in range(RANKS) if hosts and hosts[other] != hosts[rank]]

            def remote(run: str, rank: int = rank) -> Link:
                return remote_link(run, rank, servers[rank], addresses)

            links[rank] = open_link(token, rank, RANKS, far=far, remote=remote, hub=hub)
        on_all(links, lambda link: link_suite.run(link, RANKS))
