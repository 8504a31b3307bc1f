"""Cancels every job of a master: `cancel_all.py HOST:PORT`."""

import sys

import plancompiler as pc


def main() -> None:
    """Ask which jobs there are, and cancel those that have not ended."""
    with pc.Client(sys.argv[1]) as client:
        for job in client.status().jobs:
            if not job.phase.is_end:
                client.cancel(job.job_id)


main()
