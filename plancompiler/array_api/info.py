"""What the array API asks of a namespace: its dtypes, devices and abilities."""

from __future__ import annotations

from plancompiler.array_api.dtypes import DEFAULT_FLOAT, DEFAULT_INT, STANDARD, isdtype
from plancompiler.array_api.placement import default_device
from plancompiler.ir import DType, Placement


class Info:
    """What `__array_namespace_info__` gives."""

    def capabilities(self) -> dict[str, bool | int | None]:
        """Which optional parts of the standard exist here, for eager tensors."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Placement:
        """All ranks of this program."""
        return default_device()

    def default_dtypes(self, *, device: Placement | None = None) -> dict[str, DType]:
        """The dtypes that functions take without being told."""
        return {
            "real floating": DEFAULT_FLOAT,
            "integral": DEFAULT_INT,
            "indexing": DEFAULT_INT,
        }

    def devices(self) -> tuple[Placement, ...]:
        """The placement that is the default; there are as many others as there are meshes."""
        return (default_device(),)

    def dtypes(
        self, *, device: Placement | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """Dtypes of the standard by name, of some kinds or all."""
        return {str(each): each for each in STANDARD if kind is None or isdtype(each, kind)}


def __array_namespace_info__() -> Info:  # noqa: N807  # as the standard names it
    """What this namespace can do."""
    return Info()
