"""Whatever bytes a reader is given, it returns a value or raises an error of ours, soon and within
bounded memory. `tests.damage` says how the bytes are damaged; campaigns try more of the same.
"""

from __future__ import annotations

import pytest

from tests.damage import Format, attempt, bounded_memory
from tests.damaged_formats import formats

SEEDS = 150
SLOW = {"job": 60, "slice": 100}
"""Formats whose inputs are compiled."""
MEMORY = 768 << 20
"""Bytes that a reader may take."""
HANG = 10.0
"""Seconds after which it hangs."""
NAMES = (
    *("index", "index json", "shard", "shard header", "shards in memory", "safetensors"),
    *("timeline", "timeline json", "cache entry", "cache facts", "cached slices"),
    *("npz", "npy header", "job", "boxing graph", "slice", "plan"),
    *("cluster message", "chunks", "note", "abort", "directory", "far directory"),
    *("data of a rank", "arrays of a member"),
)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Format]:
    return {each.name: each for each in formats(tmp_path_factory.mktemp("damage"))}


def test_all_formats_are_tried(every: dict[str, Format]) -> None:
    assert tuple(every) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_or_harmless(name: str, every: dict[str, Format]) -> None:
    refused = 0
    with bounded_memory(MEMORY):
        for seed in range(SLOW.get(name, SEEDS)):
            outcome = attempt(every[name], seed)
            assert not outcome.is_defect, f"{name}, seed {seed}" + repr(outcome.error)
            assert outcome.seconds < HANG, f"{name}, seed {seed}"
            refused += outcome.error is not None
    # A reader of the cache treats what is damaged as if it were not there.
    assert refused or name in ("cache entry", "cache facts")
