"""The verifier of a job's types: what came from elsewhere is what the op table makes of it.

`ir.verify_job` checks names and order; here every op's kind, attributes, operands and layout are
held against its definition, so that nothing after it needs to doubt a shape.
"""

from __future__ import annotations

from plancompiler.errors import JobError, PlanCompilerError
from plancompiler.ir import Job, Op, Value
from plancompiler.ir.sbp import Split
from plancompiler.ir.shard import element_count
from plancompiler.ops.registry import Types, infer_types, op_def

MAX_TENSOR_BYTES = 1 << 56
"""Of one global tensor. The bytes of all that a rank holds are counted in 64 bits."""


def verify_types(job: Job) -> None:
    """Raise JobError, or what the op table says, where an op is not what its definition makes of
    its inputs and attributes.
    """
    made: dict[str, Value] = {}
    inferred: dict[tuple[object, ...], Types] = {}
    """By kind and by the identity of attributes and shapes: layers repeat, and share them."""
    for op in job.ops:
        for value in op.inputs:
            known = made.get(value.name)
            # Values compare element by element.
            if known is not value and (
                known is None or known.type != value.type or known.placement != value.placement
            ):
                raise _wrong(op, "an op reads a value as something else than was made", value)
        read = tuple((id(value.shape), value.dtype) for value in op.inputs)
        key = (op.kind, id(op.attrs), read)
        types = inferred.get(key)
        if types is None:
            types = inferred[key] = _inferred(op)
        if types != op.output_types:
            raise JobError(
                "an op makes something else than it says",
                at=op,
                got=", ".join(map(str, op.outputs)) or "nothing",
                expected=", ".join(map(str, types)) or "nothing",
            )
        for _, source in op_def(op.kind).mutates:
            if op.inputs[source].placement != op.placement:
                raise _wrong(op, "an op changes a value in place elsewhere", op.inputs[source])
        for value in op.outputs:
            _verify_value(op, value)
            made[value.name] = value


def _inferred(op: Op) -> Types:
    try:
        return infer_types(op.kind, op.input_types, dict(op.attrs))
    except PlanCompilerError as error:
        raise error.at(op=op.name, source=op.source) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _wrong(op, f"no op {op.kind!r} has such inputs and attributes", error) from error


def _verify_value(op: Op, value: Value) -> None:
    if min(value.shape, default=0) < 0:
        raise _wrong(op, "a tensor has a negative extent", value)
    if element_count(value.shape) * value.dtype.itemsize > MAX_TENSOR_BYTES:
        raise _wrong(op, "a tensor is larger than any memory", value)
    if op.sbp is not None:
        if len(op.sbp) != op.placement.ndim:
            raise _wrong(op, "an op's layout does not fit its mesh", op.sbp)
        for entry in op.sbp:
            if isinstance(entry, Split) and entry.axis >= len(value.shape):
                raise _wrong(op, "an op's layout splits an axis that its output lacks", op.sbp)


def _wrong(op: Op, what: str, got: object) -> JobError:
    return JobError(what, at=op, got=str(got))
