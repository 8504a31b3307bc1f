"""Wrong use: each ends with one paragraph on stderr, exit code 1 or 2, and nothing on stdout."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import Invoke, Write

BODY = """
import plancompiler as pc

mesh = pc.Placement("cpu", [0, 1])


def build():
    with pc.job("wrong") as job:
        {line}
        pc.output("out", x.sum())
    return job
"""


def check(result: Result, exit_code: int, *words: str) -> None:
    """One paragraph that holds all the words."""
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    paragraph = result.stderr.strip()
    assert "\n" not in paragraph, paragraph
    for word in words:
        assert word in paragraph, paragraph


def test_an_unknown_mode_lists_the_four(invoke: Invoke, mlp: str) -> None:
    modes = ("naive", "rank_per_thread", "rank_per_iter", "rank_per_process")
    for command in ("run", "compile"):
        check(invoke(command, mlp, "--mode", "fastest"), 2, "E101", "'fastest'", *modes)


def test_the_environment_may_name_an_unknown_mode(
    invoke: Invoke, mlp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANCOMPILER_COMPILE_MODE", "slowest")
    check(invoke("compile", mlp), 2, "E101", "'slowest'")


def test_a_missing_job_file(invoke: Invoke, tmp_path: Path) -> None:
    check(invoke("run", str(tmp_path / "nowhere.py")), 2, "E102", "nowhere.py", "does not exist")
    check(invoke("run", str(tmp_path)), 2, "E102", "is not a file")


def test_a_job_file_that_is_not_python(invoke: Invoke, write: Write) -> None:
    check(invoke("run", write("no python", "job.toml")), 2, "E102", "not Python")


def test_a_job_file_without_build_lists_its_functions(invoke: Invoke, write: Write) -> None:
    path = write("def make():\n    pass\n")
    check(invoke("run", path), 2, "E102", "no function 'build'", "make", "def build(**config)")
    check(invoke("run", f"{path}:other"), 2, "E102", "no function 'other'")


def test_a_job_file_that_does_not_load_names_the_line(invoke: Invoke, write: Write) -> None:
    path = write("import math\n\nmath.nothing()\n")
    check(invoke("compile", path), 2, "E102", "AttributeError", f"{path}:3")
    path = write("def build(:\n    pass\n")
    check(invoke("compile", path), 2, "E102", "SyntaxError", f"{path}:1")


def test_a_build_that_raises_names_the_line(invoke: Invoke, write: Write) -> None:
    path = write("def build():\n    return 1 / 0\n")
    check(invoke("compile", path), 2, "E102", "ZeroDivisionError", f"{path}:2")


def test_a_build_that_returns_something_else(invoke: Invoke, write: Write) -> None:
    path = write("def build():\n    return 7\n")
    check(invoke("compile", path), 2, "E102", "Got: int", "return job")


def test_a_setting_that_build_does_not_accept(invoke: Invoke, mlp: str) -> None:
    check(invoke("compile", mlp, "-D", "width=7"), 2, "E100", "width=7", "build(ranks=None")


@pytest.mark.parametrize("setting", ["hidden", "=3", "2x=3", "a b=1"])
def test_a_setting_that_does_not_parse(invoke: Invoke, mlp: str, setting: str) -> None:
    check(invoke("compile", mlp, "-D", setting), 2, "E100", repr(setting), "key=value")


def test_a_job_with_no_output(invoke: Invoke, write: Write) -> None:
    path = write(
        "import plancompiler as pc\n\n"
        "def build():\n"
        "    with pc.job('silent') as job:\n"
        "        pc.input('x', (4,), 'float32', pc.Placement('cpu', [0]))\n"
        "    return job\n"
    )
    check(invoke("compile", path), 1, "E123", "'silent'", "no output", "pc.output")


@pytest.mark.parametrize(
    ("line", "exit_code", "words"),
    [
        (
            'x = pc.input("x", (4, 4), "float32", mesh, ["S[0]"])',
            2,
            ("E110", "S[0]"),
        ),
        (
            'x = pc.input("x", (4, 4), "float32", mesh, ["S(2)"])',
            2,
            ("E111", "S(2)", "below 2"),
        ),
        (
            'x = pc.input("x", (4, 4), "float32", mesh, ["S(0)", "B"])',
            2,
            ("E112", "2 entries", "1 entries"),
        ),
        (
            'x = pc.input("x", (4,), "float32", pc.Placement("cpu", [0, 1, 1]))',
            2,
            ("E113", "rank 1 in [0, 1, 1]"),
        ),
        (
            'x = pc.input("x", (4,), "float13", mesh)',
            1,
            ("E121", "float13"),
        ),
    ],
)
def test_a_malformed_layout(
    invoke: Invoke, write: Write, line: str, exit_code: int, words: tuple[str, ...]
) -> None:
    check(invoke("compile", write(BODY.format(line=line))), exit_code, *words)


def test_shapes_that_do_not_match_show_the_users_line(invoke: Invoke, write: Write) -> None:
    path = write(
        BODY.format(
            line='x = pc.input("a", (4, 5), "float32", mesh) @ '
            'pc.input("b", (6, 7), "float32", mesh)'
        )
    )
    check(invoke("compile", path), 1, "E120", "matmul", "job.py:9")


def test_a_rank_outside_the_world_names_the_op(invoke: Invoke, fed: str, mlp: str) -> None:
    check(invoke("compile", fed, "--ranks", "1"), 2, "E114", "input", "rank 1", "at least 2 ranks")
    check(invoke("compile", mlp, "--ranks", "2", "--rank", "2"), 2, "E114", "0 to 1")


@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_a_number_of_ranks_that_is_none(invoke: Invoke, mlp: str, ranks: str) -> None:
    result = invoke("run", mlp, "--ranks", ranks)
    assert result.exit_code == 2
    assert "--ranks" in result.stderr


def test_a_job_that_must_be_fed_cannot_be_run_by_a_command(invoke: Invoke, fed: str) -> None:
    check(invoke("run", fed, "--steps", "1"), 1, "E130", "inputs x", "session.step")


def test_a_loss_that_is_not_finite_is_reported(invoke: Invoke, mlp: str) -> None:
    result = invoke("run", mlp, "-D", "rate=1e30", "--steps", "50")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "[E191 NonFiniteError]" in result.stderr
    assert "loss" in result.stderr.splitlines()[-1]
    assert "job.py:" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [
        "compile {job} --out {file}",
        "compile {job} --out {file}/new/plans",
        "forecast {job} --trace {file}/trace.json",
        "forecast {job} --html {file}/new/page.html",
        "forecast {job} --chakra {file}/traces",
        "run {job} --trace {file}/trace.json",
        "search {job} --out {file}/layout.toml",
        "submit {job} --master 127.0.0.1:1 --compile-only --out {file}/plans",
        "submit {job} --master 127.0.0.1:1 --trace {file}/trace.json",
        "fetch 1 --master 127.0.0.1:1 --what plans --out {file}/plans",
        "import torch {job} --out {file}",
        "import onnx {job} --out {file}/model",
        "import jax {job} --out {file}/model",
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_done(
    invoke: Invoke, write: Write, tmp_path: Path, command: str
) -> None:
    job = write("raise AssertionError('it was loaded')")
    file = tmp_path / "file"
    file.write_text("")
    result = invoke(*command.format(job=job, file=file).split())
    check(result, 2, str(file))
    assert "loaded" not in result.stderr
    assert file.read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "job.py"]


def test_a_checkpoint_that_cannot_be_written_fails_before_the_first_step(
    invoke: Invoke, mlp: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = invoke("run", mlp, "--steps", "3", "--save", str(file / "checkpoint"))
    check(result, 1, "E132", "cannot be written", str(file))
    check(invoke("run", mlp, "--steps", "3", "--save", str(file)), 1, "E132", "written")
    assert file.read_text() == ""
    check(invoke("run", mlp, "--save-every", "2"), 2, "E100", "--save DIR")


def test_a_log_level_that_is_none(
    invoke: Invoke, mlp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANCOMPILER_LOG", "loud")
    check(invoke("compile", mlp), 2, "E100", "PLANCOMPILER_LOG", "debug or info")


def test_a_damaged_plan_file(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    assert invoke("compile", mlp, "--out", str(out)).exit_code == 0
    whole = (out / "rank_0.plan").read_bytes()
    damaged = tmp_path / "damaged.plan"
    for data in (b"", whole[: len(whole) // 2], whole[:-1], b"\x00" * 100, b"plan" * 1000):
        damaged.write_bytes(data)
        check(invoke("inspect", str(damaged)), 1, "E140", "damaged.plan")


def test_inspecting_what_is_not_there(invoke: Invoke, mlp: str, tmp_path: Path) -> None:
    check(invoke("inspect", str(tmp_path / "none")), 2, "E100", "no such plan file")
    for words in (("inspect",), ("inspect", "--boxing"), ("compile",), ("run",)):
        check(invoke(*words, "x" * 300), 2, "E100", "cannot be looked at", "xxx", "too long")
    (tmp_path / "empty").mkdir()
    check(invoke("inspect", str(tmp_path / "empty")), 2, "E100", "holds no plans", "--out DIR")
    out = tmp_path / "plans"
    assert invoke("compile", mlp, "--out", str(out)).exit_code == 0
    check(invoke("inspect", str(out), "--rank", "7"), 2, "E100", "on rank 7", "0, 1")
    check(invoke("inspect", str(out / "rank_0.plan"), "--rank", "0"), 2, "E100", "--rank")


@pytest.mark.processes
def test_an_unreachable_master(invoke: Invoke, mlp: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for command in (("submit", mlp), ("worker",)):
            result = invoke(*command, "--master", address, "--timeout", "0.5")
            assert result.exit_code == 1
            assert "E181" in result.stderr
            assert address in result.stderr


@pytest.mark.parametrize("command", ["run", "compile", "inspect", "submit", "master", "worker"])
def test_missing_arguments_show_how_to_use_the_command(invoke: Invoke, command: str) -> None:
    result = invoke(command)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert result.stdout == ""


def test_an_unknown_command(invoke: Invoke) -> None:
    result = invoke("compute")
    assert result.exit_code == 2
    assert "No such command 'compute'" in result.stderr
