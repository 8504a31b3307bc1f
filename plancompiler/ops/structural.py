"""Ops that hold a job together: inputs, variables, outputs, changes of layout, and constants.

The compiler fixes the layouts of `input`, `variable`, `output` and `redistribute`; their rules
only say that any one layout is whole. The constants can be split along every axis: each device
computes its own box.
"""

from __future__ import annotations

import math

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
from plancompiler.ops.attributes import (
    Bool,
    Dtype,
    Float,
    Floats,
    Int,
    Ints,
    Number,
    Shape,
    Text,
)
from plancompiler.ops.check import (
    check_float,
)
from plancompiler.ops.gradient import of_one
from plancompiler.ops.initializer import check_initializer, initialize
from plancompiler.ops.kernel import copy_unless_shared
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.rule import operand_line


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
    return TensorType(attrs["shape"], attrs["dtype"])


# --- input, variable, output, redistribute --------------------------------------------------------


def _input_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """Copies this device's shard of the fed value, which the runner puts into `state["value"]`."""
    value = context.state.get("value")
    if value is None:
        raise ExecutionError("an input has no value", got=repr(context.attrs["name"]))
    copy_unless_shared(value, outputs[0])


define_op(
    "input",
    infer="-> x dtype shape",
    rule=_whole_rule,
    attrs=(
        Text("name"),
        Shape(),
        Dtype("dtype"),
        Bool("batched", True),
    ),
    kernel=_input_kernel,
    flops=0,
    source=True,
    portable=False,
    doc="A value that the caller feeds at each step.",
)


def _variable_infer(inputs: Types, attrs: AttrMap) -> Types:
    tensor = _declared(attrs)
    check_initializer(attrs["init"], attrs["init_args"], tensor.dtype, attrs["file"])
    if attrs["file_shape"] and math.prod(attrs["file_shape"]) != math.prod(tensor.shape):
        raise AttributeValueError(
            "a variable has another number of elements in files",
            got=attrs["file_shape"],
            expected=f"{math.prod(tensor.shape)} elements",
        )
    if attrs["trainable"] and not tensor.dtype.is_floating:
        raise DTypeError("a trainable variable needs a floating dtype", got=tensor)
    return (tensor,)


def _variable_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """The value before the first step; after that the variable's storage keeps it."""
    attrs = context.attrs
    value = initialize(
        attrs["init"],
        attrs["init_args"],
        attrs["name"],
        context.seed,
        context.output_shapes[0],
        context.output_regions[0],
        attrs["dtype"],
        attrs["file"],
        attrs["key"],
        file_shape=attrs["file_shape"],
    )
    np.copyto(outputs[0], value)


define_op(
    "variable",
    infer=_variable_infer,
    rule=_whole_rule,
    inputs=0,
    attrs=(
        Text("name"),
        Shape(),
        Dtype("dtype"),
        Text("init"),
        Floats("init_args"),
        Bool("trainable"),
        Text("file", ""),
        Text("key", ""),
        Ints("file_shape", ()),
    ),
    kernel=_variable_kernel,
    flops=0,
    files=("file",),
    portable=False,
    doc="A tensor that lives from step to step, and how it starts.",
)


def _output_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """Checks the value where the output must be finite; the runner reports it."""
    value = inputs[0]
    if context.attrs["finite"] and not np.isfinite(value).all():
        wrong = value[~np.isfinite(value)].flat[0]
        raise NonFiniteError(
            f"output {context.attrs['name']!r} is not finite in step {context.step}",
            got=wrong,
            expected="finite numbers",
            hint="lower the learning rate, or look for a division by zero or log of zero",
        )


define_op(
    "output",
    infer="x X ->",
    rule=_whole_rule,
    attrs=(
        Text("name"),
        Bool("finite", False),
    ),
    kernel=_output_kernel,
    flops=0,
    portable=False,
    doc="A value that each step reports.",
)


define_op(
    "redistribute",
    infer="x X ... -> y X ...",
    rule=_whole_rule,
    attrs=(
        Text("late", ""),
        Text("along", ""),
        Text("stream", ""),
    ),
    kernel=lambda context, inputs, outputs: copy_unless_shared(inputs[0], outputs[0]),
    gradient=of_one(lambda attrs, x, y, dy: dy.redistribute(placement=x.placement)),
    flops=0,
    view=((0, 0),),
    precision="following",
    doc="The same value in another layout: boxing before this op does the work. It stands "
    "right after the value's producer and serves all who want the layout; with `late` it "
    "stands right before the op of that name (before this one, if there is none) and serves "
    "this op alone. With `along`, the layout is demanded along the mesh axis of that name "
    "only; along others the input keeps its own, reduced. With `stream`, the collectives that "
    "make the layout run on the stream of that name.",
)


def _assign_infer(inputs: Types, attrs: AttrMap) -> Types:
    if inputs[0] != inputs[1]:
        raise ShapeError(
            "assign needs a value of the variable's shape and dtype",
            got=inputs[1],
            expected=inputs[0],
        )
    return inputs[:1]


def _assign_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    outputs[0][...] = inputs[1]


define_op(
    "assign",
    infer=_assign_infer,
    rule="..., ... -> ...",
    kernel=_assign_kernel,
    flops=0,
    mutates=((0, 0),),
    doc="(variable, value) -> value, which the variable holds from then on.",
)


# --- constants ------------------------------------------------------------------------------------


def _fill_infer(inputs: Types, attrs: AttrMap) -> Types:
    tensor = _declared(attrs)
    value = attrs["value"]
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


define_op(
    "fill",
    infer=_fill_infer,
    rule=_free_rule,
    inputs=0,
    attrs=(
        Shape(),
        Dtype("dtype"),
        Number("value"),
    ),
    kernel=lambda context, inputs, outputs: outputs[0].fill(context.attrs["value"]),
    flops=0,
    doc="A tensor full of one number.",
)


def _causal_mask_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    rows, columns = (np.arange(start, stop) for start, stop in context.output_regions[0])
    np.less_equal(columns, rows[:, None], out=outputs[0])


define_op(
    "causal_mask",
    infer="-> mask bool size size",
    rule=_free_rule,
    attrs=(Int("size", least=0),),
    kernel=_causal_mask_kernel,
    flops=0,
    doc="bool [size, size], True where the column is at most the row.",
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
    base, warmup = float(attrs["base"]), int(attrs.get("warmup", 0))
    if step < warmup:
        return base * (step + 1) / warmup
    schedule = attrs["schedule"]
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
        rates, first = attrs["rates"], attrs["first"]
        if not first <= step < first + len(rates):
            raise UsageError(
                "the job has no learning rate for this step",
                got=f"step {step}",
                expected=f"one of the {len(rates)} steps from {first} on",
            )
        return float(rates[step - first])
    final, total = attrs.get("final", 0.0), attrs["total"]
    progress = min(1.0, (step - warmup) / (total - warmup))
    if schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2
    return float(base + (final - base) * progress)


def _learning_rate_infer(inputs: Types, attrs: AttrMap) -> Types:
    if attrs["schedule"] == "listed":
        rates = attrs["rates"]
        if attrs["first"] is None or not rates or not all(0 <= rate < math.inf for rate in rates):
            raise AttributeValueError(
                "listed learning rates need a first step, and finite rates of at least 0",
                got=f"first={attrs['first']!r}, rates={rates!r}"[:200],
            )
    if attrs["schedule"] in ("linear", "cosine") and attrs["total"] <= attrs["warmup"]:
        raise AttributeValueError(
            "attribute 'total' has a wrong value",
            got=attrs["total"],
            expected=f"a whole number of at least {attrs['warmup'] + 1}",
        )
    return (TensorType((), DType.FLOAT32),)


def _learning_rate_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    rate = None
    if context.rates is not None:
        rate = context.rates(context.attrs["optimizer"], context.step)
    outputs[0].fill(learning_rate_at(context.step, context.attrs) if rate is None else rate)


define_op(
    "learning_rate",
    infer=_learning_rate_infer,
    rule=_free_rule,
    inputs=0,
    attrs=(
        Text("schedule", among=SCHEDULES),
        Float("base", least=0.0),
        Int("warmup", 0, least=0),
        Int("total", 0),
        Float("final", 0.0, least=0.0),
        Int("optimizer", 0, least=0),
        Floats("rates", None),
        Int("first", None, least=0),
    ),
    kernel=_learning_rate_kernel,
    flops=0,
    counts_steps=True,
    doc="The learning rate of the step, by a schedule or as it is fed.",
)
