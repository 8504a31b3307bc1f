"""Addresses: HOST:PORT, and whether other machines can reach one."""

from __future__ import annotations

import ipaddress

from plancompiler.errors import ClusterError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; a ClusterError where it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ClusterError("not an address", got=repr(address), expected="HOST:PORT")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
