"""What clusters are told to start a run: batch scripts of Slurm, Indexed Jobs of Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plancompiler.errors import UsageError

KINDS = ("slurm", "kubernetes")
ENDPOINT_PORT = 29400
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
"""What Kubernetes takes as the name of a Job whose pods have names of their own after it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What shall be started."""

    name: str
    command: str
    """`launch` or `run`."""
    words: tuple[str, ...]
    """What follows it: a script or job file with its own arguments, and options."""
    nodes: int
    ranks: int
    """On each node."""


def checked_run(name: str, words: Sequence[str], nodes: int, ranks: int) -> Run:
    """UsageError where it makes no sense."""
    if not words or words[0] not in ("launch", "run"):
        raise UsageError(
            "a manifest starts scripts or jobs",
            got=" ".join(words) or "nothing",
            expected="launch SCRIPT … or run FILE …",
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            "a run cannot have this name",
            got=repr(name),
            expected="small letters, digits and hyphens, at most 52, the first one a letter",
            hint="give another one with --name",
        )
    return Run(name, words[0], tuple(words[1:]), nodes, ranks)


def slurm_script(run: Run, seconds_to_save: int) -> str:
    """A script for `sbatch`: the launcher runs in it, and its ranks as a step of the job."""
    count = run.nodes * run.ranks
    options = ["--engine", "slurm", "--ranks" if run.command == "run" else "-n", str(count)]
    reach = "" if run.nodes == 1 else ' --address "$(hostname):0"'
    return "\n".join(
        (
            "#!/bin/bash",
            f"#SBATCH --job-name={run.name}",
            f"#SBATCH --nodes={run.nodes}",
            f"#SBATCH --ntasks-per-node={run.ranks}",
            "# So long before the job's time is over it is told to save.",
            f"#SBATCH --signal=B:USR1@{seconds_to_save}",
            *(
                (
                    "# Between nodes: TLS by PLANCOMPILER_WORLD_TLS_CA, _CERT and _KEY, or, on a",
                    "# network that you trust, PLANCOMPILER_WORLD_INSECURE=1.",
                )
                if run.nodes > 1
                else ()
            ),
            f"exec plancompiler {run.command} {shlex.join(options)}{reach} {shlex.join(run.words)}",
            "",
        )
    )


def kubernetes_manifest(run: Run, image: str, secret: str) -> str:
    """An Indexed Job with a pod per node, and the service by which pods find the first, as JSON,
    which `kubectl apply` takes. `secret` is the name of a Secret with the run's token.
    """
    if run.command != "launch":
        raise UsageError(
            "pods of an Indexed Job start scripts",
            got=run.command,
            expected="launch SCRIPT …",
            hint="a job runs in them as plancompiler master and worker",
        )
    labels = {"plancompiler-run": run.name}
    endpoint = f"{run.name}-0.{run.name}:{ENDPOINT_PORT}"
    options = ["--nnodes", str(run.nodes), "-n", str(run.ranks), "--rdzv-endpoint", endpoint]
    token = {"secretKeyRef": {"name": secret, "key": "token"}}
    container = {
        "name": "ranks",
        "image": image,
        "command": ["plancompiler", "launch", *options, *run.words],
        "env": [
            {"name": "PLANCOMPILER_WORLD_TOKEN", "valueFrom": token},
            # Pods trust the cluster's network, unless the user gives them TLS.
            {"name": "PLANCOMPILER_WORLD_INSECURE", "value": "1"},
        ],
        "ports": [{"containerPort": ENDPOINT_PORT}],
    }
    pod = {"restartPolicy": "Never", "subdomain": run.name, "containers": [container]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": run.name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": run.nodes,
            "parallelism": run.nodes,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": run.name, "labels": labels},
        # Names of pods, at once: they meet before they are ready.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    items: list[dict[str, Any]] = [service, job]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"
