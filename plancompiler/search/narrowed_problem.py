"""A problem without the choices that prices show to be too dear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plancompiler.search.layout_arcs import LayoutArcs
from plancompiler.search.linear_program import GroupArcs, LayoutProblem
from plancompiler.search.price_ascent import PriceAscent


def affordable(ascent: PriceAscent, candidates: int) -> float:
    """By how many seconds layouts may be above the bound, so that about so many candidates have a
    part in them; infinite where all have.
    """
    excess = np.sort(np.concatenate(ascent.excess()))
    return float(excess[candidates]) if candidates < len(excess) else np.inf


def narrowed_problem(ascent: PriceAscent, most: float) -> LayoutProblem:
    """The problem with those candidates and arcs only that have a part in layouts of at most so
    many seconds above the bound. All these layouts are in it.
    """
    problem = ascent.problem
    if most == np.inf:
        return problem
    stays = [excess <= most for excess in ascent.excess()]
    candidates = tuple(
        each.where(keep.tolist()) for each, keep in zip(problem.candidates, stays, strict=True)
    )
    groups = []
    for number, (arcs, excess) in enumerate(zip(problem.groups, ascent.arc_excess(), strict=True)):
        group = problem.tied.groups[number]
        wanted = [
            each[stays[group.readers[place].ops]]
            for place, each in zip(problem.readers[number], arcs.wanted, strict=True)
        ]
        groups.append(_narrowed(arcs, arcs.made[stays[group.maker]], wanted, excess <= most))
    return replace(problem, candidates=candidates, groups=tuple(groups))


def _narrowed(
    arcs: GroupArcs, made: np.ndarray, wanted: Sequence[np.ndarray], keep: np.ndarray
) -> GroupArcs:
    graph = arcs.arcs
    tails, heads = graph.tails[keep], graph.heads[keep]
    layouts, number = np.unique(np.concatenate([made, *wanted, tails, heads]), return_inverse=True)
    cuts = np.cumsum([len(made), *map(len, wanted), len(tails)])
    new_made, *new_wanted, new_tails, new_heads = np.split(number, cuts)
    names = list(graph.number_of)
    number_of = {names[layout]: place for place, layout in enumerate(layouts.tolist())}
    return replace(
        arcs,
        arcs=LayoutArcs(number_of, new_tails, new_heads, graph.seconds[keep]),
        made=new_made,
        wanted=tuple(new_wanted),
    )
