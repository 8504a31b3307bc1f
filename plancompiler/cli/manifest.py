"""`plancompiler manifest`: what a cluster is told to start a run."""

from __future__ import annotations

from pathlib import Path

import click

from plancompiler.cli.options import json_option
from plancompiler.cli.output import print_json, print_result
from plancompiler.engines.manifest import (
    KINDS,
    checked_run,
    jobset_manifest,
    kubernetes_manifest,
    slurm_script,
)


@click.command("manifest", context_settings={"allow_interspersed_args": False})
@click.option("--name", help="The run's name; by default the script's.")
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="How many nodes."
)
@click.option(
    "-n",
    "--ranks",
    "--nproc-per-node",
    type=click.IntRange(min=1),
    required=True,
    help="How many ranks on each node.",
)
@click.option(
    "--image", default="plancompiler", show_default=True, help="Of Kubernetes: the pods' image."
)
@click.option(
    "--secret",
    default="plancompiler",
    show_default=True,
    help="Of Kubernetes: the Secret whose key `token` is the secret of the run's hosts.",
)
@click.option(
    "--seconds-to-save",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Of Slurm: how long before the job's time is over it gets SIGUSR1.",
)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@json_option
def manifest_command(
    name: str | None,
    nnodes: int,
    ranks: int,
    image: str,
    secret: str,
    seconds_to_save: int,
    kind: str,
    words: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print what starts `plancompiler WORDS` on a cluster: a script for sbatch, or a manifest.

    KIND is slurm, kubernetes (an Indexed Job with its service) or jobset (a JobSet).

    \b
    Example:
      plancompiler manifest -n 4 --nnodes 2 slurm run examples/mlp.py --save model > job.sh
      plancompiler manifest -n 4 --nnodes 2 --image IMAGE kubernetes launch train.py > job.json
      plancompiler manifest -n 4 --nnodes 2 --image IMAGE jobset run examples/mlp.py > job.json
    """
    given = name or (Path(words[1]).stem.lower().replace("_", "-") if len(words) > 1 else "run")
    asked = checked_run(given, words, nnodes, ranks)
    if kind == "slurm":
        text = slurm_script(asked, seconds_to_save)
    else:
        write = kubernetes_manifest if kind == "kubernetes" else jobset_manifest
        text = write(asked, image, secret)
    if as_json:
        print_json({"kind": kind, "name": asked.name, "text": text})
    else:
        print_result(text, end="")
