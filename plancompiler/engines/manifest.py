"""What clusters are told to start a run: batch scripts of Slurm; Indexed Jobs and JobSets of
Kubernetes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plancompiler.errors import UsageError

KINDS = ("slurm", "kubernetes", "jobset")
ENDPOINT_PORT = 29400
_POD_NAME_CHARACTERS = 63 - len("-abcde")
"""Of a pod, without the five characters that Kubernetes puts behind it."""
_RANKS = "ranks"
"""What the pods of a JobSet are called in it."""
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
    """An Indexed Job, and the service by which its pods find the first, as JSON, which
    `kubectl apply` takes. `secret` is the name of a Secret with the run's token.

    A script has a pod for each node, a job one for each rank.
    """
    labels = {"plancompiler-run": run.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": run.name, "labels": labels},
        # Names of pods, at once: they meet before they are ready.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": run.name, "labels": labels},
        "spec": _indexed_job(run, image, secret, run.name, labels),
    }
    items: list[dict[str, Any]] = [service, job]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"


def jobset_manifest(run: Run, image: str, secret: str) -> str:
    """The same as a JobSet of one Job, whose controller makes the service."""
    labels = {"plancompiler-run": run.name}
    pods = f"{run.name}-{_RANKS}-0"
    spec = _indexed_job(run, image, secret, pods, labels)
    del spec["template"]["spec"]["subdomain"]  # the controller's
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": _RANKS, "replicas": 1, "template": {"spec": spec}}],
        },
    }
    return json.dumps(jobset, indent=2) + "\n"


def _indexed_job(
    run: Run, image: str, secret: str, pods: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """The specification of a Job whose pods are called `pods` and their number."""
    count = run.nodes if run.command == "launch" else run.nodes * run.ranks
    longest = f"{pods}-{count - 1}"
    if len(longest) > _POD_NAME_CHARACTERS:
        raise UsageError(
            "a pod of the run cannot have its name",
            got=f"{longest}, {len(longest)} characters",
            expected=f"at most {_POD_NAME_CHARACTERS}",
            hint="give a shorter one with --name",
        )
    first = f"{pods}-0.{run.name}"
    environment: dict[str, str] = {}
    options: list[str] = []
    if run.command == "launch":
        endpoint = f"{first}:{ENDPOINT_PORT}"
        options = ["--nnodes", str(count), "-n", str(run.ranks), "--rdzv-endpoint", endpoint]
    else:
        environment = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": first,
            "MASTER_PORT": str(ENDPOINT_PORT),
        }
    # Pods trust the cluster's network, unless the user gives them TLS.
    environment["PLANCOMPILER_WORLD_INSECURE"] = "1"
    token = {"secretKeyRef": {"name": secret, "key": "token"}}
    container = {
        "name": "ranks",
        "image": image,
        "command": ["plancompiler", run.command, *options, *run.words],
        "env": [
            {"name": "PLANCOMPILER_WORLD_TOKEN", "valueFrom": token},
            *({"name": name, "value": text} for name, text in environment.items()),
        ],
        "ports": [{"containerPort": ENDPOINT_PORT}],
    }
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": dict(labels)},
            "spec": {"restartPolicy": "Never", "subdomain": run.name, "containers": [container]},
        },
    }
