"""The op table: one `OpDef` per op kind says everything the system knows about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from plancompiler.errors import AttributeValueError, UnknownOpError
from plancompiler.ir.op import Attrs, AttrValue, TensorType
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.sbp import NdSbp, Reduction
from plancompiler.ir.shard import Region, element_count
from plancompiler.ops.rule import (
    NdSignature,
    Signature,
    expand_rule,
    nd_signatures,
    signatures_of_rule,
)

Array = np.ndarray[Any, np.dtype[Any]]
AttrMap = Mapping[str, AttrValue]
Types = tuple[TensorType, ...]


@dataclass(slots=True)
class KernelContext:
    """What a kernel may know besides its arrays. One context lives as long as its task."""

    attrs: AttrMap
    input_shapes: tuple[tuple[int, ...], ...]
    """Global shapes."""
    output_shapes: tuple[tuple[int, ...], ...]
    input_regions: tuple[Region, ...]
    """Which box of the global tensor each local array is."""
    output_regions: tuple[Region, ...]
    seed: int = 0
    """The job's seed."""
    step: int = 0
    """Counts the steps of the run; set before each call."""
    state: dict[str, Any] = field(default_factory=dict)
    """Scratch that a kernel keeps between calls (an open file, a work buffer)."""


class Infer(Protocol):
    """Shape rule: output types from input types, or a ShapeError / DTypeError."""

    def __call__(self, inputs: Types, attrs: AttrMap) -> Types: ...


class Rule(Protocol):
    """Sharding rule as a function, where the line depends on shapes or attributes."""

    def __call__(self, inputs: Types, outputs: Types, attrs: AttrMap) -> str: ...


class Gradient(Protocol):
    """Gradients of the inputs from those of the outputs (None where there is none).

    Written with tensor operators and `apply`, so it serves symbolic and eager tensors alike.
    """

    def __call__(
        self,
        attrs: AttrMap,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        grads: Sequence[Any],
    ) -> Sequence[Any]: ...


class Kernel(Protocol):
    """Compute local outputs into `outputs` (allocated by the caller) from local `inputs`."""

    def __call__(
        self, context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> None: ...


class Extra(Protocol):
    """Signatures along a mesh axis of `parts` devices that the rule line cannot say."""

    def __call__(
        self, inputs: Types, outputs: Types, attrs: AttrMap, parts: int
    ) -> Sequence[Signature]: ...


class Legal(Protocol):
    """Whether a combination of 1-D signatures is legal on a whole mesh (nested splits)."""

    def __call__(
        self,
        inputs: Types,
        outputs: Types,
        attrs: AttrMap,
        signature: NdSignature,
        hierarchy: tuple[int, ...],
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class OpDef:
    """The one definition of an op."""

    kind: str
    infer: Infer
    rule: str | Rule
    kernel: Kernel
    gradient: Gradient | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    """Sets of inputs in which the op is linear together: `((0, 1),)` for add, `((0,), (1,))` for
    matmul."""
    reduction: Reduction | None = Reduction.SUM
    """How outputs combine when a summed-away factor is split; None forbids it."""
    extra: Extra | None = None
    legal: Legal | None = None
    flops: Callable[[Types, Types, AttrMap], int] | None = None
    """Floating-point operations on global tensors; None means one per output element."""
    view: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs where the output's bytes are the input's, so no work is needed if they
    share memory."""
    inplace: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs where the kernel may write the output over the input."""
    mutates: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs where the output is the input variable's next value and takes its
    storage."""
    source: bool = False
    """Makes data from outside the job (inputs, data files): may run ahead of the step."""
    doc: str = ""


_TABLE: dict[str, OpDef] = {}


def register(definition: OpDef) -> OpDef:
    """Add an op to the table; a kind can be defined once."""
    if definition.kind in _TABLE:
        raise AttributeValueError("an op kind is defined twice", got=repr(definition.kind))
    _TABLE[definition.kind] = definition
    return definition


def op_def(kind: str) -> OpDef:
    """The definition of an op kind."""
    try:
        return _TABLE[kind]
    except KeyError:
        raise UnknownOpError(
            "no such op", got=repr(kind), hint="`plancompiler ops` lists the op kinds"
        ) from None


def op_table() -> dict[str, OpDef]:
    """All definitions by kind, in order of definition."""
    return dict(_TABLE)


def apply(kind: str, *inputs: TensorOperators, **attrs: AttrValue) -> Any:
    """Run or record an op on tensors of one kind; its output, or a tuple where it has several."""
    outputs = inputs[0]._apply(kind, inputs, attrs)  # noqa: SLF001  # the door of every tensor class
    return outputs[0] if len(outputs) == 1 else outputs


def apply_source(like: TensorOperators, kind: str, **attrs: AttrValue) -> Any:
    """The output of an op without inputs, on the placement of `like`."""
    outputs = like._source(kind, attrs)  # noqa: SLF001
    return outputs[0] if len(outputs) == 1 else outputs


def infer_types(kind: str, inputs: Types, attrs: AttrMap) -> Types:
    """Output types of an op."""
    return op_def(kind).infer(inputs, attrs)


def flops_of(kind: str, inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    """Floating-point operations of an op on its global tensors."""
    definition = op_def(kind)
    if definition.flops is not None:
        return definition.flops(inputs, outputs, attrs)
    return sum(element_count(tensor.shape) for tensor in outputs)


@lru_cache(maxsize=16384)
def axis_signatures(
    kind: str, inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> tuple[Signature, ...]:
    """All legal signatures of an op along one mesh axis of `parts` devices."""
    definition = op_def(kind)
    named = dict(attrs)
    line = definition.rule
    if not isinstance(line, str):
        line = line(inputs, outputs, named)
    found = signatures_of_rule(
        expand_rule(line, inputs, outputs), definition.linear, definition.reduction
    )
    if definition.extra is not None:
        found = (*found, *definition.extra(inputs, outputs, named, parts))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=16384)
def mesh_signatures(
    kind: str, inputs: Types, outputs: Types, attrs: Attrs, hierarchy: tuple[int, ...]
) -> tuple[NdSignature, ...]:
    """All legal signatures of an op on a mesh, in rule order."""
    definition = op_def(kind)
    per_axis = [axis_signatures(kind, inputs, outputs, attrs, parts) for parts in hierarchy]
    found = nd_signatures(per_axis, hierarchy)
    if definition.legal is None:
        return found
    named = dict(attrs)
    return tuple(
        signature
        for signature in found
        if definition.legal(inputs, outputs, named, signature, hierarchy)
    )


def only_signature(sbp: NdSbp, count_in: int, count_out: int) -> NdSignature:
    """All operands in one layout: what ops with a demanded layout (redistribute) have."""
    return NdSignature((sbp,) * count_in, (sbp,) * count_out)
