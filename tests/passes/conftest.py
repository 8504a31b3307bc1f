"""What tests of several passes compare with."""

from __future__ import annotations

import pytest

from tests.dense import run_dense
from tests.examples import gpt
from tests.passes.worlds import STEPS


@pytest.fixture(scope="session")
def one_rank() -> tuple[float, ...]:
    """Losses of the small GPT on one rank."""
    return tuple(float(each["loss"]) for each in run_dense(gpt(), STEPS))
