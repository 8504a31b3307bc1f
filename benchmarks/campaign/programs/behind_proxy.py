"""`plancompiler`, as a worker that others reach at another address: `behind_proxy.py ADDRESS
worker …`. It tells the master that address instead of the one at which it listens.
"""

import sys
from dataclasses import replace
from typing import Any

from plancompiler.cli.main import main
from plancompiler.worker import peers


def announce(address: str) -> None:
    """Register with this address from now on."""
    offer = peers.HostPeers.offer

    def other_address(self: peers.HostPeers, *words: Any) -> Any:
        return replace(offer(self, *words), peer_address=address)

    setattr(peers.HostPeers, offer.__name__, other_address)  # in this process


announce(sys.argv.pop(1))
main()
