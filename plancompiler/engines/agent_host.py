"""An agent inside a process of an engine that starts functions and not commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

_SHOWN = 2000
"""Characters of what a failed agent said last."""


def run_agent(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Start an agent, and return how it ended once it has. It ends when this process does."""
    from plancompiler.engines.launch_variables import without_launcher  # noqa: PLC0415  # elsewhere

    with subprocess.Popen(
        [sys.executable, *command[1:], "--with-stdin"],
        env=without_launcher(os.environ) | dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read()  # to its end; standard input stays open meanwhile
        code = process.wait()
    return f"exit code {code}" + (f"; it said: {said[-_SHOWN:].strip()}" if said.strip() else "")
