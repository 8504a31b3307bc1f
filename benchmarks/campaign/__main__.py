"""Campaigns of faults, and the page that their tables are on.

    python -m benchmarks.campaign [--kind kills|restarts|network|damage|hostile|ops|mistakes|all]
        [--count N] [--seed S] [--case I] [--jobs J] [--out FILE] [--lines FILE ...] [--write]

Prints one JSON line per case that went wrong, and a table per kind. Ends with 1 where a case did.
Each line of a problem has the command that replays its case alone. `--write` puts the tables into
docs/reliability.md, with results that an earlier run wrote to `--lines FILE`; tables of kinds that
did not run stay as they are.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.campaign import damage, hostile, kills, mistakes, network, ops, restarts
from benchmarks.campaign.case import Case, Result
from benchmarks.campaign.page import table, write

KINDS: dict[str, Any] = {
    "kills": kills,
    "restarts": restarts,
    "network": network,
    "damage": damage,
    "hostile": hostile,
    "mistakes": mistakes,
    "ops": ops,
}


def run_cases(kind: str, cases: Iterable[Case], jobs: int = 1) -> Iterator[Result]:
    """Results as they come, from several worlds at the same time."""
    if jobs == 1:
        with KINDS[kind].opened() as campaign:
            yield from map(campaign.run, cases)
        return
    waiting = iter(cases)
    lock = threading.Lock()
    results: list[Result] = []
    changed = threading.Condition()

    def work() -> None:
        with KINDS[kind].opened() as campaign:
            while True:
                with lock:
                    case = next(waiting, None)
                if case is None:
                    return
                result = campaign.run(case)
                with changed:
                    results.append(result)
                    changed.notify()

    with ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(work) for _ in range(jobs)]
        for worker in workers:
            worker.add_done_callback(lambda _: _wake(changed))
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: results or all(each.done() for each in workers))
                    ready, results[:] = list(results), []
                yield from ready
                if not ready and all(each.done() for each in workers):
                    break
        finally:  # Ctrl-C: no more cases than those that run
            with lock:
                waiting = iter(())
        for worker in workers:
            worker.result()


def read_results(file: Path, kind: str) -> Iterator[Result]:
    """Results of a kind that `--out` wrote."""
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if record["campaign"] == kind:
            case = Case(kind, record["seed"], record["case"])
            words = (record[each] for each in ("group", "what", "ending", "seconds", "problems"))
            yield Result(case, *words)


def _wake(changed: threading.Condition) -> None:
    with changed:
        changed.notify()


def main() -> int:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--count", type=int, help="cases of each kind; by default the long form")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, nargs="+", help="only these cases")
    parser.add_argument("--jobs", type=int, default=1, help="worlds at the same time")
    parser.add_argument("--out", type=Path, help="all results as JSON lines")
    parser.add_argument("--lines", type=Path, nargs="*", default=[], help="earlier results too")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    # In a background job of a shell SIGINT is ignored, which children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    good = True
    lines = options.out.open("w") if options.out else None
    for kind in KINDS if options.kind == "all" else [options.kind]:
        module = KINDS[kind]
        indices: Iterable[int] = range(module.COUNT if options.count is None else options.count)
        if options.case is not None:
            indices = options.case
        # Of a case that was run twice the last result counts.
        results = {each.case: each for file in options.lines for each in read_results(file, kind)}
        count = 0
        begin = time.monotonic()
        for result in run_cases(
            kind, (Case(kind, options.seed, index) for index in indices), options.jobs
        ):
            results[result.case] = result
            count += 1
            if lines is not None:
                print(json.dumps(result.as_json()), file=lines, flush=True)
            if result.problems or options.case is not None:
                good = good and not result.problems
                print(json.dumps({**result.as_json(), "replay": result.case.replay}), flush=True)
        print(table(list(results.values())))
        print(f"{count} cases in {time.monotonic() - begin:.0f} s", flush=True)
        if options.write:
            write(kind, list(results.values()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
