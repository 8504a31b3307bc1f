"""Updates of many small tensors as one, because their cost is that of calls, not of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from plancompiler.eager.op_plan import OpPlan
from plancompiler.eager.tensor import DistTensor
from plancompiler.ir import AttrValue

SMALL = 4096
"""The number of elements up to which copying a tensor costs less than calls of its own."""

Row = Sequence[DistTensor]
"""The inputs of one update."""


def update_all(
    plan_of: Callable[..., OpPlan], kind: str, attrs: Mapping[str, AttrValue], rows: Sequence[Row]
) -> None:
    """Run an elementwise op that changes its inputs, on many rows of inputs.

    In a row, all inputs have one shape and layout, except for numbers that all rows share.
    """
    plans: dict[object, OpPlan] = {}
    groups: dict[object, tuple[OpPlan, list[Row]]] = {}
    for row in rows:
        spec = row[0].spec
        # The states lie as their parameter does, and so does the gradient by now.
        plan = plans.get(spec)
        if plan is None:
            specs = tuple([each.spec for each in row])
            plan = plans[spec] = plan_of(kind, specs, attrs)
        if row[0].local.size > SMALL or not spec.shape or not plan.joinable:
            plan.update(row)
        else:
            key = id(spec.dtype), id(row[-1])  # one object per dtype, and an enum's hash is slow
            group = groups.get(key)
            if group is None:
                groups[key] = plan, [row]
            else:
                group[1].append(row)
    for plan, members in groups.values():
        if len(members) == 1:
            plan.update(members[0])
        else:
            _update_together(plan, members)


def _update_together(plan: OpPlan, rows: Sequence[Row]) -> None:
    """Run a plan on the elements of all rows; its kernel takes any number of them."""
    arrays = [
        np.concatenate([tensor.local for tensor in column], axis=None)
        if column[0].spec.shape
        else column[0].local
        for column in zip(*rows, strict=True)
    ]
    sources = [source for _, source in plan.mutates]
    plan.context.step = plan.world.step
    plan.kernel(plan.context, arrays, [arrays[source] for source in sources])
    start = 0
    for row in rows:
        shape, size = row[0].local.shape, row[0].local.size
        stop = start + size
        for source in sources:
            tensor = row[source]
            made = arrays[source][start:stop]
            np.copyto(tensor.local, made if len(shape) == 1 else made.reshape(shape))
            tensor.written()
        start = stop
