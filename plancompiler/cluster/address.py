"""Addresses: HOST:PORT, and whether other machines can reach one."""

from __future__ import annotations

import ipaddress

from plancompiler.errors import ClusterError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; a ClusterError where it is none."""
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not _is_host(host) or not is_port:
        raise ClusterError("not an address", got=repr(address), expected="HOST:PORT")
    return host.strip("[]"), int(port)


def _is_host(host: str) -> bool:
    """Whether a text can be the name or the number of a host: others cannot even be looked up."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
