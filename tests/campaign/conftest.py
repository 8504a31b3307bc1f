"""Runs cases of a campaign and shows what went wrong, with the command that runs it alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator

import pytest

from benchmarks.campaign.__main__ import run_cases
from benchmarks.campaign.case import Case, Result

Hold = Callable[[str, int, Iterable[int]], list[Result]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Runs the cases of a kind, a seed and indices; none may go wrong."""

    def run(kind: str, seed: int, indices: Iterable[int]) -> list[Result]:
        results = list(run_cases(kind, (Case(kind, seed, index) for index in indices)))
        wrong = [
            "\n".join([f"{each.what}: {each.case.replay}", *each.problems])
            for each in results
            if each.problems
        ]
        assert not wrong, "\n\n".join(wrong)
        return results

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield run
    signal.signal(signal.SIGINT, before)
