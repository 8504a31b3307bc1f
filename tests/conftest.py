"""What holds for all tests, and what the suite says at its end: figures that tests recorded."""

from __future__ import annotations

import compileall
import gc
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import threadpoolctl

from plancompiler.blas import numba_choice
from plancompiler.cache import keys
from plancompiler.cache.store import FOLDER_VARIABLE
from tests.launched_scripts import TROUBLED, line_script
from tests.process_guard import ProcessGuard
from tests.threads import no_thread_outlives_its_module  # noqa: F401  # a fixture of all tests


@pytest.fixture(autouse=True, scope="session")
def no_plan_cache() -> Iterator[None]:
    """No test, and no process that a test starts, reads or writes the user's plan cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def no_compiled_loops() -> Iterator[None]:
    """Where numba is installed, only tests of its loops wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(numba_choice.VARIABLE, "0")
        numba_choice.numba_version.cache_clear()
        yield


@pytest.fixture(autouse=True, scope="session")
def one_blas_thread() -> Iterator[None]:
    """Test processes run beside each other, and ranks are threads: more BLAS threads than cores
    wait for each other in loops, which took nine times the work on the small arrays of tests.
    """
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Switches the plan cache on, in an empty folder of its own."""
    folder = tmp_path / "plan_cache"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    # A tree that is edited while its tests run would switch the cache off.
    monkeypatch.setattr(keys, "LOADED", time.time())
    keys.software_digest.cache_clear()
    yield folder
    keys.software_digest.cache_clear()


PROCESS_FIXTURES = frozenset({"workers", "cluster", "host_world", "certificates"})
"""Fixtures that start processes: a worker has one beside it, and certificates are made by one."""
GUARD = ProcessGuard()
PRODUCT = ("plancompiler", "executor", "master", "worker")
"""Folders of the product's code, below the repository's."""


def pytest_configure(config: pytest.Config) -> None:
    """Bytecode of what is collected, hypothesis, and the marks that `scripts/test --quick` uses."""
    # Asserts are rewritten in all test modules, and in hypothesis. Where the environment forbids
    # bytecode, each worker would do this anew, which takes 8 s of a processor; and each of the many
    # programs that tests start would compile the product, which more than doubles its start.
    if not hasattr(config, "workerinput"):
        for folder in PRODUCT:
            compileall.compile_dir(config.rootpath / folder, quiet=2)
    sys.dont_write_bytecode = False
    from hypothesis import HealthCheck, settings

    # On a loaded machine any example can take long.
    settings.register_profile(
        "any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any speed")
    config.addinivalue_line("markers", "processes: starts processes")
    config.addinivalue_line("markers", "engines: only scripts/test --engines runs them")
    config.addinivalue_line("markers", "slow: its cases take a second of a processor or more")
    if "not processes" in config.option.markexpr:
        GUARD.install()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that use a fixture that starts processes start processes."""
    if PROCESS_FIXTURES.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The guard knows which test runs, its fixtures included."""
    GUARD.test = item
    try:
        return (yield)
    finally:
        GUARD.test = None


def pytest_collection_finish() -> None:
    """What the tests' modules hold stays to the end: no collection of cycles looks at it again."""
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)
    gc.collect()
    gc.freeze()
    # What is frozen does not count for Python, which looks at all the rest when that has grown by a
    # quarter: by its own thresholds a fifth of the time of tests that compile went there.
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every recorded property, such as the number of signatures proved."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            terminalreporter.write_line(f"{name.replace('_', ' ')}: {value}")


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's `line.py`."""
    path = tmp_path_factory.mktemp("launched") / "line.py"
    path.write_text(line_script())
    return path


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launched") / "troubled.py"
    path.write_text(TROUBLED)
    return path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Programs can be interrupted even where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
