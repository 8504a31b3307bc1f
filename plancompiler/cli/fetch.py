"""`plancompiler fetch`: bring here what a job made."""

from __future__ import annotations

import json
from pathlib import Path

import click

from plancompiler.cli.client_options import client_options, job_id_argument
from plancompiler.cli.options import output_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.cluster.chunks import arrays_to_bytes
from plancompiler.executor.trace import about_run, write_trace
from plancompiler.ir.whole_file import make_writable_folder, named_file, naming_output, write_whole
from plancompiler.running.client import Client, Handle

_NO_STEP = (1 << 40) - 1
"""A first step that no job has: who waits for the end only reads no outputs."""


@click.command("fetch")
@job_id_argument
@click.option(
    "--what",
    type=click.Choice(("plans", "checkpoint", "timeline", "outputs")),
    required=True,
    help="plans: what it was compiled into; checkpoint: the one that it has written last; "
    "timeline: of a job that was recorded, after its end; outputs: those that the master keeps.",
)
@output_option("--out", "what is fetched", "The folder to write into.", folder=True, required=True)
@client_options
def fetch_command(job: int, what: str, out: Path, client: Client, as_json: bool) -> None:
    """Bring the plans, checkpoint, timeline or outputs of JOB into a folder of this machine.

    \b
    Example:
      plancompiler fetch 3 --what checkpoint --out here --master 127.0.0.1:50051
    """
    counts: dict[str, int] = {}
    if what == "checkpoint":
        client.fetch_checkpoint(job, out)
    else:
        with client.job(job, since=_NO_STEP if what == "timeline" else 0) as handle:
            with naming_output("what was fetched", out):
                make_writable_folder(out)
            if what == "plans":
                handle.plans().save(out)
            elif what == "timeline":
                handle.result()
                about = about_run(handle.plans().job, "processes")
                write_trace(out / "timeline.json", handle.timelines(), about)
            else:
                counts = _write_outputs(handle, out)
    files = sorted(path.name for path in out.iterdir())
    if as_json:
        print_json({"job": job, "what": what, "out": str(out), "files": files, **counts})
    else:
        print_note(f"wrote the {what} of job {job} to {out}: {len(files)} files")


def _write_outputs(handle: Handle, out: Path) -> dict[str, int]:
    """Scalars as a JSON object for each step, arrays in a file for each step."""
    done, steps = handle.status().done_steps, 0
    path = out / "outputs.jsonl"
    with naming_output("outputs", path), named_file(path) as lines:
        for outputs in handle if done else ():
            scalars = {
                key: value for key, value in outputs.items() if isinstance(value, float | int)
            }
            arrays = {name: value for name, value in outputs.items() if name not in scalars}
            lines.write(json.dumps(scalars).encode() + b"\n")
            if arrays:
                file = f"step_{outputs['step']:08d}.safetensors"
                write_whole(out / file, [arrays_to_bytes(arrays)])
            steps += 1
            if outputs["step"] >= done - 1:  # the job may go on
                break
    return {"steps": steps, "dropped_steps": handle.dropped_steps}
