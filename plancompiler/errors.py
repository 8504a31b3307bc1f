"""Every error a user can meet, one class per situation, each with a stable code.

An error says what went wrong, where (op, the user's source line, rank), what was got, what was
expected, and what to do. The command line prints `str(error)` and exits with `error.exit_code`:
2 for wrong use, 1 for work that failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as plain data, the form in which it crosses processes."""

    code: str
    what: str
    op: str | None = None
    source: str | None = None
    rank: int | None = None
    got: str | None = None
    expected: str | None = None
    hint: str | None = None


class Located(Protocol):
    """What has a name and a line of the user's, as ops have."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> object: ...


class PlanCompilerError(Exception):
    """Base of all errors raised on purpose; subclasses only differ in code and meaning."""

    code: ClassVar[str] = "E000"
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        at: Located | None = None,
        op: str | None = None,
        source: object | None = None,
        rank: int | None = None,
        got: object | None = None,
        expected: object | None = None,
        hint: str | None = None,
    ) -> None:
        """`at` is the op that gives `op` and `source`."""
        if at is not None:
            op, source = at.name, at.source
        self.report = ErrorReport(
            code=self.code,
            what=what.rstrip("."),
            op=op,
            source=None if source is None else str(source),
            rank=rank,
            got=None if got is None else str(got),
            expected=None if expected is None else str(expected),
            hint=None if hint is None else hint.rstrip("."),
        )
        super().__init__(what)

    def __str__(self) -> str:
        report = self.report
        parts = [f"[{report.code} {type(self).__name__}] {_ended(report.what)}"]
        where = []
        if report.op is not None:
            where.append(f"op {report.op!r}")
        if report.source is not None:
            where.append(f"at {report.source}")
        if report.rank is not None:
            where.append(f"on rank {report.rank}")
        if where:
            parts.append(f"Where: {' '.join(where)}.")
        if report.got is not None:
            parts.append(f"Got: {_ended(report.got)}")
        if report.expected is not None:
            parts.append(f"Expected: {_ended(report.expected)}")
        if report.hint is not None:
            parts.append(f"What to do: {_ended(report.hint)}")
        return " ".join(parts)

    def at(
        self, *, op: str | None = None, source: object | None = None, rank: int | None = None
    ) -> Self:
        """Itself, with the place filled in where it was not known to the raiser."""
        report = self.report
        self.report = replace(
            report,
            op=report.op if report.op is not None else op,
            source=report.source if report.source is not None or source is None else str(source),
            rank=report.rank if report.rank is not None else rank,
        )
        return self

    @classmethod
    def from_report(cls, report: ErrorReport) -> PlanCompilerError:
        """Rebuild the error a peer reported; an unknown code becomes the base class."""
        error = CATALOG.get(report.code, PlanCompilerError)("")
        error.report = report
        return error


def _ended(text: str) -> str:
    """A text with a full stop, which it may have: what was got is often another error's text."""
    return text if text.endswith(".") else f"{text}."


# --- wrong use: the command line or its files -----------------------------------------------------


class UsageError(PlanCompilerError):
    """A command or function was called in a way that cannot mean anything."""

    code, exit_code = "E100", 2


class UnknownModeError(PlanCompilerError):
    """The compile mode is none of the four."""

    code, exit_code = "E101", 2


class JobFileError(PlanCompilerError):
    """The job file is missing, does not load or parse, or has no such function."""

    code, exit_code = "E102", 2


# --- the job: placements, SBP, shapes ------------------------------------------------------------


class SbpSyntaxError(PlanCompilerError):
    """A string is not an SBP."""

    code, exit_code = "E110", 2


class SbpAxisError(PlanCompilerError):
    """A split names an axis that the tensor does not have."""

    code, exit_code = "E111", 2


class SbpLengthError(PlanCompilerError):
    """An NdSbp does not have one entry per mesh axis."""

    code, exit_code = "E112", 2


class PlacementError(PlanCompilerError):
    """A placement is malformed: a rank twice, a ragged array, a bad device type or axis names."""

    code, exit_code = "E113", 2


class RankError(PlanCompilerError):
    """A rank is outside the world."""

    code, exit_code = "E114", 2


class ShapeError(PlanCompilerError):
    """The shapes given to an op do not fit together."""

    code = "E120"


class DTypeError(PlanCompilerError):
    """A dtype is unknown or not accepted by the op."""

    code = "E121"


class PlacementMismatchError(PlanCompilerError):
    """An op was given values that live on different placements."""

    code = "E122"


class JobError(PlanCompilerError):
    """The job as a whole is malformed: no output, a name twice, an op without its producer."""

    code = "E123"


class GradientError(PlanCompilerError):
    """A gradient was asked for that does not exist."""

    code = "E124"


class UnknownOpError(PlanCompilerError):
    """No op of that kind is defined here."""

    code = "E125"


class AttributeValueError(PlanCompilerError):
    """An op's attribute is missing, unknown or out of its range."""

    code = "E126"


class IndexingError(AttributeValueError, IndexError):
    """An index does not fit the tensor; Python's own IndexError, too, as walks over rows ask."""

    code = "E196"


class UnknownNameError(PlanCompilerError, AttributeError):
    """Something has no such name; Python's own AttributeError, too, as `hasattr` asks."""

    code = "E197"


class TracingError(PlanCompilerError):
    """A tracing function was used outside `pc.job()`, or a value left its job."""

    code = "E127"


class MicrobatchError(PlanCompilerError):
    """A job cannot be cut into the micro-batches and pipeline stages that were asked for."""

    code = "E128"


class InplaceError(PlanCompilerError):
    """A change in place would alter a tensor's layout, or what the tape still needs."""

    code = "E129"


class FeedError(PlanCompilerError):
    """A value fed to an input has a wrong name, shape or dtype, or is missing."""

    code = "E130"


class DataError(PlanCompilerError):
    """A data file of a job is missing or does not hold what the job says."""

    code = "E131"


class CheckpointError(PlanCompilerError):
    """A checkpoint is missing, damaged, or holds other variables than the job."""

    code = "E132"


class OutputError(PlanCompilerError):
    """A file, folder or stream that a result was to go to cannot be written."""

    code = "E133"


class ModelImportError(PlanCompilerError):
    """A model of another system cannot be imported."""

    code = "E134"


class MachineFileError(PlanCompilerError):
    """A machine file does not describe a machine."""

    code = "E135"
    exit_code = 2


# --- the wire ------------------------------------------------------------------------------------


class WireFormatError(PlanCompilerError):
    """Bytes are not the message they claim to be."""

    code = "E140"


class VersionError(PlanCompilerError):
    """Two sides run versions that do not fit together."""

    code = "E141"


# --- the compiler --------------------------------------------------------------------------------


class BoxingError(PlanCompilerError):
    """No way is known from one layout to another."""

    code = "E150"


class IdOverflowError(PlanCompilerError):
    """A rank, family, lane or slot does not fit its field of an id."""

    code = "E160"


class VerifyError(PlanCompilerError):
    """A verifier found a job, boxing graph or plan that breaks a rule."""

    code = "E170"


class DeadlockError(VerifyError):
    """Tasks wait for each other in a circle."""

    code = "E171"


class MemoryOverlapError(VerifyError):
    """Two registers alive at once share memory."""

    code = "E172"


class DigestMismatchError(VerifyError):
    """Two ranks disagree about a register that crosses between them."""

    code = "E173"


class MixedKernelsError(PlanCompilerError):
    """Ranks compute with other numeric kernels, whose results differ in their last bits."""

    code = "E174"


# --- the cluster ---------------------------------------------------------------------------------


class ClusterError(PlanCompilerError):
    """The cluster could not do what was asked."""

    code = "E180"


class MasterUnreachableError(ClusterError):
    """No master answers at the address."""

    code = "E181"


class RegistrationError(ClusterError):
    """The master refused a worker."""

    code = "E182"


class WorkerLostError(ClusterError):
    """A worker went away while it was needed."""

    code = "E183"


class DeadlineError(ClusterError):
    """A phase did not end within its time limit."""

    code = "E184"


class SecurityError(ClusterError):
    """Somebody may not do this: an address, certificate, token or role does not allow it."""

    code, exit_code = "E185", 2


class JobCancelledError(ClusterError):
    """The job was cancelled."""

    code = "E186"


class LimitError(ClusterError):
    """There is too much of something for the cluster at once."""

    code = "E187"


class EngineError(ClusterError):
    """An engine is not installed, or cannot start the ranks that were asked for."""

    code = "E189"


# --- execution -----------------------------------------------------------------------------------


class ExecutionError(PlanCompilerError):
    """A task failed while it ran."""

    code = "E190"


class NonFiniteError(ExecutionError):
    """An output that must be finite is not."""

    code = "E191"


class TransportError(ExecutionError):
    """Ranks could not exchange data."""

    code = "E192"


class AbortedError(ExecutionError):
    """The run was stopped because another rank failed or the user asked for it."""

    code = "E193"


class DeviceError(ExecutionError):
    """A device or an optional library that the plan needs is not there."""

    code = "E194"


class CustomOpError(ExecutionError):
    """A function of a user's own op (its kernel, `infer`, gradient or cost) raised an exception."""

    code = "E195"


def _catalog() -> dict[str, type[PlanCompilerError]]:
    classes: dict[str, type[PlanCompilerError]] = {}
    pending: list[type[PlanCompilerError]] = [PlanCompilerError]
    while pending:
        cls = pending.pop()
        classes[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return classes


CATALOG: dict[str, type[PlanCompilerError]] = _catalog()
"""Code → class, for every error above."""
