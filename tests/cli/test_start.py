"""The program's first moments: what it loads, and Ctrl-C and SIGTERM before a command has begun."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.blas.kernel_choice import VARIABLE, this_cpu
from plancompiler.cli.program import COMMANDS, load_command
from tests.cli.conftest import Invoke

WAIT = 60
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(sys.executable).with_name("plancompiler")


def loaded_by(code: str) -> list[str]:
    """The modules of a fresh process after these lines."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT,
    )
    return done.stderr.split()


def test_the_commands_are_those_that_have_a_file() -> None:
    folder = ROOT / "plancompiler/cli"
    files = [
        path.stem for path in folder.glob("*.py") if f"def {path.stem}_command" in path.read_text()
    ]
    assert sorted(COMMANDS) == sorted(file.replace("_", "-") for file in files)
    assert [load_command(name).name for name in COMMANDS] == list(COMMANDS)


def test_the_programs_help_lists_every_command(invoke: Invoke) -> None:
    listed = invoke("--help").stdout.partition("Commands:")[2].splitlines()
    assert [line.split(maxsplit=1) for line in listed if line] == [
        [name, text] for name, text in COMMANDS.items()
    ]


@pytest.mark.processes
def test_tensors_of_jobs_have_their_methods_without_eager_code() -> None:
    loaded = loaded_by("import plancompiler as pc\npc.Value.argmax, pc.Value.permute")
    assert "plancompiler.eager.tensor" not in loaded


@pytest.mark.processes
def test_help_and_version_load_nothing_of_the_compiler() -> None:
    for option in ("--help", "--version"):
        loaded = loaded_by(
            "from plancompiler.cli.program import cli\n"
            f"cli([{option!r}], prog_name='plancompiler', standalone_mode=False)"
        )
        assert "plancompiler.cli.program" in loaded
        heavy = {"numpy", "grpc", "networkx", "rich", "plancompiler.ir", "plancompiler.public"}
        assert heavy & set(loaded) == set()


@pytest.mark.processes
def test_runs_with_threads_need_no_grpc_and_only_search_needs_networkx() -> None:
    loaded = loaded_by("import plancompiler.cli.run")
    assert "plancompiler.running.session" in loaded
    assert {"grpc", "networkx", "rich"} & set(loaded) == set()


def numpy_imports(path: Path) -> list[ast.stmt]:
    """The statements of a module that import NumPy when it is loaded."""
    numpy_imports: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] == "numpy" for name in names):
            numpy_imports.append(node)
    return numpy_imports


def first_own_import(path: Path) -> str:
    """What a module imports of ours first."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plancompiler"):
            return f"{node.module}.{node.names[0].name}"
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        "import plancompiler; import numpy",
        "import plancompiler.running.session",
        "import plancompiler.executor.comm.link",
        "from plancompiler.cli.program import load_command; load_command('run')",
    ],
)
def test_a_program_may_start_in_any_module(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen when NumPy is imported, by whomever; here for a CPU that has a choice."""
    monkeypatch.delenv(VARIABLE, raising=False)
    script = (
        "import os, plancompiler as pc\n"
        "from plancompiler.blas import kernel_choice as choice\n"
        "choice.this_cpu = lambda: choice.Cpu('AuthenticAMD', 25, choice.AVX512)\n"
        f"{code}\n"
        f"print(choice.CHOSEN, os.environ.get({VARIABLE!r}))\n"
        "from plancompiler.blas.loaded_library import describe\n"
        "print(describe())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=WAIT
    )
    chosen, said = done.stdout.splitlines()
    assert chosen == "Haswell None"
    if "openblas" in said and {"avx2", "fma"} <= cpu_flags():
        assert "Haswell kernels (chosen by plancompiler)" in said


def cpu_flags() -> frozenset[str]:
    cpu = this_cpu()
    return frozenset() if cpu is None else cpu.flags


@pytest.mark.processes
def test_importing_the_package_loads_next_to_nothing() -> None:
    ours = sorted(n for n in loaded_by("import plancompiler") if n.startswith("plancompiler"))
    hooks = ("", ".array_namespace", ".compiler_settings", ".eager_world", ".other_names")
    assert ours == ["plancompiler", *(f"plancompiler.hooks{name}" for name in hooks)]
    assert not {"numpy", "dataclasses", "platform"} & set(loaded_by("import plancompiler"))


# --- signals before a command has begun -----------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("program", "module"),
    [
        ([sys.executable, "-m", "plancompiler"], "click"),
        ([sys.executable, "-m", "plancompiler"], "plancompiler.errors"),
        ([str(SCRIPT)], "numpy._core"),
        ([sys.executable, "-m", "plancompiler"], "plancompiler.ops"),
    ],
)
def test_signals_while_modules_are_loaded_end_the_program_at_once(
    program: list[str], module: str, number: int, code: int, mlp: str
) -> None:
    child = subprocess.Popen(
        [*program, "run", mlp, "--steps", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Python then says which module it has loaded, as soon as it has.
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    try:
        assert child.stderr is not None
        names = (line.rpartition("|")[2].strip() for line in child.stderr)
        assert module in names
        child.send_signal(number)
        _, errors = child.communicate(timeout=WAIT)
    finally:
        child.kill()
    assert child.returncode == code
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors
    said = [line for line in errors.splitlines() if line.startswith("plancompiler: interrupted")]
    assert len(said) == (number == signal.SIGINT)
