"""The table of calls that share memory, or do not, is what PyTorch does."""

from __future__ import annotations

import pytest

from tests.eager.view_calls import COPIES, REFUSED, SHAPE, VIEWS
from tests.importers.models import torch


def _base() -> torch.Tensor:
    return torch.arange(1.0, 49.0, dtype=torch.float64).reshape(SHAPE)


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_views_in_pytorch(name):
    x = _base()
    part = VIEWS[name](torch, x)
    elements = part.contiguous().clone()
    part *= -1.0
    assert torch.equal(x, torch.where(torch.isin(_base(), elements.ravel()), -_base(), _base()))


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_copies_in_pytorch(name):
    x = _base()
    part = COPIES[name](torch, x)
    part *= -1.0
    assert torch.equal(x, _base())


@pytest.mark.parametrize("name", [each for each in REFUSED if each != "overlapping windows"])
def test_what_is_refused_is_refused_in_pytorch(name):
    """Windows that overlap are not: what becomes of elements in two of them is left open there."""

    def change():
        part = REFUSED[name](torch, _base())
        part *= -1.0

    with pytest.raises(RuntimeError):
        change()
