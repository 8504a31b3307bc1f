"""Tracing: `with pc.job(name) as job:` records the ops that its body applies, and freezes them.

The yielded object is the `Job` itself. It is empty while the body runs and is filled once, when the
body ends; after that it never changes. The recording is done by a `JobBuilder`, which is the active
tracer of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from plancompiler.errors import (
    JobError,
    PlacementMismatchError,
    PlanCompilerError,
    TracingError,
    UsageError,
)
from plancompiler.frontend.open_layouts import with_config
from plancompiler.frontend.out import takes_out
from plancompiler.frontend.stored import kept_array
from plancompiler.hooks.eager_world import eager_world
from plancompiler.ir import (
    NO_ORIGIN,
    AttrValue,
    DType,
    Job,
    NdSbp,
    Op,
    Origin,
    Phase,
    Placement,
    SourceLine,
    Value,
    freeze_attrs,
    plain_value,
    verify_job,
)
from plancompiler.ir.operators import SbpLike, Scalar
from plancompiler.ir.placement import require_placement
from plancompiler.ir.settings import Settings, default_settings
from plancompiler.ir.source import shown_path, user_line
from plancompiler.ir.value import ACTIVE_TRACER, Tracer
from plancompiler.ops.liveness import live_ops
from plancompiler.ops.registry import infer_types
from plancompiler.plan.plan import COLLECTIVE_STREAMS

CONSTANT_ELEMENTS = 1024
"""A constant of so many elements is part of the job's text and travels with it."""


class JobBuilder:
    """The tracer of one job: names ops, infers types, remembers the user's lines."""

    def __init__(self, name: str, seed: int = 0, config: Settings | None = None) -> None:
        self.name = name
        self.seed = seed
        self.config = default_settings() if config is None else config
        self.ops: list[Op] = []
        """Everything recorded so far, in order."""
        self.attachments: dict[object, object] = {}
        """What other parts of the frontend remember per job, by a key of their own."""
        self.rates: dict[int, Callable[[int], float]] = {}
        """See `Job.rates`."""
        self.open_layouts: set[str] = set()
        """See `Job.open_layouts`."""
        self._producers: dict[str, tuple[Op, Value]] = {}
        self._counts: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._shared: dict[object, tuple[Value, ...]] = {}
        self._source: SourceLine | None = None
        self._origin = NO_ORIGIN

    # The Tracer protocol.

    def apply(
        self, kind: str, inputs: Sequence[Value], attrs: Mapping[str, AttrValue]
    ) -> tuple[Value, ...]:
        """Record an op on values that live on one placement."""
        if not inputs:
            raise TracingError("an op without inputs needs a placement", op=kind)
        placement = getattr(inputs[0], "placement", None)
        for value in inputs[1:]:
            other = getattr(value, "placement", None)
            if other is not placement and other != placement:
                raise PlacementMismatchError(
                    "an op needs all its inputs on one placement",
                    op=self._next_name(kind),
                    source=self.source_line(),
                    got=", ".join(
                        f"%{getattr(each, 'name', each)} on {getattr(each, 'placement', None)}"
                        for each in inputs
                    ),
                    hint="move a value first: value.redistribute(placement=...)",
                )
        return self.add(kind, inputs, attrs, placement)

    def redistribute(
        self,
        value: Value,
        placement: Placement | None,
        sbp: NdSbp | None,
        along: str | None = None,
    ) -> Value:
        """Record a change of layout. With `sbp` None the compiler chooses it on the new placement:
        the same where both meshes have as many axes (partial becomes broadcast), else broadcast.
        With `along`, only that mesh axis takes its entry of `sbp`, and the others stay so too.
        """
        target = value.placement if placement is None else placement
        if target == value.placement and sbp is None:
            return value
        attrs: dict[str, AttrValue] = {} if along is None else {"along": along}
        return self.add("redistribute", (value,), attrs | _COLLECTIVE_STREAM.get(), target, sbp)[0]

    def reduced(self, value: Value) -> Value:
        """Record that a value is wanted reduced, and else in the layout that it is made in."""
        return self.add("redistribute", (value,), _COLLECTIVE_STREAM.get(), value.placement)[0]

    def full(
        self, placement: Placement, shape: tuple[int, ...], dtype: DType, value: Scalar
    ) -> Value:
        """Record a constant tensor."""
        attrs: dict[str, AttrValue] = {"shape": shape, "dtype": str(dtype), "value": value}
        return self.add("fill", (), attrs, placement)[0]

    def source(
        self, placement: Placement, kind: str, attrs: Mapping[str, AttrValue]
    ) -> tuple[Value, ...]:
        """Outputs of an op without inputs whose value only depends on attributes and the step; one
        such op per placement serves the whole job.
        """
        key = (kind, freeze_attrs(attrs), placement)
        outputs = self._shared.get(key)
        if outputs is None:
            outputs = self._shared[key] = self.add(kind, (), attrs, placement)
        return outputs

    # The rest of the frontend.

    def add(
        self,
        kind: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, AttrValue],
        placement: Placement | None,
        sbp: NdSbp | None = None,
    ) -> tuple[Value, ...]:
        """Record an op on `placement`; `sbp` demands the layout of its outputs. Returns these."""
        name = self._next_name(kind)
        source = self.source_line()
        try:
            for value in inputs:
                self._check_owned(value)
            placement = require_placement(placement)
            plain = {key: plain_value(key, value) for key, value in attrs.items()}
            types = infer_types(kind, tuple(value.type for value in inputs), plain)
            if sbp is not None:
                for tensor in types:
                    sbp.check(placement.ndim, len(tensor.shape))
            if sbp is not None and sbp.has_partial and not inputs:
                return self._partial_source(kind, attrs, placement, sbp)
        except PlanCompilerError as error:
            error.at(op=name, source=source)
            raise
        if len(types) == 1:
            names: Sequence[str] = (name,)
        else:
            names = [f"{name}.{slot}" for slot in range(len(types))]
        outputs = tuple(
            Value(value_name, tensor.shape, tensor.dtype, placement, source)
            for value_name, tensor in zip(names, types, strict=True)
        )
        attributes = freeze_attrs(plain)
        op = Op(
            name, kind, tuple(inputs), outputs, attributes, placement, sbp, source, self._origin
        )
        stem = _stem(kind)
        self._counts[stem] = self._counts.get(stem, 0) + 1
        self.ops.append(op)
        for value in outputs:
            self._producers[value.name] = (op, value)
        return outputs

    def _partial_source(
        self, kind: str, attrs: Mapping[str, AttrValue], placement: Placement, sbp: NdSbp
    ) -> tuple[Value, ...]:
        """Outputs demanded partial of an op that makes whole values: made whole, then changed."""
        if kind == "variable":
            raise UsageError(
                "a variable cannot be partial: its parts would be updated apart",
                got=str(sbp),
                expected="split or broadcast on every mesh axis",
            )
        return tuple(
            self.redistribute(value, None, sbp)
            for value in self.add(kind, (), attrs, placement, sbp.reduced())
        )

    def producer(self, value: Value) -> Op:
        """The op that makes a value of this job."""
        self._check_owned(value)
        return self._producers[value.name][0]

    def next_number(self, purpose: str) -> int:
        """Counts from 0 per purpose, in order of tracing: the same for every layout of a job."""
        number = self._numbers[purpose] = self._numbers.get(purpose, -1) + 1
        return number

    def drawing_from(self, generator: object) -> NoReturn:
        """TracingError: a job draws all numbers from the seed that it is run with."""
        raise TracingError(
            "a job has no generator: its random numbers follow from the seed that it is run with",
            got=type(generator).__name__,
            hint="leave generator= out; key= tells draws apart",
        )

    @contextmanager
    def lines_of(self, source: SourceLine) -> Iterator[None]:
        """Ops recorded inside belong to this user's line (gradients belong to their forward op)."""
        before, self._source = self._source, source
        try:
            yield
        finally:
            self._source = before

    @contextmanager
    def originating(self, origin: Origin) -> Iterator[None]:
        """Ops recorded inside come from there."""
        before, self._origin = self._origin, origin
        try:
            yield
        finally:
            self._origin = before

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Ops recorded inside belong to this phase of the step, and to no region."""
        return self.originating(Origin(phase, stage=self._origin.stage))

    def stage(self, number: int) -> AbstractContextManager[None]:
        """Ops recorded inside belong to this pipeline stage; the innermost counts."""
        return self.originating(replace(self._origin, stage=number))

    @contextmanager
    def region(self, name: str, checkpoint: bool) -> Iterator[None]:
        """Ops recorded inside may be computed again together; the outermost region counts.

        Within a region that is only a candidate, one that the user marked takes over.
        """
        outer = self._origin
        if outer.region and (outer.checkpoint or not checkpoint):
            yield
            return
        number = self.next_number(f"region {name}")
        called = name if number == 0 else f"{name} (call {number + 1})"
        with self.originating(replace(outer, region=called, checkpoint=checkpoint)):
            yield

    def source_line(self) -> SourceLine:
        """The user's line that is being recorded."""
        return user_line() if self._source is None else self._source

    def finish(self) -> Job:
        """The checked job: ops that influence no output, update or variable are left out."""
        job = Job(
            self.name,
            live_ops(self.ops),
            self.seed,
            self.config,
            rates=self.rates,
            open_layouts=frozenset(self.open_layouts),
        )
        verify_job(job)
        return with_config(job, self.config)

    def _next_name(self, kind: str) -> str:
        stem = _stem(kind)
        return f"{stem}_{self._counts.get(stem, 0)}"

    def _check_owned(self, value: object) -> None:
        if not isinstance(value, Value):
            raise TracingError(
                "an op of a job works on values of the job",
                got=type(value).__name__,
                hint="bring arrays in through pc.input or pc.constant",
            )
        known = self._producers.get(value.name)
        if known is None or known[1] is not value:
            raise TracingError(
                f"a value of another job was used in job {self.name!r}",
                got=f"{value}, traced at {value.source}",
                hint="values live only inside the `with pc.job(...)` block that made them: build "
                "it in this job again, or feed its numbers through pc.input",
            )


class _JobTrace:
    """The context manager behind `job`."""

    def __init__(self, name: str, seed: int, config: Settings | None) -> None:
        self._builder = JobBuilder(name, seed, config)
        self._job = Job(name, (), seed, self._builder.config)
        self._token: Token[Tracer | None] | None = None

    def __enter__(self) -> Job:
        if ACTIVE_TRACER.get() is not None:
            raise TracingError(
                "a job is already being traced here",
                got=repr(self._job.name),
                hint="end the first `with pc.job(...)` block before the next",
            )
        if self._job.ops:
            raise TracingError("a job can be traced only once", got=repr(self._job.name))
        self._token = ACTIVE_TRACER.set(self._builder)
        return self._job

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._token is not None:
            ACTIVE_TRACER.reset(self._token)
        if error is not None:
            if isinstance(error, PlanCompilerError) and traceback is not None:
                error.at(source=_raised_line(traceback))
            return
        finished = self._builder.finish()
        # The one moment at which a Job changes: from empty to complete. What was cached while it
        # was empty (a user who read job.inputs inside the block) is forgotten.
        fresh = self._job.__dict__
        fresh.clear()
        fresh.update({each.name: getattr(finished, each.name) for each in fields(finished)})


def job(name: str, seed: int = 0, config: Settings | None = None) -> _JobTrace:
    """Trace a job: `with pc.job("mlp") as job: ...`, after which `job` is a complete `Job`.

    `seed` drives initialisers, dropout and data order; `config` says how the job wants to be
    compiled, wherever that happens (`pc.Config(zero=1)`). An exception in the body propagates and
    leaves the job empty; one of ours learns the user's line on the way, if it has none. Raises
    JobError at the end of the block if nothing is reported (`pc.output`) or two inputs, outputs
    or variables have one name.
    """
    if not isinstance(name, str) or not name:
        raise UsageError("a job needs a name", got=repr(name), expected="a non-empty string")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise UsageError("a seed is a whole number of 63 bits", got=repr(seed))
    if config is not None and not isinstance(config, Settings):
        raise UsageError(
            "a job's config must be a Config", got=type(config).__name__, expected="pc.Config(...)"
        )
    return _JobTrace(name, seed, config)


def as_job(value: object) -> Job:
    """`value` if it is a complete Job; else an error that says what is missing."""
    if not isinstance(value, Job):
        raise UsageError("not a job", got=type(value).__name__, expected="what pc.job(...) yields")
    if not value.ops:
        raise JobError(
            f"job {value.name!r} is empty: its `with` block has not ended, or ended with an error",
            hint="return or use the job after the block",
        )
    return value


def current_builder() -> JobBuilder:
    """The builder of the enclosing `with pc.job()`, for what only a traced job can do."""
    tracer = ACTIVE_TRACER.get()
    if not isinstance(tracer, JobBuilder):
        raise TracingError(
            "this can only be used while a job is traced",
            got="no job that is being traced",
            hint="put the code inside `with pc.job(...)`",
        )
    return tracer


def current_recorder() -> Any:
    """The builder of the enclosing `with pc.job()`; outside of jobs what runs ops at once, which
    has the same methods as far as ops are concerned.
    """
    return eager_world() if ACTIVE_TRACER.get() is None else current_builder()


def stage(number: int) -> AbstractContextManager[None]:
    """Ops recorded inside are on this pipeline stage: `with pc.stage(1): x = block(x)`.

    Stages count from 0 and may be named in any order; the innermost `with` counts, and gradients
    are on the stage of what they differentiate. Where no op of a job is named, its placements say
    what its stages are. With the schedule `interleaved` this numbers the chunks of the model.
    Raises UsageError for what is no stage, and TracingError outside a job.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(
            "a pipeline stage is a whole number", got=repr(number), expected="0, 1, 2, ..."
        )
    return current_builder().stage(number)


_COLLECTIVE_STREAM: ContextVar[dict[str, AttrValue]] = ContextVar(
    "plancompiler_collective_stream",
    default={},  # noqa: B039  # nobody changes it
)
"""The attribute `stream` of changes of layout that are recorded, if they have one."""


@contextmanager
def collective_stream(name: str) -> Iterator[None]:
    """Changes of layout asked for inside run on this stream of each rank:
    `with pc.collective_stream("compute"): y = pc.all_reduce(y)`.

    The streams are `collective`, `gradient`, `parameter` and `compute`; elsewhere the job's config
    decides (`streams`). The first op that names a stream for a layout of a value decides for all
    who read it so. Results do not depend on it, and eager tensors communicate at once, whatever is
    named. Raises UsageError for another name.
    """
    if name not in COLLECTIVE_STREAMS:
        raise UsageError(
            "there is no such stream of collectives",
            got=repr(name),
            expected=f"one of {', '.join(COLLECTIVE_STREAMS)}",
        )
    before = _COLLECTIVE_STREAM.set({"stream": name})
    try:
        yield
    finally:
        _COLLECTIVE_STREAM.reset(before)


def input(
    name: str,
    shape: int | Sequence[int],
    dtype: DType | str,
    placement: Placement,
    sbp: SbpLike | None = None,
    *,
    batched: bool = True,
) -> Value:
    """A tensor that the caller feeds each step under `name`.

    `shape` is global; `sbp` is how the devices hold it (default: broadcast). Micro-batches cut the
    first axis, unless `batched` is False: then all of them see the whole value (class weights, a
    mask). Raises SbpLengthError, SbpAxisError, DTypeError or ShapeError, each with the caller's
    line.
    """
    attrs: dict[str, AttrValue] = {
        "name": name,
        "shape": _shape(shape),
        "dtype": _dtype_name(dtype),
    }
    if not batched:
        attrs["batched"] = False
    current_builder()  # an input is fed by who runs the job, so there is none outside
    return source_tensor("input", attrs, placement, sbp)


def source_tensor(
    kind: str,
    attrs: Mapping[str, AttrValue],
    placement: Placement,
    sbp: SbpLike | None,
) -> Value:
    """Record an op without inputs and with one output in a demanded layout (default: broadcast)."""
    recorder = current_recorder()
    tensor: Value = recorder.add(kind, (), attrs, placement, demanded_sbp(placement, sbp))[0]
    if sbp is None and isinstance(recorder, JobBuilder):
        recorder.open_layouts.add(tensor.name)
    return tensor


def demanded_sbp(placement: Placement, sbp: SbpLike | None) -> NdSbp:
    """What the user wrote as an NdSbp; broadcast by default."""
    if sbp is None:
        return NdSbp.broadcast(getattr(placement, "ndim", 1))
    return NdSbp.of(sbp)


def output(name: str, value: Value, finite: bool | None = None) -> None:
    """Report `value` after each step under `name`.

    With `finite` the run fails with NonFiniteError when the value is not finite; by default this is
    checked for floating scalars (losses).
    """
    builder = current_builder()
    checked = finite
    if checked is None:
        checked = isinstance(value, Value) and value.shape == () and value.dtype.is_floating
    builder.add(
        "output", (value,), {"name": name, "finite": checked}, getattr(value, "placement", None)
    )


@takes_out
def full(
    shape: int | Sequence[int],
    value: Scalar,
    dtype: DType | str | None = None,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    out: Any = None,
) -> Value:
    """A tensor that holds one number; without `sbp` the compiler chooses its layout. By default it
    is float32, int64 or bool, as the number is.
    """
    placement = require_placement(placement, "full")
    if dtype is None:
        known = {bool: DType.BOOL, int: DType.INT64}
        dtype = known.get(type(value), DType.FLOAT32)
    attrs: dict[str, AttrValue] = {
        "shape": _shape(shape),
        "dtype": _dtype_name(dtype),
        "value": value,
    }
    demanded = None if sbp is None else demanded_sbp(placement, sbp)
    tensor: Value = current_recorder().add("fill", (), attrs, placement, demanded)[0]
    return tensor


@takes_out
def zeros(
    shape: int | Sequence[int],
    dtype: DType | str = "float32",
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    out: Any = None,
) -> Value:
    """A tensor of zeros; without `sbp` the compiler chooses its layout."""
    return full(shape, 0, dtype, require_placement(placement, "zeros"), sbp)


@takes_out
def ones(
    shape: int | Sequence[int],
    dtype: DType | str = "float32",
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    out: Any = None,
) -> Value:
    """A tensor of ones; without `sbp` the compiler chooses its layout."""
    return full(shape, 1, dtype, require_placement(placement, "ones"), sbp)


@takes_out
def constant(
    value: object,
    dtype: DType | str,
    placement: Placement,
    sbp: SbpLike | None = None,
    *,
    out: Any = None,
) -> Value:
    """A tensor whose elements never change: a number, nested lists or an array.

    Up to CONSTANT_ELEMENTS elements are written into the job. More are written to a file of the
    user's cache that is named by its content. Without `sbp` the compiler chooses its layout.
    """
    recorder = current_recorder()
    array = np.asarray(value)
    target = DType.parse(dtype)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UsageError(
            "a constant is a tensor of numbers",
            source=recorder.source_line(),
            got=f"{array.dtype} of shape {array.shape}",
        )
    kind = "constant"
    attrs: dict[str, AttrValue] = {"shape": array.shape, "dtype": str(target)}
    if array.size > CONSTANT_ELEMENTS:
        kept = kept_array(array.astype(target.numpy, copy=False))
        kind = "stored_constant"
        attrs |= {"file": kept.file, "key": kept.key}
    else:
        attrs["values"] = tuple(_number(item) for item in array.ravel().tolist())
    demanded = None if sbp is None else demanded_sbp(placement, sbp)
    tensor: Value = recorder.add(kind, (), attrs, placement, demanded)[0]
    return tensor


def _raised_line(traceback: TracebackType) -> SourceLine | None:
    """The innermost line outside this package on the way to an error."""
    line = None
    step: TracebackType | None = traceback
    while step is not None:
        shown = shown_path(step.tb_frame.f_code.co_filename)
        if shown:
            line = SourceLine(shown, step.tb_lineno)
        step = step.tb_next
    return line


def _stem(kind: str) -> str:
    """What the ops of a kind are named after: for a custom op, its function."""
    return kind.rpartition(":")[2].rpartition(".")[2]


def _dtype_name(dtype: DType | str) -> str:
    if isinstance(dtype, int):
        raise UsageError(
            "the extents of a tensor are one argument here",
            source=user_line(),
            got=f"{dtype} in the place of the dtype",
            expected="pc.zeros((2, 3), placement=placement)",
        )
    return str(DType.parse(dtype))


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _number(value: bool | int | float) -> int | float:
    return int(value) if isinstance(value, bool) else value
