"""Convolutions with a group for each channel: sums over the positions of the window.

There is nothing to multiply as matrices here, so loops over positions are faster than columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from plancompiler.ops import kernel as blocking
from plancompiler.ops.kernel import scratch
from plancompiler.ops.registry import Array, KernelContext
from plancompiler.ops.window import Window, box


def _planes(window_bytes: int, channels: int, images: int) -> Iterator[tuple[int, slice]]:
    """An image and some of its channels, whose planes fit in cache."""
    step = max(1, blocking.BLOCK_BYTES // max(1, window_bytes))
    for image in range(images):
        for start in range(0, channels, step):
            yield image, slice(start, min(start + step, channels))


def convolve(context: KernelContext, window: Window, x: Array, weight: Array, out: Array) -> None:
    """x [n, c, *spatial] with weight [c, 1, *kernel] into out [n, c, *windows]."""
    if prod(window.stride) == 1:
        _slide(context, window, x, weight, out)
        return
    spatial, windows = x.shape[2:], out.shape[2:]
    factors = weight.reshape(len(weight), *window.kernel, *(1,) * window.ndim)
    positions = list(window.positions(spatial, windows))
    plane = max(prod(spatial), prod(windows)) * x.itemsize
    for image, channels in _planes(plane, x.shape[1], len(x)):
        seen, made = x[image, channels], out[image, channels]
        made.fill(0)
        work = scratch(context, "work", made.shape, made.dtype)
        for at, target, source in positions:
            target = box(slice(None), *target)
            part = work[target]
            np.multiply(seen[box(slice(None), *source)], factors[box(channels, *at)], out=part)
            np.add(made[target], part, out=made[target])


def _slide(context: KernelContext, window: Window, x: Array, weight: Array, out: Array) -> None:
    """A depthwise convolution of stride 1.

    With rows, padded, behind each other, the elements that all windows see at one position are one
    run of memory. That makes loops of whole planes where slices make one per row; what windows
    across the end of a row give is left out at the end.
    """
    padded = tuple(
        extent + before + after
        for extent, (before, after) in zip(x.shape[2:], window.padding, strict=True)
    )
    inside = tuple(
        slice(before, before + extent)
        for extent, (before, _) in zip(x.shape[2:], window.padding, strict=True)
    )
    steps = [prod(padded[axis + 1 :]) for axis in range(window.ndim)]
    starts = [
        sum(
            at * dilation * step
            for at, dilation, step in zip(place, window.dilation, steps, strict=True)
        )
        for place in np.ndindex(*window.kernel)
    ]
    length = 1 + sum((extent - 1) * step for extent, step in zip(out.shape[2:], steps, strict=True))
    factors = weight.reshape(len(weight), -1)
    valid = box(slice(None), *(slice(0, extent) for extent in out.shape[2:]))
    for image, channels in _planes(prod(padded) * x.itemsize, x.shape[1], len(x)):
        count = channels.stop - channels.start
        seen = x[image, channels]
        if padded != x.shape[2:]:
            seen = scratch(context, "padded", (count, *padded), x.dtype)
            seen.fill(0)
            np.copyto(seen[box(slice(None), *inside)], x[image, channels])
        seen = seen.reshape(count, -1)
        total = scratch(context, "total", (count, prod(padded)), x.dtype)
        made, work = total[:, :length], scratch(context, "work", (count, length), x.dtype)
        np.multiply(seen[:, :length], factors[channels, :1], out=made)
        for place, start in enumerate(starts[1:], 1):
            part = seen[:, start : start + length]
            np.multiply(part, factors[channels, place : place + 1], out=work)
            np.add(made, work, out=made)
        np.copyto(out[image, channels], total.reshape(count, *padded)[valid])


def convolve_transposed(
    context: KernelContext, window: Window, x: Array, weight: Array, out: Array
) -> None:
    """x [n, c, *windows] back through weight [c, 1, *kernel] into out, which is zero."""
    reflected = _reflected(window)
    if reflected is not None:
        flipped = np.flip(weight, tuple(range(2, weight.ndim))).copy()
        _slide(context, reflected, x, flipped, out)
        return
    windows, spatial = x.shape[2:], out.shape[2:]
    factors = weight.reshape(len(weight), *window.kernel, *(1,) * window.ndim)
    positions = list(window.positions(spatial, windows))
    plane = max(prod(spatial), prod(windows)) * x.itemsize
    for image, channels in _planes(plane, x.shape[1], len(x)):
        seen, made = x[image, channels], out[image, channels]
        work = scratch(context, "work", seen.shape, seen.dtype)
        for at, target, source in positions:
            target = box(slice(None), *target)
            source = box(slice(None), *source)
            part = work[target]
            np.multiply(seen[target], factors[box(channels, *at)], out=part)
            np.add(made[source], part, out=made[source])


def _reflected(window: Window) -> Window | None:
    """The window whose convolution with the flipped weight is the transposed one, if it exists."""
    padding = tuple(
        (window.reach(axis) - 1 - before, window.reach(axis) - 1 - after)
        for axis, (before, after) in enumerate(window.padding)
    )
    if prod(window.stride) != 1 or any(number < 0 for pair in padding for number in pair):
        return None
    return Window(window.kernel, window.stride, padding, window.dilation)


def weight_gradient(window: Window, x: Array, dy: Array, out: Array) -> None:
    """Add the gradient of the weight [c, 1, *kernel] to out."""
    spatial, windows = x.shape[2:], dy.shape[2:]
    axes = "xyz"[: window.ndim]
    equation = f"c{axes},c{axes}->c"
    result = out.reshape(len(out), *window.kernel)
    positions = list(window.positions(spatial, windows))
    for image, channels in _planes(prod(spatial) * x.itemsize, x.shape[1], len(x)):
        seen, passed = x[image, channels], dy[image, channels]
        for at, target, source in positions:
            result[box(channels, *at)] += np.einsum(
                equation, seen[box(slice(None), *source)], passed[box(slice(None), *target)]
            )
