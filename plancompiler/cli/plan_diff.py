"""`plancompiler plan-diff`: two sets of plans, or two forecasts, beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.options import allow_ops_option, json_option
from plancompiler.cli.output import format_bytes, print_json, print_result, print_table
from plancompiler.cli.plan_folder import load_plans
from plancompiler.errors import UsageError
from plancompiler.forecasting.difference import (
    Different,
    described_plans,
    difference,
    forecast_of_text,
)
from plancompiler.ir.arguments import is_file, is_folder
from plancompiler.ir.whole_file import read_file

EXIT_DIFFERENT = 1
DIGEST_SHOWN = 12
"""Characters of a digest in a table."""


@click.command("plan-diff")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@allow_ops_option
@json_option
@click.pass_context
def plan_diff_command(
    context: click.Context, first: Path, second: Path, allow_ops: tuple[str, ...], as_json: bool
) -> None:
    """Compare two folders of plans, or two forecasts, by the user's source lines.

    Shown is what differs: tasks, collectives by kind, bytes between ranks, memory and predicted
    time, then the sums. The exit code is 0 if all is equal, and 1 otherwise.

    \b
    Example:
      plancompiler compile examples/gpt.py -D dp=2 --out plain
      plancompiler compile examples/gpt.py -D dp=2 --zero 1 --out sharded
      plancompiler plan-diff plain sharded
      plancompiler forecast examples/gpt.py -D dp=2 --json > forecast.json
    """
    folders = [_is_plan_folder(path) for path in (first, second)]
    if folders[0] is not folders[1]:
        raise UsageError(
            "a folder of plans and a forecast cannot be compared",
            got=f"{first} and {second}",
            expected="two folders of plans or two forecasts",
        )
    one, other = (
        described_plans(load_plans(str(path), {}, {}, allow_ops)) if folder else _forecast(path)
        for path, folder in zip((first, second), folders, strict=True)
    )
    known = difference(one, other)
    if as_json:
        print_json({"first": str(first), "second": str(second)} | known.json())
    elif known.equal:
        print_result("The same." if not known.lines else "The same plans, made by other lines.")
    else:
        columns = (f">{first}", f">{second}", ">change")
        if known.lines:
            print_table(("source", "figure", *columns), _rows_of_lines(known.lines.items()))
            print_result()
        print_table(("sum", *columns), (_row(each) for each in known.sums))
    if not known.equal:
        context.exit(EXIT_DIFFERENT)


def _is_plan_folder(path: Path) -> bool:
    if not is_folder(path) and not is_file(path):
        raise UsageError(
            "there is no such folder of plans or forecast",
            got=str(path),
            expected="what `plancompiler compile --out` or `forecast --json` wrote",
        )
    return is_folder(path)


def _forecast(path: Path) -> dict[str, Any]:
    return forecast_of_text(read_file("a forecast", path), f"the forecast {path}")


def _rows_of_lines(
    lines: Iterable[tuple[str, Iterable[Different]]],
) -> Iterator[tuple[str, ...]]:
    for source, figures in lines:
        shown = source or "(no line)"
        for each in figures:
            yield shown, *_row(each)
            shown = ""


def _row(each: Different) -> tuple[str, str, str, str]:
    return each.name, _shown(each, each.first), _shown(each, each.second), _change(each)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _shown(each: Different, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"{len(value)} items"
    if not _is_number(value):
        return str(value)[:DIGEST_SHOWN] if each.name == "digest" else str(value)
    if "bytes" in each.name:
        return format_bytes(value)
    return f"{value * 1e3:.3f} ms" if "seconds" in each.name else f"{value:g}"


def _change(each: Different) -> str:
    """To the byte, for sizes of which the first digits agree."""
    if isinstance(each.first, list) and isinstance(each.second, list):
        return "others"
    if not _is_number(each.first) or not _is_number(each.second):
        return ""
    more = each.second - each.first
    if "bytes" in each.name:
        return f"{more:+,.0f} B"
    return f"{more * 1e3:+.6g} ms" if "seconds" in each.name else f"{more:+g}"
