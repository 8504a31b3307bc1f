"""`plancompiler cache`: what the plan cache holds, and how to empty it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import click

from plancompiler.cache.plan_cache import SLICES, runs
from plancompiler.cache.store import FOLDER_VARIABLE, Kept, Store, open_store
from plancompiler.cli.options import json_option
from plancompiler.cli.output import format_bytes, print_json, print_note, print_table
from plancompiler.errors import UsageError
from plancompiler.frontend.stored import arrays_folder, clear_kept_arrays

_SHOWN_KEY = 12


@click.group("cache")
def cache_command() -> None:
    """Show or empty the plan cache, from which unchanged jobs get their plans.

    \b
    Example:
      plancompiler cache ls --json
      plancompiler cache clear
    """


@cache_command.command("ls")
@json_option
def ls_command(as_json: bool) -> None:
    """List what is kept, most recently used first.

    \b
    Example:
      plancompiler cache ls
    """
    store = _store()
    kept = store.kept()
    total = sum(each.nbytes for each in kept)
    if as_json:
        print_json(
            {
                "folder": str(store.folder),
                "bytes": total,
                "limit": store.limit,
                "entries": [
                    {
                        "key": each.key,
                        "holds": _holds(each),
                        "job": each.facts.get("job"),
                        "ranks": _ranks(each),
                        "world_size": each.facts.get("world_size"),
                        "bytes": each.nbytes,
                        "last_used": _time(each),
                    }
                    for each in kept
                ],
            }
        )
        return
    print_table(
        ("key", "holds", "job", "ranks", ">bytes", "last used"),
        (
            (
                each.key[:_SHOWN_KEY],
                _holds(each),
                each.facts.get("job", "(damaged)"),
                f"{_rank_text(_ranks(each))} of {each.facts.get('world_size', '?')}",
                format_bytes(each.nbytes),
                _time(each),
            )
            for each in kept
        ),
    )
    print_note(f"{format_bytes(total)} of {format_bytes(store.limit)} in {store.folder}")


@cache_command.command("clear")
@click.option("--arrays", is_flag=True, help="Remove arrays that programs gave to jobs, not plans.")
@json_option
def clear_command(arrays: bool, as_json: bool) -> None:
    """Remove everything that is kept.

    \b
    Example:
      plancompiler cache clear
    """
    if arrays:
        folder = arrays_folder()
        count, nbytes = clear_kept_arrays()
    else:
        store = _store()
        folder = store.folder
        count, nbytes = store.clear()
    if as_json:
        print_json({"folder": str(folder), "removed": count, "bytes": nbytes})
        return
    print_note(f"removed {count} entries, {format_bytes(nbytes)}, from {folder}")


def _store() -> Store:
    store = open_store()
    if store is None:
        raise UsageError(
            "the plan cache is switched off",
            got=f"{FOLDER_VARIABLE}=0, or no home folder",
            hint=f"set {FOLDER_VARIABLE} to a folder",
        )
    return store


def _holds(kept: Kept) -> str:
    return "slices" if SLICES in kept.names else "plans"


def _ranks(kept: Kept) -> list[int]:
    """The ranks whose slices or plans are kept."""
    if SLICES in kept.names:
        return list(range(int(kept.facts.get("world_size", 0))))
    return sorted(int(name.rpartition("_")[2]) for name in kept.names)


def _rank_text(ranks: Sequence[int]) -> str:
    """`0-3, 8`; every second one from 0 on as `0-6:2`."""
    return ", ".join(
        str(start)
        if length == 1
        else f"{start}-{start + (length - 1) * stride}" + (f":{stride}" if stride > 1 else "")
        for start, length, stride in runs(ranks)
    )


def _time(kept: Kept) -> str:
    """Local time, to the second."""
    return datetime.fromtimestamp(kept.last_used).astimezone().isoformat(" ", "seconds")
