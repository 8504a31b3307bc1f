"""Which processes share a network and memory: the identity of a host, or of a part of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

HOST_VARIABLE = "PLANCOMPILER_HOST"
"""Where the user may name the host of a process; see `host_id`."""


def network_name() -> str:
    """Names the network that this process sees: its machine since it was started, and namespace.

    Processes with the same name for it reach each other's loopback addresses and abstract sockets.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def host_id(name: str) -> str:
    """What processes have in common that can map each other's memory. `name` is what the user calls
    the host, empty for nothing: under two names it is two hosts.
    """
    return f"{network_name()}/{os.getuid()}/{name}"
