"""Ops that hold a job together: inputs, variables, outputs, changes of layout, and constants.

The compiler fixes the layouts of `input`, `variable`, `output` and `redistribute`; their rules
only say that any one layout is whole. The constants can be split along every axis: each device
computes its own box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.errors import (
    AttributeValueError,
    DTypeError,
    ExecutionError,
    NonFiniteError,
    ShapeError,
    UsageError,
)
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.check import (
    bool_attr,
    check_float,
    dtype_attr,
    expect_inputs,
    float_attr,
    floats_attr,
    int_attr,
    only_attrs,
    shape_attr,
    str_attr,
)
from plancompiler.ops.initializer import check_initializer, initialize
from plancompiler.ops.kernel import copy_unless_shared
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    KernelContext,
    OpDef,
    Types,
    register,
)
from plancompiler.ops.rule import operand_line
from plancompiler.ops.shape import no_flops


def _whole_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """Every axis of every operand stays whole."""

    def side(tensors: Types) -> str:
        return ", ".join(
            operand_line(len(tensor.shape), whole=range(len(tensor.shape))) for tensor in tensors
        )

    return f"{side(inputs)} -> {side(outputs)}"


def _free_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    """An op without inputs whose output can be split along every axis."""
    return f"-> {operand_line(len(outputs[0].shape))}"


def _declared(attrs: AttrMap) -> TensorType:
    return TensorType(shape_attr(attrs), dtype_attr(attrs))


# --- input, variable, output, redistribute --------------------------------------------------------


def _input_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("input", inputs, 0)
    only_attrs("input", attrs, "name", "shape", "dtype", "batched")
    str_attr(attrs, "name")
    bool_attr(attrs, "batched", True)
    return (_declared(attrs),)


def _input_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    """Copies this device's shard of the fed value, which the runner puts into `state["value"]`."""
    value = context.state.get("value")
    if value is None:
        raise ExecutionError("an input has no value", got=repr(context.attrs["name"]))
    copy_unless_shared(value, outputs[0])


register(
    OpDef(
        "input",
        infer=_input_infer,
        rule=_whole_rule,
        kernel=_input_kernel,
        flops=no_flops,
        source=True,
        doc="A value that the caller feeds at each step.",
    )
)


def _variable_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("variable", inputs, 0)
    only_attrs("variable", attrs, "name", "shape", "dtype", "init", "init_args", "trainable")
    str_attr(attrs, "name")
    tensor = _declared(attrs)
    check_initializer(str_attr(attrs, "init"), floats_attr(attrs, "init_args"), tensor.dtype)
    if bool_attr(attrs, "trainable") and not tensor.dtype.is_floating:
        raise DTypeError("a trainable variable needs a floating dtype", got=tensor)
    return (tensor,)


def _variable_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    """The value before the first step; after that the variable's storage keeps it."""
    attrs = context.attrs
    found = initialize(
        str_attr(attrs, "init"),
        floats_attr(attrs, "init_args"),
        str_attr(attrs, "name"),
        context.seed,
        context.output_shapes[0],
        context.output_regions[0],
        dtype_attr(attrs),
    )
    np.copyto(outputs[0], found)


register(
    OpDef(
        "variable",
        infer=_variable_infer,
        rule=_whole_rule,
        kernel=_variable_kernel,
        flops=no_flops,
        doc="A tensor that lives from step to step, and how it starts.",
    )
)


def _output_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("output", inputs, 1)
    only_attrs("output", attrs, "name", "finite")
    str_attr(attrs, "name")
    bool_attr(attrs, "finite", False)
    return ()


def _output_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    """Checks the value where the output must be finite; the runner reports it."""
    value = inputs[0]
    if bool_attr(context.attrs, "finite", False) and not np.isfinite(value).all():
        wrong = value[~np.isfinite(value)].flat[0]
        raise NonFiniteError(
            f"output {context.attrs['name']!r} is not finite in step {context.step}",
            got=wrong,
            expected="finite numbers",
            hint="lower the learning rate, or look for a division by zero or log of zero",
        )


register(
    OpDef(
        "output",
        infer=_output_infer,
        rule=_whole_rule,
        kernel=_output_kernel,
        flops=no_flops,
        doc="A value that each step reports.",
    )
)


def _redistribute_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("redistribute", inputs, 1)
    only_attrs("redistribute", attrs, "late", "along")
    str_attr(attrs, "late", "")
    str_attr(attrs, "along", "")
    return inputs


def _redistribute_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    copy_unless_shared(inputs[0], outputs[0])


def _redistribute_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    return (grads[0].redistribute(placement=inputs[0].placement),)


register(
    OpDef(
        "redistribute",
        infer=_redistribute_infer,
        rule=_whole_rule,
        kernel=_redistribute_kernel,
        gradient=_redistribute_gradient,
        flops=no_flops,
        view=((0, 0),),
        doc="The same value in another layout: boxing before this op does the work. It stands "
        "right after the value's producer and serves all who want the layout; with `late` it "
        "stands right before the op of that name (before this one, if there is none) and serves "
        "this op alone. With `along`, the layout is demanded along the mesh axis of that name "
        "only; along others the input keeps its own, reduced.",
    )
)


def _assign_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("assign", inputs, 2)
    only_attrs("assign", attrs)
    if inputs[0] != inputs[1]:
        raise ShapeError(
            "assign needs a value of the variable's shape and dtype",
            got=inputs[1],
            expected=inputs[0],
        )
    return inputs[:1]


def _assign_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    outputs[0][...] = inputs[1]


register(
    OpDef(
        "assign",
        infer=_assign_infer,
        rule="..., ... -> ...",
        kernel=_assign_kernel,
        flops=no_flops,
        mutates=((0, 0),),
        doc="(variable, value) -> value, which the variable holds from then on.",
    )
)


# --- constants ------------------------------------------------------------------------------------


def _fill_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("fill", inputs, 0)
    only_attrs("fill", attrs, "shape", "dtype", "value")
    tensor = _declared(attrs)
    value = attrs.get("value")
    if not isinstance(value, (bool, int, float)):
        raise AttributeValueError("fill needs a plain number as its value", got=repr(value))
    if not tensor.dtype.is_floating and isinstance(value, float):
        raise DTypeError(
            "fill cannot put this number into a tensor of its dtype",
            got=f"{value!r} into {tensor.dtype}",
        )
    if tensor.dtype.is_floating:
        check_float("fill", value)
    if tensor.dtype.is_integer:
        limits = np.iinfo(tensor.dtype.value)
        if not limits.min <= value <= limits.max:
            raise AttributeValueError(
                "fill was given a number outside its dtype",
                got=value,
                expected=f"{limits.min} to {limits.max} for {tensor.dtype}",
            )
    return (tensor,)


def _fill_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    outputs[0].fill(context.attrs["value"])


register(
    OpDef(
        "fill",
        infer=_fill_infer,
        rule=_free_rule,
        kernel=_fill_kernel,
        flops=no_flops,
        doc="A tensor full of one number.",
    )
)


def _causal_mask_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("causal_mask", inputs, 0)
    only_attrs("causal_mask", attrs, "size")
    size = int_attr(attrs, "size", least=0)
    return (TensorType((size, size), DType.BOOL),)


def _causal_mask_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    rows, columns = (np.arange(start, stop) for start, stop in context.output_regions[0])
    np.less_equal(columns, rows[:, None], out=outputs[0])


register(
    OpDef(
        "causal_mask",
        infer=_causal_mask_infer,
        rule=_free_rule,
        kernel=_causal_mask_kernel,
        flops=no_flops,
        doc="bool [size, size], True where the column is at most the row.",
    )
)


# --- learning rate --------------------------------------------------------------------------------

SCHEDULES = ("constant", "linear", "cosine", "fed", "listed")


def learning_rate_at(step: int, attrs: AttrMap) -> float:
    """The learning rate of a step.

    It rises linearly to `base` over the first `warmup` steps; `linear` and `cosine` then take it
    to `final` at step `total`, and it stays there. `listed` has `rates`, that of step `first` and
    those of the steps after it; UsageError for any other step. UsageError for `fed`, which says
    that rates come from who runs the op (`KernelContext.rates`).
    """
    base = float_attr(attrs, "base")
    warmup = int_attr(attrs, "warmup", 0)
    if step < warmup:
        return base * (step + 1) / warmup
    schedule = str_attr(attrs, "schedule", among=SCHEDULES)
    if schedule == "constant":
        return base
    if schedule == "fed":
        raise UsageError(
            "the learning rate is a function of the user's, and nobody has fed its value",
            got=f"step {step}",
            hint="pc.run(job) and Client.open(job) feed it; elsewhere use pc.optim.constant, "
            "linear or cosine",
        )
    if schedule == "listed":
        rates, first = attrs["rates"], int_attr(attrs, "first")
        assert isinstance(rates, tuple)  # as inferred; looking at each again would take long
        if not first <= step < first + len(rates):
            raise UsageError(
                "the job has no learning rate for this step",
                got=f"step {step}",
                expected=f"one of the {len(rates)} steps from {first} on",
            )
        return float(rates[step - first])
    final, total = float_attr(attrs, "final", 0.0), int_attr(attrs, "total")
    progress = min(1.0, (step - warmup) / (total - warmup))
    if schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2
    return base + (final - base) * progress


def _learning_rate_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("learning_rate", inputs, 0)
    names = ("schedule", "base", "warmup", "total", "final", "optimizer", "rates", "first")
    only_attrs("learning_rate", attrs, *names)
    int_attr(attrs, "optimizer", 0, least=0)
    schedule = str_attr(attrs, "schedule", among=SCHEDULES)
    float_attr(attrs, "base", least=0.0)
    float_attr(attrs, "final", 0.0, least=0.0)
    warmup = int_attr(attrs, "warmup", 0, least=0)
    if schedule == "listed":
        int_attr(attrs, "first", least=0)
        wrong = next((rate for rate in floats_attr(attrs, "rates") if not 0 <= rate < math.inf), 0)
        float_attr({"rates": wrong}, "rates", least=0.0, below=math.inf)
    if schedule in ("linear", "cosine"):
        int_attr(attrs, "total", least=warmup + 1)
    else:
        int_attr(attrs, "total", 0)
    return (TensorType((), DType.FLOAT32),)


def _learning_rate_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    rate = None
    if context.rates is not None:
        rate = context.rates(int_attr(context.attrs, "optimizer", 0), context.step)
    outputs[0].fill(learning_rate_at(context.step, context.attrs) if rate is None else rate)


register(
    OpDef(
        "learning_rate",
        infer=_learning_rate_infer,
        rule=_free_rule,
        kernel=_learning_rate_kernel,
        flops=no_flops,
        doc="The learning rate of the step, by a schedule or as it is fed.",
    )
)
