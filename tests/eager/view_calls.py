"""Calls that give part or all of a tensor, as one types them in PyTorch, and whose memory it is.

`m` is `pc` or `torch`, `x` one of its tensors [4, 6, 2]. A view shares elements with `x`, a copy
has its own, and what is refused raises an error when it is made or changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHAPE = (4, 6, 2)

VIEWS: dict[str, Callable[..., Any]] = {
    "itself": lambda m, x: x.contiguous(),
    "its dtype": lambda m, x: x.double(),
    "number": lambda m, x: x[1],
    "numbers": lambda m, x: x[-1, 2],
    "slices": lambda m, x: x[1:3, ::2],
    "dots": lambda m, x: x[..., 1],
    "all": lambda m, x: x[...],
    "new axis": lambda m, x: x[:, None, 2],
    "select": lambda m, x: x.select(1, -2),
    "narrow": lambda m, x: x.narrow(1, 1, 3),
    "unbind": lambda m, x: x.unbind(1)[2],
    "split": lambda m, x: x.split(4, 1)[1],
    "sizes": lambda m, x: x.split_with_sizes([1, 5], 1)[1],
    "chunk": lambda m, x: x.chunk(4, 1)[2],
    "tensor_split": lambda m, x: x.tensor_split(4, 1)[2],
    "hsplit": lambda m, x: x.hsplit(3)[1],
    "vsplit": lambda m, x: x.vsplit(2)[1],
    "dsplit": lambda m, x: x.dsplit(2)[1],
    "transpose": lambda m, x: x.transpose(0, 1),
    "swapaxes": lambda m, x: x.swapaxes(0, 2),
    "permute": lambda m, x: x.permute(2, 0, 1),
    "movedim": lambda m, x: x.movedim(0, 2),
    "moveaxis": lambda m, x: m.moveaxis(x, 0, -1),
    "T": lambda m, x: x[0].T,
    "mT": lambda m, x: x.mT,
    "t": lambda m, x: x[:, :, 0].t(),
    "squeeze": lambda m, x: x[:, :1].squeeze(1),
    "unsqueeze": lambda m, x: x.unsqueeze(1),
    "flatten": lambda m, x: x.flatten(1),
    "ravel": lambda m, x: x.ravel(),
    "reshape": lambda m, x: x.reshape(2, 24),
    "reshape_as": lambda m, x: x.reshape_as(x.movedim(0, 2)),
    "view": lambda m, x: x.view(4, -1),
    "view of a part": lambda m, x: x[:, 1:3].view(4, 4),
    "view_as": lambda m, x: x.view_as(x.movedim(1, 2)),
    "unflatten": lambda m, x: x.unflatten(1, (2, 3)),
    "atleast": lambda m, x: m.atleast_2d(x),
    "detach": lambda m, x: x.detach(),
    "diagonal": lambda m, x: x.diagonal(),
    "diagonals": lambda m, x: m.diagonal(x, 1, 1, 2),
    "diagonal below": lambda m, x: x.diagonal(offset=-1, dim1=2, dim2=0),
    "windows": lambda m, x: x.unfold(1, 2, 2),
    "windows apart": lambda m, x: x.unfold(1, 2, 3),
    "windows of rows": lambda m, x: x.unfold(0, 2, 2),
    "one window": lambda m, x: x.unfold(-1, 2, 5),
    "windows of columns": lambda m, x: x.transpose(0, 1).unfold(0, 3, 3)[1],
    "view of views": lambda m, x: x.transpose(0, 1)[1:].select(2, 1).unsqueeze(0),
}
TURNED: dict[str, Callable[..., Any]] = {
    "backwards": lambda m, x: x[::-1],
    "every other one, backwards": lambda m, x: x[:, -2:0:-2],
    "twice backwards": lambda m, x: x[::-1, 1:][..., ::-1],
    "backwards and flat": lambda m, x: x[::-1, ::-1, ::-1].reshape(-1),
    "part of what is backwards": lambda m, x: x.transpose(0, 1)[::-1].select(1, 2),
}
"""Views in NumPy; PyTorch has no negative steps."""
COPIES: dict[str, Callable[..., Any]] = {
    "contiguous": lambda m, x: x.transpose(0, 1).contiguous(),
    "contiguous part": lambda m, x: x[:, 1:].contiguous(),
    "reshape": lambda m, x: x.transpose(0, 1).reshape(-1),
    "flatten": lambda m, x: x[:, :3].flatten(),
    "ravel": lambda m, x: x.mT.ravel(),
    "clone": lambda m, x: x.clone(),
    "list": lambda m, x: x[[0, 2]],
    "True": lambda m, x: x[True],
    "flip": lambda m, x: x.flip(0),
    "no flip": lambda m, x: x.flip(()),
    "roll": lambda m, x: x.roll(0, 1),
    "rot90": lambda m, x: m.rot90(x, 4),
    "repeat": lambda m, x: x.repeat(1, 1, 1),
    "tile": lambda m, x: x.tile((1, 1, 1)),
    "repeat_interleave": lambda m, x: x.repeat_interleave(1, 0),
    "repeat_interleave of a column": lambda m, x: x[:, :1].repeat_interleave(3, 1),
    "diag": lambda m, x: x[:, :4, 0].diag(),
    "no padding": lambda m, x: m.nn.functional.pad(x, (0, 0)),
    "padding that cuts": lambda m, x: m.nn.functional.pad(x, (0, -1)),
    "no circular padding": lambda m, x: m.nn.functional.pad(x, (0, 0), "circular"),
    "pixel_shuffle": lambda m, x: m.nn.functional.pixel_shuffle(x, 1),
    "slice_scatter": lambda m, x: m.slice_scatter(x, x[:0], 0, 0, 0),
    "concatenation of one": lambda m, x: m.cat([x], 0),
}
REFUSED: dict[str, Callable[..., Any]] = {
    "view": lambda m, x: x.transpose(0, 1).view(-1),
    "view_as": lambda m, x: x.mT.view_as(x),
    "expand": lambda m, x: x[:, :1].expand(4, 6, 2),
    "expand_as": lambda m, x: x[:, :1].expand_as(x),
    "broadcast_to": lambda m, x: m.broadcast_to(x[0], (4, 6, 2)),
    "overlapping windows": lambda m, x: x.unfold(1, 3, 1),
}
