"""PyTorch's op database, where PyTorch is installed: a small part of what `op_db` measures."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

CHOSEN = "^(abs|add|sum|lgamma|softmax|matmul|sort|nn.functional.mse_loss)$"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_runs_are_equal_or_refused():
    from tests.suites.op_db import measure_all, totals

    counts = totals(measure_all(CHOSEN, samples=6, spread=2, most=4))
    assert counts["mapped"] == 8
    assert counts["equal"] >= 100
    assert counts["wrong"] == counts["crash"] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_what_pytorch_rounds_is_no_error_of_ours():
    """The gradient of a norm over one element is zero; PyTorch's in float32 is 2e-4."""
    from tests.suites.op_db import measure_all, totals

    counts = totals(measure_all("^nn.functional.layer_norm$", spread=0))
    assert counts["equal"] >= 10
    assert counts["wrong"] == counts["crash"] == 0
