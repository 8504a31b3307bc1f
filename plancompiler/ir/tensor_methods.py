"""The class that gets the methods that are public functions, which `frontend.methods` derives.

What type checkers know of them is in the file beside this one, `tensor_methods.pyi`, which
`python -m plancompiler.frontend.methods` writes.
"""

from __future__ import annotations


class TensorMethods:
    """Mixin: `x.permute(1, 0)` for `pc.permute(x, (1, 0))`, and so on."""

    __slots__ = ()
