"""The rules of ONNX's layers: convolutions, pooling, normalisation, dropout, losses, and numbers
that are quantised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.importers.graph import Array
from plancompiler.importers.onnx_rules import (
    as_tensor,
    at,
    cut,
    define,
    dtype_of,
    limits,
    numbers,
    product,
    refused,
)
from plancompiler.importers.rules import onnx_rule
from plancompiler.ir import DType

Pairs = list[tuple[int, int]]

# --- windows --------------------------------------------------------------------------------------


def _pads(
    auto_pad: str,
    pads: Sequence[int] | None,
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pairs:
    """Elements before and after each spatial axis."""
    count = len(kernel)
    if auto_pad == "NOTSET":
        given = [0] * (2 * count) if pads is None else list(pads)
        return list(zip(given[:count], given[count:], strict=True))
    if auto_pad == "VALID":
        return [(0, 0)] * count
    pairs = []
    for extent, size, step, wide in zip(extents, kernel, strides, dilations, strict=True):
        reach = wide * (size - 1) + 1
        total = max(0, (-(-extent // step) - 1) * step + reach - extent)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return pairs


def _ceiled(
    pairs: Pairs,
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pairs:
    """What is read after each axis, so that a window that is only in part in it counts, too. A
    window that would begin in the padding after an axis does not.
    """
    made = []
    for (low, high), extent, size, step, wide in zip(
        pairs, extents, kernel, strides, dilations, strict=True
    ):
        reach = wide * (size - 1) + 1
        windows = -(-(extent + low + high - reach) // step) + 1
        if (windows - 1) * step >= extent + low:
            windows -= 1
        made.append((low, max(high, (windows - 1) * step + reach - extent - low)))
    return made


def _one_each(values: Sequence[int] | None, count: int) -> list[int]:
    return [1] * count if values is None else list(values)


def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    count = weight.ndim - 2
    if not 1 <= count <= 3:
        raise refused("convolution", f"{count} spatial axes", "1 to 3")
    strides, dilations = _one_each(strides, count), _one_each(dilations, count)
    pairs = _pads(auto_pad, pads, x.shape[2:], weight.shape[2:], strides, dilations)
    function = (f.conv1d, f.conv2d, f.conv3d)[count - 1]
    return function(x, weight, bias, strides, pairs, dilations, group)


def _conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """All windows, of which the pads are cut off."""
    count = weight.ndim - 2
    if not 1 <= count <= 3:
        raise refused("convolution", f"{count} spatial axes", "1 to 3")
    strides, dilations = _one_each(strides, count), _one_each(dilations, count)
    more = [0] * count if output_padding is None else list(output_padding)
    full = [
        step * (extent - 1) + add + (size - 1) * wide + 1
        for step, extent, add, size, wide in zip(
            strides, x.shape[2:], more, weight.shape[2:], dilations, strict=True
        )
    ]
    if output_shape is not None or auto_pad.startswith("SAME"):
        wanted = (
            list(output_shape)[-count:]
            if output_shape is not None
            else [extent * step for extent, step in zip(x.shape[2:], strides, strict=True)]
        )
        total = [whole - each for whole, each in zip(full, wanted, strict=True)]
        pairs = [
            (each // 2, each - each // 2)
            if auto_pad == "SAME_UPPER"
            else (each - each // 2, each // 2)
            for each in total
        ]
    else:
        pairs = _pads("NOTSET" if auto_pad == "NOTSET" else "VALID", pads, (), full, (), ())
    function = (f.conv_transpose1d, f.conv_transpose2d, f.conv_transpose3d)[count - 1]
    symmetric = all(low == high >= 0 for low, high in pairs)
    if symmetric:
        padding = [low for low, _ in pairs]
        return function(x, weight, bias, strides, padding, more, dilations, group)
    made = function(x, weight, None, strides, 0, 0, dilations, group)
    low = [0] * made.ndim
    high = [0] * made.ndim
    for axis, ((before, after), whole) in enumerate(zip(pairs, full, strict=True), 2):
        start, stop = max(0, before), min(made.shape[axis], whole - max(0, after))
        low[axis], high[axis] = max(0, -before), whole - max(0, after) - stop + max(0, -after)
        made = cut(made, axis, start, stop)
    if any(low) or any(high):
        made = f.pad(made, low, high)
    return made if bias is None else made + bias.reshape([-1, *[1] * count])


def _windows(
    x: Any,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    fill: float,
) -> list[Any]:
    """For each place in a window, the elements there of all windows."""
    low, high = [0, 0], [0, 0]
    for before, after in pairs:
        low.append(before)
        high.append(after)
    x = f.pad(x, low, high, fill) if any(low) or any(high) else x
    counts = [
        (extent - wide * (size - 1) - 1) // step + 1
        for extent, size, step, wide in zip(x.shape[2:], kernel, strides, dilations, strict=True)
    ]
    made = []
    for place in itertools.product(*map(range, kernel)):
        part = x
        for axis, (number, step, wide, windows) in enumerate(
            zip(place, strides, dilations, counts, strict=True), 2
        ):
            start = number * wide
            part = cut(part, axis, start, start + (windows - 1) * step + 1, step)
        made.append(part)
    return made


def _covered(
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    counted: Pairs,
) -> Array:
    """How many elements each window covers, of the axes and of the `counted` padding."""
    count: Array = np.ones(())
    for extent, size, step, wide, (low, high), (before, after) in zip(
        extents, kernel, strides, dilations, pairs, counted, strict=True
    ):
        line = np.zeros(low + extent + high)
        line[low - before : low + extent + after] = 1
        windows = (len(line) - wide * (size - 1) - 1) // step + 1
        sums = [
            line[start * step : start * step + wide * (size - 1) + 1 : wide].sum()
            for start in range(windows)
        ]
        count = count[..., None] * np.asarray(sums)
    return count


def _max_pool(
    x: Any,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    outputs: int = 1,
) -> Any:
    count = len(kernel_shape)
    strides, dilations = _one_each(strides, count), _one_each(dilations, count)
    extents = x.shape[2:]
    pairs = _pads(auto_pad, pads, extents, kernel_shape, strides, dilations)
    if ceil_mode:
        pairs = _ceiled(pairs, extents, kernel_shape, strides, dilations)
    if outputs == 1 and count <= 3 and x.dtype.is_floating:
        function = (f.max_pool1d, f.max_pool2d, f.max_pool3d)[count - 1]
        return function(x, list(kernel_shape), strides, pairs, dilations)
    lowest = -math.inf if x.dtype.is_floating else int(np.iinfo(x.dtype.numpy).min)
    stacked = f.stack(_windows(x, kernel_shape, strides, dilations, pairs, lowest), 0)
    if outputs == 1:
        return f.max(stacked, 0)
    order = "F" if storage_order else "C"
    places = np.arange(math.prod(x.shape)).reshape(x.shape)
    if storage_order:
        each = math.prod(extents)
        inside = np.arange(each).reshape(extents[::-1]).T if order == "F" else 0
        starts = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * count) * each
        places = starts + inside
    wide = [(0, 0), (0, 0), *pairs]
    padded = np.pad(places, wide)
    windows = []
    for place in itertools.product(*map(range, kernel_shape)):
        part = padded
        for axis, (number, step, far) in enumerate(zip(place, strides, dilations, strict=True), 2):
            start, made = number * far, stacked.shape[axis + 1]
            part = part.take(np.arange(start, start + (made - 1) * step + 1, step), axis)
        windows.append(part)
    best = f.argmax(stacked, 0, True).cast(DType.INT64)
    where = f.gather(as_tensor(np.stack(windows).astype(np.int64), x), 0, best)
    return f.max(stacked, 0), f.squeeze(where, 0)


def _average_pool(
    x: Any,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    count = len(kernel_shape)
    strides, dilations = _one_each(strides, count), _one_each(dilations, count)
    extents = x.shape[2:]
    given = _pads(auto_pad, pads, extents, kernel_shape, strides, dilations)
    wide = _ceiled(given, extents, kernel_shape, strides, dilations) if ceil_mode else given
    if max(dilations) == 1 and count <= 3 and (wide == given or not count_include_pad):
        function = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)[count - 1]
        return function(x, list(kernel_shape), strides, wide, bool(count_include_pad))
    total = _sum_of_windows(x, kernel_shape, strides, dilations, wide)
    counted = given if count_include_pad else [(0, 0)] * count
    covered = _covered(extents, kernel_shape, strides, dilations, wide, counted)
    return total * as_tensor((1 / covered).astype(x.dtype.numpy), x)


def _sum_of_windows(
    x: Any,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
) -> Any:
    total, *others = _windows(x, kernel, strides, dilations, pairs, 0)
    for each in others:
        total = total + each
    return total


def _lp_pool(
    x: Any,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    count = len(kernel_shape)
    strides, dilations = _one_each(strides, count), _one_each(dilations, count)
    pairs = _pads(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    if ceil_mode:
        pairs = _ceiled(pairs, x.shape[2:], kernel_shape, strides, dilations)
    return _root(_sum_of_windows(_raised(x, p), kernel_shape, strides, dilations, pairs), p)


def _raised(x: Any, p: int) -> Any:
    return f.abs(x) if p == 1 else f.square(x) if p == 2 else f.pow(f.abs(x), float(p))


def _root(x: Any, p: int) -> Any:
    return x if p == 1 else f.sqrt(x) if p == 2 else f.pow(x, 1 / p)


def _over_space(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x, list(range(2, x.ndim)), True)


def _max_unpool(
    x: Any,
    indices: Any,
    output_shape: Any = None,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """Elements put back where a maximum was; indices count through the whole tensor as it was
    before it was pooled, which may be smaller than the result.
    """
    count = len(kernel_shape)
    strides = _one_each(strides, count)
    pairs = _pads("NOTSET", pads, (), kernel_shape, (), ())
    before = [
        (extent - 1) * step - low - high + size
        for extent, step, (low, high), size in zip(
            x.shape[2:], strides, pairs, kernel_shape, strict=True
        )
    ]
    shape = list(x.shape[:2]) + before
    wanted = shape if output_shape is None else numbers(output_shape)
    flat = f.full_like(x, 0, [math.prod(shape)])
    rows = math.prod(x.shape)
    made = f.scatter(flat, 0, indices.reshape([rows]), x.reshape([rows])).reshape(shape)
    if wanted == shape:
        return made
    low = [0] * len(shape)
    return f.pad(made, low, [more - less for more, less in zip(wanted, shape, strict=True)])


def _lrn(x: Any, size: int, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0) -> Any:
    """Each element over a power of the sum of squares of its neighbours in channels."""
    low, high = [0] * x.ndim, [0] * x.ndim
    low[1], high[1] = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = f.pad(f.square(x), low, high)
    total = cut(squares, 1, 0, x.shape[1])
    for start in range(1, size):
        total = total + cut(squares, 1, start, start + x.shape[1])
    return x * f.pow(total * (alpha / size) + bias, -beta)


def _col2im(
    x: Any,
    image_shape: Any,
    block_shape: Any,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """Blocks added up where they lie in an image."""
    image, block = numbers(image_shape), numbers(block_shape)
    count = len(image)
    strides, dilations = _one_each(strides, count), _one_each(dilations, count)
    pairs = _pads("NOTSET", pads, (), block, (), ())
    padded = [extent + low + high for extent, (low, high) in zip(image, pairs, strict=True)]
    places = np.arange(math.prod(padded)).reshape(padded)
    counts = [
        (extent - wide * (size - 1) - 1) // step + 1
        for extent, size, step, wide in zip(padded, block, strides, dilations, strict=True)
    ]
    columns = []
    for place in itertools.product(*map(range, block)):
        part = places
        for axis, (number, step, wide, windows) in enumerate(
            zip(place, strides, dilations, counts, strict=True)
        ):
            start = number * wide
            part = part.take(np.arange(start, start + (windows - 1) * step + 1, step), axis)
        columns.append(part.reshape(-1))
    index = np.concatenate(columns).astype(np.int64)
    n, channels = x.shape[0], x.shape[1] // math.prod(block)
    flat = x.reshape([n, channels, index.size])
    empty = f.full_like(x, 0, [n, channels, math.prod(padded)])
    whole = np.ascontiguousarray(np.broadcast_to(index, flat.shape))
    made = f.scatter(empty, 2, as_tensor(whole, x), flat, "add").reshape([n, channels, *padded])
    for axis, ((low, _), extent) in enumerate(zip(pairs, image, strict=True), 2):
        made = cut(made, axis, low, low + extent)
    return made


define(
    {
        "Conv": _conv,
        "ConvTranspose": _conv_transpose,
        "MaxPool": _max_pool,
        "AveragePool": _average_pool,
        "LpPool": _lp_pool,
        "GlobalAveragePool": _over_space(f.mean),
        "GlobalMaxPool": _over_space(f.max),
        "GlobalLpPool": lambda x, p=2: _root(_over_space(f.sum)(_raised(x, p)), p),
        "LRN": _lrn,
    }
)
onnx_rule("MaxUnpool", known=[2])(_max_unpool)
onnx_rule("Col2Im", known=[1, 2])(_col2im)

# --- normalisation --------------------------------------------------------------------------------


def _batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    spatial: int = 1,
    outputs: int = 1,
) -> Any:
    if not spatial:
        raise refused("batch norm", "spatial=0", "spatial=1")
    if not training_mode:
        if outputs > 1:
            raise refused("batch norm", f"{outputs} results", "one result, or training_mode=1")
        return f.batch_norm(x, scale, bias, mean, variance, epsilon)
    now, spread = f.batch_statistics(x)
    normal = f.batch_norm(x, scale, bias, now, spread, epsilon)
    if outputs == 1:
        return normal
    kept = [
        old * momentum + f.stop_gradient(new).cast(old.dtype) * (1 - momentum)
        for old, new in ((mean, now), (variance, spread))
    ]
    return normal, *kept


def _layer_norm(
    x: Any,
    scale: Any,
    bias: Any = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int = 1,
) -> Any:
    """Over all axes from `axis` on; also the mean and the reciprocal of the deviation."""
    axis = at(x, axis)
    shape = x.shape[axis:]
    wide = x.cast(dtype_of(stash_type)) if x.dtype.is_half else x
    if outputs == 1 and scale.shape == shape and (bias is None or bias.shape == shape):
        count = math.prod(shape)
        flat = x if len(shape) == 1 else x.reshape([*x.shape[:axis], count])
        gamma = scale.reshape([count])
        beta = f.zeros_like(gamma) if bias is None else bias.reshape([count])
        made = f.layer_norm(flat, gamma, beta, epsilon)
        return made if made.shape == x.shape else made.reshape(x.shape)
    axes = list(range(axis, x.ndim))
    mean = f.mean(wide, axes, True)
    centred = wide - mean
    inverse = f.rsqrt(f.mean(f.square(centred), axes, True) + epsilon)
    normal = (centred * inverse).cast(x.dtype) * scale
    normal = normal if bias is None else normal + bias
    return normal if outputs == 1 else (normal, mean, inverse)


def _rms_norm(
    x: Any, scale: Any, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    axis = at(x, axis)
    if axis == x.ndim - 1 and scale.shape == x.shape[-1:]:
        return f.rms_norm(x, scale, epsilon)
    wide = x.cast(dtype_of(stash_type)) if x.dtype.is_half else x
    squares = f.mean(f.square(wide), list(range(axis, x.ndim)), True)
    return (wide * f.rsqrt(squares + epsilon)).cast(x.dtype) * scale


def _group_norm(
    x: Any, scale: Any, bias: Any, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    """Opset 18 has a number for each group, later ones for each channel."""
    if scale.shape[0] != x.shape[1]:
        each = x.shape[1] // num_groups
        scale, bias = f.repeat_interleave(scale, each, 0), f.repeat_interleave(bias, each, 0)
    return f.group_norm(x, num_groups, scale, bias, epsilon)


def _mean_variance_norm(x: Any, axes: Sequence[int] = (0, 2, 3)) -> Any:
    centred = x - f.mean(x, list(axes), True)
    deviation = f.sqrt(f.mean(f.square(centred), list(axes), True))
    return centred / (deviation + 1e-9)


def _lp_norm(x: Any, axis: int = -1, p: int = 2) -> Any:
    size = _root(f.sum(_raised(x, p), at(x, axis), True), p)
    return x / f.where(f.equal(size, 0), f.full_like(size, 1), size)


def _dropped(
    x: Any, ratio: Any = 0.5, training_mode: Any = None, seed: int = 0, outputs: int = 1
) -> Any:
    """A ratio that is an attribute is that of a model in evaluation mode: it changes nothing."""
    rate = 0.5 if ratio is None else float(np.asarray(ratio).item())
    if training_mode is None or not bool(np.asarray(training_mode).item()) or not rate:
        if outputs == 1:
            return x
        return x, f.full_like(x, 1).cast(DType.BOOL)
    if outputs == 1:
        return f.dropout(x, rate)
    kept = f.not_equal(f.dropout(f.full_like(x, 1), rate), 0)
    return f.where(kept, x * (1 / (1 - rate)), 0.0), kept


define(
    {
        "BatchNormalization": _batch_norm,
        "InstanceNormalization": lambda x, scale, bias, epsilon=1e-5: f.instance_norm(
            x, scale, bias, epsilon
        ),
        "LayerNormalization": _layer_norm,
        "RMSNormalization": _rms_norm,
        "GroupNormalization": _group_norm,
        "MeanVarianceNormalization": _mean_variance_norm,
        "LpNormalization": _lp_norm,
    }
)
onnx_rule("Dropout", known=[1, 2])(_dropped)

# --- losses ---------------------------------------------------------------------------------------


def _nll_loss(
    x: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Any:
    """Of log probabilities [n, classes, ...] and labels [n, ...]."""
    order = [0, *range(2, x.ndim), 1]
    labels = target.cast(DType.INT64)
    counted = None if ignore_index is None else f.not_equal(labels, ignore_index)
    if counted is not None:
        labels = f.where(counted, labels, f.zeros_like(labels))
    rows = x.transpose(order)
    picked = f.squeeze(f.gather(rows, rows.ndim - 1, f.unsqueeze(labels, labels.ndim)), labels.ndim)
    share = f.full_like(picked, 1)
    if weight is not None:
        flat = f.index_select(weight, labels.reshape([math.prod(labels.shape)]), 0)
        share = flat.reshape(labels.shape)
    if counted is not None:
        share = f.where(counted, share, f.zeros_like(share))
        picked = f.where(counted, picked, f.zeros_like(picked))
    losses = -picked * share
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / share.sum()


def _cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outputs: int = 1,
) -> Any:
    logs = f.log_softmax(x, 1)
    loss = _nll_loss(logs, target, weight, ignore_index, reduction)
    return loss if outputs == 1 else (loss, logs)


define({"NegativeLogLikelihoodLoss": _nll_loss, "SoftmaxCrossEntropyLoss": _cross_entropy})

# --- quantised numbers ----------------------------------------------------------------------------


def _along(parameter: Any, x: Any, axis: int, block: int) -> Any:
    """Scales and zero points beside x: one for all, one for each place of an axis, or one for each
    block along it."""
    if parameter.ndim == 0 or math.prod(parameter.shape) == 1:
        return parameter.reshape([1] * x.ndim) if parameter.ndim else parameter
    axis = at(x, axis)
    if block:
        whole = f.repeat_interleave(parameter, block, axis)
        return cut(whole, axis, 0, x.shape[axis])
    if parameter.ndim == 1:
        return parameter.reshape([-1 if each == axis else 1 for each in range(x.ndim)])
    raise refused("quantisation", f"scales of shape {parameter.shape}", "one axis")


def _whole(x: Any, dtype: DType, zero: Any = None) -> Any:
    """Rounded numbers within the limits of a dtype, shifted by a zero point."""
    if not dtype.is_integer:
        raise refused("quantisation", str(dtype), "whole numbers")
    rounded = f.round(x)
    if zero is not None:
        rounded = rounded + zero.cast(x.dtype)
    return f.clip(rounded, *limits(dtype)).cast(dtype)


def _quantized(
    x: Any,
    scale: Any,
    zero: Any = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Any:
    dtype = zero.dtype if zero is not None else dtype_of(output_dtype or 2)
    scale = _along(scale, x, axis, block_size).cast(x.dtype if x.dtype.is_floating else scale.dtype)
    x = x if x.dtype.is_floating else x.cast(scale.dtype)
    zero = None if zero is None else _along(zero, x, axis, block_size)
    return _whole(x / scale, dtype, zero)


def _dequantized(
    x: Any,
    scale: Any,
    zero: Any = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Any:
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    scale = _along(scale, x, axis, block_size)
    numbers = x.cast(scale.dtype)
    if zero is not None:
        numbers = numbers - _along(zero, x, axis, block_size).cast(scale.dtype)
    made = numbers * scale
    return made if made.dtype is dtype else made.cast(dtype)


def _quantized_now(x: Any) -> Any:
    """As 8 bits, with a scale and a zero point of its range, which includes zero."""
    low, high = f.minimum(f.min(x), 0.0), f.maximum(f.max(x), 0.0)
    scale = (high - low) * (1 / 255)
    zero = f.clip(f.round(-low / scale), 0, 255)
    made = f.clip(f.round(x / scale) + zero, 0, 255)
    return made.cast(DType.UINT8), scale, zero.cast(DType.UINT8)


def _shifted(x: Any, zero: Any, axis: int) -> Any:
    """Whole numbers less their zero point, as int32."""
    wide = x.cast(DType.INT32)
    if zero is None:
        return wide
    return wide - _along(zero, x, axis, 0).cast(DType.INT32)


def _exact(x: Any) -> Any:
    """Whole numbers as float64, in which their products are exact."""
    return x.cast(DType.FLOAT64)


def _matmul_integer(a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    left = _exact(_shifted(a, a_zero, max(0, a.ndim - 2)))
    right = _exact(_shifted(b, b_zero, b.ndim - 1))
    return product(left, right).cast(DType.INT32)


def _conv_integer(x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **window: Any) -> Any:
    left, right = _exact(_shifted(x, x_zero, 1)), _exact(_shifted(w, w_zero, 0))
    return _conv(left, right, **window).cast(DType.INT32)


def _requantized(made: Any, scale: Any, y_scale: Any, y_zero: Any) -> Any:
    """Products in another scale."""
    return _whole(made * (scale / y_scale.cast(DType.FLOAT64)), y_zero.dtype, y_zero)


def _qlinear_matmul(
    a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    left = _exact(_shifted(a, a_zero, max(0, a.ndim - 2)))
    right = _exact(_shifted(b, b_zero, b.ndim - 1))
    scale = _along(a_scale, a, max(0, a.ndim - 2), 0).cast(DType.FLOAT64)
    scale = scale * _along(b_scale, b, b.ndim - 1, 0).cast(DType.FLOAT64)
    return _requantized(product(left, right), scale, y_scale, y_zero)


def _qlinear_conv(
    x: Any,
    x_scale: Any,
    x_zero: Any,
    w: Any,
    w_scale: Any,
    w_zero: Any,
    y_scale: Any,
    y_zero: Any,
    bias: Any = None,
    **window: Any,
) -> Any:
    left, right = _exact(_shifted(x, x_zero, 1)), _exact(_shifted(w, w_zero, 0))
    made = _conv(left, right, None if bias is None else _exact(bias), **window)
    scale = _along(w_scale, made, 1, 0).cast(DType.FLOAT64) * x_scale.cast(DType.FLOAT64)
    return _requantized(made, scale, y_scale, y_zero)


define(
    {
        "QuantizeLinear": _quantized,
        "DequantizeLinear": _dequantized,
        "DynamicQuantizeLinear": _quantized_now,
        "MatMulInteger": _matmul_integer,
        "ConvInteger": _conv_integer,
        "QLinearMatMul": _qlinear_matmul,
        "QLinearConv": _qlinear_conv,
    }
)

# --- random numbers -------------------------------------------------------------------------------


def _random_like(draw: Callable[..., Any], names: tuple[str, str]) -> Callable[..., Any]:
    def rule(x: Any, dtype: int | None = None, seed: float = 0.0, **attributes: float) -> Any:
        wanted = x.dtype if dtype is None else dtype_of(dtype)
        first, second = attributes.get(names[0], 0.0), attributes.get(names[1], 1.0)
        return draw(x.shape, first, second, dtype=wanted, placement=x.placement)

    return rule


def _coins(x: Any, dtype: int | None = None, seed: float = 0.0) -> Any:
    wanted = x.dtype if dtype is None else dtype_of(dtype)
    return f.less(f.uniform(x.shape, placement=x.placement), x).cast(wanted)


define(
    {
        "RandomNormalLike": _random_like(f.normal, ("mean", "scale")),
        "RandomUniformLike": _random_like(f.uniform, ("low", "high")),
        "Bernoulli": _coins,
    }
)
