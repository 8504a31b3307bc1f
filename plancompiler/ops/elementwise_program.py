"""Programs of elementwise ops, and functions that are written as such programs.

A program is a list of instructions over tensors of one shape. A chain of ops reads and writes whole
tensors between its members; a program runs block by block, and keeps what lies between in buffers
of one block that fit in a core's own cache.

A formula is a Python function of tensors, such as `x * x.sigmoid()`. Called on symbols it gives its
program, called on tensors their ops; so that its kernel, its device code, its gradient and its
place in fused chains all follow from the one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from plancompiler.errors import GradientError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import Attrs, AttrValue, TensorType, freeze_attrs
from plancompiler.ir.operators import Scalar, TensorOperators
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp
from plancompiler.ops.gradient import widened
from plancompiler.ops.kernel import (
    BLOCK_BYTES,
    is_numpy,
    kernel_for,
    piece_starts,
    scratches,
    ufunc_call,
)
from plancompiler.ops.numba_loops import compiled, loops_suit, no_loop
from plancompiler.ops.program_loops import Arithmetic, LoopText, arithmetic, loop_text, runs
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Formula,
    Kernel,
    KernelContext,
    OpDef,
    infer_types,
    op_def,
)

Instructions = tuple["Instruction", ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op of a program."""

    kind: str
    operands: tuple[int, ...]
    attrs: Attrs

    def __str__(self) -> str:
        attrs = f" {json.dumps(dict(self.attrs), separators=(',', ':'))}" if self.attrs else ""
        return f"{self.kind} {','.join(map(str, self.operands))}{attrs}"


# --- from a formula to its program ----------------------------------------------------------------


class Recording:
    """The instructions that a formula has asked for so far; equal ones are asked for once."""

    def __init__(self, dtypes: Sequence[DType], everything: bool) -> None:
        self.dtypes = list(dtypes)
        self._everything = everything
        self._numbers: dict[Instruction, int] = {}

    def expands(self, definition: OpDef) -> bool:
        """Whether an op is recorded as the instructions of its formula."""
        return definition.formula is not None and (
            self._everything or definition.kernel in _DERIVED
        )

    def number_of(self, instruction: Instruction) -> int:
        """The number of an instruction's result."""
        number = self._numbers.get(instruction)
        if number is None:
            operands = tuple(TensorType((), self.dtypes[each]) for each in instruction.operands)
            (made,) = infer_types(instruction.kind, operands, dict(instruction.attrs))
            number = self._numbers[instruction] = len(self.dtypes)
            self.dtypes.append(made.dtype)
        return number

    def program(
        self, results: Sequence[int], leaves: Sequence[int]
    ) -> tuple[Instructions, tuple[int, ...]]:
        """The instructions that `results` need, numbered anew behind the leaves, and the results'
        new numbers.
        """
        needed = set(results)
        for instruction, number in reversed(self._numbers.items()):
            if number in needed:
                needed.update(instruction.operands)
        new = {number: place for place, number in enumerate(leaves)}
        program = []
        for instruction, number in self._numbers.items():
            if number in needed:
                operands = tuple(new[operand] for operand in instruction.operands)
                new[number] = len(new)
                program.append(Instruction(instruction.kind, operands, instruction.attrs))
        return tuple(program), tuple(new[number] for number in results)


class Symbol(TensorOperators):
    """An input or a result of a program that is being recorded."""

    __slots__ = ("number", "recording")

    def __init__(self, recording: Recording, number: int) -> None:
        self.recording = recording
        self.number = number

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # the mixin has an attribute
        return ()

    @property
    def dtype(self) -> DType:  # type: ignore[override]  # likewise
        return self.recording.dtypes[self.number]

    def _apply(
        self, kind: str, inputs: Sequence[Symbol], attrs: Mapping[str, AttrValue]
    ) -> tuple[Symbol, ...]:
        definition = op_def(kind)
        if self.recording.expands(definition):
            assert definition.formula is not None
            return (_widely(definition.formula, attrs, inputs),)
        operands = tuple(each.number for each in inputs)
        instruction = Instruction(kind, operands, freeze_attrs(attrs))
        return (Symbol(self.recording, self.recording.number_of(instruction)),)

    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> Symbol:
        like = self if dtype is self.dtype else self.cast(dtype)
        (zeros,) = self._apply("zeros_like", (like,), {})
        return zeros + value

    def _source(self, kind: str, attrs: Mapping[str, AttrValue]) -> tuple[Symbol, ...]:
        raise GradientError("a formula is a function of its inputs alone", op=kind)

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> Symbol:
        raise GradientError("a formula leaves layouts to its ops")


def _widely(formula: Formula, attrs: AttrMap, inputs: Sequence[Symbol]) -> Symbol:
    """What a formula gives: of 16 bits, what it gives in float32, rounded once."""
    result: Symbol = formula(attrs, *map(widened, inputs))
    dtype = inputs[0].dtype
    return result.cast(dtype) if dtype.is_half else result


@lru_cache(maxsize=1024)
def program_of(
    formula: Formula, attrs: Attrs, dtypes: tuple[DType, ...], everything: bool = False
) -> Instructions:
    """The program of a formula with these attributes on inputs of these dtypes.

    Ops inside it that are formulas themselves become their instructions: those whose kernels are
    derived too, or all with `everything`.
    """
    recording = Recording(dtypes, everything)
    inputs = [Symbol(recording, number) for number in range(len(dtypes))]
    result = _widely(formula, dict(attrs), inputs).number
    return recording.program([result], range(len(dtypes)))[0]


@lru_cache(maxsize=1024)
def expanded(
    program: Instructions, dtypes: tuple[DType, ...], everything: bool = False
) -> Instructions:
    """A program with the instructions of its formulas in their places; see `program_of`."""
    recording = Recording(dtypes, everything)
    numbers: list[Symbol] = [Symbol(recording, number) for number in range(len(dtypes))]
    for instruction in program:
        operands = [numbers[operand] for operand in instruction.operands]
        numbers += operands[0]._apply(instruction.kind, operands, dict(instruction.attrs))  # noqa: SLF001  # what every tensor has
    return recording.program([numbers[-1].number], range(len(dtypes)))[0]


_DERIVED: set[Kernel] = set()
"""Kernels made by `kernel_of`."""


def kernel_of(formula: Formula) -> Kernel:
    """The kernel of an op that a formula describes; it takes bfloat16 as it is."""

    def run(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        bound = context.state.get("bound")
        if bound is None:
            dtypes = tuple(DType.parse(array.dtype) for array in inputs)
            program = program_of(formula, freeze_attrs(context.attrs), dtypes)
            bound = context.state["bound"] = BoundProgram(program, dtypes, context)
        bound(inputs, outputs[0])

    _DERIVED.add(run)
    return run


# --- running a program ----------------------------------------------------------------------------


class BoundProgram:
    """A program bound to the dtypes of its inputs, as one Python function of a block."""

    def __init__(
        self, program: Instructions, inputs: Sequence[DType], context: KernelContext
    ) -> None:
        self._context = context
        types = [TensorType((), dtype) for dtype in inputs]
        for instruction in program:
            operands = tuple(types[number] for number in instruction.operands)
            types += infer_types(instruction.kind, operands, dict(instruction.attrs))
        buffers, dtypes = buffers_of(program, types, len(inputs))
        self._dtypes = tuple(dtypes)
        names = {result: f"w{buffer}" for result, buffer in buffers.items()}
        given = [f"x{number}" for number in range(len(inputs))]
        self._source = ProgramText(program, types, given, names, context.arrays)
        self._last = names[len(types) - 1]
        self._run = self._source.function(loops=False, last="out")
        self._apart = tuple(number for number in read_apart(program[-1]) if number < len(inputs))
        """Inputs that the last instruction reads where its kernel may not write over them."""
        self._block = max(1, BLOCK_BYTES // max(each.dtype.itemsize for each in types))
        # Formulas take logarithms of 0 and exponentials that overflow; what comes of it is bounded.
        self._bounds = any(each.kind.startswith(("log", "exp")) for each in program)

    def __call__(self, inputs: Arrays, out: Array) -> None:
        """Run it on arrays of one shape."""
        if self._bounds:
            with np.errstate(divide="ignore", over="ignore"):
                self._blocks(inputs, out)
        else:
            self._blocks(inputs, out)

    def _blocks(self, inputs: Arrays, out: Array) -> None:
        run, apart = self._run, self._apart
        size, step = out.size, self._block
        loops = loops_suit(out, *inputs) and bool(self._source.runs)
        if loops:
            # A loop reads its inputs anew for every element, and vectorises none that overlap.
            apart, step = tuple(range(len(inputs))), max(1, step // LOOP_PIECES)
            run = self._source.function(loops=True, last="out")
        # Where the output lies over an input, only the last step writes there, and only if it may.
        if apart and any(np.may_share_memory(inputs[each], out) for each in apart):
            run = self._source.function(loops=loops, copies=(("out", self._last),))
        # On devices every call is a launch, and no cache is worth one.
        if not loops and (
            size <= step
            or not isinstance(out, np.ndarray)
            or not all(each.flags.c_contiguous for each in (*inputs, out))
        ):
            run(inputs, scratches(self._context, out.shape, self._dtypes), out)
            return
        flat, result = [array.reshape(-1) for array in inputs], out.reshape(-1)
        work = scratches(self._context, (step,), self._dtypes)
        for start in piece_starts(result, size, step):
            stop = start + step
            if stop > size:
                work = [array[: size - start] for array in work]
            run([array[start:stop] for array in flat], work, result[start:stop])


def buffers_of(
    program: Instructions,
    types: Sequence[TensorType],
    inputs: int,
    placed: Collection[int] = (),
    kept: Collection[int] = (),
) -> tuple[dict[int, int], list[np.dtype[Any]]]:
    """The work buffer of every result but those that are `placed` elsewhere, and the buffers'
    dtypes; a buffer is free again after the last reader of what it holds, unless that is `kept`.
    """
    last_read: dict[int, int] = {}
    for place, instruction in enumerate(program):
        last_read.update(dict.fromkeys(instruction.operands, place))
    last_read.update(dict.fromkeys(kept, len(program)))
    dtypes: list[np.dtype[Any]] = []
    buffers: dict[int, int] = {}
    free: dict[DType, list[int]] = {}
    for place, instruction in enumerate(program):
        made = types[inputs + place].dtype
        held = [n for n in dict.fromkeys(instruction.operands) if n in buffers]
        dying = [number for number in held if last_read[number] == place]
        barred = read_apart(instruction)
        # First the buffers that the kernel may write over while it reads them.
        for number in sorted(dying, key=lambda number: number in barred):
            if number not in barred:
                free.setdefault(types[number].dtype, []).append(buffers[number])
        if inputs + place not in placed:
            if not free.get(made):
                free.setdefault(made, []).append(len(dtypes))
                dtypes.append(made.numpy)
            buffers[inputs + place] = free[made].pop()
        for number in dying:
            if number in barred:
                free.setdefault(types[number].dtype, []).append(buffers[number])
    return buffers, dtypes


def read_apart(instruction: Instruction) -> frozenset[int]:
    """Operands that an instruction reads in places where its kernel may not write over them."""
    allowed = {position for _, position in op_def(instruction.kind).inplace}
    return frozenset(
        number for place, number in enumerate(instruction.operands) if place not in allowed
    )


LOOP_PIECES = 4
"""A loop reads and writes many arrays at once: pieces of this part of a block fit in cache."""


class ProgramText:
    """A program as the text of a Python function: small tensors feel every call in between."""

    def __init__(
        self,
        program: Instructions,
        types: Sequence[TensorType],
        inputs: Sequence[str],
        results: Mapping[int, str],
        arrays: Any,
        numbers: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> None:
        """`inputs` are the names of what the function is given, the program's leaves in front, and
        `results` those of what instructions make: of inputs, or `w0`, `w1`, … of work buffers. Some
        leaves are `numbers`. Results that are `kept` are read after the program.
        """
        self._arrays = arrays
        self._names: dict[str, Any] = {"copyto": np.copyto}
        self._inputs = len(types) - len(program)
        works = {name for name in results.values() if name.startswith("w")}
        self._head = f"def run(inputs, work, out):\n  {', '.join(inputs)}, = inputs"
        if works:
            self._head += f"\n  {''.join(f'w{each}, ' for each in range(len(works)))} = work"
        self._calls: list[tuple[str, str]] = []
        """Each with the name of its result in place of {}."""
        self._program = program
        self._types = types
        self._numbers = frozenset(numbers)
        self._kept = frozenset(kept)
        self._values = values = [*inputs[: self._inputs]]
        for place, instruction in enumerate(program):
            result = self._inputs + place
            given = [values[number] for number in instruction.operands]
            operands = [types[number].dtype for number in instruction.operands]
            values.append(results[result])
            call = self._call(place, instruction, given, operands, types[result].dtype)
            self._calls.append((call, values[-1]))
        self._made: dict[object, Callable[..., None]] = {}

    def _call(
        self,
        place: int,
        instruction: Instruction,
        given: Sequence[str],
        operands: Sequence[DType],
        made: DType,
    ) -> str:
        """One instruction as a call, with {} for its result."""
        definition = op_def(instruction.kind)
        attrs = definition.complete(dict(instruction.attrs))
        dtypes = [dtype.numpy for dtype in (*operands, made)]
        ufunc = ufunc_call(definition.kernel, attrs)
        if ufunc is not None and not any(dtype.itemsize == 2 for dtype in dtypes):
            self._names[f"f{place}"], arguments = ufunc
            names, tensors = [], iter(given)
            for number, argument in enumerate(arguments):
                if argument is None:
                    names.append(next(tensors))
                else:
                    # NumPy makes an array of a number at each call; devices take none of it.
                    held = np.asarray(argument, dtypes[0]) if is_numpy(self._arrays) else argument
                    names.append(f"s{place}_{number}")
                    self._names[names[-1]] = held
            return f"f{place}({', '.join(names)}, out={{}})"
        nothing: tuple[Any, ...] = ((),) * len(given)
        context = KernelContext(attrs, nothing, ((),), nothing, ((),), arrays=self._arrays)
        self._names[f"c{place}"] = context
        self._names[f"k{place}"] = kernel_for(definition, dtypes)
        return f"k{place}(c{place}, ({', '.join(given)},), ({{}},))"

    @cached_property
    def arithmetic(self) -> list[Arithmetic | None]:
        """Per instruction, what it is as a part of a loop."""
        loops = []
        for result, instruction in enumerate(self._program, self._inputs):
            definition, operands = op_def(instruction.kind), instruction.operands
            call = ufunc_call(definition.kernel, definition.complete(dict(instruction.attrs)))
            dtypes = [self._types[number].dtype for number in (*operands, result)]
            loops.append(arithmetic(result, call, operands, dtypes))
        return loops

    @cached_property
    def runs(self) -> list[range]:
        """Places of instructions that can be one loop."""
        return runs(self.arithmetic)

    def function(
        self, loops: bool, last: str | None = None, copies: Sequence[tuple[str, str]] = ()
    ) -> Callable[..., None]:
        """The function; its last result is made in what has the name `last`, and at its end there
        are `copies`, (to, from). With `loops`, numba compiles what can be loops.
        """
        key = loops, last, *copies
        made = self._made.get(key)
        if made is not None:
            return made
        targets = [target for _, target in self._calls]
        if last is not None:
            targets[-1] = last
        names = dict(self._names)
        lines = [call.format(name) for (call, _), name in zip(self._calls, targets, strict=True)]
        for run in reversed(self.runs if loops else ()):
            loop = self._loop(run, targets)
            dtype = self._types[self._inputs + run.start].dtype
            names[f"l{run.start}"] = (
                compiled(loop.text, "loop", dtype.numpy) if self._arrays is np else no_loop
            )
            lines[run.start : run.stop] = [f"l{run.start}({', '.join(loop.arguments)})"]
        lines += [f"copyto({to}, {source})" for to, source in copies]
        exec("\n  ".join([self._head, *lines]), names)  # noqa: S102  # the text is made here
        function: Callable[..., None] = names["run"]
        self._made[key] = function
        return function

    def _loop(self, run: range, targets: Sequence[str]) -> LoopText:
        """Instructions as a loop that keeps what others read."""
        later = {
            operand for instruction in self._program[run.stop :] for operand in instruction.operands
        }
        later |= {len(self._types) - 1, *self._kept}
        results = {self._inputs + place: targets[place] for place in run}
        return loop_text(
            [each for each in self.arithmetic[run.start : run.stop] if each is not None],
            dict(enumerate(self._values)),
            {number: name for number, name in results.items() if number in later},
            str(self._types[self._inputs + run.start].dtype),
            self._numbers,
        )
