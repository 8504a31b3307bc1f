"""Eager execution: tensors on the ranks of a placement that run ops at once.

The same ops, sharding rules and boxing planner as in compiled jobs decide what each rank does.
"""

from plancompiler.eager.anomaly import detect_anomaly
from plancompiler.eager.creation import from_local, tensor
from plancompiler.eager.equality import allclose, array_equal
from plancompiler.eager.generator import Generator
from plancompiler.eager.inplace import into
from plancompiler.eager.launcher import init
from plancompiler.eager.local import join_parts, local_map, local_part
from plancompiler.eager.profile import Profile, profile
from plancompiler.eager.routing import global_gather, global_scatter
from plancompiler.eager.scaling import LossScale
from plancompiler.eager.settings import (
    default_generator,
    grad,
    implicit_broadcast,
    manual_seed,
    no_grad,
    using_generator,
)
from plancompiler.eager.spawn import spawn
from plancompiler.eager.state import load, save
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.watch import CommTrace, comm_trace
from plancompiler.eager.world import World, current_world

__all__ = [
    "CommTrace",
    "DistTensor",
    "Generator",
    "LossScale",
    "Profile",
    "World",
    "allclose",
    "array_equal",
    "comm_trace",
    "current_world",
    "default_generator",
    "detect_anomaly",
    "from_local",
    "global_gather",
    "global_scatter",
    "grad",
    "implicit_broadcast",
    "init",
    "into",
    "join_parts",
    "load",
    "local_map",
    "local_part",
    "manual_seed",
    "no_grad",
    "profile",
    "save",
    "spawn",
    "tensor",
    "using_generator",
]
