"""What the tests of wrong use share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import plancompiler as pc
from plancompiler.errors import ErrorReport, PlanCompilerError


def raised(
    error: type[PlanCompilerError], body: Callable[[], object], match: str | None = None
) -> ErrorReport:
    """The report of the error that `body` raises while it is traced."""
    with pytest.raises(error, match=match) as caught, pc.job("j"):
        body()
    return caught.value.report
