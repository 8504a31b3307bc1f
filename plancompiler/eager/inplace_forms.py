"""The in-place forms of tensors: `x += y`, `x.relu_()`, `copy_`; the world does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from plancompiler.eager.spec import SpecTensor
from plancompiler.errors import UsageError
from plancompiler.frontend import functions
from plancompiler.frontend.functions.random import like
from plancompiler.ir.operators import Scalar
from plancompiler.ir.source import user_line

_Forms = TypeVar("_Forms", bound="InPlaceForms")


def _in_place(kind: str) -> Callable[[_Forms, Any], _Forms]:
    """An operator that changes its left operand."""

    def run(self: _Forms, other: Any) -> _Forms:
        changed: _Forms = self.spec.world.change(
            self,
            lambda before: before._binary(kind, other),  # noqa: SLF001  # the operators' own way
            kind,
        )
        return changed

    return run


_REFORMING: Mapping[str, Callable[..., Any]] = {
    "flatten_": functions.flatten,
    "permute_": functions.permute,
    "reshape_": lambda x, *shape: x.reshape(*shape),
    "squeeze_": functions.squeeze,
    "t_": lambda x: x.transpose(),
    "transpose_": functions.transpose,
    "unsqueeze_": functions.unsqueeze,
}
"""What changes the shape of a tensor in place, and not its elements."""


_DRAWING: Mapping[str, Callable[..., Any]] = {
    "bernoulli_": functions.bernoulli,
    "cauchy_": functions.cauchy,
    "exponential_": functions.exponential,
    "geometric_": functions.geometric,
    "log_normal_": functions.log_normal,
    "normal_": functions.normal,
    "random_": functions.randint,
    "uniform_": functions.uniform,
}
"""What fills a tensor with random numbers."""


class InPlaceForms(SpecTensor):
    """Mixin: what changes a tensor and never its identity, shape, dtype or layout."""

    __slots__ = ()

    def copy_(self, value: Self) -> Self:
        """Take the value of a tensor of the same shape, dtype and placement, in this layout."""
        return cast("Self", self.spec.world.copy(self, value))

    def fill_(self, value: Scalar) -> Self:
        """Set every element to one number."""
        return self.copy_(self._full(self.shape, self.dtype, value))

    def zero_(self) -> Self:
        """Set every element to zero."""
        return self.fill_(0)

    def __setitem__(self, index: Any, value: Any) -> None:
        """`x[index] = value`, a number or a tensor that is broadcast to the elements' shape."""
        self.spec.world.assign(self, index, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """`x.relu_()`: every method that gives a tensor has a form that changes it in place."""
            if name in _REFORMING:
                return lambda *args, **kwargs: self.spec.world.reform(
                    self, lambda before: _REFORMING[name](before, *args, **kwargs), name
                )
            if name in _DRAWING:
                return lambda *args, **kwargs: self.copy_(
                    _DRAWING[name](self.shape, *args, **like(self, kwargs))
                )
            method = None
            if name.endswith("_") and not name.startswith("_"):
                method = getattr(type(self), name[:-1], None)
            if not callable(method):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            return lambda *args, **kwargs: self.spec.world.change(
                self, lambda before: method(before, *args, **kwargs), name
            )

    def _into(
        self, out: Any, function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """A function's results in `out`, which is this tensor or holds it: see `pc.eager.into`."""
        return self.spec.world.into(out, function, *args, **named)

    __iadd__ = _in_place("add")
    __isub__ = _in_place("sub")
    __imul__ = _in_place("mul")
    __itruediv__ = _in_place("div")
    __ifloordiv__ = _in_place("floor_divide")
    __imod__ = _in_place("remainder")
    __ipow__ = _in_place("pow")
    __iand__ = _in_place("bitwise_and")
    __ior__ = _in_place("bitwise_or")
    __ixor__ = _in_place("bitwise_xor")
    __ilshift__ = _in_place("shift_left")
    __irshift__ = _in_place("shift_right")


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
