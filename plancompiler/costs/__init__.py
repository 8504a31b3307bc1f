"""What work costs on a machine: machine files, and the one cost model that is read off them.

Layouts, buckets, recomputation, reports and forecasts all ask here, so that they agree.
"""

from __future__ import annotations

from plancompiler.costs.choice import (
    GENERIC,
    chosen_machine,
    generic_machine,
    machine_names,
    machine_of,
    machine_of_job,
)
from plancompiler.costs.links import LinkCost, MeshLinks, exchange_link, link_between, links_of
from plancompiler.costs.machine import Machine
from plancompiler.costs.op_time import op_seconds
from plancompiler.costs.primitive import Cost, primitive_cost

__all__ = [
    "GENERIC",
    "Cost",
    "LinkCost",
    "Machine",
    "MeshLinks",
    "chosen_machine",
    "exchange_link",
    "generic_machine",
    "link_between",
    "links_of",
    "machine_names",
    "machine_of",
    "machine_of_job",
    "op_seconds",
    "primitive_cost",
]
