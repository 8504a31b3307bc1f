"""What the search may choose for an op: each legal signature, with the work of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from plancompiler.boxing.infer_sbp import legal_signatures, passing_seconds
from plancompiler.boxing.planner import canonical
from plancompiler.costs import Machine, links_of, op_seconds
from plancompiler.costs.op_time import FREE_OPS
from plancompiler.errors import ShapeError
from plancompiler.ir import BROADCAST, NdSbp, Op, Sbp, Split, TensorType
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import flops_of, op_def, pointwise_of
from plancompiler.ops.rule import NdSignature

CHOSEN_FREELY = frozenset({"input", "variable", "redistribute"})
"""Ops whose output may have any layout that is not partial."""


@dataclass(frozen=True)
class Candidates:
    """An op's legal signatures under its pins, and what each costs a device."""

    signatures: tuple[NdSignature, ...]
    seconds: np.ndarray
    """Computing, per signature."""
    held_bytes: np.ndarray
    """What a device holds for the whole step, per signature; none until `memory_model` says so."""

    def where(self, keep: Sequence[bool]) -> Candidates:
        """Those for which `keep` is true."""
        chosen = np.array(keep, bool)
        return Candidates(
            tuple(each for each, stays in zip(self.signatures, keep, strict=True) if stays),
            self.seconds[chosen],
            self.held_bytes[chosen],
        )


def candidates_of(op: Op, microbatches: int, machine: Machine) -> Candidates:
    """The candidates of an op. ShapeError where what the user demands leaves none."""
    signatures = tuple(_legal(op, microbatches))
    if not signatures:
        raise ShapeError(
            f"no sharding of {op.kind} fits the layouts demanded of it",
            op=op.name,
            source=op.source,
            got=f"outputs {op.sbp}",
            hint="take the layout away, or demand another one",
        )
    seconds = np.array(seconds_of(op, signatures, machine))
    return Candidates(signatures, seconds, np.zeros(len(signatures)))


def _legal(op: Op, microbatches: int) -> Iterator[NdSignature]:
    hierarchy = op.placement.hierarchy
    ndim = op.placement.ndim
    pins = _pins(op, ndim)
    if op.kind == "output":
        yield NdSignature((NdSbp.broadcast(ndim),), ())
        return
    if op.kind in CHOSEN_FREELY:
        if op.sbp is not None and op.attr("along") is None:
            # It may be partial, which the search would not choose here.
            demanded = canonical(op.sbp, hierarchy)
            yield NdSignature((demanded,) * len(op.inputs), (demanded,))
            return
        for sbp in whole_layouts(len(op.outputs[0].shape), hierarchy):
            if _fits(sbp, pins, hierarchy):
                yield NdSignature((sbp,) * len(op.inputs), (sbp,))
        return
    mutates = op_def(op.kind).mutates
    for signature in legal_signatures(op, microbatches):
        if any(signature.outputs[made] != signature.inputs[kept] for made, kept in mutates):
            continue
        if all(_fits(sbp, pins, hierarchy) for sbp in signature.outputs):
            yield signature


def _pins(op: Op, ndim: int) -> tuple[Sbp | None, ...]:
    """Per mesh axis, what the user demands of the op's outputs."""
    if op.sbp is None:
        return (None,) * ndim
    along = op.attr("along")
    if along is None:
        return op.sbp.entries
    position = (op.placement.axes or ()).index(str(along))
    return tuple(op.sbp[axis] if axis == position else None for axis in range(ndim))


def _fits(sbp: NdSbp, pins: tuple[Sbp | None, ...], hierarchy: tuple[int, ...]) -> bool:
    return all(
        pin is None or extent == 1 or pin == entry
        for entry, pin, extent in zip(sbp, pins, hierarchy, strict=True)
    )


@lru_cache(maxsize=4096)
def whole_layouts(ndim: int, hierarchy: tuple[int, ...]) -> tuple[NdSbp, ...]:
    """All layouts without partial entries of a tensor of so many axes."""
    entries: list[Sbp] = [BROADCAST, *(Split(axis) for axis in range(ndim))]
    options = [entries if extent > 1 else [BROADCAST] for extent in hierarchy]
    return tuple(canonical(NdSbp(chosen), hierarchy) for chosen in product(*options))


def _bytes(tensor: TensorType) -> int:
    return element_count(tensor.shape) * tensor.dtype.itemsize


@lru_cache(maxsize=65536)
def pieces_of(sbp: NdSbp, hierarchy: tuple[int, ...]) -> int:
    """Into how many pieces a layout cuts a tensor."""
    return element_count(
        [
            extent
            for entry, extent in zip(sbp, hierarchy, strict=True)
            if isinstance(entry, (Split, Halo))
        ]
    )


@lru_cache(maxsize=65536)
def _split_axes(sbp: NdSbp) -> int:
    """Mesh axes that split, as bits."""
    return sum(1 << axis for axis, entry in enumerate(sbp) if isinstance(entry, (Split, Halo)))


def seconds_of(op: Op, signatures: Sequence[NdSignature], machine: Machine) -> list[float]:
    """What each takes beside other devices at work: by what was measured of its kind, or else the
    roofline, which is arithmetic or memory traffic of one device, whichever takes longer.
    """
    if op.kind in FREE_OPS or op.kind == "redistribute" or op_def(op.kind).view:
        return [0.0] * len(signatures)
    hierarchy = op.placement.hierarchy
    shares = [
        element_count([extent for axis, extent in enumerate(hierarchy) if bits >> axis & 1])
        for bits in range(1 << len(hierarchy))
    ]
    types = (*op.input_types, *op.output_types)
    sizes = [_bytes(each) for each in types]
    flops = flops_of(op.kind, op.input_types, op.output_types, dict(op.attrs))
    pointwise = pointwise_of(op.kind, op.input_types, op.output_types, dict(op.attrs))
    dtype = (op.outputs or op.inputs)[0].dtype
    seconds = []
    beside = machine.host.slowdown if op.placement.size > 1 else 1.0
    measured = machine.kernels.get((op.kind, str(dtype))) if op.placement.size > 1 else None
    passing, links = op_def(op.kind).passing, links_of(machine, op.placement)
    for signature in signatures:
        bits, held = 0, 0.0
        for sbp, size in zip((*signature.inputs, *signature.outputs), sizes, strict=True):
            bits |= _split_axes(sbp)
            held += size / pieces_of(sbp, hierarchy)
        parts = shares[bits]
        if measured is not None:
            spent = measured.seconds(flops / parts, held)
        else:
            spent = beside * op_seconds(machine, flops / parts, held, dtype, pointwise / parts)
        if passing is not None:
            given = op.input_types
            spent += passing_seconds(passing, given, signature, hierarchy, flops, links)
        seconds.append(spent)
    return seconds
