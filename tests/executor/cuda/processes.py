"""Functions that ranks call which are processes: threads cannot share a device (docs/gpu.md).

Also the program that each rank runs: it is given the folder of the call.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import plancompiler as pc

ROOT = Path(__file__).resolve().parents[3]
CALL = "PLANCOMPILER_TEST_CALL"
"""Environment variable of ranks that run a test again: the folder, the number of the call that is
theirs."""
_calls: dict[str, int] = {}
"""By test, how often it has called `spawn_again`."""


def in_processes(folder, function, ranks, *args):
    """What a function of a module returns on each rank of an eager program."""
    folder.mkdir(exist_ok=True)
    (folder / "call").write_bytes(pickle.dumps((function, args)))
    return _launched(folder, ranks, {})


def shared_folder():
    """A folder of this test that ranks see which run it again."""
    if CALL in os.environ:
        folder = Path(os.environ[CALL].split("#")[0])
    else:
        folder = _folder_of(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])
    (folder / "files").mkdir(exist_ok=True)
    return folder / "files"


def _folder_of(test):
    folder = Path(tempfile.gettempdir()) / f"spawned {os.getpid()} {abs(hash(test))}"
    folder.mkdir(exist_ok=True)
    return folder


def spawn_again(function, ranks):
    """What a function returns on each rank, whatever it is: each rank runs the test again up to
    here, with what earlier calls have returned.
    """
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    number = _calls[test] = _calls.get(test, -1) + 1
    if CALL in os.environ:
        where, own = os.environ[CALL].split("#")
        folder = Path(where)
        if number < int(own):
            return _results(folder, f"results {number}")
        world = pc.init()
        (folder / str(world.rank)).write_bytes(pickle.dumps(function()))
        # Its part is done, and the rest of the test is none of this rank's.
        world.close()
        os._exit(0)
    folder = _folder_of(test)
    (folder / "test").write_text(test)
    results = _launched(folder, ranks, {CALL: f"{folder}#{number}"})
    (folder / f"results {number}").write_bytes(pickle.dumps(results))
    return results


def _launched(folder, ranks, more):
    for rank in range(ranks):
        (folder / str(rank)).unlink(missing_ok=True)
    # What plugins of pytest tell their own workers is not for these.
    inherited = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*(sys.executable, "-m", "plancompiler", "launch", "-n", str(ranks)), __file__, folder],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": path, **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [_results(folder, str(rank)) for rank in range(ranks)]


def _results(folder, name):
    return pickle.loads((folder / name).read_bytes())  # noqa: S301  (of this test)


def main():
    folder = Path(sys.argv[1])
    if CALL in os.environ:
        test = (folder / "test").read_text()
        # No plugins but the one whose option pyproject.toml sets.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        words = ["-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-o", "addopts=", "-m", ""]
        sys.exit(pytest.main([*words, test]))
    world = pc.init()
    function, args = _results(folder, "call")
    (folder / str(world.rank)).write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    main()
