"""Which of OpenBLAS's kernel sets is chosen, by whom, and what is said about it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plancompiler.blas import kernel_choice, loaded_library
from plancompiler.blas.kernel_choice import AVX512, Cpu, kernel_set_for
from plancompiler.running.worker_processes import worker_environment

FLAGS = AVX512 | {"avx2", "fma"}
ZEN_5 = Cpu("AuthenticAMD", 26, FLAGS)
ZEN_4 = Cpu("AuthenticAMD", 25, FLAGS)


@pytest.mark.parametrize(
    ("cpu", "chosen"),
    [
        (ZEN_5, "SkylakeX"),
        (Cpu("AuthenticAMD", 27, FLAGS), "SkylakeX"),
        (ZEN_4, "Haswell"),
        # Zen 3 has the family of Zen 4 and no AVX-512.
        (Cpu("AuthenticAMD", 25, frozenset({"avx2", "fma"})), None),
        (Cpu("AuthenticAMD", 26, FLAGS - {"avx512bw"}), None),
        (Cpu("AuthenticAMD", 23, FLAGS), None),
        # OpenBLAS knows these.
        (Cpu("GenuineIntel", 6, FLAGS), None),
        (None, None),
    ],
)
def test_the_set_follows_from_the_cpu(cpu: Cpu | None, chosen: str | None) -> None:
    assert kernel_set_for(cpu, {}) == chosen


def test_what_the_user_chose_stays() -> None:
    assert kernel_set_for(ZEN_5, {"OPENBLAS_CORETYPE": "Zen"}) is None
    assert kernel_set_for(ZEN_5, {"OPENBLAS_CORETYPE": ""}) == "SkylakeX"


def test_a_cpu_is_read_from_its_first_description() -> None:
    text = (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
        "flags\t\t: fpu avx2 avx512f\npower management:\n\n"
        "processor\t: 1\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nflags\t\t: fpu\n"
    )
    assert Cpu.parse(text) == Cpu("AuthenticAMD", 26, frozenset({"fpu", "avx2", "avx512f"}))


@pytest.mark.parametrize(
    "text", ["", "processor : 0\nFeatures : fp asimd\n", "vendor_id : A\ncpu family : x\nflags : f"]
)
def test_other_cpus_are_left_alone(text: str) -> None:
    assert Cpu.parse(text) is None


LOADED = """
import os
{before}
import plancompiler
from plancompiler.blas import kernel_choice
from plancompiler.blas.loaded_library import describe
print(kernel_choice.CHOSEN, os.environ.get("OPENBLAS_CORETYPE"), describe(), sep="|")
"""


def loaded(monkeypatch: pytest.MonkeyPatch, chosen: str | None, before: str = "") -> list[str]:
    """What a fresh process with this variable loads: our choice, the variable, the BLAS."""
    if chosen is None:
        monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    else:
        monkeypatch.setenv("OPENBLAS_CORETYPE", chosen)
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().split("|")


@pytest.mark.processes
def test_a_process_loads_what_its_cpu_is_best_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    wanted = kernel_set_for(kernel_choice.this_cpu(), {})
    chosen, variable, said = loaded(monkeypatch, None)
    assert chosen == str(wanted)
    # What this process starts is not told, and may choose for itself.
    assert variable == "None"
    assert f"chosen by {'the library' if wanted is None else 'plancompiler'}" in said
    if "openblas" in said and wanted is not None:
        assert f"{wanted} kernels" in said


@pytest.mark.processes
def test_a_process_loads_what_the_user_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nehalem's are among the sets of every x86-64 build and run on all of these CPUs.
    chosen, variable, said = loaded(monkeypatch, "Nehalem")
    assert (chosen, variable) == ("None", "Nehalem")
    assert "chosen by OPENBLAS_CORETYPE" in said
    if "openblas" in said and kernel_choice.this_cpu() is not None:
        assert "Nehalem kernels" in said


@pytest.mark.processes
def test_numpy_that_is_loaded_already_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, variable, said = loaded(monkeypatch, None, "import numpy")
    assert (chosen, variable) == ("None", "None")
    assert "chosen by the library" in said


def test_slower_kernels_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    pools = [{"user_api": "blas", "internal_api": "openblas", "architecture": "Haswell"}]
    monkeypatch.setattr(loaded_library.threadpoolctl, "threadpool_info", lambda: pools)
    monkeypatch.setattr(kernel_choice, "this_cpu", lambda: ZEN_5)
    said = loaded_library.faster_kernels()
    assert said is not None
    assert "OPENBLAS_CORETYPE=SkylakeX" in said
    pools[0]["architecture"] = "SkylakeX"
    assert loaded_library.faster_kernels() is None
    pools[0]["architecture"] = "Haswell"
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert loaded_library.faster_kernels() is None


THREADS_AND_PROCESSES = """
import os
os.environ["OPENBLAS_CORETYPE"] = "{loaded}"
import numpy as np
del os.environ["OPENBLAS_CORETYPE"]
import plancompiler as pc
from plancompiler.blas.loaded_library import numeric_kernels
from tests.examples import mlp

if __name__ == "__main__":
    losses = []
    for backend in ("threads", "processes"):
        with pc.run(mlp(ranks=2, hidden=48), backend=backend) as session:
            losses.append([outputs["loss"] for outputs in session.run(40)])
    print(losses[0] == losses[1], numeric_kernels())
"""


@pytest.mark.processes
def test_ranks_as_threads_and_as_processes_have_the_same_kernels(tmp_path: Path) -> None:
    """Also where NumPy was loaded before plancompiler, with kernels that nobody would choose."""
    script = tmp_path / "both.py"
    script.write_text(THREADS_AND_PROCESSES.format(loaded="Nehalem"))
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("OPENBLAS_CORETYPE", None)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=root,
        timeout=120,
    )
    assert done.stdout.startswith("True NumPy ")
    if "openblas" in done.stdout and kernel_choice.this_cpu() is not None:
        assert "with Nehalem kernels" in done.stdout


def test_workers_are_given_the_kernels_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"user_api": "blas", "internal_api": "openblas", "architecture": "Zen"}
    own |= {"filepath": "/x/numpy.libs/libopenblas.so", "version": "0.3"}
    other = {**own, "filepath": "/x/scipy.libs/libopenblas.so", "architecture": "Haswell"}
    monkeypatch.setattr(loaded_library.threadpoolctl, "threadpool_info", lambda: [other, own])
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert loaded_library.kernel_environment() == {"OPENBLAS_CORETYPE": "Zen"}
    assert worker_environment()["OPENBLAS_CORETYPE"] == "Zen"
    monkeypatch.setenv("OPENBLAS_CORETYPE", "SkylakeX")
    assert loaded_library.kernel_environment() == {}
    assert worker_environment()["OPENBLAS_CORETYPE"] == "SkylakeX"
