"""A run of all ranks' plans by a virtual clock: the actors of the executor, with given costs."""

from plancompiler.simulate.clock import simulate
from plancompiler.simulate.cost import (
    FREE_KINDS,
    Cost,
    Latency,
    Uses,
    Wake,
    no_latency,
    no_uses,
    no_wake,
    slot_cost,
    unit_cost,
)
from plancompiler.simulate.simulation import Action, Simulation, chrome_trace

__all__ = [
    "FREE_KINDS",
    "Action",
    "Cost",
    "Latency",
    "Simulation",
    "Uses",
    "Wake",
    "chrome_trace",
    "no_latency",
    "no_uses",
    "no_wake",
    "simulate",
    "slot_cost",
    "unit_cost",
]
