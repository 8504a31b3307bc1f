"""Updates of variables that are written as formulas, such as `w - rate * g`.

A formula is a Python function of the variables, the gradient and numbers. Called once on symbols,
it gives a program of elementwise instructions, which runs block by block on the host, as compiled
loops where numba is, and as launches on a device; and the text of what is computed of numbers
alone, once per call. So one function is all that there is of an update: its kernels, its sharding
rule, its cost and what an optimizer keeps for it follow.

The attributes of an update are numbers of the formula, and so are its inputs that are scalars, the
`count` of the update (from 1; the kernel's step, unless it is an input) and the `elements` of the
whole variable. An attribute can be asked whether it is zero; a scalar cannot: its value is
known on the device only.

A formula sees the gradient `g` multiplied by the attribute `grad_scale`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from plancompiler.errors import GradientError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import Attrs, AttrValue, TensorType, freeze_attrs
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Attribute, Float, complete
from plancompiler.ops.elementwise_program import (
    LOOP_PIECES,
    Instructions,
    ProgramText,
    Recording,
    Symbol,
    buffers_of,
    read_apart,
)
from plancompiler.ops.kernel import (
    BLOCK_BYTES,
    copy_unless_shared,
    in_float32,
    is_numpy,
    piece_starts,
    scratches,
)
from plancompiler.ops.numba_loops import loops_suit
from plancompiler.ops.operands import Operand, parse_operands
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    Infer,
    Kernel,
    KernelContext,
    Types,
    define_op,
    infer_types,
)

Formula = Callable[..., Any]
"""`(*tensors, **numbers)` to the outputs: a tensor, or a tuple. It takes the numbers that it names.
"""

# --- numbers of a formula -------------------------------------------------------------------------


class _Numbers(Recording):
    """The instructions of a formula, and the numbers that they take."""

    def __init__(self, dtypes: Sequence[DType]) -> None:
        super().__init__(dtypes, everything=False)
        self.texts: dict[str, tuple[int, float | None]] = {}
        """What numbers are computed as, with their places among the values, and constants."""
        self.functions: dict[str, Callable[..., Any]] = {"inf": math.inf, "nan": math.nan}  # type: ignore[dict-item]  # constants among functions

    def place_of(self, text: str, constant: float | None) -> int:
        """The place of a number among the values."""
        known = self.texts.get(text)
        if known is not None:
            return known[0]
        self.texts[text] = len(self.dtypes), constant
        self.dtypes.append(self.dtypes[0])
        return len(self.dtypes) - 1


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}


class Number(Symbol):
    """A number of a formula: a constant, or what is computed of scalars before the elements."""

    __slots__ = ("constant", "text")

    def __init__(self, recording: _Numbers, text: str, constant: float | None = None) -> None:
        self.recording: _Numbers = recording
        self.text = text
        self.constant = constant

    @property
    def number(self) -> int:  # type: ignore[override]  # the base has an attribute
        return self.recording.place_of(self.text, self.constant)

    @property
    def dtype(self) -> DType:  # type: ignore[override]  # the mixin has an attribute
        return self.recording.dtypes[0]

    def __bool__(self) -> bool:
        if self.constant is None:
            raise GradientError("a formula cannot choose by a number that only the device knows")
        return bool(self.constant)

    def _apply(self, kind: str, inputs: Sequence[Symbol], attrs: Mapping[str, AttrValue]) -> Any:
        if all(isinstance(each, Number) for each in inputs):
            raise GradientError(
                "what a formula computes of numbers alone it computes by `of_numbers`", op=kind
            )
        return super()._apply(kind, inputs, attrs)

    def _binary(self, kind: str, other: Any, *, swapped: bool = False) -> Any:
        pair = (other, self) if swapped else (self, other)
        if not isinstance(other, (Number, int, float)):
            return self._apply(kind, pair, {})[0]
        left, right = (each.text if isinstance(each, Number) else repr(each) for each in pair)
        text = f"({left} {_SIGNS[kind]} {right})"
        known = [each.constant if isinstance(each, Number) else each for each in pair]
        if None in known:
            return Number(self.recording, text)
        return constant(self.recording, eval(text, dict(self.recording.functions)))  # noqa: S307  # the text is made here

    def __neg__(self) -> Any:
        # An op of tensors would make everything that follows of it one, too.
        return self._binary("mul", -1.0)

    # Of a tensor and a number Python asks the class that is derived from the other's first.
    def __radd__(self, other: Any) -> Any:
        return self._binary("add", other, swapped=True)

    def __rmul__(self, other: Any) -> Any:
        return self._binary("mul", other, swapped=True)

    def __rsub__(self, other: Any) -> Any:
        return self._binary("sub", other, swapped=True)

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary("div", other, swapped=True)

    def __rpow__(self, other: Any) -> Any:
        return self._binary("pow", other, swapped=True)


def constant(recording: _Numbers, value: float) -> Number:
    """A number that is known."""
    return Number(recording, repr(float(value)), float(value))


def of_numbers(function: Callable[..., Any], *numbers: Any) -> Number:
    """What a function gives of numbers. Where one is a scalar of a device, it is called with arrays
    of no axis, as functions of NumPy take them.
    """
    first = next(each for each in numbers if isinstance(each, Number))
    name = f"f_{function.__name__}"
    first.recording.functions[name] = function
    texts = (each.text if isinstance(each, Number) else repr(each) for each in numbers)
    return Number(first.recording, f"{name}({', '.join(texts)})")


def root(number: Number) -> Number:
    """The square root of a number."""
    return of_numbers(np.sqrt, number)


# --- from a formula to its program ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateProgram:
    """What a formula computes."""

    program: Instructions
    tensors: int
    leaves: int
    """Values in front of those of the instructions: tensors, then numbers."""
    results: tuple[int, ...]
    constants: tuple[float | None, ...]
    """Of each number its value, if it is the same in every update."""
    numbers: Callable[..., tuple[Any, ...]]
    """The others: of the elements, the count of the update, and the scalars."""


@lru_cache(maxsize=1024)
def update_program(
    formula: Formula, tensors: tuple[str, ...], scalars: tuple[str, ...], attrs: Attrs, dtype: DType
) -> UpdateProgram:
    """The program of a formula with these attributes, for tensors of these names and one dtype."""
    recording = _Numbers([dtype] * len(tensors))
    values = dict(attrs)
    named: dict[str, Any] = {name: Number(recording, name) for name in ("elements", "count")}
    for name, value in values.items():
        plain = isinstance(value, float)
        named[name] = constant(recording, value) if plain else value  # type: ignore[arg-type]
    named |= {name: Number(recording, name) for name in scalars}
    symbols = {name: Symbol(recording, place) for place, name in enumerate(tensors)}
    scale = values.get("grad_scale", 1.0)
    if "g" in symbols and scale != 1.0:
        symbols["g"] = named["grad_scale"] * symbols["g"]
    asked = inspect.signature(formula).parameters
    made = formula(**symbols, **{name: each for name, each in named.items() if name in asked})
    outputs = made if isinstance(made, tuple) else (made,)
    # Recorded now: what a result is may be a number's place.
    results = [each.number for each in outputs]
    if any(result < len(tensors) for result in results):
        # It would be copied when the next values lie over it.
        raise GradientError("what a formula gives must be computed, and not be one of its tensors")
    leaves = (*range(len(tensors)), *(place for place, _ in recording.texts.values()))
    program, places = recording.program(results, leaves)
    counted = () if "count" in scalars else ("count",)
    arguments = ", ".join(("elements", *counted, *scalars))
    told = "".join(f"{text}, " for text, (_, known) in recording.texts.items() if known is None)
    numbers = eval(f"lambda {arguments}: ({told})", dict(recording.functions))  # noqa: S307  # the text is made here
    constants = tuple(known for _, known in recording.texts.values())
    return UpdateProgram(program, len(tensors), len(leaves), places, constants, numbers)


class BoundUpdate:
    """An update's program as one Python function of a block, for arrays of one dtype.

    The next value of a variable is made where the variable lies.
    """

    def __init__(
        self,
        update: UpdateProgram,
        dtype: DType,
        operands: Sequence[Operand],
        changed: Sequence[int | None],
        arrays: Any,
    ) -> None:
        """`changed` are the places of the tensors that outputs are the next values of."""
        program, leaves = update.program, update.leaves
        types = [TensorType((), dtype)] * leaves
        for instruction in program:
            given = tuple(types[number] for number in instruction.operands)
            types += infer_types(instruction.kind, given, dict(instruction.attrs))
        inputs = [f"x{place}" for place in range(leaves)]
        placed: dict[int, str] = {}
        copied: list[tuple[str, int]] = []
        for slot, (result, place) in enumerate(zip(update.results, changed, strict=True)):
            target = f"y{slot}" if place is None else f"x{place}"
            if place is None:
                inputs.append(target)
            if result in placed or result < leaves or not _may_lie_over(update, result, place):
                copied.append((target, result))
            else:
                placed[result] = target
        kept = {*placed, *(result for _, result in copied)}
        buffers, dtypes = buffers_of(program, types, leaves, placed, kept)
        self._work_dtypes = tuple(dtypes)
        names = {result: f"w{buffer}" for result, buffer in buffers.items()} | placed
        self._copies = [(to, names.get(each, f"x{each}")) for to, each in copied]
        numbers = range(update.tensors, leaves)
        self._text = ProgramText(program, types, inputs, names, arrays, numbers, kept)
        self._run = self._text.function(loops=False, copies=self._copies)
        self._update = update
        self._changed = changed
        self._arrays = arrays
        self._on_host = is_numpy(arrays)
        self._dtype = dtype.numpy
        self._places = [at for at, each in enumerate(operands) if each.shape != ()]
        scalars = [(at, each) for at, each in enumerate(operands) if each.shape == ()]
        self._scalars = [(at, each.dtype.startswith("int")) for at, each in scalars]
        self._counted = any(each.name == "count" for _, each in scalars)
        self._numbers: list[Any] = [
            None if each is None else self._number(each) for each in update.constants
        ]
        self._varying = [at for at, each in enumerate(update.constants) if each is None]
        widest = max((each.itemsize for each in self._work_dtypes), default=dtype.itemsize)
        self._block = max(1, BLOCK_BYTES // widest)

    def __call__(self, context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        """Run it on arrays of one shape, as a kernel."""
        tensors = [inputs[place] for place in self._places]
        own = []
        for place, output in zip(self._changed, outputs, strict=True):
            if place is None:
                own.append(output)
            elif tensors[place] is not output:
                copy_unless_shared(tensors[place], output)
                tensors[place] = output
        numbers = self._numbers
        if self._varying:
            numbers = numbers.copy()
            told = self._told(context, inputs)
            for place, each in zip(self._varying, told, strict=True):
                numbers[place] = self._number(each)
        first = outputs[0]
        run, step, size = self._run, self._block, first.size
        loops = bool(self._text.runs) and loops_suit(first, *tensors, *own)
        if loops:
            run, step = self._text.function(loops=True, copies=self._copies), step // LOOP_PIECES
        if not loops and (
            size <= step
            or not isinstance(first, np.ndarray)
            or not all(each.flags.c_contiguous for each in (*tensors, *own))
        ):
            work = scratches(context, first.shape, self._work_dtypes)
            run((*tensors, *numbers, *own), work, None)
            return
        flat, own = ([array.reshape(-1) for array in arrays] for arrays in (tensors, own))
        work = scratches(context, (step,), self._work_dtypes)
        for start in piece_starts(flat[0], size, step):
            stop = start + step
            if stop > size:
                work = [array[: size - start] for array in work]
            given = [array[start:stop] for array in flat]
            run((*given, *numbers, *[array[start:stop] for array in own]), work, None)

    def _told(self, context: KernelContext, inputs: Arrays) -> tuple[Any, ...]:
        """The numbers that are not constants."""
        scalars: list[Any] = [max(1, element_count(context.input_shapes[0]))]
        if not self._counted:
            scalars.append(context.step + 1)
        for place, whole in self._scalars:
            array: Any = inputs[place]
            if self._on_host:
                array = float(array)
            elif whole:
                array = array.astype(np.float64)
            scalars.append(array)
        return self._update.numbers(*scalars)

    def _number(self, value: Any) -> Any:
        """A number as instructions take it; what a device has computed stays there."""
        if self._on_host:
            return self._dtype.type(value)
        on_device = isinstance(value, self._arrays.ndarray)
        return value.astype(self._dtype) if on_device else float(value)


def _may_lie_over(update: UpdateProgram, result: int, place: int | None) -> bool:
    """Whether a result may be made where a tensor lies: it, or nothing after it, reads that one."""
    if place is None:
        return True
    maker, *later = update.program[result - update.leaves :]
    return place not in read_apart(maker) and not any(place in each.operands for each in later)


# --- from a formula to its op ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Update:
    """An update, for those that compute its program in a way of their own."""

    operands: tuple[Operand, ...]
    program: Callable[[AttrMap, DType], UpdateProgram]
    """Its program with these attributes, for tensors of this dtype."""


UPDATES: dict[str, Update] = {}
"""By op kind."""


def define_update(
    kind: str,
    line: str,
    formula: Formula,
    doc: str,
    *,
    attrs: tuple[Attribute, ...] = (),
    infer: Infer | None = None,
) -> None:
    """Register the update that a formula is, for operands of this line (`ops.operands`).

    An output that is called as an input is that variable's next value; `g` is the gradient.
    """
    operands = parse_operands(line, None)
    names = [operand.name for operand in operands.inputs]
    changed = [
        names.index(operand.name) if operand.name in names else None for operand in operands.outputs
    ]
    scaled = tuple(place for place, name in enumerate(names) if name == "g")
    if scaled:
        attrs = (*attrs, Float("grad_scale", 1.0))
    tensors, scalars = (
        tuple(each.name for each in operands.inputs if (each.shape == ()) is scalar)
        for scalar in (False, True)
    )

    def program(named: AttrMap, dtype: DType) -> UpdateProgram:
        return update_program(formula, tensors, scalars, freeze_attrs(named), dtype)

    UPDATES[kind] = Update(operands.inputs, program)

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        run: Kernel | None = context.state.get("update")
        if run is None:
            dtype = DType.parse(inputs[0].dtype)
            wide = DType.FLOAT32 if dtype.is_half else dtype
            run = BoundUpdate(
                program(context.attrs, wide), wide, operands.inputs, changed, context.arrays
            )
            if wide is not dtype:
                run = in_float32(run)
            context.state["update"] = run
        run(context, inputs, outputs)

    def flops(inputs: Types, outputs: Types, named: AttrMap) -> int:
        size = len(program(complete(attrs, named), DType.FLOAT32).program)
        return size * element_count(inputs[0].shape)

    define_op(
        kind,
        infer=infer or line,
        operands=line if infer is not None else "",
        rule=f"{', '.join(['...'] * len(names))} -> {', '.join(['...'] * len(changed))}",
        attrs=attrs,
        kernel=kernel,
        flops=flops,
        mutates=tuple((slot, place) for slot, place in enumerate(changed) if place is not None),
        scaled=scaled,
        skippable=True,
        counts_steps="count" in inspect.signature(formula).parameters and "count" not in names,
        doc=doc,
    )
