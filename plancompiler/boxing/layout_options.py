"""Who chooses the layouts of a job."""

from __future__ import annotations

from dataclasses import dataclass

from plancompiler.ir.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(Settings):
    """Layouts that the user leaves open."""

    layout: str = option(
        "given",
        "What the user does not place: `given`: it is broadcast, and layouts follow from what is "
        "placed; `auto`: the compiler searches for the best layouts of all tensors.",
        choices=("given", "auto"),
        metavar="HOW",
    )
