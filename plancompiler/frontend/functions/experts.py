"""Rows to experts that are split over devices, products by expert, and rows back."""

from __future__ import annotations

from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.out import takes_out
from plancompiler.ops.registry import apply, apply_one

__all__ = ["expert_places", "gather_rows", "grouped_matmul", "scatter_rows"]


def expert_places(
    chosen: Tensor, experts: int, bound: int, pieces: int = 1, overflow: str = "error"
) -> tuple[Tensor, Tensor]:
    """Where rows lie that are sent to experts: places [t, k] for `chosen` [t, k], -1 for none.

    `chosen` has the expert of each of k choices of t tokens, or -1. Neighbouring experts form
    `pieces`, as many in each, and a piece has `bound` places: place i of piece p has the number
    p * bound + i. Rows of a piece are sorted by expert, then by token. The second result, counts
    [pieces, experts / pieces], says how many each expert has. More rows than places are an
    ExecutionError, or with `overflow="drop"` the last ones of the piece have no place.
    """
    made: tuple[Tensor, Tensor] = apply(
        "expert_places", chosen, experts=experts, pieces=pieces, bound=bound, overflow=overflow
    )
    return made


@takes_out
def scatter_rows(
    x: Tensor, places: Tensor, pieces: int, bound: int, *, out: Tensor | None = None
) -> Tensor:
    """Rows [pieces, bound, ...] with each row of x [t, k or 1, ...] at its place, others zero.

    `places` [t, k] are those of `expert_places`. From tokens split over devices (`S(0)`) to pieces
    split over them, only rows that leave their device are moved: an uneven all-to-all.
    `gather_rows` is the inverse and the gradient.
    """
    return apply_one("scatter_rows", x, places, pieces=pieces, bound=bound)


@takes_out
def gather_rows(rows: Tensor, places: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The rows [t, k, ...] at `places` [t, k] of rows [pieces, bound, ...]; zero for -1."""
    return apply_one("gather_rows", rows, places)


@takes_out
def grouped_matmul(
    rows: Tensor, counts: Tensor, weight: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Rows [p, c, d], each times the matrix of its expert, weight [p, m, d, f]: [p, c, f].

    `counts` [p, m] says how many rows of each piece are for each of its m experts, in order; rows
    beyond these become zero (T. Gale et al., "MegaBlocks", 2022).
    """
    return apply_one("grouped_matmul", rows, counts, weight)
