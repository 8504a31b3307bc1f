"""The cost report of a boxing task graph: what every layout change does and is expected to cost."""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.boxing.exchange import Exchange, exchange_seconds, received_bytes
from plancompiler.boxing.graph import BoxingTaskGraph, TaskFamily, TensorLayout
from plancompiler.boxing.primitives import primitive_between
from plancompiler.costs import Cost, Machine, generic_machine, links_of
from plancompiler.ir import Split
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import element_count, lie_apart
from plancompiler.ir.task import Primitive, TaskKind


@dataclass(frozen=True, slots=True)
class TransferCost:
    """One transport family and what it takes on a machine."""

    family: int
    name: str
    primitive: Primitive
    before: str
    """Layout it starts from, with the placement where that differs."""
    after: str
    devices: int
    """Devices that talk to each other."""
    bytes_per_rank: int
    """Received by the busiest rank in a step; 0 where nothing crosses ranks."""
    seconds: float
    """In a step."""
    source: str


def boxing_costs(
    graph: BoxingTaskGraph, machine: Machine | None = None
) -> tuple[TransferCost, ...]:
    """One row per transport family, in global order. The copies and the assembly of an exchange are
    one row. Seconds are those of the machine, by default the generic one.
    """
    machine = machine or generic_machine()
    microbatches = 1 if graph.pipeline is None else graph.pipeline.microbatches
    return tuple(
        _cost(family, microbatches if family.per_microbatch else 1, machine)
        for family in graph.families
        if family.transfer is not None
        and not (
            family.kind in (TaskKind.SLICE_BOXING, TaskKind.BOXING_ZEROS)
            and family.transfer.primitive is Primitive.EXCHANGE
        )
    )


def _cost(family: TaskFamily, times: int, machine: Machine) -> TransferCost:
    """The cost of what a family moves, so many times in a step."""
    transfer, layout = family.transfer, family.outputs[0]
    assert transfer is not None
    before, after = str(transfer.src_sbp), str(layout.sbp)
    if transfer.primitive is Primitive.EXCHANGE:
        assert transfer.src_placement is not None
        assert transfer.src_sbp is not None
        exchange = Exchange(
            layout.shape, transfer.src_placement, transfer.src_sbp, family.placement, layout.sbp
        )
        before = f"{before} @{transfer.src_placement}"
        after = f"{after} @{family.placement}"
        devices = len({*transfer.src_placement.rank_list, *family.placement.rank_list})
        moved = max(received_bytes(exchange, layout.dtype, r) for r in exchange.busiest_ranks)
        seconds = exchange_seconds(exchange, layout.dtype, machine)
    elif transfer.primitive is Primitive.COPY or transfer.src_sbp is None:
        devices, moved, seconds = 1, 0, 0.0
    else:
        devices = devices_of(family)
        # A fused reduction is one call for several values, which are split as they please.
        costs = [
            (cost_of(family, machine, each), bytes_of_group(each, family))
            for each in family.outputs
        ]
        crosses = family.kind is TaskKind.COLLECTIVE_BOXING
        moved = round(sum(cost.share * nbytes for cost, nbytes in costs)) if crosses else 0
        seconds = costs[0][0].start + sum(cost.per_byte * nbytes for cost, nbytes in costs)
    return TransferCost(
        family=family.number,
        name=family.name.rsplit(":", 1)[0],
        primitive=transfer.primitive,
        before=before,
        after=after,
        devices=devices,
        bytes_per_rank=moved * times,
        seconds=seconds * times,
        source=str(family.source),
    )


def devices_of(family: TaskFamily) -> int:
    """Devices that talk to each other along the family's mesh axes."""
    assert family.transfer is not None
    return element_count([family.placement.hierarchy[axis] for axis in family.transfer.mesh_axes])


def cost_of(family: TaskFamily, machine: Machine, layout: TensorLayout) -> Cost:
    """The cost of a change along mesh axes to one of the family's layouts, per byte of
    `bytes_of_group`.
    """
    transfer = family.transfer
    assert transfer is not None
    assert transfer.src_sbp is not None
    axis = transfer.mesh_axes[0]
    row = primitive_between(transfer.src_sbp[axis], layout.sbp[axis])
    assert row is not None
    return row.cost(
        devices_of(family),
        links_of(machine, family.placement).along(transfer.mesh_axes),
        lie_apart(layout.shape, transfer.dst_axis, layout.dtype.itemsize),
        lie_apart(layout.shape, transfer.src_axis, layout.dtype.itemsize),
    )


def bytes_of_group(layout: TensorLayout, family: TaskFamily) -> float:
    """Bytes of what the devices that talk to each other hold together of a value."""
    assert family.transfer is not None
    pieces = element_count(
        [
            extent
            for axis, extent in enumerate(family.placement.hierarchy)
            if axis not in family.transfer.mesh_axes and isinstance(layout.sbp[axis], (Split, Halo))
        ]
    )
    return element_count(layout.shape) * layout.dtype.itemsize / pieces
