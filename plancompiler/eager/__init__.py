"""Eager execution: tensors on the ranks of a placement that run ops at once.

The same ops, sharding rules and boxing planner as in compiled jobs decide what each rank does.
"""

from plancompiler.eager.creation import from_local, tensor
from plancompiler.eager.generator import Generator
from plancompiler.eager.launcher import init
from plancompiler.eager.modes import (
    default_generator,
    grad,
    implicit_broadcast,
    manual_seed,
    no_grad,
    using_generator,
)
from plancompiler.eager.spawn import spawn
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.watch import CommTrace, comm_trace
from plancompiler.eager.world import World, current_world

__all__ = [
    "CommTrace",
    "DistTensor",
    "Generator",
    "World",
    "comm_trace",
    "current_world",
    "default_generator",
    "from_local",
    "grad",
    "implicit_broadcast",
    "init",
    "manual_seed",
    "no_grad",
    "spawn",
    "tensor",
    "using_generator",
]
