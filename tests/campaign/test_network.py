"""Some broken connections, with the code of the long campaigns."""

from __future__ import annotations

import pytest

from benchmarks.campaign.network import PLACES
from tests.campaign.conftest import Hold

CASES = {"client and master": (0, 16), "eager ranks": (7,)}


@pytest.mark.processes
def test_numbers_are_right_or_an_error_says_why(hold: Hold) -> None:
    """Of cases whose fault comes early, so that they end soon."""
    for place, indices in CASES.items():
        assert {tuple(PLACES)[index % len(PLACES)] for index in indices} == {place}
    results = hold("network", 1, [index for indices in CASES.values() for index in indices])
    assert all(each.ending for each in results)
