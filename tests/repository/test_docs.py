"""README and docs: the first job runs, and every command and option that exists is described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from plancompiler.cli import program
from plancompiler.ir.settings import format_setting
from plancompiler.lower.compile import MODES
from plancompiler.passes import Config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()
PASSES = (ROOT / "docs/passes.md").read_text()


def section(command: str) -> str:
    """What docs/commands.md says about a command."""
    section = re.search(rf"^## `plancompiler {command}[ `].*?(?=^## |\Z)", COMMANDS, re.M | re.S)
    assert section is not None, command
    return section[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "command"),
    [
        (0, [sys.executable]),
        (1, [sys.executable, "-m", "plancompiler", "launch", "-n", "2"]),
    ],
)
def test_the_programs_of_the_readme_learn(number: int, command: list[str], tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.S)[number]
    file = tmp_path / "line.py"
    file.write_text(code)
    done = subprocess.run(
        [*command, str(file)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 50
    assert losses[-1] < 1e-3 * losses[0]


def parameters_of(name: str) -> list[click.Parameter]:
    """Of a command, and of the commands of a group."""
    command = program.load_command(name)
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return [*command.params, *(each for one in inner for each in one.params)]


@pytest.mark.parametrize("command", sorted(program.COMMANDS))
def test_every_option_of_a_command_is_described(command: str) -> None:
    text = section(command)
    options = [
        name
        for parameter in program.load_command(command).params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in parameter.opts
    ]
    assert [name for name in options if name != "--json" and f"`{name}" not in text] == []


@pytest.mark.parametrize("command", sorted(program.COMMANDS))
def test_every_described_option_exists(command: str) -> None:
    described = re.findall(r"`(-{1,2}[A-Za-z-]+)", section(command))
    known = {name for parameter in parameters_of(command) for name in parameter.opts}
    foreign = {"--out"} if command == "inspect" else set()
    assert set(described) - known - foreign - {"--check-modes"} == set()


def test_the_documents_name_only_commands_that_exist() -> None:
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in re.findall(r"^ {4}.*?\bplancompiler (\w[\w-]*)", file.read_text(), re.M):
            assert line in program.COMMANDS, f"{file.name}: plancompiler {line}"


def test_the_settings_of_the_compiler_are_described_as_they_are_declared() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PASSES, re.M)[: len(Config.options())]
    assert rows == [
        (
            each.name,
            each.help,
            "those marked below" if each.default is None else f"`{format_setting(each.default)}`",
        )
        for each in Config.options()
    ]


def test_the_modes_are_described() -> None:
    assert re.findall(r"^\| `(naive|rank_\w+)` \|", section("compile"), re.M) == [
        "naive",
        "rank_per_iter",
        "rank_per_thread",
        "rank_per_process",
    ]
    assert set(re.findall(r"`(naive|rank_\w+)`", section("compile"))) == set(MODES)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_between_documents_lead_somewhere() -> None:
    folders = (ROOT / "executor/README.md", ROOT / "plancompiler/boxing/README.md")
    for file in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *folders,
        *sorted((ROOT / "docs").rglob("*.md")),
    ):
        for target in re.findall(r"\]\(([^):]+)\)", file.read_text()):
            path, _, anchor = target.partition("#")
            page = file.parent / path if path else file
            assert page.is_file(), f"{file.name}: {target}"
            assert not anchor or anchor in anchors(page), f"{file.name}: {target}"
