"""A temporary folder that goes when its process does, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from plancompiler.ir.closing import Closing
from plancompiler.limits import time_limits

_REMOVE_SECONDS = time_limits.REMOVING
"""How long processes that this one has started may still put files into the folder."""
# A process of its own, without what the interpreter does at its start for programs. What it reads
# ends when the folder is closed, or when the process that made it has ended.
_REMOVER = """
import os, shutil, sys, time
sys.stdin.buffer.read()
end = time.monotonic() + float(sys.argv[2])
while os.path.lexists(sys.argv[1]) and time.monotonic() < end:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.0 if not os.path.lexists(sys.argv[1]) else 0.05)
"""


class TemporaryFolder(Closing):
    """A new folder for this user alone; `close` removes it, and so does the end of the process.

    Raises OSError where it cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            self._remover = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REMOVER, str(self.path), str(_REMOVE_SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self.path.rmdir()
            raise

    def close(self) -> None:
        """Remove the folder and what is in it. Safe to call again."""
        self._remover.communicate()
