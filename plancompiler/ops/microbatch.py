"""Ops between what a step has once and what it has per micro-batch; the compiler inserts them.

`accumulate` and `collect_pieces` run once per micro-batch and make one value per step, which is
complete after the last. `take_piece` cuts the piece of this micro-batch out of a value of the step.
Outside a step of several micro-batches each of them is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ir.sbp import Partial, Reduction
from plancompiler.ir.shard import element_count, region_index, relative
from plancompiler.ops.check import axis_attr, expect_inputs, only_attrs, str_attr
from plancompiler.ops.registry import Array, AttrMap, KernelContext, OpDef, Types, register
from plancompiler.ops.rule import Signature, operand_line
from plancompiler.ops.shape import keeps_extremes, no_flops

ACCUMULATED = {
    Reduction.SUM: np.add,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
    Reduction.PROD: np.multiply,
}
"""How the parts of micro-batches combine, by the attribute `reduction`."""
_NAMES = tuple(str(reduction) for reduction in ACCUMULATED)


# --- accumulate -----------------------------------------------------------------------------------


def _accumulate_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("accumulate", inputs, 1)
    only_attrs("accumulate", attrs, "reduction")
    str_attr(attrs, "reduction", among=_NAMES)
    return inputs


def _accumulate_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    (part,), (total,) = inputs, outputs
    reduction = Reduction(str_attr(context.attrs, "reduction"))
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
    own = Partial(Reduction(str_attr(attrs, "reduction", among=_NAMES)))
    return (Signature((own,), (own,)),)


register(
    OpDef(
        "accumulate",
        infer=_accumulate_infer,
        rule="... -> ...",
        kernel=_accumulate_kernel,
        extra=_keeps_own,
        flops=lambda inputs, outputs, attrs: element_count(inputs[0].shape),
        collects=True,
        takes_bfloat16=True,
        doc="The sum, max, min or product (`reduction`) of what the micro-batches of a step "
        "contribute: the first is copied, the others are combined into it.",
    )
)


# --- pieces ---------------------------------------------------------------------------------------


def _collect_infer(inputs: Types, attrs: AttrMap) -> Types:
    return _piece_infer("collect_pieces", inputs, attrs)


def _take_infer(inputs: Types, attrs: AttrMap) -> Types:
    return _piece_infer("take_piece", inputs, attrs)


def _piece_infer(kind: str, inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs(kind, inputs, 1)
    only_attrs(kind, attrs, "axis")
    axis_attr(attrs, len(inputs[0].shape))
    return inputs


def _piece_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """The axis of the pieces stays whole: devices that split it too would hold rows of every piece,
    which are no box of the tensor.
    """
    ndim = len(inputs[0].shape)
    line = operand_line(ndim, whole=(axis_attr(attrs, ndim),))
    return f"{line} -> {line}"


def _collect_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    box = relative(context.input_regions[0], context.output_regions[0])
    np.copyto(outputs[0][region_index(box)], inputs[0])


def _take_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    box = relative(context.output_regions[0], context.input_regions[0])
    np.copyto(outputs[0], inputs[0][region_index(box)])


register(
    OpDef(
        "collect_pieces",
        infer=_collect_infer,
        rule=_piece_rule,
        kernel=_collect_kernel,
        linear=((0,),),
        extra=keeps_extremes,
        flops=no_flops,
        collects=True,
        takes_bfloat16=True,
        doc="The pieces along `axis` that the micro-batches of a step make, put together.",
    )
)
register(
    OpDef(
        "take_piece",
        infer=_take_infer,
        rule=_piece_rule,
        kernel=_take_kernel,
        linear=((0,),),
        extra=keeps_extremes,
        flops=no_flops,
        takes_bfloat16=True,
        doc="This micro-batch's piece along `axis` of a value of the whole step.",
    )
)
