"""An agent inside a process of an engine that starts functions and not commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SHOWN = 2000
"""Characters of what a failed agent said last."""


def run_agent(command: Sequence[str], variables: Mapping[str, str], folder: str) -> str:
    """Start an agent, and return how it ended once it has. It ends when this process does.

    `folder` is where the user has started the run: what is named by a relative path is there.
    """
    from plancompiler.engines.launch_variables import without_launcher  # noqa: PLC0415  # elsewhere

    if not Path(folder).is_dir():
        return f"its host has no folder {folder}, in which the run was started"
    with subprocess.Popen(
        [sys.executable, *command[1:], "--with-stdin"],
        cwd=folder,
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
