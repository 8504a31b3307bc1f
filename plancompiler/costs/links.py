"""The links among devices: what messages and bytes cost between the ranks of a mesh.

Ranks fill nodes in order: rank r is on node r // devices of a node. A group within a node talks
over the node's links. A group over several nodes talks over the network, for which all its members
on a node use their adapters together, as rings through every adapter do; that cannot be faster than
the node's own links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from plancompiler.costs.machine import Machine
from plancompiler.ir import Placement


class LinkCost(NamedTuple):
    """What devices that talk to each other pay (the α–β model, with γ for copies)."""

    per_message: float
    """α: seconds of a message."""
    per_byte: float
    """β: seconds per byte between devices."""
    per_copied_byte: float
    """γ: seconds per byte within a device's memory."""


@lru_cache(maxsize=256)
def link_between(machine: Machine, ranks: tuple[int, ...]) -> LinkCost:
    """The links of ranks that talk to each other, all at once."""
    node, network, device = machine.node, machine.network, machine.device
    copied = 1.0 / device.copy_bytes_per_second
    inner = LinkCost(node.latency_seconds, 1.0 / node.bytes_per_second, copied)
    if network is None or node.devices is None:
        return inner
    home = ranks[0] // node.devices
    together = sum(rank // node.devices == home for rank in ranks)
    if together == len(ranks):
        return inner
    rate = network.bytes_per_second * together / network.oversubscription
    per_byte = max(1.0 / rate, inner.per_byte)
    return LinkCost(network.latency_seconds, per_byte, copied)


def exchange_link(machine: Machine, source: Placement, target: Placement) -> LinkCost:
    """The links over which a device of one placement reads from devices of another."""
    node, reader = machine.node.devices, target.rank_list[0]
    if node is not None:
        for rank in source.rank_list:
            if rank // node != reader // node:
                return link_between(machine, (reader, rank))
    return link_between(machine, (reader,))


# Equal by identity, as machines are: paths between layouts are kept by it.
@dataclass(frozen=True, eq=False)
class MeshLinks:
    """The links along the axes of a mesh."""

    machine: Machine
    placement: Placement | None
    """None where all links are the same, whatever the mesh."""
    _known: dict[tuple[int, ...], LinkCost] = field(default_factory=dict)

    def along(self, mesh_axes: Sequence[int]) -> LinkCost:
        """The links of devices that differ along these axes, as the first such group has them."""
        axes = () if self.placement is None else tuple(mesh_axes)
        known = self._known.get(axes)
        if known is None:
            ranks: tuple[int, ...] = (0,)
            if self.placement is not None:
                ranks = self.placement.group(self.placement.rank_list[0], axes)
            known = self._known[axes] = link_between(self.machine, ranks)
        return known


@lru_cache(maxsize=1024)
def links_of(machine: Machine, placement: Placement) -> MeshLinks:
    """The links of a mesh; one object for all meshes of a machine whose links are all the same."""
    node = machine.node.devices
    if machine.network is None or node is None:
        return uniform_links(machine)
    if len({rank // node for rank in placement.rank_list}) == 1:
        return uniform_links(machine)
    return MeshLinks(machine, placement)


@lru_cache(maxsize=64)
def uniform_links(machine: Machine) -> MeshLinks:
    """The links within a node, for every mesh."""
    return MeshLinks(machine, None)
