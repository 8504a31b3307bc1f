"""Every mistake of the list, each with one error of ours."""

from __future__ import annotations

import pytest

from benchmarks.campaign import mistakes
from tests.campaign.conftest import Hold


@pytest.mark.processes
def test_every_mistake_has_its_error(hold: Hold) -> None:
    results = hold("mistakes", 1, range(mistakes.COUNT))
    assert len(results) == len({each.what for each in results}) >= 150
