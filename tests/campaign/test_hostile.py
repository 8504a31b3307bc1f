"""Some attacks on a master, with the code of the long campaigns."""

from __future__ import annotations

import pytest

from benchmarks.campaign.hostile import ATTACKS
from tests.campaign.conftest import Hold

CHOSEN = (
    "random bytes",
    "garbage after the greeting",
    "calls without a secret",
    "submissions that unpack to much",
)


@pytest.mark.processes
def test_the_master_serves_others_and_gives_back_what_it_took(hold: Hold) -> None:
    results = hold("hostile", 1, [ATTACKS.index(each) for each in CHOSEN])
    assert [each.group for each in results] == list(CHOSEN)
