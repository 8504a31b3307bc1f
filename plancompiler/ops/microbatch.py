"""Ops between what a step has once and what it has per micro-batch; the compiler inserts them.

`accumulate` and `collect_pieces` run once per micro-batch and make one value per step, which is
complete after the last. `take_piece` cuts the piece of this micro-batch out of a value of the step.
Outside a step of several micro-batches each of them is a copy.
"""

from __future__ import annotations

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ir.sbp import Partial, Reduction
from plancompiler.ir.shard import region_index, relative
from plancompiler.ops.attributes import Axis, Text
from plancompiler.ops.check import same_types
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.rule import Signature
from plancompiler.ops.scan import axis_rule
from plancompiler.ops.shape import keeps_extremes

ACCUMULATED = {
    Reduction.SUM: np.add,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
    Reduction.PROD: np.multiply,
}
"""How the parts of micro-batches combine, by the attribute `reduction`."""
_NAMES = tuple(str(reduction) for reduction in ACCUMULATED)


# --- accumulate -----------------------------------------------------------------------------------


def _accumulate_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (part,), (total,) = inputs, outputs
    reduction = Reduction(context.attrs["reduction"])
    combine = ACCUMULATED[reduction]
    if reduction in (Reduction.SUM, Reduction.PROD) and DType.parse(total.dtype).is_half:
        # Numbers of 16 bits are added up in float32, as devices' parts are.
        part = part.astype(np.float32)
        if context.microbatch > 0:
            combine(context.state.get("wide", total), part, out=part)
        context.state["wide"] = part
        np.copyto(total, part, casting="unsafe")
    elif context.microbatch == 0:
        np.copyto(total, part)
    else:
        combine(total, part, out=total)


def _keeps_own(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> tuple[Signature, ...]:
    """Parts of devices that combine as those of micro-batches do stay apart."""
    own = Partial(Reduction(attrs["reduction"]))
    return (Signature((own,), (own,)),)


define_op(
    "accumulate",
    infer=same_types,
    rule="... -> ...",
    attrs=(Text("reduction", among=_NAMES),),
    kernel=_accumulate_kernel,
    extra=_keeps_own,
    flops=1,
    collects=True,
    takes_bfloat16=True,
    doc="The sum, max, min or product (`reduction`) of what the micro-batches of a step "
    "contribute: the first is copied, the others are combined into it.",
)


# --- pieces ---------------------------------------------------------------------------------------
# Their axis stays whole: devices that split it too would hold rows of every piece, which are no box
# of the tensor.


def _collect_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    box = relative(context.input_regions[0], context.output_regions[0])
    np.copyto(outputs[0][region_index(box)], inputs[0])


def _take_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    box = relative(context.output_regions[0], context.input_regions[0])
    np.copyto(outputs[0], inputs[0][region_index(box)])


define_op(
    "collect_pieces",
    infer=same_types,
    rule=axis_rule,
    inputs=1,
    attrs=(Axis(),),
    kernel=_collect_kernel,
    linear=((0,),),
    extra=keeps_extremes,
    flops=0,
    collects=True,
    takes_bfloat16=True,
    doc="The pieces along `axis` that the micro-batches of a step make, put together.",
)
define_op(
    "take_piece",
    infer=same_types,
    rule=axis_rule,
    inputs=1,
    attrs=(Axis(),),
    kernel=_take_kernel,
    linear=((0,),),
    extra=keeps_extremes,
    flops=0,
    takes_bfloat16=True,
    doc="This micro-batch's piece along `axis` of a value of the whole step.",
)
