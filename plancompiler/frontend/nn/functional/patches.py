"""Windows as columns and back, and pixels that move between space and channels."""

from __future__ import annotations

import math
from itertools import product

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.convolution import Sizes, per_axis
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import clone
from plancompiler.frontend.functions.shape import pad, stack
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ops.registry import apply_one


def _counts(
    space: tuple[int, ...],
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> tuple[int, ...]:
    """How many windows fit along each axis."""
    counts = tuple(
        (space[at] + 2 * padding[at] - dilation[at] * (kernel[at] - 1) - 1) // stride[at] + 1
        for at in range(2)
    )
    if min(counts) < 1:
        raise ShapeError(
            "windows need room in the padded image",
            got=f"windows of {kernel}, dilation {dilation}, in {space} with padding {padding}",
        )
    return counts


def _sizes(*given: Sizes) -> tuple[tuple[int, ...], ...]:
    names = ("kernel_size", "dilation", "padding", "stride")
    sizes = tuple(per_axis(name, each, 2) for name, each in zip(names, given, strict=True))
    for name, each in zip(names, sizes, strict=True):
        least = 0 if name == "padding" else 1
        if min(each) < least:
            raise AttributeValueError(f"{name} is too small", got=each, expected=f"from {least} on")
    return sizes


@public
def unfold(
    input: Tensor,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """The windows of images [n, c, h, w] (or [c, h, w]) as columns: [n, c kh kw, windows]."""
    if input.ndim == 3:
        columns = unfold(input.reshape((1, *input.shape)), kernel_size, dilation, padding, stride)
        return columns.reshape(columns.shape[1:])
    if input.ndim != 4:
        raise ShapeError("unfold takes images", got=input.shape, expected="[n, c, h, w]")
    kernel, spread, pads, steps = _sizes(kernel_size, dilation, padding, stride)
    n, c, *space = input.shape
    counts = _counts(tuple(space), kernel, spread, pads, steps)
    around = (0, 0, *pads)
    x = pad(input, around, around) if any(pads) else input
    pieces = []
    for place in product(*map(range, kernel)):
        starts = [place[at] * spread[at] for at in range(2)]
        stops = [starts[at] + (counts[at] - 1) * steps[at] + 1 for at in range(2)]
        pieces.append(
            apply_one(
                "strided_slice",
                x,
                starts=(0, 0, *starts),
                stops=(n, c, *stops),
                steps=(1, 1, *steps),
            )
        )
    return stack(pieces, 2).reshape((n, c * len(pieces), math.prod(counts)))


@public
def fold(
    input: Tensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """Columns [n, c kh kw, windows] (or without n) put back into images [n, c, *output_size], where
    those that overlap add up: the transpose of `unfold`.
    """
    if input.ndim == 2:
        images = fold(
            input.reshape((1, *input.shape)), output_size, kernel_size, dilation, padding, stride
        )
        return images.reshape(images.shape[1:])
    kernel, spread, pads, steps = _sizes(kernel_size, dilation, padding, stride)
    space = per_axis("output_size", output_size, 2)
    counts = _counts(space, kernel, spread, pads, steps)
    positions = math.prod(kernel)
    if input.ndim != 3 or input.shape[1] % positions or input.shape[2] != math.prod(counts):
        raise ShapeError(
            "fold takes a column for each window",
            got=input.shape,
            expected=f"[n, c {positions}, {math.prod(counts)}]",
        )
    n, c = input.shape[0], input.shape[1] // positions
    columns = input.reshape((n, c, positions, *counts))
    shape = (n, c, *(space[at] + 2 * pads[at] for at in range(2)))
    total: Tensor | None = None
    for number, place in enumerate(product(*map(range, kernel))):
        starts = [place[at] * spread[at] for at in range(2)]
        stops = [starts[at] + (counts[at] - 1) * steps[at] + 1 for at in range(2)]
        put = apply_one(
            "strided_slice_grad",
            columns[:, :, number],
            shape=shape,
            starts=(0, 0, *starts),
            stops=(n, c, *stops),
            steps=(1, 1, *steps),
        )
        total = put if total is None else total + put
    assert total is not None  # a window has a position
    return total[:, :, pads[0] : pads[0] + space[0], pads[1] : pads[1] + space[1]]


@public
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Channels to space: [..., c r², h, w] as [..., c, h r, w r] (W. Shi et al., 2016)."""
    r = upscale_factor
    *lead, channels, height, width = _image(input)
    if r < 1 or channels % (r * r):
        raise ShapeError(
            "pixel_shuffle needs the square of its factor in the channels",
            got=f"{channels} channels, factor {r}",
        )
    if r == 1:  # else what follows would be a view
        return clone(input)
    c, k = channels // (r * r), len(lead)
    apart = input.reshape((*lead, c, r, r, height, width))
    order = (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    return apart.transpose(order).reshape((*lead, c, height * r, width * r))


@public
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Space to channels: [..., c, h r, w r] as [..., c r², h, w]; undoes `pixel_shuffle`."""
    r = downscale_factor
    *lead, c, height, width = _image(input)
    if r < 1 or height % r or width % r:
        raise ShapeError(
            "pixel_unshuffle needs its factor in height and width",
            got=f"{height} x {width}, factor {r}",
        )
    if r == 1:
        return clone(input)
    k = len(lead)
    apart = input.reshape((*lead, c, height // r, r, width // r, r))
    order = (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return apart.transpose(order).reshape((*lead, c * r * r, height // r, width // r))


@public
def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """Channels (axis 1) of groups, which lie one after another, put beside each other (X. Zhang et
    al., 2018).
    """
    n, channels, *space = input.shape
    if groups < 1 or channels % groups:
        raise ShapeError("groups must divide the channels", got=f"{channels} in {groups} groups")
    apart = input.reshape((n, groups, channels // groups, *space))
    return apart.transpose((0, 2, 1, *range(3, apart.ndim))).reshape(input.shape)


def _image(x: Tensor) -> tuple[int, ...]:
    if x.ndim < 3:
        raise ShapeError(
            "an image has channels and two axes", got=x.shape, expected="[..., c, h, w]"
        )
    return x.shape
