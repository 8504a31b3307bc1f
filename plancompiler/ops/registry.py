"""The op table: one `OpDef` per op kind says everything the system knows about it."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from plancompiler.errors import AttributeValueError, GradientError, ShapeError, UnknownOpError
from plancompiler.ir.op import Attrs, AttrValue, TensorType
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.sbp import NdSbp, Reduction
from plancompiler.ir.shard import Region, element_count
from plancompiler.ops.attributes import Attribute, Int, Recorded, check_attributes, complete
from plancompiler.ops.exchange import Exchange, Peers
from plancompiler.ops.operands import Operands, parse_operands
from plancompiler.ops.ring import Ring, Round
from plancompiler.ops.rule import (
    NdSignature,
    Signature,
    nd_signatures,
    parse_rule_line,
    signatures_of_line,
)

Array = np.ndarray[Any, np.dtype[Any]]
AttrMap = Mapping[str, Any]
"""Attributes as rules and kernels are given them (see `ops.attributes`)."""
Arrays = Sequence[Array]
Precision = Literal["low", "following", "traced"]
Tensors = Sequence[Any]
"""Symbolic or eager tensors; of gradients, None where there is none."""
Types = tuple[TensorType, ...]


COUNTER = Int("counter", 0, least=0)
"""Of ops that count steps."""

Facts = ParamSpec("Facts")
Tensor = TypeVar("Tensor", bound=TensorOperators)

AT_LEAST_ONE = range(1, 1 << 16)
"""The counts of inputs of an op that takes any number of them."""


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
    microbatch: int = 0
    """Counts the micro-batches of the step; regions are those of this one."""
    state: dict[str, Any] = field(default_factory=dict)
    """What a kernel keeps between calls (an open file, a table)."""
    work: dict[Hashable, Any] = field(default_factory=dict)
    """Work buffers (`ops.kernel.scratch`): what is in them is lost between calls, so that tasks
    that run one after another share them."""
    arrays: Any = np
    """The namespace that makes arrays (`empty`, `arange`, …) like those the kernel is given."""
    rates: Callable[[int, int], float | None] | None = None
    """The learning rate of (optimizer, step) as it is fed; None for the job's own."""
    ring: Ring | None = None
    """The devices with which inputs go round; None where all that is needed is here."""
    peers: Peers | None = None
    """The devices with which rows are exchanged; None where none are."""
    fixed: bool = False
    """Whether calls are given the same tuples of arrays again and again, as those of plans are."""


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
        inputs: Tensors,
        outputs: Tensors,
        grads: Tensors,
    ) -> Tensors: ...


class Kernel(Protocol):
    """Compute local outputs into `outputs` (allocated by the caller) from local `inputs`."""

    def __call__(self, context: KernelContext, inputs: Arrays, outputs: Arrays) -> None: ...


class Extra(Protocol):
    """Signatures along a mesh axis of `parts` devices that the rule line cannot say."""

    def __call__(
        self, inputs: Types, outputs: Types, attrs: AttrMap, parts: int
    ) -> Sequence[Signature]: ...


class Windows(Protocol):
    """Signatures that split an axis of windows over inputs; these have halos around their pieces
    (`ops.halo`).
    """

    def __call__(self, inputs: Types, outputs: Types, attrs: AttrMap) -> Sequence[Signature]: ...


class LinearIf(Protocol):
    """Whether an op is linear as it says, with inputs of these types and these attributes."""

    def __call__(self, inputs: Types, attrs: AttrMap) -> bool: ...


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


Alias = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class View:
    """How the output of an op of one input lies in that one's memory, which eager tensors share."""

    take: Callable[[AttrMap, tuple[int, ...]], Alias]
    """`(attributes, shape of the output)`: what makes the output of an array; it shares the array's
    memory, but for some that are reshaped."""
    put: Callable[[Any, Any, AttrMap], Any] | None
    """`(input, output, attributes)`: what the input becomes where the output is changed, by ops;
    None where elements of the output share memory, so that it cannot be changed.
    """
    cuts: bool = False
    """The output lacks elements of the input, or turns an axis around."""
    overlaps: Callable[[AttrMap], bool] = lambda attrs: False
    """Whether elements of the output share memory with these attributes, as where `put` is None."""
    on_host: bool = False
    """`take` needs NumPy's arrays: on devices the output is a copy that is kept up to date."""

    def writable(self, attrs: AttrMap) -> bool:
        """Whether the output can be changed in place."""
        return self.put is not None and not self.overlaps(attrs)


Formula = Callable[..., Any]
"""`(attributes, *inputs)`: what an op gives, written with other ops: a tensor, or a tuple."""


@dataclass(frozen=True, slots=True)
class OpDef:
    """The one definition of an op."""

    kind: str
    infer: Infer | str
    """The shape rule; or the line of `operands`, from which it follows."""
    rule: str | Rule
    kernel: Kernel
    gradient: Gradient | None = None
    attrs: tuple[Attribute, ...] = ()
    """The attributes that the op may have."""
    operands: str = ""
    """Names, dtypes and shapes of operands (`ops.operands`), checked before `infer` is asked."""
    inputs: int | Sequence[int] | None = None
    """How many inputs the op has, or may have; None where `operands` or a `rule` that is a text
    says it, or where `infer` checks it."""
    linear: tuple[tuple[int, ...], ...] = ()
    """Sets of inputs in which the op is linear together: `((0, 1),)` for add, `((0,), (1,))` for
    matmul."""
    linear_if: LinearIf | None = None
    """Where `linear` holds only for some dtypes or attributes; None means always."""
    reduction: Reduction | None = Reduction.SUM
    """How outputs combine when a summed-away factor is split; None forbids it."""
    windows: Windows | None = None
    extra: Extra | None = None
    legal: Legal | None = None
    passing: Round | Exchange | None = None
    """What the kernel can pass between devices itself: inputs that go round, for which it has
    `KernelContext.ring`, or rows that are exchanged, for which it has `peers`."""
    flops: int | Callable[[Types, Types, AttrMap], int] | None = None
    """Floating-point operations on global tensors, or how many per element of the first input; None
    means one per output element."""
    pointwise: Callable[[Types, Types, AttrMap], int] | None = None
    """Operations on global tensors beside those of `flops`, where these are of products and the
    kernel does others between them: a device does the others at its rate for float32."""
    view: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs where the output's bytes are the input's, so no work is needed if they
    share memory."""
    inplace: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs where the kernel may write the output over the input."""
    mutates: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs where the output is the input variable's next value and takes its
    storage."""
    collects: bool = False
    """Runs once per micro-batch and makes one value per step, complete after the last."""
    takes_bfloat16: bool = False
    """The kernel works on arrays of bfloat16 as they are, as those of views and moves do; else it
    is given float32 in their place, and what it makes is rounded (`ops.kernel.kernel_for`)."""
    moves: bool = False
    """Every element of the outputs is one of the inputs' elements, unchanged."""
    elementwise: bool = False
    """Every output element is a function of the input elements at its place alone, not of where
    that place is: the same on a block as on the whole."""
    strided: View | None = None
    """The output is a view of the input with other strides: eager tensors share memory there."""
    neutral: float | None = None
    """The second input, or the scalar, that leaves the first as it is."""
    mirrored: str | None = None
    """The kind that gives the same of the inputs in the other order."""
    code: str | None = None
    """An elementwise op in C++ and CUDA: an expression of the operands `{0}`, `{1}`, `{2}`, where T
    is the type of the result; a scalar is the operand after the tensor."""
    precision: Precision = "traced"
    """What mixed precision makes of the op: "low" works on 16 bits, "following" takes the dtype of
    what it is fed, "traced" works as it was traced. Ops that only move elements follow."""
    wide: tuple[int, ...] = ()
    """Inputs that stay in float32 where the op works on 16 bits."""
    portable: bool = True
    """Whether the kernel runs on a device's arrays as it is: it makes arrays with `context.arrays`
    and calls only what the arrays of devices have."""
    counts_steps: bool = False
    """The kernel goes by the number of the optimizer's step, which its `context.step` is. Compiled
    functions have several such numbers: the attribute `counter` says which of them is meant."""
    scaled: Sequence[int] = ()
    """Inputs that the op multiplies by its attribute `grad_scale` before all else."""
    skips_itself: bool = False
    """An update that sees by itself whether gradients are finite."""
    skippable: bool = False
    """An update that loss scaling can skip (`ops.loss_scale`)."""
    source: bool = False
    """Makes data from outside the job (inputs, data files): may run ahead of the step."""
    formula: Formula | None = None
    """What an elementwise op gives, by other elementwise ops (`ops.elementwise_program`)."""
    files: tuple[str, ...] = ()
    """Attributes that name files to read: a path, or a tuple of paths."""
    doc: str = ""

    def __post_init__(self) -> None:
        if self.counts_steps and COUNTER not in self.attrs:
            object.__setattr__(self, "attrs", (*self.attrs, COUNTER))

    @property
    def line(self) -> Operands | None:
        """What is said of the operands."""
        line = self.infer if isinstance(self.infer, str) else self.operands
        if not line:
            return None
        return parse_operands(line, self.rule if isinstance(self.rule, str) else None)

    @property
    def input_counts(self) -> Sequence[int] | None:
        """How many inputs the op may have; None where `infer` checks it."""
        if self.inputs is None and self.line is not None:
            return self.line.counts
        if self.inputs is None and isinstance(self.rule, str):
            return (len(parse_rule_line(self.rule)[0]),)
        return (self.inputs,) if isinstance(self.inputs, int) else self.inputs

    def complete(self, attrs: Mapping[str, AttrValue]) -> dict[str, Any]:
        """Recorded attributes as rules and kernels are given them: with defaults, as read."""
        return complete(self.attrs, attrs)

    def types(self, inputs: Types, attrs: Mapping[str, AttrValue]) -> Types:
        """Output types of the op, once the number of inputs and the attributes are checked."""
        accepted = self.input_counts
        if accepted is not None and len(inputs) not in accepted:
            raise ShapeError(
                f"{self.kind} has another number of inputs than it needs",
                got=f"{len(inputs)} ({', '.join(map(str, inputs)) or 'no inputs'})",
                expected="at least 1"
                if accepted is AT_LEAST_ONE
                else " or ".join(map(str, accepted)),
            )
        check_attributes(self.kind, self.attrs, attrs, inputs)
        named = self.complete(attrs)
        line = self.line
        if callable(self.infer):
            if line is not None:
                line.check(self.kind, inputs, named)
            return self.infer(inputs, named)
        assert line is not None
        return line.results(self.kind, inputs, named)

    def gradients(
        self,
        attrs: Mapping[str, AttrValue],
        inputs: Tensors,
        outputs: Tensors,
        grads: Tensors,
    ) -> Tensors:
        """Gradients of the inputs from those of the outputs; GradientError where there are none."""
        if self.gradient is None:
            raise GradientError(
                f"{self.kind} has no gradient",
                hint="detach its input, or keep it off the way from the parameters to the loss",
            )
        passed = self.gradient(Recorded(attrs, self.attrs), inputs, outputs, grads)
        if len(passed) != len(inputs):
            raise GradientError(
                f"the gradient of {self.kind} has another number of entries than the op has inputs",
                got=len(passed),
                expected=len(inputs),
            )
        return passed


def stops(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    """The gradient of an op whose outputs are constants to differentiation."""
    return (None,) * len(inputs)


_TABLE: dict[str, OpDef] = {}


def register(definition: OpDef) -> OpDef:
    """Add an op to the table; a kind can be defined once."""
    if definition.kind in _TABLE:
        raise AttributeValueError("an op kind is defined twice", got=repr(definition.kind))
    _TABLE[definition.kind] = definition
    return definition


def _defining(make: Callable[Facts, OpDef]) -> Callable[Facts, OpDef]:
    def define(*args: Facts.args, **facts: Facts.kwargs) -> OpDef:
        """Add the op of these facts, those of `OpDef`, to the table; a kind can be defined once."""
        return register(make(*args, **facts))

    return define


define_op = _defining(OpDef)


def op_def(kind: str) -> OpDef:
    """The definition of an op kind: a built-in one, or a custom one by its import path."""
    try:
        return _TABLE[kind]
    except KeyError:
        return _CUSTOM.get(kind) or _import_custom(kind)


def op_table() -> dict[str, OpDef]:
    """All built-in definitions by kind, in order of definition."""
    return dict(_TABLE)


# --- custom ops -----------------------------------------------------------------------------------

_CUSTOM: dict[str, OpDef] = {}
_ALLOWED: set[str] = set()
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(kind: str) -> bool:
    """Whether a kind is `module:function`, as custom ops are named."""
    return _IMPORT_PATH.fullmatch(kind) is not None


def is_custom(kind: str) -> bool:
    """Whether an op kind is a user's own."""
    return kind not in _TABLE


def register_custom(definition: OpDef) -> OpDef:
    """Define a custom op in this process, or define it anew (a module that is loaded again)."""
    if definition.kind in _TABLE:
        raise AttributeValueError("a built-in op has this kind", got=repr(definition.kind))
    if definition.kind in _CUSTOM:
        axis_signatures.cache_clear()
        mesh_signatures.cache_clear()
        piece_signatures.cache_clear()
    _CUSTOM[definition.kind] = definition
    return definition


def custom_ops() -> dict[str, OpDef]:
    """The custom ops defined in this process so far, by kind."""
    return dict(_CUSTOM)


def allow_custom_ops(*modules: str) -> None:
    """Let `op_def` import custom ops from these top-level modules, and from packages below them.

    A job names its custom ops by import path, and importing runs code. So a process imports none
    but those that its owner allows; what a process has defined itself needs no leave. Raises
    AttributeValueError as `check_top_level` does.
    """
    check_top_level(modules)
    _ALLOWED.update(modules)


def check_top_level(modules: Iterable[str]) -> None:
    """Raise AttributeValueError for what is no name of a top-level module."""
    for module in modules:
        if not module.isidentifier():
            raise AttributeValueError(
                "custom ops are allowed by top-level module",
                got=repr(module),
                expected="a name without dots, such as 'my_ops'",
            )


def _import_custom(kind: str) -> OpDef:
    """Import the module of a custom op that is not defined here yet."""
    module, _, _ = kind.partition(":")
    if not is_import_path(kind) or module == "__main__":
        hint = "`plancompiler ops` lists the op kinds"
        if ":" in kind:
            hint = "define it at the top level of a module that this process can import"
        raise UnknownOpError("no such op", got=repr(kind), hint=hint)
    top = module.partition(".")[0]
    if top not in _ALLOWED:
        raise UnknownOpError(
            "this process may not import the module of a custom op",
            got=repr(kind),
            expected="one of " + ", ".join(sorted(_ALLOWED)) if _ALLOWED else "no custom ops",
            hint=f"if its code can be trusted, start the master and its workers with --allow-ops "
            f"{top}",
        )
    try:
        importlib.import_module(module)
    except Exception as error:
        raise UnknownOpError(
            "the module of a custom op cannot be imported",
            got=f"{kind!r}: {type(error).__name__}: {error}",
            hint=f"install what provides {top!r} here",
        ) from error
    definition = _CUSTOM.get(kind)
    if definition is None:
        raise UnknownOpError(
            "a module does not define the custom op that a job names",
            got=repr(kind),
            hint="install the version with which the job was made",
        )
    return definition


def apply(kind: str, *inputs: TensorOperators, **attrs: AttrValue) -> Any:
    """Run or record an op on tensors of one kind; its output, or a tuple where it has several."""
    outputs = inputs[0]._apply(kind, inputs, attrs)  # noqa: SLF001  # what every tensor class has
    return outputs[0] if len(outputs) == 1 else outputs


def apply_one(kind: str, first: Tensor, *others: Any, **attrs: AttrValue) -> Tensor:
    """The same for an op of one output, which is a tensor of the inputs' kind."""
    return first._apply(kind, (first, *others), attrs)[0]  # noqa: SLF001  # as above


def apply_source(like: TensorOperators, kind: str, **attrs: AttrValue) -> Any:
    """The output of an op without inputs, on the placement of `like`."""
    outputs = like._source(kind, attrs)  # noqa: SLF001  # as above
    return outputs[0] if len(outputs) == 1 else outputs


def infer_types(kind: str, inputs: Types, attrs: Mapping[str, AttrValue]) -> Types:
    """Output types of an op."""
    return op_def(kind).types(inputs, attrs)


def flops_of(kind: str, inputs: Types, outputs: Types, attrs: Mapping[str, AttrValue]) -> int:
    """Floating-point operations of an op on its global tensors."""
    definition = op_def(kind)
    flops = definition.flops
    if isinstance(flops, int):
        return flops * element_count(inputs[0].shape) if flops else 0
    if flops is not None:
        return flops(inputs, outputs, definition.complete(attrs))
    return sum(element_count(tensor.shape) for tensor in outputs)


def pointwise_of(kind: str, inputs: Types, outputs: Types, attrs: Mapping[str, AttrValue]) -> int:
    """Operations of an op on its global tensors that are none of its products (`OpDef`)."""
    definition = op_def(kind)
    count = definition.pointwise
    return 0 if count is None else count(inputs, outputs, definition.complete(attrs))


@lru_cache(maxsize=16384)
def axis_signatures(
    kind: str, inputs: Types, outputs: Types, attrs: Attrs, parts: int
) -> tuple[Signature, ...]:
    """All legal signatures of an op along one mesh axis of `parts` devices."""
    definition = op_def(kind)
    named = definition.complete(dict(attrs))
    line = definition.rule
    if not isinstance(line, str):
        line = line(inputs, outputs, named)
    linear = definition.linear if _is_linear(definition, inputs, named) else ()
    signatures = signatures_of_line(line, inputs, outputs, linear, definition.reduction)
    more: list[Signature] = []
    if definition.windows is not None:
        more.extend(definition.windows(inputs, outputs, named))
    if definition.extra is not None:
        more.extend(definition.extra(inputs, outputs, named, parts))
    return tuple(dict.fromkeys((*signatures, *more))) if more else signatures


def _is_linear(definition: OpDef, inputs: Types, attrs: AttrMap) -> bool:
    # Infinities and NaN among the constants make NaN of the zeros in a partial sum's parts.
    constants = (
        number
        for value in attrs.values()
        for number in (value if isinstance(value, tuple) else (value,))
    )
    if any(isinstance(number, float) and not math.isfinite(number) for number in constants):
        return False
    return definition.linear_if is None or definition.linear_if(inputs, attrs)


@lru_cache(maxsize=16384)
def mesh_signatures(
    kind: str,
    inputs: Types,
    outputs: Types,
    attrs: Attrs,
    hierarchy: tuple[int, ...],
    passing: bool = False,
) -> tuple[NdSignature, ...]:
    """All legal signatures of an op on a mesh, in rule order; last, with `passing`, those in which
    the kernel passes something between devices.
    """
    definition = op_def(kind)
    per_axis = [axis_signatures(kind, inputs, outputs, attrs, parts) for parts in hierarchy]
    signatures = nd_signatures(per_axis, hierarchy)
    if passing:
        signatures += _passing(definition, inputs, outputs, per_axis, hierarchy)
    if definition.legal is None:
        return signatures
    named = definition.complete(dict(attrs))
    return tuple(
        signature
        for signature in signatures
        if definition.legal(inputs, outputs, named, signature, hierarchy)
    )


def passes(kind: str, device_type: str) -> bool:
    """Whether an op can pass something between devices of this type itself."""
    passing = op_def(kind).passing
    return passing is not None and (passing.on_devices or device_type == "cpu")


def _passing(
    definition: OpDef,
    inputs: Types,
    outputs: Types,
    per_axis: Sequence[tuple[Signature, ...]],
    hierarchy: tuple[int, ...],
    first: int = 0,
) -> tuple[NdSignature, ...]:
    """The signatures in which the kernel passes something along one of the mesh axes from `first`
    on.
    """
    passing = definition.passing
    if passing is None:
        return ()
    split = passing.signature(inputs, outputs)
    signatures: list[NdSignature] = []
    for axis in range(first, len(hierarchy)):
        if hierarchy[axis] > 1 and split is not None:
            choices = list(per_axis)
            choices[axis] = (split,)
            signatures += filter(passing.fits, nd_signatures(choices, hierarchy))
    return tuple(signatures)


@lru_cache(maxsize=16384)
def piece_signatures(
    kind: str,
    inputs: Types,
    outputs: Types,
    attrs: Attrs,
    hierarchy: tuple[int, ...],
    over: Signature,
    microbatches: int,
    passing: bool = False,
) -> tuple[NdSignature, ...]:
    """The legal signatures on a mesh of an op that works on one micro-batch at a time.

    Micro-batches are the outermost mesh axis, along which the signature is given: `over`.
    """
    definition = op_def(kind)
    per_axis = [axis_signatures(kind, inputs, outputs, attrs, parts) for parts in hierarchy]
    whole = (microbatches, *hierarchy)
    signatures = nd_signatures([(over,), *per_axis], whole)
    if passing:
        signatures += _passing(definition, inputs, outputs, [(over,), *per_axis], whole, first=1)
    if definition.legal is not None:
        named = definition.complete(dict(attrs))
        signatures = tuple(
            signature
            for signature in signatures
            if definition.legal(inputs, outputs, named, signature, whole)
        )
    return tuple(
        NdSignature(
            tuple(NdSbp(sbp.entries[1:]) for sbp in signature.inputs),
            tuple(NdSbp(sbp.entries[1:]) for sbp in signature.outputs),
        )
        for signature in signatures
    )
