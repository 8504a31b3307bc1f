"""`Value` and `Op`: the nodes of a job, and how tracing makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import NoReturn, Protocol

from plancompiler.errors import ShapeError, TracingError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import (
    NO_ORIGIN,
    UNKNOWN_SOURCE,
    Attrs,
    AttrValue,
    Micro,
    Origin,
    SourceLine,
    TensorType,
)
from plancompiler.ir.operators import Scalar, TensorOperators
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp
from plancompiler.ir.source import user_line


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Value(TensorOperators):
    """A symbolic tensor of a job. `shape` is global; `name` is unique in its job."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    placement: Placement
    source: SourceLine = UNKNOWN_SOURCE
    """The user's line that made it, where it was traced in this process."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

    def _apply(
        self, kind: str, inputs: Sequence[Value], attrs: Mapping[str, AttrValue]
    ) -> tuple[Value, ...]:
        return current_tracer(self).apply(kind, inputs, attrs)

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> Value:
        return current_tracer(self).redistribute(self, placement, sbp)

    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> Value:
        return current_tracer(self).full(self.placement, shape, dtype, value)

    def _source(self, kind: str, attrs: Mapping[str, AttrValue]) -> tuple[Value, ...]:
        return current_tracer(self).source(self.placement, kind, attrs)

    def __bool__(self) -> bool:
        raise TracingError(
            "a symbolic value has no truth value while a job is traced",
            got=str(self),
            hint="use pc.where to choose by data, and `is` to tell values apart",
        )

    def detach(self) -> Value:
        """The same value, through which no gradient flows."""
        return self._unary("stop_gradient")

    def item(self) -> NoReturn:
        raise self._no_numbers("number")

    def tolist(self) -> NoReturn:
        raise self._no_numbers("list of numbers")

    def numpy(self) -> NoReturn:
        raise self._no_numbers("array")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._no_numbers("number")
        return str(self)

    def __float__(self) -> float:
        raise self._no_numbers("number")

    def __int__(self) -> int:
        raise self._no_numbers("number")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise self._no_numbers("array")

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError(
                "a scalar has no length", source=user_line(), got=str(self), expected="an axis"
            )
        return self.shape[0]

    def _no_numbers(self, wanted: str) -> TracingError:
        return TracingError(
            f"a symbolic value is no {wanted} while a job is traced",
            source=user_line(),
            got=str(self),
            hint="stay within functions on values, and read numbers from outputs of the run",
        )

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"

    def __repr__(self) -> str:
        return f"<Value {self}>"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation of a job on global tensors. Two are equal that say the same of equal names."""

    name: str
    """Unique in the job."""
    kind: str
    """Key into the op table."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Attrs
    placement: Placement
    sbp: NdSbp | None = None
    """What the user demands of the outputs' layout (inputs, variables, redistribute); else
    inferred."""
    source: SourceLine = UNKNOWN_SOURCE
    origin: Origin = NO_ORIGIN
    micro: Micro | None = None
    """Set on every op of a job with a pipeline."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and _comparable(self) == _comparable(other)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        """Shapes and dtypes of the inputs."""
        return tuple(value.type for value in self.inputs)

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        """Shapes and dtypes of the outputs."""
        return tuple(value.type for value in self.outputs)

    def attr(self, name: str, default: AttrValue | None = None) -> AttrValue | None:
        """An attribute, or the default where it is not set."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default


def _comparable(op: Op) -> tuple[object, ...]:
    """All that an op says; values by what they are, as `==` of values is an op itself."""
    return tuple(
        tuple((value.name, value.type, value.placement) for value in getattr(op, each.name))
        if each.name in ("inputs", "outputs")
        else getattr(op, each.name)
        for each in fields(Op)
    )


class Tracer(Protocol):
    """What records ops while a job is traced."""

    def apply(
        self, kind: str, inputs: Sequence[Value], attrs: Mapping[str, AttrValue]
    ) -> tuple[Value, ...]: ...

    def redistribute(
        self,
        value: Value,
        placement: Placement | None,
        sbp: NdSbp | None,
        along: str | None = None,
    ) -> Value: ...

    def reduced(self, value: Value) -> Value: ...

    def full(
        self, placement: Placement, shape: tuple[int, ...], dtype: DType, value: Scalar
    ) -> Value: ...

    def source(
        self, placement: Placement, kind: str, attrs: Mapping[str, AttrValue]
    ) -> tuple[Value, ...]: ...


ACTIVE_TRACER: ContextVar[Tracer | None] = ContextVar("plancompiler_tracer", default=None)


def current_tracer(value: Value | None = None) -> Tracer:
    """The tracer of the enclosing `with pc.job()`, which `value` asks for if it is given."""
    tracer = ACTIVE_TRACER.get()
    if tracer is None:
        raise TracingError(
            "symbolic values can only be used while their job is traced",
            source=user_line(),
            got=None if value is None else f"{value}, traced at {value.source}",
            hint="put the code inside `with pc.job(...)`; numbers of a finished job are its "
            'outputs: pc.output("name", value) in the job, session.step()["name"] when it runs',
        )
    return tracer
