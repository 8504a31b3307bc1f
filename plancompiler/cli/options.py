"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from plancompiler.errors import UsageError
from plancompiler.limits.time_limits import DEADLINE

Command = TypeVar("Command", bound=Callable[..., Any])

Setting = int | float | bool | str

DEFAULT_STEPS = 100
TLS_NAMES = ("--tls-ca", "--tls-cert", "--tls-key")


def with_options(command: Callable[..., Any], *options: Callable[[Any], Any]) -> Any:
    """A command with some options, which its help shows in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def amount_option(name: str, default: int, text: str, least: int = 1) -> Callable[[Any], Any]:
    """An option that is a whole number of at least `least`."""
    return click.option(
        name, type=click.IntRange(min=least), default=default, show_default=True, help=text
    )


def output_option(
    name: str, what: str, text: str, *, folder: bool = False, required: bool = False
) -> Callable[[Any], Any]:
    """An option that names a file to write, or a folder: a place where nothing can be written is
    refused before the command does anything.
    """

    def checked(
        _context: click.Context, _parameter: click.Parameter, path: Path | None
    ) -> Path | None:
        if path is not None:
            # It brings NumPy, which a command that only shows its help does without.
            from plancompiler.ir.whole_file import check_writable  # noqa: PLC0415  # see above

            check_writable(path, what, folder=folder)
        return path

    kind = click.Path(path_type=Path)
    return click.option(name, type=kind, required=required, callback=checked, help=text)


def parse_setting(text: str) -> tuple[str, Setting]:
    """`key=value`, the value read as int, float, bool or else str: the first that fits."""
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key.isidentifier():
        raise UsageError("a -D setting does not parse", got=repr(text), expected="key=value")
    return key, _parse_value(value)


def _parse_value(value: str) -> Setting:
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    lowered = value.lower()
    return lowered == "true" if lowered in ("true", "false") else value


def _parse_settings(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, Setting]:
    return dict(map(parse_setting, values))


job_argument = click.argument("target", metavar="FILE[:FUNCTION]")
job_or_plans_argument = click.argument("target", metavar="FILE[:FUNCTION]|PLAN_DIR")


settings_option = click.option(
    "-D",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_parse_settings,
    help="A setting passed to the job's function; may be repeated.",
)


allow_ops_option = click.option(
    "--allow-ops",
    multiple=True,
    metavar="MODULE",
    help="Let custom ops of jobs be imported from this module; may be repeated.",
)


mode_option = click.option(
    "--mode",
    metavar="MODE",
    help="Compile mode: naive, rank_per_thread, rank_per_iter or rank_per_process. "
    "Else PLANCOMPILER_COMPILE_MODE is read.",
)


allow_mixed_kernels_option = click.option(
    "--allow-mixed-kernels",
    is_flag=True,
    help="Where ranks compute with other versions or kernels of NumPy and its BLAS, warn "
    "instead of failing: their results differ in the last bits.",
)


cache_option = click.option(
    "--no-cache",
    "cache",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Compile everything, and keep nothing in the plan cache.",
)


strict_restore_option = click.option(
    "--no-strict-restore",
    "strict_restore",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Leave what the checkpoint holds and the job does not have.",
)


anomaly_option = click.option(
    "--anomaly",
    is_flag=True,
    help="Check what every op makes, and name the one that makes the first inf or nan.",
)


steps_option = amount_option("--steps", DEFAULT_STEPS, "How many steps.")


def save_options(command: Command) -> Command:
    """--save --save-every as the parameters `save` and `save_every` (0: only at the end)"""

    @functools.wraps(command)
    def with_folder(*args: Any, save: Path | None, save_every: int, **kwargs: Any) -> Any:
        if save_every and save is None:
            raise UsageError(
                "--save-every needs a folder to save in",
                got=f"--save-every {save_every}",
                expected="--save DIR",
            )
        return command(*args, save=save, save_every=save_every, **kwargs)

    folder = click.Path(path_type=Path)
    decorated: Command = with_options(
        with_folder,
        click.option("--save", type=folder, help="Write a checkpoint at the end."),
        click.option(
            "--save-every",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="With --save: a checkpoint after every N steps too, written while steps go on.",
        ),
    )
    return decorated


deadline_option = click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=DEADLINE,
    show_default=True,
    metavar="SECONDS",
    help="How long a rank may stand still, its processor idle, while others wait for it.",
)


def timeline_options(command: Command) -> Command:
    """--trace --profile"""
    decorated: Command = with_options(
        command,
        click.option(
            "--trace",
            type=click.Path(path_type=Path),
            help="Write the run's timeline as a Chrome trace, for Perfetto.",
        ),
        click.option("--profile", is_flag=True, help="Show where each rank's time went."),
    )
    return decorated


log_format_option = click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="How log lines and notes on stderr look; json: one object a line.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout."
)


token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the secret of master, workers and clients; by default the master makes one "
    "that those of its user on this machine find.",
)


def tls_options(command: Command) -> Command:
    """--tls-ca --tls-cert --tls-key as one parameter `tls`: all three or none"""
    # It brings gRPC, which the commands that have these options need in any case.
    from plancompiler.cluster.channel import TlsFiles  # noqa: PLC0415  # see above

    @functools.wraps(command)
    def with_files(
        *args: Any, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, **kwargs: Any
    ) -> Any:
        files = (tls_ca, tls_cert, tls_key)
        tls = None
        if tls_ca is not None and tls_cert is not None and tls_key is not None:
            tls = TlsFiles(tls_ca, tls_cert, tls_key)
        elif any(files):
            raise UsageError(
                "TLS needs three files",
                got=" ".join(
                    name for name, file in zip(TLS_NAMES, files, strict=True) if file is not None
                ),
                expected=" ".join(TLS_NAMES),
            )
        return command(*args, tls=tls, **kwargs)

    helps = (
        "PEM file of the authority that signed the other side's certificate.",
        "PEM file of one's own certificate.",
        "PEM file of one's own key.",
    )
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = map(lambda name, text: click.option(name, type=kind, help=text), TLS_NAMES, helps)
    decorated: Command = with_options(with_files, *options)
    return decorated
