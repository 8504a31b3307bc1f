"""The in-place forms of tensors: `x += y`, `x.relu_()`, `copy_`; the world does the work.

Every method that gives a tensor has a form that changes its own in place. Those of functions of
each element, and those that put elements in, are shown by `dir()`, and type checkers know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from plancompiler.eager.inplace_methods import InPlaceMethods
from plancompiler.errors import UsageError
from plancompiler.frontend import functions, methods
from plancompiler.frontend.functions import activation, derived, elementwise, indexing
from plancompiler.frontend.functions.random import like
from plancompiler.hooks.other_names import no_such_name
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


def _changing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a method that changes its tensor."""

    @wraps(method)
    def run(self: InPlaceForms, *args: Any, **kwargs: Any) -> Any:
        return self.spec.world.change(self, lambda before: method(before, *args, **kwargs), name)

    return run


def _reforming(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: InPlaceForms, *args: Any, **kwargs: Any) -> Any:
        return self.spec.world.reform(self, lambda before: method(before, *args, **kwargs), name)

    return run


def _drawing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: InPlaceForms, *args: Any, **kwargs: Any) -> Any:
        return self.copy_(method(self.shape, *args, **like(self, kwargs)))

    return run


_FAMILIES = {each.__name__ for each in (activation, derived, elementwise, indexing)}
"""Where the functions are defined that keep the shape of their first tensor."""
_OTHER_DTYPE = frozenset({"astype", "cast", "clone", "copy"})
"""Their functions that change the dtype, and those whose name says that nothing is changed."""

CHANGING: Mapping[str, Callable[..., Any]] = {
    f"{name}_": method
    for name, method in methods.METHODS.items()
    if getattr(method, "__wrapped__", method).__module__ in _FAMILIES and name not in _OTHER_DTYPE
}
"""The forms that tensors show, by name, with the methods that they are forms of."""

for _name, _method in CHANGING.items():
    setattr(InPlaceMethods, _name, _changing(_name, _method))
for _name, _method in _REFORMING.items():
    setattr(InPlaceMethods, _name, _reforming(_name, _method))
for _name, _method in _DRAWING.items():
    setattr(InPlaceMethods, _name, _drawing(_method))


class InPlaceForms(InPlaceMethods):
    """Mixin: what changes a tensor and never its identity, shape, dtype or layout."""

    __slots__ = ()

    def copy_(self, value: Self) -> Self:
        """Take the value of a tensor of the same dtype and placement, broadcast, in this layout."""
        return cast("Self", self.spec.world.copy(self, value))

    def fill_(self, value: Scalar) -> Self:
        """Set every element to one number."""
        return self.copy_(self._full(self.shape, self.dtype, value))

    def zero_(self) -> Self:
        """Set every element to zero."""
        return self.fill_(0)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Say whether ops on it are recorded; see `requires_grad`."""
        self.requires_grad = requires_grad
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """`x[index] = value`, a number or a tensor that is broadcast to the elements' shape."""
        self.spec.world.assign(self, index, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """`x.cumsum_()`: every method that gives a tensor has such a form."""
            method = None
            if name.endswith("_") and not name.startswith("_"):
                method = getattr(type(self), name[:-1], None)
            if not callable(method):
                raise no_such_name("x", name)
            return partial(_changing(name, method), self)

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
