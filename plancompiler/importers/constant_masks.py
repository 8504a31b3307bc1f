"""Masks that tell which elements are taken: `x[:, self.mask]` of a buffer of truth values, and
`x[[True, False]]`.

How many of them are true decides about shapes, and an export has no values of tensors. While a
module is exported in this context, indexing by such a mask is indexing by the places where it is
true, which are constants of the model, as all buffers are that have no floating dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from plancompiler.errors import ModelImportError
from plancompiler.ir.source import user_line


@contextmanager
def masks_as_places(torch: Any, module: Any) -> Iterator[set[str]]:
    """While a module is exported. What is given has the names of the masks that were read, which
    must not change: see `refuse_changing_masks`.
    """
    masks = {name: each for name, each in module.named_buffers() if each.dtype is torch.bool}
    places = {
        name: [axis.tolist() for axis in each.nonzero(as_tuple=True)]
        for name, each in masks.items()
        if each.device.type != "meta"
    }
    read: set[str] = set()

    def replaced(index: Any) -> list[Any]:
        """An index, as those that take its place."""
        if isinstance(index, list) and index and all(isinstance(each, bool) for each in index):
            return [torch.tensor([at for at, each in enumerate(index) if each], dtype=torch.int64)]
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool:
            # While a module is traced, its buffers are stand-ins.
            for name, each in module.named_buffers():
                if each is index and name in places:
                    read.add(name)
                    return [torch.tensor(axis, dtype=torch.int64) for axis in places[name]]
        return [index]

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # no types
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__name__", "") == "__getitem__":
                x, given = args
                every = given if isinstance(given, tuple) else (given,)
                made = [one for each in every for one in replaced(each)]
                if len(made) != len(every) or any(map(operator.is_not, made, every)):
                    args = x, tuple(made)
            return function(*args, **(kwargs or {}))

    with Mode():
        yield read


def refuse_changing_masks(read: Collection[str], changing: Collection[str]) -> None:
    """ModelImportError where a mask that was read is among the buffers that forward changes."""
    both = sorted({*read} & {*changing})
    if both:
        raise ModelImportError(
            "a mask that tells which elements are taken changes",
            source=user_line(),
            got=", ".join(both),
            expected="masks that stay as they are, since how many are true decides about shapes",
            hint="multiply by the mask, or use torch.where",
        )
