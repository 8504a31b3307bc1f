"""The rows of `benchmarks/forecast_published.py` agree with the other columns of their tables."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "forecast_published.py"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forecast_published", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_table_1_gives_the_sizes_and_aggregates_that_it_prints(published: ModuleType) -> None:
    aggregates = (4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0)
    for row, petaflops in zip(published.NARAYANAN, aggregates, strict=True):
        # Equation 2 of the paper.
        part = 13 / (12 * row.dim)
        part += (published.VOCABULARY + published.LENGTH) / (12 * row.layers * row.dim)
        assert f"{12 * row.layers * row.dim**2 * (1 + part) / 1e9:.1f}" == (
            row.name.removesuffix("B") if row.name != "1008B" else "1008.0"
        )
        # It rounds the FLOP/s of a GPU to whole teraFLOP/s.
        assert row.gpus * row.teraflops / 1e3 == pytest.approx(petaflops, rel=0.005)
        assert row.dp * row.tp * row.pp == row.gpus
        assert row.microbatches * row.micro * row.dp == row.batch


def test_table_5_gives_the_utilization_that_it_prints(published: ModuleType) -> None:
    rows = [row for row in published.KORTHIKANTI if row.selective]
    for row, hardware in zip(rows, (0.437, 0.528, 0.570, 0.570), strict=True):
        used = row.flops / (row.gpus * row.seconds * 312e12)
        assert used == pytest.approx(hardware, abs=0.0015)
        assert row.dp == 1


def test_torchtitan_gives_the_utilization_that_it_prints(published: ModuleType) -> None:
    for row, model in zip(published.TORCHTITAN, (0.611, 0.541, 0.505, 0.568, 0.517), strict=True):
        once = replace(row, again=0.0)
        # It counts the parameters of the embedding like all others.
        embedding = 6 * row.vocabulary * row.dim * row.gpus * row.micro * row.length
        used = (once.flops + embedding) / (row.gpus * row.seconds * 312e12)
        assert used == pytest.approx(model, abs=0.0015)
