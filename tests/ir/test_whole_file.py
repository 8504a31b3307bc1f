"""Files are whole or absent, and links that somebody planted are never written through."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from plancompiler.errors import DataError, OutputError
from plancompiler.ir import whole_file as module
from plancompiler.ir.whole_file import (
    create_file,
    make_writable_folder,
    named_file,
    naming_output,
    read_file,
    replace_file,
    whole_file,
    write_whole,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("lasting", [False, True])
def test_it_takes_its_name_when_it_is_whole(tmp_path: Path, lasting: bool) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with whole_file(path, lasting=lasting) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, [b"a", b"b"], keep_going=stop)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_link_under_the_targets_name_is_replaced(tmp_path: Path, precious: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    path = folder / "index.json"
    path.symlink_to(precious)
    write_whole(path, [b"new"])
    assert precious.read_text() == "precious"
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(precious)
    replace_file(path).close()
    assert precious.read_text() == "precious"
    assert not path.is_symlink()


@pytest.mark.parametrize("target", ["precious", "nothing"])
def test_a_link_under_the_temporary_name_is_an_error(
    tmp_path: Path, precious: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its random number had been guessed."""
    monkeypatch.setattr(module.secrets, "token_hex", lambda nbytes: "guessed")
    (tmp_path / "file.guessed.partial").symlink_to(tmp_path / target)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", [b"new"])
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "file.guessed.partial")


def test_modes_are_as_asked_for(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", [b""], mode=0o600)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_devices_and_pipes_that_the_user_names_are_written_in_place(tmp_path: Path) -> None:
    with named_file(Path("/dev/null")) as file:
        file.write(b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with named_file(pipe) as file:
        file.write(b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_device_is_an_error_that_names_it() -> None:
    path = Path("/dev/full")
    with (
        pytest.raises(OutputError, match="a figure cannot be written") as caught,
        naming_output("a figure", path),
        named_file(path) as file,
    ):
        file.write(b"x")
    assert caught.value.report.got == "/dev/full: No space left on device"


def test_a_link_to_a_device_is_no_device(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to("/dev/null")
    with named_file(path) as file:
        file.write(b"x")
    assert path.read_bytes() == b"x"


def test_a_folder_is_tried_before_a_long_run(tmp_path: Path, precious: Path) -> None:
    make_writable_folder(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []
    with pytest.raises(NotADirectoryError):
        make_writable_folder(precious / "below")


WRITES = re.compile(
    r"write_text\(|write_bytes\(|open\(\s*\"[wxa+b]*[wxa+][wxa+b]*\"|os\.O_(?:CREAT|WRONLY|RDWR)"
)
WRITER = "plancompiler/ir/whole_file.py"
IN_PLACE = {"plancompiler/cli/output.py", "executor/trace.py", "master/journal.py"}
"""They open the null device, try whether a pipe takes what is written, and make a database private
before SQLite opens it.
"""


def test_what_is_read_is_a_file(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"all of it")
    os.mkfifo(pipe)
    assert read_file("a table", file) == b"all of it"
    with pytest.raises(DataError, match=r"a table cannot be read.*: Is a directory"):
        read_file("a table", tmp_path, DataError, pipes=True)
    reading, writing = os.pipe()
    os.write(writing, b"what a command says")
    os.close(writing)
    assert read_file("a table", Path(f"/dev/fd/{reading}"), pipes=True) == b"what a command says"
    os.close(reading)
    for path, why in ((pipe, "a pipe, not a file"), (tmp_path / "none", "No such file")):
        with pytest.raises(DataError, match=f"a table cannot be read.*{path.name}: .*{why}"):
            read_file("a table", path, DataError)


def test_nothing_else_of_the_product_opens_files_to_write() -> None:
    folders = [ROOT / name for name in ("plancompiler", "executor", "master", "worker")]
    writing = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*.py")
        if not any(part.is_symlink() for part in path.parents) and WRITES.search(path.read_text())
    }
    assert writing - IN_PLACE == {WRITER}
