"""Words of command lines, damaged; tests/serde has the files and messages."""

from __future__ import annotations

import pytest

from benchmarks.campaign import damage
from benchmarks.campaign.case import Case
from tests.damage import Format


def test_damaged_words_are_refused_or_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "INPUTS", 20)
    with damage.opened() as campaign:
        names = list(campaign._formats)
        result = campaign.run(Case("damage", 3, names.index("command line")))
    assert result.problems == []
    assert "refused" in result.what


def test_what_is_no_error_of_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> None:
        raise KeyError("bare")

    with damage.opened() as campaign:
        campaign._formats = {"fragile": Format("fragile", lambda choices: b"", read)}
        result = campaign.run(Case("damage", 1, 0))
    assert len(result.problems) == damage.INPUTS
    assert "KeyError" in result.problems[0]
