"""The check that all ranks make the same calls: with `PLANCOMPILER_COMM_CHECK=1` they compare every
op, and everything else that must be equal, before it is used. The error for the first difference
names each rank and its source line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from plancompiler.eager.spec import AnyWorld, TensorSpec
from plancompiler.errors import TransportError
from plancompiler.executor.comm.context import CommContext
from plancompiler.ir import AttrValue, Broadcast, NdSbp, Placement
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

Said = Mapping[str, object]
"""What a rank reports of a call: name of the fact → a text or a number."""


def compare(world: AnyWorld, ranks: tuple[int, ...], call: str, said: Said) -> None:
    """Raise a TransportError on all of these ranks unless all of them report the same facts.

    The ranks call it together; on any other rank it does nothing.
    """
    if len(ranks) == 1 or world.rank not in ranks:
        return
    parts = {"call": call, **{name: str(value) for name, value in said.items()}}
    own = json.dumps([parts, str(user_line())]).encode()
    group = world.comm.context(ranks)
    rows = [json.loads(each.tobytes()) for each in gathered(group, np.frombuffer(own, np.uint8))]
    first = rows[0][0]
    for row, rank in zip(rows, ranks, strict=True):
        other = row[0]
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise TransportError(
                    f"the ranks disagree about the {name} of {call}"
                    if name != "call"
                    else "the ranks make different calls",
                    op=call,
                    source=user_line(),
                    rank=world.rank,
                    got="; ".join(
                        f"rank {each}: {rows[place][0].get(name, 'none')} at {rows[place][1]}"
                        for place, each in ((0, ranks[0]), (ranks.index(rank), rank))
                    ),
                    expected="the same on all ranks",
                    hint="all ranks run one program: nothing may depend on the rank except the "
                    "parts given to pc.from_local",
                )


def gathered(group: CommContext, own: Array) -> list[Array]:
    """The rows of numbers of all members; rows may have any length, and have one dtype."""
    sizes = group.all_gather(np.array([len(own)], np.int64))
    return np.split(group.all_gather(own), sizes.cumsum()[:-1])


def compare_value(world: AnyWorld, array: Array, placement: Placement, call: str) -> None:
    """Compare an array that must be equal on all ranks of a placement."""
    if world.rank in placement:
        compare(world, placement.rank_list, call, _described(array))


def compare_copies(
    world: AnyWorld, array: Array, placement: Placement, sbp: NdSbp, call: str
) -> None:
    """Compare this rank's part of a tensor with those of the ranks that hold the same part."""
    if world.rank not in placement:
        return
    copied = [axis for axis, entry in enumerate(sbp) if isinstance(entry, Broadcast)]
    if copied:
        compare(world, placement.group(world.rank, tuple(copied)), call, _described(array))


def compare_op(
    world: AnyWorld,
    kind: str,
    inputs: tuple[TensorSpec, ...],
    attrs: Mapping[str, AttrValue],
    placement: Placement | None,
) -> None:
    """Compare an op that is about to run."""
    where: Any = inputs[0].placement if placement is None and inputs else placement
    if isinstance(where, Placement) and world.rank in where:
        said: dict[str, object] = {
            f"input {slot}": f"{spec.dtype}{list(spec.shape)} as {spec.sbp}"
            for slot, spec in enumerate(inputs)
        }
        said |= {name: repr(value) for name, value in sorted(attrs.items())}
        if "key" in attrs or kind == "variable":
            seed, step = world.forced or (world.generator.seed, world.generator.step)
            said |= {"seed": seed, "step": step}
        compare(world, where.rank_list, kind, said)


def compare_change(world: AnyWorld, source: TensorSpec, target: TensorSpec) -> None:
    """Compare a change of layout that is about to run."""
    ranks = {*source.placement.rank_list, *target.placement.rank_list}
    compare(world, tuple(sorted(ranks)), "redistribute", {"source": source, "target": target})


def _described(array: Array) -> dict[str, object]:
    host = array if isinstance(array, np.ndarray) else array.get()
    raw = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    digest = xxhash.xxh3_64_hexdigest(raw.data)
    return {"dtype": host.dtype, "shape": host.shape, "numbers": f"digest {digest}"}
