"""Two hosts made of network namespaces, with a cable between them that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Hosts:
    """Their names as namespaces, and their addresses."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.213.7.1", "10.213.7.2")

    def on(self, host: int, command: list[str]) -> list[str]:
        """The command on one of them, which has all but the network in common with the other."""
        return ["nsenter", f"--net=/run/netns/{self.names[host]}", *command]

    def host_of(self, pid: int) -> int:
        """On which of them a process is."""
        done = subprocess.run(
            ["ip", "netns", "identify", str(pid)], capture_output=True, text=True, check=True
        )
        return self.names.index(done.stdout.strip())

    def cut(self) -> None:
        """The cable between them."""
        subprocess.run(self.on(0, ["ip", "link", "set", "cable", "down"]), check=True)

    def mend(self) -> None:
        """The cable that was cut."""
        subprocess.run(self.on(0, ["ip", "link", "set", "cable", "up"]), check=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """They are gone afterwards; what runs on them must have ended."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root makes network namespaces, with ip of iproute2")
    hosts = Hosts((f"pc{os.getpid()}a", f"pc{os.getpid()}b"))
    made = []
    try:
        for name in hosts.names:
            done = subprocess.run(
                ["ip", "netns", "add", name], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                pytest.skip(f"network namespaces cannot be made: {done.stderr}")
            made.append(name)
        ends = [word for name in hosts.names for word in ("name", "cable", "netns", name)]
        cable = ["ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:]]
        subprocess.run(cable, check=True)
        for host, address in enumerate(hosts.addresses):
            for words in (
                ["ip", "address", "add", f"{address}/24", "dev", "cable"],
                ["ip", "link", "set", "cable", "up"],
                ["ip", "link", "set", "lo", "up"],
            ):
                subprocess.run(hosts.on(host, words), check=True)
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=True)
