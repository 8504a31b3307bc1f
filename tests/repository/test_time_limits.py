"""docs/time-limits.md and all other modules have the limits of `time_limits.py`, and no others."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from plancompiler.cluster import channel
from plancompiler.limits import time_limits
from plancompiler.master.events import Limits
from plancompiler.running.session import run

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([0-9.]+) \| (.+) \| (.+) \|$", re.M)
LIMIT = re.compile(
    r"^ *(\w*(?:SECONDS|DEADLINE|TIMEOUT|SILENCE|GRACE)\w*|timeout|silence|deadline)"
    r"(?:: float)?(?: \| None)? = ([0-9]+\.[0-9]+),?$",
    re.M,
)
"""A limit that a module defines by itself."""
SHORTEST = 1.0
"""Seconds; below are pauses between looks, which bound nothing."""


def defined() -> dict[str, float]:
    return {
        name: value
        for name, value in vars(time_limits).items()
        if isinstance(value, float) and name != "BUSY_SHARE"
    }


def test_the_page_has_every_limit_with_its_default() -> None:
    rows = ROW.findall((ROOT / "docs/time-limits.md").read_text())
    assert {name: float(seconds) for name, seconds, _, _ in rows} == defined()
    assert all(how.strip() for _, _, _, how in rows)


def test_no_other_module_defines_a_limit() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}: {name} = {seconds}"
        for folder in ("plancompiler", "master", "worker", "executor")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "time_limits.py"
        for name, seconds in LIMIT.findall(path.read_text())
        if float(seconds) >= SHORTEST
    ]
    assert elsewhere == []


def test_the_names_that_the_page_tells_users_exist() -> None:
    text = (ROOT / "docs/time-limits.md").read_text()
    fields = {field.name for field in dataclasses.fields(Limits)}
    assert set(re.findall(r"`Limits\((\w+)=\)`", text)) == fields
    assert run.__defaults__ is not None
    assert time_limits.DEADLINE in run.__defaults__
    assert channel.SILENCE_SECONDS == time_limits.SILENCE
