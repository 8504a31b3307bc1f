"""Many legal layouts of a job at once, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plancompiler.ops.registry import op_def
from plancompiler.ops.rule import NdSignature
from plancompiler.search.layout_arcs import LayoutArcs
from plancompiler.search.linear_program import LayoutProblem

MOST_TREES = 10_000
"""That are kept of a tensor's layouts."""


def random_choices(problem: LayoutProblem, many: int, rng: np.random.Generator) -> np.ndarray:
    """[ops, many]: of each op a candidate at random; variables as their updates want them."""
    counts = [len(problem.candidates[number].signatures) for number in problem.tied.class_of]
    return settled(problem, rng.integers(0, np.array(counts)[:, None], (len(counts), many)))


def neighbours(
    problem: LayoutProblem,
    signatures: Sequence[NdSignature],
    many: int,
    rng: np.random.Generator,
    changed: int = 3,
) -> np.ndarray:
    """[ops, many]: these signatures, but of at most so many ops each."""
    chosen = np.array(
        [
            problem.candidates[number].signatures.index(signature)
            for number, signature in zip(problem.tied.class_of, signatures, strict=True)
        ]
    )
    choices = np.repeat(chosen[:, None], many, axis=1)
    for sample in range(many):
        for op in rng.integers(0, len(chosen), rng.integers(0, changed + 1)):
            count = len(problem.candidates[problem.tied.class_of[op]].signatures)
            choices[op, sample] = rng.integers(0, count)
    return settled(problem, choices)


def settled(problem: LayoutProblem, choices: np.ndarray) -> np.ndarray:
    """With the variables that an op updates where it wants them."""
    ops, class_of = problem.tied.job.ops, problem.tied.class_of
    maker = {value.name: place for place, op in enumerate(ops) for value in op.outputs}
    for place, op in enumerate(ops):
        for _, source in op_def(op.kind).mutates:
            at = maker[op.inputs[source].name]
            if ops[at].kind != "variable":
                continue
            taken = [each.inputs[source] for each in problem.candidates[class_of[place]].signatures]
            number = {
                each.outputs[0]: number
                for number, each in enumerate(problem.candidates[class_of[at]].signatures)
            }
            choices[at] = np.array([number.get(each, -1) for each in taken])[choices[place]]
    return choices


def seconds_of_many(
    problem: LayoutProblem, choices: np.ndarray, most_layouts: int | None = None
) -> np.ndarray:
    """The additive objective of each of [ops, many] choices; infinite for illegal ones. A value
    that is wanted in more than `most_layouts` counts as if it were wanted in so many of them: the
    objective is no less.
    """
    tied = problem.tied
    ops = tied.job.ops
    total = np.zeros(choices.shape[1])
    place_of, readers = {}, {}
    for place, (op, number) in enumerate(zip(ops, tied.class_of, strict=True)):
        total += problem.candidates[number].seconds[choices[place]]
        total[choices[place] < 0] = np.inf
        for value in op.outputs:
            place_of[value.name] = place
        for operand, value in enumerate(op.inputs):
            readers.setdefault(value.name, []).append((place, operand))
    prices = BoxingPrices(most_layouts)
    for number, group in enumerate(tied.groups):
        arcs, used = problem.groups[number], problem.readers[number]
        roles = {
            (group.readers[place].ops, group.readers[place].operand): role
            for role, place in enumerate(used)
        }
        for name in group.names:
            made = arcs.made[choices[place_of[name]]]
            wanted = []
            for place, operand in readers[name]:
                role = roles.get((tied.class_of[place], operand))
                if role is None:
                    continue  # on another placement
                layouts = arcs.wanted[role][choices[place]]
                if arcs.fixed[role]:
                    total[layouts != made] = np.inf
                wanted.append(layouts)
            if wanted:
                total += prices.of_many(arcs.arcs, np.array([made, *wanted]))
    return total


class BoxingPrices:
    """What boxing values costs: for each set of wanted layouts once, whatever was made. It takes
    time that is exponential in their number, so only `most_layouts` of them may be counted.
    """

    def __init__(self, most_layouts: int | None = None) -> None:
        self._most = most_layouts
        self._trees: dict[int, _Trees] = {}

    def of_many(self, graph: LayoutArcs, layouts: np.ndarray) -> np.ndarray:
        """Seconds for [1 + readers, many] layouts, the first of which is that which is made."""
        if id(graph) not in self._trees:
            self._trees[id(graph)] = _Trees(graph)
        made, wanted = layouts[0], np.sort(layouts[1:], axis=0)
        wanted[1:][wanted[1:] == wanted[:-1]] = graph.count  # one that is wanted twice counts once
        wanted.sort(axis=0)
        wanted = wanted[: self._most]
        radix = (graph.count + 1) ** np.arange(len(wanted), dtype=object)
        if radix[-1] * (graph.count + 1) < 2**62:
            _, first, place = np.unique(
                radix.astype(np.int64) @ wanted, return_index=True, return_inverse=True
            )
            kinds = wanted[:, first]
        else:
            kinds, place = np.unique(wanted, axis=1, return_inverse=True)
        trees, place = self._trees[id(graph)], place.reshape(-1)
        order = np.argsort(place, kind="stable")
        seconds = np.empty(len(place))
        for start in range(0, kinds.shape[1], MOST_TREES):
            few = slice(*np.searchsorted(place[order], [start, start + MOST_TREES]))
            rows = trees.seconds(kinds[:, start : start + MOST_TREES])
            seconds[order[few]] = rows[place[order[few]] - start, made[order[few]]]
        return seconds


class _Trees:
    """Directed Steiner trees over the layouts of a value, by the sets of layouts that they reach
    (S. Dreyfus and R. Wagner, 1972). A set's parts are looked up among those of all other sets.
    """

    def __init__(self, graph: LayoutArcs) -> None:
        self._ways = graph.distances()
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def seconds(self, kinds: np.ndarray) -> np.ndarray:
        """[sets, layouts]: what it costs to reach each set of [readers, sets] from each layout."""
        count = len(self._ways)
        if len(self._known) > MOST_TREES:
            self._known.clear()
        return np.array(
            [
                self._tree(tuple([each for each in kind if each < count]))
                for kind in kinds.T.tolist()
            ]
        )

    def _tree(self, ends: tuple[int, ...]) -> np.ndarray:
        known = self._known.get(ends)
        if known is None:
            if len(ends) == 1:
                known = self._ways[:, ends[0]]
            else:
                first, *rest = ends
                forks = np.full(len(self._ways), np.inf)
                for bits in range((1 << len(rest)) - 1):
                    one = [first, *(end for at, end in enumerate(rest) if bits >> at & 1)]
                    other = [end for at, end in enumerate(rest) if not bits >> at & 1]
                    np.minimum(forks, self._tree(tuple(one)) + self._tree(tuple(other)), out=forks)
                known = (self._ways + forks).min(axis=1)
            self._known[ends] = known
        return known
