"""`plancompiler forecast`: what a job takes on a machine, before it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from plancompiler.cli.config_options import config_options, configured
from plancompiler.cli.job_file import load_job
from plancompiler.cli.options import (
    Setting,
    amount_option,
    job_argument,
    json_option,
    output_option,
    settings_option,
)
from plancompiler.cli.output import format_bytes, print_json, print_note, print_result, print_table
from plancompiler.costs.choice import chosen_machine
from plancompiler.forecasting import Forecast, forecast
from plancompiler.forecasting.chakra import write_traces
from plancompiler.forecasting.fitting import Change, changes_of
from plancompiler.forecasting.html_report import html_report
from plancompiler.forecasting.measured_run import MeasuredRun, run_measured, total_memory
from plancompiler.forecasting.memory import WorkBuffers
from plancompiler.ir.whole_file import named_file, naming_output
from plancompiler.running.session import BACKENDS, run
from plancompiler.running.world_size import world_size_of
from plancompiler.simulate import chrome_trace

AT_PEAK_SHOWN = 8
"""Values alive at the peak that a table shows."""


@click.command("forecast")
@job_argument
@click.option(
    "--ranks", type=click.IntRange(min=1), help="World size; by default what the job needs."
)
@output_option(
    "--trace",
    "the timeline",
    "Write the step's predicted timeline here, for Perfetto or chrome://tracing.",
)
@output_option("--html", "the report", "Write the forecast here as one page for browsers.")
@output_option(
    "--chakra",
    "the folder of traces",
    "Write execution traces of MLCommons Chakra into this folder.",
    folder=True,
)
@click.option("--check", is_flag=True, help="Run the job here too.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="threads",
    show_default=True,
    help="How ranks share a host, on a calibrated machine and with --check.",
)
@amount_option("--check-steps", 10, "How many steps --check times.")
@config_options
@settings_option
@json_option
def forecast_command(
    target: str,
    ranks: int | None,
    trace: Path | None,
    html: Path | None,
    chakra: Path | None,
    check: bool,
    backend: str,
    check_steps: int,
    config: Mapping[str, Any],
    settings: Mapping[str, Setting],
    as_json: bool,
) -> None:
    """Tell the memory, the traffic and the time of a job's step on a machine.

    Memory and traffic are read off the compiled plans; time is computed of the machine's figures.
    Nothing of the job runs.

    \b
    Example:
      plancompiler forecast examples/gpt.py -D dp=2 -D tp=2 --machine a100-sxm
      plancompiler forecast examples/mlp.py --ranks 2 --check
    """
    # A job carries a machine's figures, but its curves are in the file alone.
    machine = chosen_machine(config["machine"]) if "machine" in config else None
    job = configured(load_job(target, settings, ranks), config)
    predicted = forecast(job, machine, ranks=world_size_of(job, ranks), backend=backend)
    if trace is not None:
        with naming_output("a timeline", trace), named_file(trace) as file:
            file.write(chrome_trace(predicted.simulation).encode())
        print_note(f"wrote the timeline to {trace}")
    if html is not None:
        with naming_output("a report", html), named_file(html) as file:
            file.write(html_report(predicted).encode())
        print_note(f"wrote the report to {html}")
    if chakra is not None:
        with naming_output("traces", chakra):
            count = write_traces(predicted, chakra)
        print_note(f"wrote the traces of {count} ranks to {chakra}")
    changes = () if predicted.fits else changes_of(predicted)
    measured = run_measured(predicted, run, check_steps) if check else None
    if as_json:
        print_json(_plain(predicted, changes, measured))
        return
    _print(predicted)
    if not predicted.fits:
        _print_out_of_memory(predicted, changes)
    if measured is not None:
        _print_check(predicted, measured)


def _plain(
    predicted: Forecast, changes: Iterable[Change], measured: MeasuredRun | None
) -> dict[str, Any]:
    plain = predicted.json()
    if not predicted.fits:
        plain["at_peak"] = [
            {"name": each.name, "op": each.op, "source": each.source, "bytes": each.nbytes}
            for each in predicted.at_peak
        ]
        plain["changes"] = [
            {
                "settings": each.settings,
                "memory_bytes": each.forecast.worst.memory.total,
                "step_seconds": each.forecast.step_seconds,
                "fits": each.forecast.fits,
            }
            for each in changes
        ]
    return plain if measured is None else plain | measured.json(predicted)


def _print(predicted: Forecast) -> None:
    worst, busiest = predicted.worst, predicted.busiest
    kinds = ", ".join(
        f"{kind} {format_bytes(nbytes)}" for kind, nbytes in worst.memory.by_kind().items()
    )
    rows = [
        ("machine", f"{predicted.machine.name}, {predicted.ranks} ranks"),
        ("figures", _origin(predicted)),
        ("classes of ranks", str(len(predicted.classes))),
        ("memory of the fullest rank", f"{format_bytes(worst.memory.total)} (rank {worst.rank})"),
        ("", kinds),
        *_work_rows(worst.work),
        ("it fits", "yes" if predicted.fits else "no"),
        *(
            (f"traffic {link}", format_bytes(nbytes))
            for link, nbytes in predicted.traffic_by_link.items()
        ),
        ("step", f"{predicted.step_seconds * 1e3:.3f} ms"),
        ("computing, busiest rank", f"{busiest.compute_seconds * 1e3:.3f} ms"),
        (
            "communication not hidden",
            f"{busiest.exposed_communication_seconds * 1e3:.3f} ms",
        ),
    ]
    if predicted.bubble_fraction is not None:
        rows.append(("bubble", f"{predicted.bubble_fraction:.1%}"))
    rows.append(("model FLOPs utilization", f"{predicted.mfu:.1%}"))
    rows.append(("forecast took", f"{predicted.seconds_taken:.2f} s"))
    print_table(("what", "value"), rows)


def _work_rows(work: WorkBuffers | None) -> Iterator[tuple[str, str]]:
    """What kernels make beside that memory, and of which it is not known."""
    if work is None:
        return
    yield "work buffers of its kernels, beside", format_bytes(work.total)
    if work.not_counted:
        yield "", f"without {', '.join(work.not_counted)}: not known before they run"


def _origin(predicted: Forecast) -> str:
    measured, known = len(predicted.measured), len(predicted.machine.sources)
    return f"{measured} of {known} measured, the others of data sheets and rules of thumb"


def _print_out_of_memory(predicted: Forecast, changes: Collection[Change]) -> None:
    capacity = format_bytes(predicted.machine.device.memory_bytes)
    print_result()
    print_result(f"A device holds {capacity}. Alive when the fullest rank holds most:")
    print_table(
        (">bytes", "value", "op", "source"),
        (
            (format_bytes(each.nbytes), each.name, each.op, each.source)
            for each in predicted.at_peak[:AT_PEAK_SHOWN]
        ),
    )
    print_result()
    print_table(
        ("change", "fits", ">memory", ">step"),
        (
            (
                str(each),
                "yes" if each.forecast.fits else "no",
                format_bytes(each.forecast.worst.memory.total),
                f"{each.forecast.step_seconds * 1e3:.3f} ms",
            )
            for each in changes
        ),
    )
    if not any(each.forecast.fits for each in changes):
        print_result("None of the compiler's settings is enough: split the job over more ranks, or")
        print_result("make its batch or its model smaller.")


def _print_check(predicted: Forecast, measured: MeasuredRun) -> None:
    error = measured.json(predicted)["error"]
    print_result()
    print_table(
        ("", ">predicted", ">measured", ">error"),
        (
            (
                "memory of all ranks",
                format_bytes(total_memory(predicted)),
                format_bytes(measured.memory_bytes),
                f"{error['memory']:+.2%}",
            ),
            (
                "traffic of all ranks",
                format_bytes(predicted.traffic_bytes),
                format_bytes(measured.traffic_bytes),
                f"{error['traffic']:+.2%}",
            ),
            (
                "step",
                f"{predicted.step_seconds * 1e3:.3f} ms",
                f"{measured.step_seconds * 1e3:.3f} ms",
                f"{error['step']:+.1%}",
            ),
        ),
    )
