"""The class that gets the methods that change an eager tensor in place, such as `x.add_(y)`.

`eager.inplace_forms` derives them. What type checkers know of them is in `inplace_methods.pyi`.
"""

from __future__ import annotations

from plancompiler.eager.spec import SpecTensor


class InPlaceMethods(SpecTensor):
    """Mixin: each changes the elements of a tensor, and nothing else of it."""

    __slots__ = ()
