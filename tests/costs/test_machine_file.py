"""Machine files are read with their sources, or refused with line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

import plancompiler as pc
from plancompiler.costs import GENERIC, chosen_machine, machine_names, machine_of
from plancompiler.costs.choice import FOLDER
from plancompiler.errors import MachineFileError, UsageError
from plancompiler.ir import DType
from plancompiler.passes import Config

TEXT = (FOLDER / "a100-sxm.toml").read_text()


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", machine_names())
def test_shipped_files_have_a_source_for_each_figure(name: str) -> None:
    machine = machine_of(name)
    assert machine.name == name
    assert len(machine.sources) > 8
    assert machine.measured == ()  # data sheets and rules of thumb
    assert machine.device.peak_flops(DType.FLOAT32) > 1e9
    assert machine_of(machine.text).text == machine.text
    assert " " not in machine.text


def test_all_machines_of_the_page_are_there() -> None:
    page = {GENERIC, "a100-sxm", "h100-sxm", "h200-sxm", "b200-sxm", "mi300x", "tpu-v5p"}
    assert set(machine_names()) == page


CORES = 'name = "a100-sxm"\nhost.cores = { value = 8, source = "x" }'
MISTAKES = {
    "missing": ('launch_seconds = { value = 3e-6, source = "x" }', "", "device.launch_seconds"),
    "negative": ("value = 80e9", "value = -1", "device.memory_bytes"),
    "not a number": ("value = 80e9", 'value = "80 GB"', "device.memory_bytes"),
    "infinite": ("value = 80e9", "value = inf", "device.memory_bytes"),
    "not whole": ("value = 8,", "value = 8.5,", "node.devices"),
    "above its range": ("value = 0.71", "value = 1.5", "device.matrix_efficiency"),
    "unknown": ("launch_seconds", "lunch_seconds", "device.lunch_seconds"),
    "unknown table": ("[network]", "[networks]", "networks"),
    "unknown dtype": ("int8 =", "int7 =", "device.flops_per_second.int7"),
    "no source": ("{ value = 80e9, source", "{ value = 80e9, origin", "device.memory_bytes"),
    "inconsistent": ("value = 25e9", "value = 400e9", "network.bytes_per_second"),
    "no size of nodes": ("devices = { value = 8", "#", "node.devices"),
    "another type": ('type = "cuda"', 'type = "abacus"', "device.type"),
    "cores of devices": ('name = "a100-sxm"', CORES, "host.cores"),
    "no source beside": ("value = 312e12, source", "value = 312e12, #", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_line_and_field(mistake: str, tmp_path: Path) -> None:
    before, after, field = MISTAKES[mistake]
    if mistake == "missing":
        (before,) = (line for line in TEXT.splitlines() if line.startswith("launch_seconds"))
    assert before in TEXT
    text = TEXT.replace(before, after, 1)
    path = written(tmp_path, text)
    with pytest.raises(MachineFileError) as caught:
        chosen_machine(path)
    report = caught.value.report
    if field is None:  # not TOML at all; its parser says where
        assert "line" in str(report.got)
        return
    assert field in report.what
    assert report.source is not None
    file, _, line = report.source.rpartition(":")
    assert file == str(path)
    line_text = text.splitlines()[int(line) - 1]
    part, _, name = field.rpartition(".")
    assert name in line_text or f"[{part}]" in line_text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineFileError, match="cannot be read"):
        chosen_machine(tmp_path / "none.toml")


def test_measured_tasks_are_points_of_sizes_and_seconds(tmp_path: Path) -> None:
    task = '[[task]]\nkind = "add"\ndtype = "float32"\nform = ""\nworld = "{}"\npoints = {}\n'
    points = "[[8, 4, 32, 384, 0, 1e-6], [8, 8, 64, 768, 10, 2e-6]]"
    good = chosen_machine(written(tmp_path, TEXT + task.format("alone", points)))
    (measured,) = good.tasks
    assert measured.points[1] == ((8, 8, 64, 768, 10), 2e-6)
    assert good.digest != machine_of("a100-sxm").digest
    bad = [("alone", each) for each in ("[]", "[[1, 2, 3]]", "[[1, 1, 1, 1, 1, -1]]", "3")]
    twice = f"{points}\n{task.format('alone', points)}".rstrip()
    with pytest.raises(MachineFileError, match="twice") as caught:
        chosen_machine(written(tmp_path, TEXT + task.format("alone", twice)))
    assert str(caught.value.report.source).endswith(f":{len(TEXT.splitlines()) + 7}")
    for world, wrong in [*bad, ("nowhere", points)]:
        with pytest.raises(MachineFileError, match=r"task\[0\]") as caught:
            chosen_machine(written(tmp_path, TEXT + task.format(world, wrong)))
        assert str(caught.value.report.source).endswith(f":{len(TEXT.splitlines()) + 1}")


def test_a_setting_carries_the_figures_of_a_users_file(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT.replace('name = "a100-sxm"', 'name = "my machine, 2"'))
    config = Config(machine=str(path))
    path.unlink()
    text = str(config)
    assert text.count(" ") == 0
    read = Config.parse(text)
    assert read == config
    assert machine_of(read.machine).name == "my machine, 2"
    assert machine_of(read.machine).network == machine_of("a100-sxm").network
    assert Config(machine=machine_of("h100-sxm")).machine != GENERIC  # type: ignore[arg-type]
    assert str(Config(machine=GENERIC)) == ""


def kernel_text(start: float) -> str:
    """What kernels of kind `a` cost, in a machine's text."""
    costs = {"start_seconds": start, "seconds_per_flop": 0, "seconds_per_byte": 1e-9}
    return ",".join(f"kernel.a.float32.{name}={value}" for name, value in costs.items())


def test_a_job_of_others_has_no_file_read(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    with pytest.raises(UsageError, match="no such machine"):
        Config.parse(f"machine={path}")
    with pytest.raises(UsageError, match="given by its name"):
        Config(machine=3)  # type: ignore[arg-type]
    good = machine_of("a100-sxm").text
    assert machine_of(f"{good},{kernel_text(1)}").kernels
    wrong = ("kernel=1", "kernel.a=1", "kernel.a.float32=1", kernel_text(-1), "kernel.a.b.c.d=1")
    for text in (
        "figures:",
        "figures:name=x",
        "figures:device.type.a=1,device.type=cpu",
        *(f"{good},{each}" for each in wrong),
    ):
        with pytest.raises((UsageError, MachineFileError)):
            Config.parse(f"machine={text}")


def test_more_ranks_than_devices(tmp_path: Path) -> None:
    machine = machine_of("tpu-v5p")
    machine.check_devices(6144)
    with pytest.raises(UsageError, match="fewer devices"):
        machine.check_devices(6145)
    machine_of("h100-sxm").check_devices(1 << 19)


def test_the_job_carries_its_machine() -> None:
    with pc.job("j", config=pc.Config(machine="h100-sxm")) as job:
        pc.output("x", pc.ones((2,), "float32", placement=pc.Placement("cpu", [0])))
    assert "machine=h100-sxm" in str(job)
