"""`Config`: what the user asks of the compiler besides the job itself. A job carries its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from plancompiler.errors import UsageError

PASS_NAMES = (
    "mixed_precision",
    "fold",
    "cse",
    "prune_scaling",
    "recompute",
    "zero",
    "sequence_parallel",
    "fuse_elementwise",
    "dce",
    "microbatch",
)
"""Every pass over jobs, in the order in which they run (`plancompiler.passes.PASSES`)."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
RECOMPUTE = ("none", "auto")
PRECISIONS = ("float32", "float16", "bfloat16")
FUSE_BYTES = 32 << 20
"""Default size of a bucket of fused reductions."""

PASS_OF = {
    "zero": "zero",
    "recompute": "recompute",
    "precision": "mixed_precision",
    "sequence_parallel": "sequence_parallel",
    "microbatches": "microbatch",
    "schedule": "microbatch",
}
"""Settings that one pass carries out."""
_NAME_LISTS = ("passes", "dp_axes", "tp_axes")


@dataclass(frozen=True, slots=True)
class Config:
    """How a job is compiled. Plain data with one text form, which is also its wire form."""

    passes: tuple[str, ...] | None = None
    """Names of the passes to run, in any order; None means those that run by default."""
    zero: int = 0
    """What is split over the data-parallel axes: 1 optimizer state, 2 gradients too, 3 parameters
    too."""
    prefetch: int = 1
    """With zero=3, layers whose parameters are gathered ahead of the one that is computed."""
    schedule: str = "gpipe"
    """Order of the micro-batches of a pipeline."""
    microbatches: int = 1
    """Pieces that the batch is cut into."""
    fuse_bytes: int = FUSE_BYTES
    """Largest bucket of fused reductions; 0 fuses none."""
    recompute: str = "none"
    """What is computed again for backward. `none`: only what the job marks. `auto`: the compiler
    chooses among the calls of transformer blocks."""
    memory_bytes: int = 0
    """With recompute=auto, most bytes that a device may take; 0: as few as can be."""
    precision: str = "float32"
    """Dtype of most of the computation; variables stay as they are."""
    loss_scale: int = 0
    """With precision=float16, what gradients are multiplied by at first; 0: 65536."""
    loss_scale_steps: int = 2000
    """With precision=float16, steps without overflow after which the scale is doubled."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel blocks are split along the sequence."""
    dp_axes: tuple[str, ...] = ("dp",)
    """Mesh axes that are data-parallel."""
    tp_axes: tuple[str, ...] = ("tp",)
    """Mesh axes that are tensor-parallel."""

    def __post_init__(self) -> None:
        for name in _NAME_LISTS:
            _check_names(name, getattr(self, name))
        _check_flag("sequence_parallel", self.sequence_parallel)
        for name in self.passes or ():
            if name not in PASS_NAMES:
                raise UsageError(
                    "there is no such pass",
                    got=repr(name),
                    expected=f"some of {', '.join(PASS_NAMES)}",
                )
        _check_number("zero", self.zero, 0, 3)
        _check_number("prefetch", self.prefetch, 0)
        _check_number("microbatches", self.microbatches, 1)
        _check_number("fuse_bytes", self.fuse_bytes, 0)
        _check_number("memory_bytes", self.memory_bytes, 0)
        _check_number("loss_scale", self.loss_scale, 0)
        _check_number("loss_scale_steps", self.loss_scale_steps, 1)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("recompute", self.recompute, RECOMPUTE)
        _check_choice("precision", self.precision, PRECISIONS)
        if self.memory_bytes and self.recompute != "auto":
            raise UsageError(
                "memory_bytes is what recompute=auto keeps to",
                got=f"memory_bytes={self.memory_bytes} recompute={self.recompute}",
                expected="recompute=auto",
            )
        for name in ("loss_scale", "loss_scale_steps"):
            value = getattr(self, name)
            if self.precision != "float16" and value != _DEFAULTS[name]:
                raise UsageError(
                    "losses are scaled for the range of float16 only",
                    got=f"{name}={value} precision={self.precision}",
                    expected="precision=float16",
                    hint=f"leave {name} out",
                )
        for name, needed in PASS_OF.items():
            value = getattr(self, name)
            if self.passes is not None and needed not in self.passes and value != _DEFAULTS[name]:
                raise UsageError(
                    f"{name}={value} is the work of a pass that is not chosen",
                    got=f"passes={','.join(self.passes)}",
                    expected=f"{needed} among the passes",
                )

    def __str__(self) -> str:
        """`zero=1 passes=cse,dce`: what differs from the defaults; empty for the default."""
        return " ".join(
            f"{each.name}={_format(getattr(self, each.name))}"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        )

    @classmethod
    def parse(cls, text: str) -> Config:
        """The config of a text form; a UsageError where it is none."""
        given: dict[str, str] = {}
        for part in text.split():
            name, equals, value = part.partition("=")
            if not equals or name not in _DEFAULTS or name in given:
                raise UsageError(
                    "a config does not parse",
                    got=repr(part),
                    expected=f"KEY=VALUE with a key of {', '.join(_DEFAULTS)}, each at most once",
                )
            given[name] = value
        return cls.of(given)

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Config:
        """The config of settings whose values may still be text (`"1"`, `"cse,dce"`)."""
        found: dict[str, object] = {}
        for name, value in settings.items():
            if name not in _DEFAULTS:
                raise UsageError(
                    "there is no such setting of the compiler",
                    got=repr(name),
                    expected=f"one of {', '.join(_DEFAULTS)}",
                )
            found[name] = _read(name, value) if isinstance(value, str) else value
        return cls(**found)  # type: ignore[arg-type]  # the constructor checks every value


_DEFAULTS: dict[str, object] = {each.name: each.default for each in fields(Config)}


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _read(name: str, text: str) -> object:
    if name in _NAME_LISTS:
        return tuple(part for part in text.split(",") if part)
    if isinstance(_DEFAULTS[name], bool):
        found = {"0": False, "1": True}.get(text)
        return text if found is None else found
    if isinstance(_DEFAULTS[name], int):
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{name} must be a whole number", got=repr(text)) from None
    return text


def _check_names(name: str, value: object) -> None:
    if value is None and name == "passes":
        return
    if not isinstance(value, tuple) or not all(
        isinstance(each, str) and each.isidentifier() for each in value
    ):
        raise UsageError(f"{name} must be a tuple of names", got=repr(value))
    if len(set(value)) != len(value):
        raise UsageError(f"{name} holds a name twice", got=repr(value))


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is on or off", got=repr(value), expected="True or False")


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]  # `whole` says it is a number
        raise UsageError(
            f"{name} must be a whole number",
            got=repr(value),
            expected=f"at least {least}" if most is None else f"{least} to {most}",
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(
            f"unknown {name}", got=repr(value), expected=f"one of {', '.join(choices)}"
        )


DEFAULT_CONFIG = Config()
