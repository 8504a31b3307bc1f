"""The example jobs, in sizes that tests can afford."""

from __future__ import annotations

from pathlib import Path

from plancompiler.cli.job_file import load_job
from plancompiler.ir import Job

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

TINY_GPT = {"layers": 2, "dim": 32, "heads": 4, "length": 16}


def mlp(**config: object) -> Job:
    """The digits network, narrow."""
    return load_job(str(EXAMPLES / "mlp.py"), {"hidden": 30, "batch": 30, **config})


def gpt(**config: object) -> Job:
    """The byte GPT with two narrow layers."""
    return load_job(str(EXAMPLES / "gpt.py"), {**TINY_GPT, **config})
