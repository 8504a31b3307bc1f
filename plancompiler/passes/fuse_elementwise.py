"""Elementwise fusion: ops of one shape that feed each other become one program, run in cache.

Layouts and collectives must not change for it. So a value may vanish inside a program only if a
reduction that could have stood at it can as well stand at one input of the program: each partial
that its maker passes on comes from exactly one operand, of as many bytes. An op that adds two
partials can only come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from plancompiler.ir import Job, Op, Partial, Value, freeze_attrs
from plancompiler.ops.elementwise_program import Instruction
from plancompiler.ops.fused import (
    KIND,
    MAX_INPUTS,
    MAX_INSTRUCTIONS,
)
from plancompiler.ops.registry import axis_signatures, op_def
from plancompiler.passes.base import (
    PassResult,
    counted,
    producers_of,
    readers_of,
    with_ops,
)


def fuse_elementwise(job: Job) -> PassResult:
    """The job with groups of elementwise ops as one op each."""
    finder = _Finder(job)
    programs: dict[str, Op] = {}
    gone: set[str] = set()
    for root in reversed(job.ops):
        if root.name in gone or not finder.fits(root):
            continue
        group = finder.group(root)
        if len(group) > 1:
            programs[root.name] = _program(group, finder.inputs_of(group))
            gone.update(op.name for op in group)
    ops = [
        programs.get(op.name, op) for op in job.ops if op.name not in gone or op.name in programs
    ]
    return PassResult(
        with_ops(job, ops),
        f"fused {counted(len(gone), 'op')} into {len(programs)}",
        tuple(finder.notes()),
    )


class _Finder:
    """Finds what can be fused."""

    def __init__(self, job: Job) -> None:
        self._producers = producers_of(job)
        self._readers = readers_of(job)
        self._place = {op.name: place for place, op in enumerate(job.ops)}
        self._after_updates = _after_updates(job)
        self._kept_for_reductions: set[str] = set()

    def fits(self, op: Op) -> bool:
        """Whether an op can be in a program at all."""
        return (
            op_def(op.kind).elementwise
            and op.sbp is None
            and op.name not in self._after_updates
            and all(value.shape == op.outputs[0].shape for value in op.inputs)
        )

    def group(self, root: Op) -> list[Op]:
        """The ops that end in `root`, in order."""
        group = {root.name: root}
        grown = True
        while grown:
            grown = False
            for value in self.inputs_of(group.values()):
                maker = self._producers[value.name]
                if self._can_join(maker, root, group):
                    wider = {**group, maker.name: maker}
                    if (
                        len(wider) <= MAX_INSTRUCTIONS
                        and len(self.inputs_of(wider.values())) <= MAX_INPUTS
                    ):
                        group, grown = wider, True
                        break
        return sorted(group.values(), key=lambda op: self._place[op.name])

    def _can_join(self, maker: Op, root: Op, group: dict[str, Op]) -> bool:
        if (
            not self.fits(maker)
            or maker.outputs[0].shape != root.outputs[0].shape
            or maker.placement != root.placement
            # What belongs to forward and is read by backward alone would move there.
            or maker.origin != root.origin
            or any(op.name not in group for op in self._readers[maker.outputs[0].name])
        ):
            return False
        if not _passes_one_partial(maker):
            self._kept_for_reductions.add(maker.name)
            return False
        return True

    @staticmethod
    def inputs_of(group: Iterable[Op]) -> list[Value]:
        """Values that a group reads and does not make, in order."""
        ops = list(group)
        made = {value.name for op in ops for value in op.outputs}
        inputs: dict[str, Value] = {}
        for op in ops:
            for value in op.inputs:
                if value.name not in made:
                    inputs.setdefault(value.name, value)
        return list(inputs.values())

    def notes(self) -> Iterator[str]:
        """What stayed apart."""
        if self._kept_for_reductions:
            count = counted(len(self._kept_for_reductions), "op")
            yield f"{count} not inside a program: a reduction may stand after them"


def _after_updates(job: Job) -> set[str]:
    """Ops that read what an update makes: they run after all others, and must not mix with them."""
    updated: set[str] = set()
    late: set[str] = set()
    for op in job.ops:
        if op_def(op.kind).mutates or any(value.name in updated for value in op.inputs):
            late.add(op.name)
            updated.update(value.name for value in op.outputs)
    return late


def _passes_one_partial(op: Op) -> bool:
    """Whether each partial that an op passes on comes from one operand of as many bytes."""
    (target,) = op.outputs
    inputs = op.input_types
    known = axis_signatures(op.kind, inputs, (target.type,), op.attrs, 2)
    for signature in known:
        if isinstance(signature.outputs[0], Partial):
            partial = [
                value
                for value, entry in zip(op.inputs, signature.inputs, strict=True)
                if isinstance(entry, Partial)
            ]
            if len(partial) != 1 or partial[0].dtype.itemsize != target.dtype.itemsize:
                return False
    return True


def _program(group: list[Op], inputs: list[Value]) -> Op:
    """The op that does what a group does."""
    root = group[-1]
    numbers = {value.name: number for number, value in enumerate(_best_first(root, inputs))}
    program = []
    for op in group:
        operands = tuple(numbers[value.name] for value in op.inputs)
        program.append(str(Instruction(op.kind, operands, op.attrs)))
        numbers[op.outputs[0].name] = len(numbers)
    return Op(
        name=root.name,
        kind=KIND,
        inputs=tuple(_best_first(root, inputs)),
        outputs=root.outputs,
        attrs=freeze_attrs({"program": tuple(program)}),
        placement=root.placement,
        source=root.source,
        origin=root.origin,
    )


def _best_first(root: Op, inputs: list[Value]) -> list[Value]:
    """Inputs with one in front whose memory the output can reuse: one of its dtype."""
    return sorted(inputs, key=lambda value: value.dtype is not root.outputs[0].dtype)
