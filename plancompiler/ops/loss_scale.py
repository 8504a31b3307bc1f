"""What loss scaling needs of updates: to be skipped, leaving every bit of the variables, in steps
whose gradients are not finite; and the scale's own update (P. Micikevicius et al., 2018).

Each update that is `skippable` has a guarded form, `guarded_adam_update` and so on, with one input
more: `found_inf` of all gradients, a scalar. Where it is not zero, the variables stay as they are.
The form of an update that goes by the number of the step takes a second one: how many steps were
`skipped` so far, which do not count.
"""

from __future__ import annotations

from dataclasses import replace

from plancompiler.ops import (  # noqa: F401  # they register the updates
    data_norm,
    moments,
    optimizer,
)
from plancompiler.ops.attributes import Float, Int
from plancompiler.ops.kernel import copy_unless_shared
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    Kernel,
    KernelContext,
    OpDef,
    Rule,
    Types,
    define_op,
    op_def,
    op_table,
    register,
)

SKIPPABLE = tuple(each.kind for each in op_table().values() if each.skippable)
"""Updates that have a guarded form."""
LARGEST_SCALE = 2.0**24


def guarded_kind(kind: str) -> str | None:
    """The guarded form of an update; None where it has none."""
    return f"guarded_{kind}" if kind in SKIPPABLE else None


def _register_guarded(plain: OpDef) -> None:
    kind = f"guarded_{plain.kind}"

    added = ["found_inf f ()", *["skipped int32 ()"] * plain.counts_steps]

    def guarded(line: str) -> str:
        return line.replace(" ->", "".join(f", {each}" for each in added) + " ->")

    infer, more = plain.infer, len(added)
    register(
        replace(
            plain,
            kind=kind,
            infer=guarded(infer)
            if isinstance(infer, str)
            else lambda inputs, attrs: infer(inputs[:-more], attrs),
            operands=guarded(plain.operands),
            rule=_guarded_rule(plain.rule, more),
            inputs=tuple(count + more for count in plain.input_counts or ()),
            kernel=_guarded_kernel(plain),
            flops=plain.flops or 0,
            portable=False,
            skippable=False,
            skips_itself=True,
            doc=f"{plain.kind} with found_inf as one input more: where it is not 0, variables keep "
            "their values and other outputs are 0."
            + " Another input is the number of steps that were skipped so far, which do not count."
            * plain.counts_steps,
        )
    )


def _guarded_rule(rule: str | Rule, more: int) -> str | Rule:
    """The rule with scalars as so many inputs more."""
    scalars = ", ..." * more + " ->"
    if isinstance(rule, str):
        return rule.replace(" ->", scalars)

    def guarded(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
        return rule(inputs[:-more], outputs, attrs).replace(" ->", scalars)

    return guarded


def _guarded_kernel(plain: OpDef) -> Kernel:
    kept, counts = dict(plain.mutates), plain.counts_steps

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        *operands, broken = inputs[:-1] if counts else inputs
        if not broken:
            step = context.step
            if counts:
                context.step = step - int(inputs[-1])
            plain.kernel(context, operands, outputs)
            context.step = step
            return
        for target, output in enumerate(outputs):
            if target in kept:
                copy_unless_shared(operands[kept[target]], output)
            else:
                output.fill(0)

    return kernel


for _kind in SKIPPABLE:
    _register_guarded(op_def(_kind))


# --- the scale ------------------------------------------------------------------------------------


def _scale_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    scale, good, skipped = float(inputs[0]), int(inputs[1]) + 1, int(inputs[2])
    factor = context.attrs["factor"]
    if inputs[3]:
        scale, good, skipped = max(1.0, scale / factor), 0, skipped + 1
    elif good >= context.attrs["interval"]:
        scale, good = min(LARGEST_SCALE, scale * factor), 0
    outputs[0].fill(scale)
    outputs[1].fill(good)
    outputs[2].fill(skipped)


define_op(
    "loss_scale_update",
    infer="scale F (), good int32 (), skipped int32 (), found_inf f () -> "
    "scale F (), good int32 (), skipped int32 ()",
    rule="..., ..., ..., ... -> ..., ..., ...",
    attrs=(
        Int("interval", least=1),
        Float("factor", 2.0, least=1.0),
    ),
    kernel=_scale_kernel,
    mutates=((0, 0), (1, 1), (2, 2)),
    doc="(scale, good steps, skipped steps, found_inf) -> (scale', good steps', skipped steps'): "
    "divided by `factor` where found_inf is not 0, multiplied by it after `interval` good steps.",
)
