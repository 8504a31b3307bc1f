"""Functions that ranks call which are processes: threads cannot share a device (docs/gpu.md).

Also the program that each rank runs: it is given the folder of the call.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import plancompiler as pc

ROOT = Path(__file__).resolve().parents[3]


def in_processes(folder, function, ranks, *args, timeout=100):
    """What a function of a module returns on each rank of an eager program."""
    folder.mkdir(exist_ok=True)
    (folder / "call").write_bytes(pickle.dumps((function, args)))
    words = [sys.executable, "-m", "plancompiler", "launch", "-n", str(ranks)]
    done = subprocess.run(
        [*words, __file__, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    results = [folder / str(rank) for rank in range(ranks)]
    assert done.returncode == 0, done.stderr
    return [pickle.loads(each.read_bytes()) for each in results]  # noqa: S301  (of this test)


def main():
    folder = Path(sys.argv[1])
    world = pc.init()
    function, args = pickle.loads((folder / "call").read_bytes())  # noqa: S301  (of this test)
    (folder / str(world.rank)).write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    main()
