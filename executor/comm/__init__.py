"""How ranks exchange data: transports (local, host), groups and collectives."""

from plancompiler.executor.comm.base import Group, GroupKey, Publication, Sink, Transport
from plancompiler.executor.comm.host import HostTransport
from plancompiler.executor.comm.local import LocalHub, LocalTransport

__all__ = [
    "Group",
    "GroupKey",
    "HostTransport",
    "LocalHub",
    "LocalTransport",
    "Publication",
    "Sink",
    "Transport",
]
