"""SBP: how a tensor lies on a mesh axis (split, broadcast, partial), and on all of them (NdSbp).

An op may also want an input split with a halo around each piece (`halo`); no value is made so.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from plancompiler.errors import SbpAxisError, SbpLengthError, SbpSyntaxError
from plancompiler.ir.halo import Halo, parse_halo


class Reduction(enum.Enum):
    """How the parts of a partial value combine."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    AVG = "avg"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"Reduction.{self.name}"


@dataclass(frozen=True, slots=True)
class Split:
    """The tensor's axis `axis` is cut into balanced pieces, one per device of the mesh axis."""

    axis: int

    def __str__(self) -> str:
        return f"S({self.axis})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every device of the mesh axis holds the whole value."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device holds a part of full shape; the value is their reduction."""

    reduction: Reduction = Reduction.SUM

    def __str__(self) -> str:
        return "P" if self.reduction is Reduction.SUM else f"P({self.reduction})"


Sbp = Split | Broadcast | Partial | Halo

BROADCAST = Broadcast()
PARTIAL_SUM = Partial()

_PATTERN = re.compile(r"\s*(?:S\(\s*(\d{1,4})\s*\)|(B)|P(?:\(\s*([a-z]+)\s*\))?)\s*")
_EXPECTED = "S(i), B, P, P(max), P(min), P(prod) or P(avg)"


@lru_cache(maxsize=4096)
def parse_sbp(text: str) -> Sbp:
    """`S(0)`, `B`, `P` or `P(max)` as a value; the inverse of `str`."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SbpSyntaxError("not an SBP", got=repr(text), expected=_EXPECTED)
    axis, broadcast, reduction = match.groups()
    if axis is not None:
        return Split(int(axis))
    if broadcast is not None:
        return BROADCAST
    try:
        return Partial(Reduction(reduction or "sum"))
    except ValueError:
        raise SbpSyntaxError("unknown reduction", got=repr(text), expected=_EXPECTED) from None


@dataclass(frozen=True, slots=True)
class NdSbp:
    """One SBP per mesh axis, outermost first."""

    entries: tuple[Sbp, ...]

    @staticmethod
    def of(value: NdSbp | Sbp | str | Iterable[Sbp | str]) -> NdSbp:
        """Anything a user may write: `["S(0)", "B"]`, `"[S(0), B]"`, `"B"`, `Split(0)`."""
        if isinstance(value, NdSbp):
            return value
        if isinstance(value, str):
            return _parse_nd_sbp(value)
        if isinstance(value, (Split, Broadcast, Partial)):
            return NdSbp((value,))
        if not isinstance(value, Iterable):
            raise SbpSyntaxError(
                "not an SBP", got=f"{type(value).__name__} {value!r}", expected=_EXPECTED
            )
        entries = []
        for entry in value:
            if isinstance(entry, str):
                entries.append(parse_sbp(entry))
            elif isinstance(entry, (Split, Broadcast, Partial)):
                entries.append(entry)
            else:
                raise SbpSyntaxError("not an SBP", got=repr(entry), expected=_EXPECTED)
        return NdSbp(tuple(entries))

    @staticmethod
    def parse(text: str) -> NdSbp:
        """The inverse of `str`: also layouts with halos, which users do not write."""
        if "H(" not in text:
            return _parse_nd_sbp(text)
        entries = text.strip().removeprefix("[").removesuffix("]").split(",")
        return NdSbp(tuple(parse_halo(entry) or parse_sbp(entry) for entry in entries))

    @staticmethod
    def broadcast(ndim: int) -> NdSbp:
        """Broadcast on each of `ndim` mesh axes."""
        return NdSbp((BROADCAST,) * ndim)

    def check(self, mesh_ndim: int, tensor_ndim: int) -> NdSbp:
        """Itself if it fits a mesh and a tensor of these numbers of axes; else an error."""
        if len(self.entries) != mesh_ndim:
            raise SbpLengthError(
                "an SBP list needs one entry per mesh axis",
                got=f"{self} ({len(self.entries)} entries)",
                expected=f"{mesh_ndim} entries",
            )
        for entry in self.entries:
            if isinstance(entry, Split) and entry.axis >= tensor_ndim:
                raise SbpAxisError(
                    "a split names an axis that the tensor does not have",
                    got=str(self),
                    expected=f"split axes below {tensor_ndim}, the tensor's number of axes",
                )
        return self

    def replace(self, mesh_axis: int, sbp: Sbp) -> NdSbp:
        """A copy with one entry changed."""
        return NdSbp((*self.entries[:mesh_axis], sbp, *self.entries[mesh_axis + 1 :]))

    @property
    def has_partial(self) -> bool:
        return any(isinstance(entry, Partial) for entry in self.entries)

    @property
    def has_halo(self) -> bool:
        return any(isinstance(entry, Halo) for entry in self.entries)

    def without_halos(self) -> NdSbp:
        """The layout with a split in place of every halo, as values are made."""
        return NdSbp(
            tuple(Split(entry.axis) if isinstance(entry, Halo) else entry for entry in self.entries)
        )

    def reduced(self) -> NdSbp:
        """The layout with broadcast in place of every partial entry."""
        return NdSbp(
            tuple(BROADCAST if isinstance(entry, Partial) else entry for entry in self.entries)
        )

    def __iter__(self) -> Iterator[Sbp]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, mesh_axis: int) -> Sbp:
        return self.entries[mesh_axis]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.entries))}]"


@lru_cache(maxsize=4096)
def _parse_nd_sbp(text: str) -> NdSbp:
    stripped = text.strip()
    if not (stripped.startswith("[") and stripped.endswith("]")):
        return NdSbp((parse_sbp(text),))
    inner = stripped[1:-1].strip()
    return NdSbp(tuple(parse_sbp(part) for part in inner.split(",")) if inner else ())
