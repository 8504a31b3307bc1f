"""The in-place forms of tensors: `x += y`, `x.relu_()`, `copy_`; `inplace` does the work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from plancompiler.eager.spec import TensorSpec
from plancompiler.errors import InplaceError, UsageError
from plancompiler.ir.operators import Scalar, TensorOperators, is_scalar
from plancompiler.ir.source import user_line


class InPlaceForms(TensorOperators):
    """Mixin: what changes a tensor and never its identity, shape, dtype or layout."""

    __slots__ = ()

    spec: TensorSpec

    def copy_(self, value: Self) -> Self:
        """Take the value of a tensor of the same shape, dtype and placement, in this layout."""
        check_tensor("copy_", value)
        own, other = self.spec, value.spec
        if other.type != own.type or other.placement != own.placement:
            raise InplaceError(
                "a tensor can take the value of one of its own shape, dtype and placement only",
                source=user_line(),
                got=str(other),
                expected=str(own),
            )
        inplace = _inplace()
        changed: Self = inplace.change(self, lambda _: inplace.copied(value, self), "copy_")
        return changed

    def fill_(self, value: Scalar) -> Self:
        """Set every element to one number."""
        return self.copy_(self._full(self.shape, self.dtype, value))

    def zero_(self) -> Self:
        """Set every element to zero."""
        return self.fill_(0)

    def __setitem__(self, index: Any, value: Any) -> None:
        """`x[index] = value`, a number or a tensor that is broadcast to the elements' shape."""
        part = self[index]
        if is_scalar(value):
            part.fill_(value)
            return
        if not isinstance(value, InPlaceForms):
            value = self.coerced("x[index] = value", value)
        if _inplace().is_same_view(part, value):
            return  # of `x[index] += y`, which has changed the elements already
        if value.shape != part.shape:
            value = value._unary("expand_to", shape=part.shape)  # noqa: SLF001  # as operators do
        part.copy_(value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """`x.relu_()`: every method that gives a tensor has a form that changes it in place."""
            method = None
            if name.endswith("_") and not name.startswith("_"):
                method = getattr(type(self), name[:-1], None)
            if not callable(method):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            return lambda *args, **kwargs: _inplace().change(
                self, lambda before: method(before, *args, **kwargs), name
            )

    def _into(
        self, out: Any, function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """A function's results in `out`, which is this tensor or holds it: see `pc.eager.into`."""
        return _inplace().into(out, function, *args, **named)

    def _changed_by(self, kind: str, other: Any) -> Self:
        changed: Self = _inplace().change(
            self,
            lambda before: before._binary(kind, other),  # noqa: SLF001  # the operators' own way
            kind,
        )
        return changed

    def __iadd__(self, other: Any) -> Self:
        return self._changed_by("add", other)

    def __isub__(self, other: Any) -> Self:
        return self._changed_by("sub", other)

    def __imul__(self, other: Any) -> Self:
        return self._changed_by("mul", other)

    def __itruediv__(self, other: Any) -> Self:
        return self._changed_by("div", other)

    def __ifloordiv__(self, other: Any) -> Self:
        return self._changed_by("floor_divide", other)

    def __imod__(self, other: Any) -> Self:
        return self._changed_by("remainder", other)

    def __ipow__(self, other: Any) -> Self:
        return self._changed_by("pow", other)

    def __iand__(self, other: Any) -> Self:
        return self._changed_by("bitwise_and", other)

    def __ior__(self, other: Any) -> Self:
        return self._changed_by("bitwise_or", other)

    def __ixor__(self, other: Any) -> Self:
        return self._changed_by("bitwise_xor", other)

    def __ilshift__(self, other: Any) -> Self:
        return self._changed_by("shift_left", other)

    def __irshift__(self, other: Any) -> Self:
        return self._changed_by("shift_right", other)


def check_tensor(kind: str, value: object) -> None:
    """Refuse what is no eager tensor where one is needed."""
    if not isinstance(value, InPlaceForms):
        raise UsageError(
            f"{kind} takes a DistTensor",
            op=kind,
            source=user_line(),
            got=type(value).__name__,
            hint="pc.tensor(array, placement, sbp) makes one",
        )


def _inplace() -> Any:
    """What changes tensors in place, which builds on this module."""
    return importlib.import_module("plancompiler.eager.inplace")
