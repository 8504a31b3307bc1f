"""Random tensors. Each element follows from the job's seed, the op's key, the step and its global
index (see `plancompiler.ops.random`), so the values are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plancompiler.errors import AttributeValueError, DTypeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops import random
from plancompiler.ops.attributes import Attribute, Dtype, Float, Int, Shape
from plancompiler.ops.check import (
    FLOATS,
    INTEGERS,
    NUMBERS,
)
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op
from plancompiler.ops.rule import operand_line


def _words(context: KernelContext) -> random.Words:
    """A random word per element of this device's box."""
    start = random.stream_of(context)
    shape, region = context.output_shapes[0], context.output_regions[0]
    return random.words(start, shape, region, context.arrays)


def _register(
    kind: str,
    check: Callable[[AttrMap, TensorType], None],
    make: Callable[[KernelContext], Array],
    *attributes: Attribute,
    doc: str,
) -> None:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        tensor = TensorType(attrs["shape"], attrs["dtype"])
        check(attrs, tensor)
        return (tensor,)

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        np.copyto(outputs[0], make(context), casting="unsafe")

    define_op(
        kind,
        infer=infer,
        rule=lambda inputs, outputs, attrs: f"-> {operand_line(len(outputs[0].shape))}",
        inputs=0,
        attrs=(
            Shape(),
            Dtype("dtype"),
            Int("key"),
            *attributes,
        ),
        kernel=kernel,
        doc=doc + " Attribute `key` names the stream of numbers.",
    )


def _expect_floating(kind: str, tensor: TensorType) -> None:
    if tensor.dtype not in FLOATS:
        raise DTypeError(f"{kind} needs a floating dtype", got=tensor)


# --- uniform --------------------------------------------------------------------------------------


def _check_uniform(attrs: AttrMap, tensor: TensorType) -> None:
    _expect_floating("uniform", tensor)
    low, high = attrs["low"], attrs["high"]
    if not (low <= high and np.isfinite(high - low)):
        raise AttributeValueError("uniform needs finite bounds in order", got=(low, high))


def _unit(context: KernelContext) -> Array:
    """Numbers in [0, 1) with 53 random bits."""
    return random.uniform(
        context.seed,
        context.attrs["key"],
        context.step,
        context.output_shapes[0],
        context.output_regions[0],
        arrays=context.arrays,
    )


def _uniform(context: KernelContext) -> Array:
    low, high = context.attrs["low"], context.attrs["high"]
    numbers = _unit(context)
    np.multiply(numbers, high - low, out=numbers)
    return np.add(numbers, low, out=numbers)


_register(
    "uniform",
    _check_uniform,
    _uniform,
    Float("low"),
    Float("high"),
    doc="Random numbers from `low` to `high`.",
)


# --- normal ---------------------------------------------------------------------------------------


def _check_normal(attrs: AttrMap, tensor: TensorType) -> None:
    _expect_floating("normal", tensor)
    mean, std = attrs["mean"], attrs["std"]
    if not np.isfinite((mean, std)).all():
        raise AttributeValueError("normal needs a finite mean and deviation", got=(mean, std))


def _normal(context: KernelContext) -> Array:
    numbers = random.normal(
        context.seed,
        context.attrs["key"],
        context.step,
        context.output_shapes[0],
        context.output_regions[0],
        arrays=context.arrays,
    )
    np.multiply(numbers, context.attrs["std"], out=numbers)
    return np.add(numbers, context.attrs["mean"], out=numbers)


_register(
    "normal",
    _check_normal,
    _normal,
    Float("mean"),
    Float("std", least=0.0),
    doc="Normally distributed random numbers of a mean and a standard deviation.",
)


# --- made of uniform and normal numbers -----------------------------------------------------------


def _check_positive(kind: str, name: str) -> Callable[[AttrMap, TensorType], None]:
    def check(attrs: AttrMap, tensor: TensorType) -> None:
        _expect_floating(kind, tensor)
        if not 0.0 < attrs[name] < np.inf:
            raise AttributeValueError(
                f"{kind} needs a positive {name}", got=attrs[name], expected="a number above 0"
            )

    return check


def _exponential(context: KernelContext) -> Array:
    numbers: Array = -np.log1p(-_unit(context)) / context.attrs["rate"]
    return numbers


_register(
    "exponential",
    _check_positive("exponential", "rate"),
    _exponential,
    Float("rate"),
    doc="Random numbers x >= 0 of density rate · exp(-rate · x).",
)


def _cauchy(context: KernelContext) -> Array:
    turned: Array = np.tan(np.pi * (_unit(context) - 0.5))
    turned *= context.attrs["scale"]
    turned += context.attrs["median"]
    return turned


_register(
    "cauchy",
    _check_positive("cauchy", "scale"),
    _cauchy,
    Float("median"),
    Float("scale"),
    doc="Random numbers of a Cauchy distribution, half of them within `scale` of `median`.",
)

_register(
    "log_normal",
    _check_positive("log_normal", "std"),
    lambda context: np.exp(_normal(context)),
    Float("mean"),
    Float("std", least=0.0),
    doc="Random numbers whose logarithms are normally distributed.",
)


def _check_geometric(attrs: AttrMap, tensor: TensorType) -> None:
    if not 0.0 < attrs["p"] < 1.0:
        raise AttributeValueError(
            "geometric needs a probability",
            got=attrs["p"],
            expected="a number between 0 and 1, both excluded",
        )


def _geometric(context: KernelContext) -> Array:
    # The least n for which n trials fail with probability 1 - u at most.
    trials: Array = np.log1p(-_unit(context)) / np.log1p(-context.attrs["p"])
    return np.floor(trials, out=trials) + 1


_register(
    "geometric",
    _check_geometric,
    _geometric,
    Float("p"),
    doc="Random numbers of trials of probability `p` to the first success: 1 or more.",
)


# --- bernoulli ------------------------------------------------------------------------------------


def _check_bernoulli(attrs: AttrMap, tensor: TensorType) -> None:
    if not 0.0 <= attrs["p"] <= 1.0:
        raise AttributeValueError(
            "bernoulli needs a probability", got=attrs["p"], expected="a number from 0 to 1"
        )


def _bernoulli(context: KernelContext) -> Array:
    return np.less(_unit(context), context.attrs["p"])


_register(
    "bernoulli",
    _check_bernoulli,
    _bernoulli,
    Float("p"),
    doc="1 (or True) with probability `p`, else 0, in any dtype.",
)


# --- randint --------------------------------------------------------------------------------------


_EXACT = {
    DType.BFLOAT16: 2**8,
    DType.FLOAT16: 2**11,
    DType.FLOAT32: 2**24,
    DType.FLOAT64: 2**53,
}
"""Up to where a floating dtype has every whole number."""


def _check_randint(attrs: AttrMap, tensor: TensorType) -> None:
    if tensor.dtype not in NUMBERS:
        raise DTypeError("randint needs a dtype of numbers", got=tensor)
    low, high = attrs["low"], attrs["high"]
    if tensor.dtype in INTEGERS:
        limits = np.iinfo(tensor.dtype.value)
        least, most = int(limits.min), int(limits.max)
    else:  # as far as it has every whole number
        most = _EXACT[tensor.dtype]
        least = -most
    if not least <= low < high <= most + 1:
        raise AttributeValueError(
            "randint needs bounds in order, within its dtype",
            got=f"{low} to {high} for {tensor.dtype}",
            expected=f"{least} <= low < high <= {most + 1}",
        )


def _randint(context: KernelContext) -> Array:
    low, high = context.attrs["low"], context.attrs["high"]
    numbers = _words(context)
    if high - low < 1 << 64:
        # Of 64 random bits the remainder favours low numbers by less than (high - low) / 2**64.
        np.remainder(numbers, np.uint64(high - low), out=numbers)
    np.add(numbers, np.uint64(low & (1 << 64) - 1), out=numbers)
    return numbers.view(np.int64)


_register(
    "randint",
    _check_randint,
    _randint,
    Int("low"),
    Int("high"),
    doc="Random whole numbers from `low` to `high` - 1.",
)


# --- permutation ----------------------------------------------------------------------------------


def _check_permutation(attrs: AttrMap, tensor: TensorType) -> None:
    if tensor.dtype not in INTEGERS:
        raise DTypeError("permutation needs a dtype of whole numbers", got=tensor)
    if len(tensor.shape) != 1 or tensor.shape[0] - 1 > np.iinfo(tensor.dtype.value).max:
        raise AttributeValueError(
            "permutation needs one axis whose numbers fit its dtype", got=tensor
        )


def _permutation(context: KernelContext) -> Array:
    # Every device orders all words, as their order is what the numbers are.
    (count,) = context.output_shapes[0]
    start = random.stream_of(context)
    words = random.words(start, (count,), ((0, count),), context.arrays)
    order = np.argsort(words, kind="stable")
    return order[slice(*context.output_regions[0][0])]


_register(
    "permutation",
    _check_permutation,
    _permutation,
    doc="The numbers from 0 to the extent - 1 in a random order.",
)
