"""What does not divide: layers over stages, the vocabulary over tp, the batch over dp."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.dense import run_dense
from tests.examples import gpt
from tests.integration.test_layouts import local_losses

STEPS = 8


@lru_cache
def dense_losses(batch: int) -> tuple[float, ...]:
    """Losses of three layers and 257 rows of the vocabulary, computed densely."""
    job = gpt(layers=3, vocabulary=257, batch=batch)
    return tuple(float(each["loss"]) for each in run_dense(job, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "layout"),
    [
        (8, {"pp": 2}),
        (8, {"tp": 2, "split_vocabulary": True}),
        (8, {"tp": 4, "split_vocabulary": True}),
        (7, {"dp": 2}),
        (7, {"dp": 3, "zero": 1}),
        (7, {"dp": 2, "tp": 2, "pp": 2, "split_vocabulary": True}),
        (7, {"dp": 2, "tp": 2, "zero": 3, "split_vocabulary": True}),
        # Pieces of 7 sequences over 2 replicas; 2 stages of 2 layers and 1.
        (14, {"dp": 2, "pp": 2, "microbatches": 2, "schedule": "1f1b"}),
        (14, {"dp": 2, "tp": 2, "microbatches": 2, "split_vocabulary": True}),
        # Fewer sequences in a piece than replicas.
        (4, {"dp": 3, "pp": 2, "microbatches": 2, "schedule": "gpipe", "zero": 1}),
    ],
    ids=str,
)
def test_uneven_layouts_train_to_the_dense_losses(batch: int, layout: dict[str, Any]) -> None:
    job = gpt(layers=3, vocabulary=257, batch=batch, **layout)
    np.testing.assert_allclose(local_losses(job, STEPS), dense_losses(batch), rtol=1e-4)
