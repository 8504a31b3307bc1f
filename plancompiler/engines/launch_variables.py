"""The variables in which launchers tell a process its rank, the number of ranks, and its run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from plancompiler.errors import UsageError
from plancompiler.executor.process_status import (
    own_processes,
    process_environment,
    process_status,
)

RANK = "PLANCOMPILER_RANK"
WORLD_SIZE = "PLANCOMPILER_WORLD_SIZE"
TOKEN = "PLANCOMPILER_WORLD_TOKEN"  # the name of a variable
PIPE = "PLANCOMPILER_LAUNCH_PIPE"
"""A descriptor that reads to its end when the launcher is gone."""
LOCAL_RANK = "PLANCOMPILER_LOCAL_RANK"
LOCAL_WORLD_SIZE = "PLANCOMPILER_LOCAL_WORLD_SIZE"
RESTART = "PLANCOMPILER_RESTART"
"""How often the program was started before in this run."""
TRANSPORT = "PLANCOMPILER_WORLD_TRANSPORT"
ADDRESSES = "PLANCOMPILER_WORLD_ADDRESSES"
"""HOST:PORT of each rank, in order, separated by commas."""
INSECURE = "PLANCOMPILER_WORLD_INSECURE"
TLS = tuple(f"PLANCOMPILER_WORLD_TLS_{name}" for name in ("CA", "CERT", "KEY"))
"""PEM files: the authority that signed all ranks' certificates, and this rank's own pair."""


def world_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """What `plancompiler launch` tells a rank of its place, also under the names that programs for
    torchrun read.
    """
    return {
        RANK: str(rank),
        WORLD_SIZE: str(size),
        LOCAL_RANK: str(local_rank),
        LOCAL_WORLD_SIZE: str(local_size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


@dataclass(frozen=True, slots=True)
class LaunchVariables:
    """The environment variables of one launcher."""

    name: str
    rank: str
    size: str
    run: tuple[str, ...]
    """What tells apart runs on one host, and is equal on all ranks of a run. Where none is set, the
    launcher's process tells them apart.
    """
    local_size: str = ""
    """The number of ranks on this host."""
    rendezvous: tuple[str, ...] = ()
    """What ranks on several hosts need to be told, all of it or nothing on one host."""
    always_both: bool = True
    """Whether rank without size, or the reverse, is a mistake."""


LAUNCHERS = (
    LaunchVariables("plancompiler launch", RANK, WORLD_SIZE, (TOKEN,), LOCAL_WORLD_SIZE),
    LaunchVariables(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
        "LOCAL_WORLD_SIZE",
        ("MASTER_ADDR", "MASTER_PORT"),
    ),
    LaunchVariables(
        "Kubernetes Indexed Job",
        "JOB_COMPLETION_INDEX",
        # Kubernetes does not say how many there are; whoever writes the manifest does.
        "WORLD_SIZE",
        ("MASTER_ADDR", "MASTER_PORT"),
        "LOCAL_WORLD_SIZE",
        always_both=False,
    ),
    LaunchVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LaunchVariables(
        "MPI (PMI)", "PMI_RANK", "PMI_SIZE", ("PMI_PORT", "PMI_JOBID"), "MPI_LOCALNRANKS"
    ),
    LaunchVariables(
        "Slurm",
        "SLURM_PROCID",
        # Of the step that srun has started. SLURM_NTASKS is there in batch scripts too, which have
        # a number, and run once.
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        always_both=False,
    ),
)
"""In the order in which they are looked for: a launcher may run inside another."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher has told a process."""

    launcher: LaunchVariables | None
    """None where there is none."""
    rank: int
    size: int
    run: str
    """The name of the run: equal on all its ranks, and another one for each run of a host."""
    local_size: int | None = None
    """The number of ranks on this host, where the launcher says so."""

    @property
    def is_on_several_hosts(self) -> bool:
        return self.local_size is not None and self.local_size < self.size


ALONE = Launched(None, 0, 1, "")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a program that another launcher starts: what this process was told of its own
    place would contradict what that says.
    """
    told = {each.rank for each in LAUNCHERS} | {each.size for each in LAUNCHERS}
    told |= {each.local_size for each in LAUNCHERS} | {LOCAL_RANK, "LOCAL_RANK", TOKEN, PIPE}
    return {name: text for name, text in environment.items() if name not in told}


def read_launcher(environment: Mapping[str, str]) -> Launched:
    """The values of the first launcher that has set variables. UsageError for inconsistent ones."""
    for launcher in LAUNCHERS:
        named = [name for name in (launcher.rank, launcher.size) if name in environment]
        if len(named) == 2:
            return _read(environment, launcher)
        if named and launcher.always_both and not _speaks_for(environment, named[0]):
            missing = launcher.size if launcher.rank in environment else launcher.rank
            raise UsageError(
                f"{launcher.name} has set {named[0]} and not {missing}",
                got=f"{named[0]}={environment[named[0]]}",
                expected=f"both {launcher.rank} and {launcher.size}, or neither",
                hint=f"set {missing}, or unset {named[0]} to run as one rank",
            )
    return ALONE


def _speaks_for(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable is one of another launcher that has set both of its own."""
    return any(
        name in (each.rank, each.size) and each.rank in environment and each.size in environment
        for each in LAUNCHERS
    )


def _read(environment: Mapping[str, str], launcher: LaunchVariables) -> Launched:
    rank, size = (_number(environment, name, launcher) for name in (launcher.rank, launcher.size))
    if not 0 <= rank < size:
        raise UsageError(
            f"{launcher.name} has set a rank outside its world",
            got=f"{launcher.rank}={rank}, {launcher.size}={size}",
            expected=f"{launcher.rank} from 0 to {launcher.size} - 1",
        )
    local = None
    if environment.get(launcher.local_size):
        local = _number(environment, launcher.local_size, launcher)
        if not 0 < local <= size:
            raise UsageError(
                f"{launcher.name} has set more ranks on this host than there are ranks",
                got=f"{launcher.local_size}={local}, {launcher.size}={size}",
                expected=f"{launcher.local_size} from 1 to {launcher.size}",
            )
    missing = [name for name in launcher.rendezvous if not environment.get(name)]
    if missing and local is not None and local < size:
        raise UsageError(
            f"{launcher.name} has not set where the ranks of several hosts meet",
            got=f"no {' and no '.join(missing)}, {launcher.local_size}={local}, "
            f"{launcher.size}={size}",
            expected=f"{' and '.join(launcher.rendezvous)}, the same on all hosts",
            hint="start the ranks with torchrun, or set these variables for each of them",
        )
    named = [f"{name}={environment[name]}" for name in launcher.run if environment.get(name)]
    text = "\n".join([launcher.name, str(os.getuid()), *(named or [_launcher_process(launcher)])])
    return Launched(launcher, rank, size, hashlib.sha256(text.encode()).hexdigest(), local)


def _number(environment: Mapping[str, str], name: str, launcher: LaunchVariables) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(
            f"a variable of {launcher.name} is not a whole number",
            got=f"{name}={environment[name]}",
        ) from None


def processes_of(launched: Launched, rank: int) -> list[int]:
    """The processes of this host that were told that they are this rank of the same run."""
    launcher = launched.launcher
    if launcher is None:
        return []
    same = {name: os.environ.get(name) for name in (launcher.size, *launcher.run)}
    told = {**same, launcher.rank: str(rank)}
    return [
        pid
        for pid in own_processes()
        if (environment := process_environment(pid)) is not None
        and all(environment.get(name) == value for name, value in told.items())
    ]


def _launcher_process(launcher: LaunchVariables) -> str:
    """Names the process that has started the ranks of this host: the next ancestor that was not
    told this process's rank. Those between the two, such as a shell, were.
    """
    own = os.environ.get(launcher.rank)
    status = process_status(os.getpid())
    while status is not None and status.parent > 1:
        pid = status.parent
        told = process_environment(pid)
        status = process_status(pid)
        if status is not None and (told is None or told.get(launcher.rank) != own):
            return f"process {pid} of {status.started}"
    return "no process"
