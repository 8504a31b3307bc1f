"""Gradients that a PyTorch module computes in its own way. An export leaves them out without an
error, as it has the operations of forward passes only.

They come from functions with a `backward` of their own, from hooks that change gradients on their
way or the tensors that are saved for them, and from parameters that are frozen for a part of the
forward pass. Checkpoints of the reentrant kind are such functions, too, but their gradients are
those of the operations within, so these are exported in their place. And where a model computes in
another precision (`torch.autocast`), an export forgets what ran without gradients there: what that
reads is detached while it is exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch  # it sets attributes of PyTorch, and always sets them back

from plancompiler.errors import ModelImportError
from plancompiler.ir.source import user_line

_CHECKPOINT = "CheckpointFunction"

_MOST_ELEMENTS = 1 << 20
"""Of a function's arguments, so that its gradient is compared."""
_SCALES = (1e-2, 1.0, 1e2)
"""Of its arguments and of the gradients that it gets, in all pairs: one that cuts off large or
small ones shows itself.
"""

_NO_OPERATIONS = ("__get__", "__set__", "__delete__")


@contextmanager
def own_gradients_refused(torch: Any, module: Any) -> Iterator[None]:
    """While a module is exported in this context: ModelImportError, after the export, where it
    computes gradients of parameters that are trained in its own way.
    """
    function, tensor = torch.autograd.Function, torch.Tensor
    apply, register = function.__dict__["apply"].__func__, tensor.register_hook
    seen = [
        f"a hook of {name}"
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        # There is no public way to ask for hooks.
        and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # noqa: SLF001
    ]

    seen += [f"a backward hook of module {name or 'itself'}" for name in _hooked(torch, module)]
    applications: list[tuple[Any, Any, Any]] = []

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        differentiated = torch.is_grad_enabled() and any(
            isinstance(each, tensor) and each.requires_grad for each in args
        )
        if kind.__name__ == _CHECKPOINT and kind.__module__ == "torch.utils.checkpoint":
            run, _preserves_random_state, *given = args
            return run(*given)
        if differentiated:
            applications.append((kind, args, kwargs))
        return apply(kind, *args, **kwargs)

    def registered(self: Any, hook: Any) -> Any:
        seen.append(f"a hook of a result, {getattr(hook, '__qualname__', hook)}")
        return register(self, hook)

    saving = torch.autograd.graph.saved_tensors_hooks
    enter = saving.__enter__

    def entered(self: Any) -> Any:
        # PyTorch's own kinds, such as checkpoints, give back what was saved.
        if type(self) is saving or not type(self).__module__.startswith("torch."):
            seen.append("hooks of saved tensors")
        return enter(self)

    with (
        patch.object(function, "apply", classmethod(applied)),
        patch.object(tensor, "register_hook", registered),
        patch.object(saving, "__enter__", entered),
        _watched_operations(torch, seen),
    ):
        yield
    for kind, args, kwargs in applications:
        if kwargs or not _is_derivative(torch, kind, args):
            seen.append(f"{kind.__qualname__}.backward")
    if seen:
        raise ModelImportError(
            f"{type(module).__name__} computes gradients in its own way, which no export has",
            source=user_line(),
            got=", ".join(dict.fromkeys(seen)),
            expected="operations whose gradients PyTorch knows",
            hint="write the function as an operation (torch.library.custom_op) with a rule "
            "(pc.torch_rule) of functions that have this gradient; to import the model without "
            "training it, call module.requires_grad_(False)",
        )


def _hooked(torch: Any, module: Any) -> list[str]:
    """The modules with hooks of gradients, if there are parameters to train. There is no public way
    to ask for hooks.
    """
    if not any(each.requires_grad for each in module.parameters()):
        return []
    # There is no public way to ask for hooks.
    every = torch.nn.modules.module
    if every._global_backward_hooks or every._global_backward_pre_hooks:  # noqa: SLF001
        return [""]
    return [
        name
        for name, each in module.named_modules()
        if each._backward_hooks or each._backward_pre_hooks  # noqa: SLF001
    ]


class _WatchedNode:
    """How a result was made, `grad_fn`; hooks of it are noted."""

    def __init__(self, node: Any, seen: list[str]) -> None:
        self._node = node
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._seen.append(f"a hook of a result's {self._node.name()}")
        return getattr(self._node, name)


def _watched_operations(torch: Any, seen: list[str]) -> Any:
    """A mode of PyTorch in which operations read detached tensors where gradients are off and
    autocast is on. `seen` takes changes in place of tensors that have gradients there, hooks of
    `grad_fn`, and parameters that begin or cease to need a gradient.
    """

    def active() -> bool:
        return not torch.is_grad_enabled() and any(
            torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")
        )

    def detached(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value

    mapped = torch.utils._pytree.tree_map  # noqa: SLF001  # it has no public name

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # no types
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            attribute = getattr(getattr(function, "__self__", None), "__name__", "")
            if name == "__get__" and attribute == "grad_fn":
                node = function(*args)
                return None if node is None else _WatchedNode(node, seen)
            if name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
                tensor, wanted = args[0], (*args[1:], *(kwargs or {}).values(), True)[0]
                if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad != wanted:
                    seen.append("a parameter whose requires_grad changes in forward")
            if name not in _NO_OPERATIONS and active():
                changes = name in ("__setitem__", "copy_") or (
                    name.endswith("_") and not name.endswith("__")
                )
                changes |= name.startswith("__i") and name.endswith("__") and name != "__invert__"
                kept = args[:1] if changes else ()
                if any(isinstance(each, torch.Tensor) and each.requires_grad for each in kept):
                    seen.append(f"a change in place without gradients, {name}")
                args = (*kept, *mapped(detached, args[len(kept) :]))
                kwargs = mapped(detached, kwargs)
            return function(*args, **(kwargs or {}))

    return Mode()


def _is_derivative(torch: Any, kind: Any, args: Any) -> bool:
    """Whether a function's own `backward` gives what PyTorch derives of its `forward`, as where
    somebody wrote a derivative out; on random arguments of these shapes, in float64.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if any(not each.is_floating_point() for each in tensors):
        return False
    if sum(each.numel() for each in tensors) > _MOST_ELEMENTS:
        return False
    try:
        with torch.enable_grad():
            return all(_agrees(torch, kind, args, scale) for scale in _SCALES)
    except Exception:  # whatever somebody's function raises on other arguments than its own
        return False


def _agrees(torch: Any, kind: Any, args: Any, size: float) -> bool:
    """Whether both gradients are equal for arguments of this size."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Any, scale: float) -> Any:
        return scale * torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

    values = [
        drawn(each.shape, size).requires_grad_() if isinstance(each, torch.Tensor) else each
        for each in args
    ]
    inputs = [each for each in values if isinstance(each, torch.Tensor)]
    own = kind.apply(*values)
    plain = kind.forward(*_context(torch, kind), *values)
    if not isinstance(own, torch.Tensor) or not torch.allclose(own, plain):
        return False
    for scale in _SCALES:
        flow = drawn(own.shape, scale)
        pairs = [
            torch.autograd.grad(out, inputs, flow, retain_graph=True, allow_unused=True)
            for out in (own, plain)
        ]
        for ours, theirs in zip(*pairs, strict=True):
            if (ours is None) != (theirs is None):
                return False
            if ours is not None and not _close(torch, ours, theirs):
                return False
    return True


def _context(torch: Any, kind: Any) -> tuple[Any, ...]:
    """What `forward` takes first; nothing where a function has a `setup_context` of its own."""
    if kind.setup_context is not torch.autograd.Function.setup_context:
        return ()
    return (torch.autograd.function.FunctionCtx(),)


def _close(torch: Any, one: Any, other: Any) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max())))
