"""plancompiler: from a Python program with placements to one static plan per rank, run by actors.

    import plancompiler as pc

    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("mean") as job:
        x = pc.input("x", (8,), "float32", mesh, "S(0)")
        pc.output("mean", x.mean())
    with pc.run(job) as session:
        session.step(x=...)

The names are those of `plancompiler.public`, which is imported when the first of them is asked for:
a command that only shows its help needs none, and Ctrl-C meets as little as can be before the
program has its handlers. What has to be done at once is to choose the kernels of NumPy's BLAS, as
whoever imports NumPy next loads it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.machinery
import os
import sys

from plancompiler.hooks.array_namespace import set_array_namespace
from plancompiler.hooks.compiler_settings import set_compiler_settings
from plancompiler.hooks.eager_world import set_eager_world
from plancompiler.hooks.other_names import no_such_name, set_other_names

TYPE_CHECKING = False  # type checkers take it as true, by its name; `typing` need not be loaded
if TYPE_CHECKING:
    from typing import Any

    from plancompiler.frontend.functions import *  # noqa: F403  # as in `public`
    from plancompiler.public import *  # noqa: F403  # its __all__ is ours
    from plancompiler.public import __all__ as __all__
    from plancompiler.public import __version__ as __version__


# Else gRPC notes on standard error, after our own errors, that a connection has ended.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


class _NumPyFinder:
    """Finds NumPy, once, so that its BLAS is loaded with the kernels that
    `blas.kernel_choice` chooses, whoever imports it."""

    @classmethod
    def find_spec(
        cls, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "numpy":
            return None
        sys.meta_path.remove(cls)
        spec: importlib.machinery.ModuleSpec | None
        spec = importlib.import_module(f"{__name__}.blas.kernel_choice").numpy_spec()
        return spec


if "numpy" not in sys.modules:
    sys.meta_path.insert(0, _NumPyFinder)


def _eager_world() -> Any:
    """The current eager world; from the second time on without asking for the package."""
    current_world = importlib.import_module(f"{__name__}.eager").current_world
    set_eager_world(current_world)
    return current_world()


# At its end the interpreter looks for cycles in all that is loaded, again and again: a quarter of a
# short program's time. The system takes the memory back anyway.
atexit.register(gc.freeze)

set_eager_world(_eager_world)
set_array_namespace(
    lambda version: importlib.import_module(f"{__name__}.array_api").namespace_of(version)
)
set_other_names(
    lambda owner, name: importlib.import_module(f"{__name__}.frontend.other_names").unknown_name(
        owner, name
    )
)
set_compiler_settings(lambda: importlib.import_module(f"{__name__}.passes").Config)


def __getattr__(name: str) -> Any:
    """A part of the package, else a public name."""
    if name.startswith("_") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Parts first: they are imported from here while the public names are not complete.
    part = f"{__name__}.{name}"
    if importlib.machinery.PathFinder.find_spec(part, __path__) is not None:  # noqa: F405  # every package has it
        return importlib.import_module(part)
    names = importlib.import_module(f"{__name__}.public")
    try:
        value = globals()[name] = getattr(names, name)
    except AttributeError:
        raise no_such_name("pc", name) from None
    return value


def __dir__() -> list[str]:
    return dir(importlib.import_module(f"{__name__}.public"))
