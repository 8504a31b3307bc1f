"""Models of PyTorch train here as they do there: one rank, and layouts."""

from __future__ import annotations

import pytest

import plancompiler as pc
from tests.importers.models import MODELS, made
from tests.importers.training import DP, ONE, TP, compare, reference, rows_split, trained


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_pytorch(name):
    module, example = made(name)
    wanted = reference(module, example)
    model = pc.from_torch(module, example)
    state = module.state_dict()
    assert list(dict(model.named_parameters(remove_duplicate=False))) or not state
    compare(trained(model.place(ONE), example, ONE, ["B", "B"]), wanted, 1e-5, 1e-5)
    compare(trained(model.place(DP), example, DP, ["S(0)", "B"]), wanted, 1e-4, 1e-4)
    placed = model.place(TP, rows_split(model))
    compare(trained(placed, example, TP, ["B", "B"]), wanted, 1e-4, 1e-4)
