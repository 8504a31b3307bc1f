"""Tensors of a PyTorch module that lie in the same memory.

A tensor that a module has under several names is one, and stays one. Others may share numbers with
it: a parameter made of the transpose of a weight, a buffer that is a slice of another, an attribute
that is a view of a parameter. In PyTorch one changes with the other, and an optimizer changes two
such parameters one after the other. Tensors of an imported model have memory of their own, so a
module in which one of them changes is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from typing import Any

import numpy as np

from plancompiler.errors import ModelImportError
from plancompiler.ir.source import user_line


def refuse_shared_memory(torch: Any, program: Any, changing: Collection[str], read: bool) -> None:
    """ModelImportError where two tensors of an exported program share memory, and one of them is a
    parameter that can be trained or one of the buffers that are `changing`; or where a tensor that
    is no parameter was computed of one.

    A program that was `read` from a file has a tensor for each of the names of one: there, two
    parameters or two buffers in one place are one.
    """
    users = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    stored = {**program.constants, **program.state_dict}
    tensors = {
        spec.target: stored[spec.target]
        for spec in program.graph_signature.input_specs
        if spec.arg.name in users and isinstance(stored.get(spec.target), torch.Tensor)
    }
    parameter = torch.nn.Parameter
    by_storage: dict[int, dict[Any, tuple[str, Any]]] = {}
    moving = set()
    for name, tensor in tensors.items():
        if tensor.grad_fn is not None:
            raise ModelImportError(
                "a tensor of the model was computed of parameters before the model was called",
                source=user_line(),
                got=f"{name} {_shown(tensor)} by {tensor.grad_fn.name()}",
                expected="parameters, and tensors without gradients",
                hint="compute it in forward, so that it changes with the parameters",
            )
        key: Any = id(tensor)
        if read:
            place = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
            key = (*place, isinstance(tensor, parameter))
        # PyTorch has no public name for the storage of a tensor that may be on the meta device.
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001
        first, _ = by_storage.setdefault(storage, {}).setdefault(key, (name, tensor))
        if name in changing or (isinstance(tensor, parameter) and tensor.requires_grad):
            moving.add(first)
    for several in by_storage.values():
        for (one, a), (other, b) in combinations(several.values(), 2):
            if (one in moving or other in moving) and _overlap(a, b):
                raise ModelImportError(
                    "two tensors of the model share memory, so that one changes with the other",
                    source=user_line(),
                    got=f"{one} {_shown(a)} and {other} {_shown(b)}",
                    expected="one tensor, which may have several names, or memory of its own for "
                    "each",
                    hint="compute one of them from the other in forward, such as its transpose, or "
                    "tie equal ones: second.weight = first.weight",
                )


def _overlap(one: Any, other: Any) -> bool:
    """Whether two tensors of one storage have an element in common; their numbers are not read."""
    memory = np.empty(one.untyped_storage().nbytes(), np.uint8)  # pages that nobody touches

    def place(tensor: Any) -> Any:
        size = tensor.element_size()
        strides = [size * each for each in tensor.stride()]
        return np.ndarray(
            tuple(tensor.shape), f"V{size}", memory, size * tensor.storage_offset(), strides
        )

    return bool(np.shares_memory(place(one), place(other)))


def _shown(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
