"""Values of buffers of PyTorch modules on the meta device, where a tensor has a shape and no
numbers.

Weights may come later, but what is computed from a model's configuration, such as the frequencies
of rotary positions, is part of its graph and saved nowhere. The method by which a module's author
computes it again is called on copies without weights: `_init_weights` of the models of transformers
or `reset_parameters`, which PyTorch's own tools for the meta device use. Two calls start from
different numbers: what they leave different was not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

_BEGINNINGS = (0, 1)
"""What the buffers are full of before they are computed."""


def computed_buffers(torch: Any, module: Any) -> dict[str, Any]:
    """By name, the buffers on the meta device that are not saved with the weights and whose values
    follow from the module's configuration. The module is left as it is.
    """
    values: dict[str, Any] = {}
    initializers: dict[str, Callable[[Any], None]] = {}
    for path, owner in module.named_modules():
        parent = initializers.get(path.rpartition(".")[0]) if path else None
        if callable(getattr(owner, "_init_weights", None)):
            parent = owner._init_weights  # noqa: SLF001  # so transformers initialise modules
        if parent is not None:
            initializers[path] = parent
        names = [
            name
            for name, buffer in owner._buffers.items()  # noqa: SLF001  # the only list of them
            if buffer is not None
            and buffer.device.type == "meta"
            and name in owner._non_persistent_buffers_set  # noqa: SLF001  # likewise
        ]
        compute = parent or _reset
        if not names or (parent is None and not hasattr(owner, "reset_parameters")):
            continue
        first, second = (_computed(torch, owner, names, compute, each) for each in _BEGINNINGS)
        for name in names:
            if name in first and name in second and torch.equal(first[name], second[name]):
                values[f"{path}.{name}" if path else name] = first[name]
    return values


def _reset(module: Any) -> None:
    module.reset_parameters()


def _computed(
    torch: Any, owner: Any, names: list[str], compute: Callable[[Any], None], beginning: int
) -> Mapping[str, Any]:
    """The module's buffers of these names, after an initialiser ran on a copy."""
    shell = _without_numbers(torch, owner)
    for name in names:
        shell._buffers[name] = torch.full_like(  # noqa: SLF001  # see above
            owner._buffers[name],  # noqa: SLF001
            beginning,
            device="cpu",
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(beginning)  # what is drawn at random must differ, too
        try:
            compute(shell)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return {}  # an initialiser that needs numbers of other tensors
    return {
        name: buffer
        for name, buffer in shell._buffers.items()  # noqa: SLF001  # see above
        if name in names and buffer.device.type == "cpu"
    }


def _without_numbers(torch: Any, module: Any) -> Any:
    """A copy of a module whose tensors are all on the meta device."""
    shell = copy(module)
    shell.__dict__.update(
        _parameters={
            name: each if each is None else torch.nn.Parameter(each.to("meta"), each.requires_grad)
            for name, each in module._parameters.items()  # noqa: SLF001  # see above
        },
        _buffers={
            name: each if each is None else each.to("meta")
            for name, each in module._buffers.items()  # noqa: SLF001  # see above
        },
        _modules={
            name: each if each is None else _without_numbers(torch, each)
            for name, each in module._modules.items()  # noqa: SLF001  # see above
        },
    )
    return shell
