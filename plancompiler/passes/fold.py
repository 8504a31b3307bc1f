"""Constant folding: ops whose result is known, or is another value, are not computed.

    fills           an elementwise op on fills alone is a fill; so is a reshaped or expanded fill
    neutral         x * 1, x / 1, x ** 1, x + 0, x - 0, and a cast, reshape, transpose, expansion or
                    slice that changes nothing, are x; so is stop_gradient, once gradients are there
    inverse         two negations, a transpose and its inverse, a cast to a wider dtype and back
    chains          reshapes, transposes, casts by way of a wider dtype, factors in float32 and
                    float64 become one
    scalar operands x * fill and x / fill become x * scalar and x / scalar

Only numbers are computed, never tensors. Results are the same to the bit, except that x + 0
may keep a negative zero and that two factors are multiplied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from plancompiler.ir import AttrValue, DType, Job, Op, Value, freeze_attrs
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import KernelContext, op_def
from plancompiler.ops.view import keeps_order
from plancompiler.passes.base import PassResult, counted, readers_of, rewired, with_ops

_WIDE = frozenset({DType.FLOAT32, DType.FLOAT64})


def fold_constants(job: Job) -> PassResult:
    """The job without what is known before it runs."""
    folder = _Folder(job)
    kept = [op for each in job.ops if (op := folder.fold(each)) is not None]
    parts = [
        f"{counted(folder.constants, 'op')} became constants",
        f"{counted(len(job.ops) - len(kept), 'op')} stood for their input",
        f"{counted(folder.simplified, 'op')} became simpler",
    ]
    return PassResult(with_ops(job, kept), ", ".join(parts), tuple(folder.notes))


class _Folder:
    def __init__(self, job: Job) -> None:
        self.constants = self.simplified = 0
        self.notes: list[str] = []
        self._readers = readers_of(job)
        self._made: dict[str, Op] = {}
        """Who makes each value, after folding."""
        self._instead: dict[str, Value] = {}

    def fold(self, op: Op) -> Op | None:
        """What stands for an op of the job; None where an earlier value does."""
        op = rewired(op, self._instead)
        if op.sbp is None and op.inputs and len(op.outputs) == 1:
            constant = self._constant(op)
            if constant is not None:
                self.constants += 1
                op = constant
            else:
                simpler = self._simpler(op)
                if simpler is not op:
                    self.simplified += 1
                    op = simpler
                same = self._same_as(op)
                if same is not None and self._may_stand(op, same):
                    self._instead[op.outputs[0].name] = same
                    return None
        for value in op.outputs:
            self._made[value.name] = op
        return op

    def _may_stand(self, op: Op, source: Value) -> bool:
        """Whether the readers of an op can read its input instead."""
        target = op.outputs[0]
        if source.type != target.type or source.placement != target.placement:
            return False
        for reader in self._readers.get(target.name, ()):
            overwritten = {reader.inputs[read].name for _, read in op_def(reader.kind).mutates}
            if source.name in overwritten:
                self.notes.append(
                    f"{op.name} stays: {reader.name} overwrites its input %{source.name}"
                )
                return False
        return True

    def _fill(self, value: Value) -> bool | int | float | None:
        """The number that a value is full of, if that is known."""
        op = self._made.get(value.name)
        number = (
            op.attr("value") if op is not None and op.kind == "fill" and op.sbp is None else None
        )
        return number if isinstance(number, (bool, int, float)) else None

    def _inner(self, op: Op, kind: str) -> Op | None:
        """The producer of an op's only input, if it is of this kind and demands no layout."""
        inner = self._made.get(op.inputs[0].name)
        return inner if inner is not None and inner.kind == kind and inner.sbp is None else None

    def _constant(self, op: Op) -> Op | None:
        """The fill that an op on fills amounts to."""
        numbers = [self._fill(value) for value in op.inputs]
        if any(number is None for number in numbers):
            return None
        (target,) = op.outputs
        definition = op_def(op.kind)
        if definition.moves:
            constant = numbers[0]
        elif definition.elementwise:
            arrays = [
                np.full((), number, value.dtype.numpy)
                for number, value in zip(numbers, op.inputs, strict=True)
            ]
            out = np.empty((), target.dtype.numpy)
            nothing = ((),) * len(arrays)
            context = KernelContext(
                definition.complete(dict(op.attrs)), nothing, ((),), nothing, ((),)
            )
            with np.errstate(all="ignore"):
                dtypes = [array.dtype for array in (*arrays, out)]
                kernel_for(definition, dtypes)(context, arrays, [out])
            constant = out.item()
        else:
            return None
        if isinstance(constant, float) and not math.isfinite(constant):
            self.notes.append(f"{op.name} stays: it is {constant}, which is for the run to show")
            return None
        attrs = freeze_attrs(
            {"shape": target.shape, "dtype": str(target.dtype), "value": _plain(constant)}
        )
        return replace(op, kind="fill", inputs=(), attrs=attrs)

    def _same_as(self, op: Op) -> Value | None:
        """The value that the op's output equals."""
        source = op.inputs[0]
        definition = op_def(op.kind)
        neutral = definition.neutral
        if neutral is not None:
            if len(op.inputs) == 1:
                same = op.attr("scalar") == neutral and not op.attr("swapped", False)
                return source if same else None
            if self._fill(op.inputs[1]) == neutral:
                return source
            if definition.mirrored == op.kind and self._fill(source) == neutral:
                return op.inputs[1]
            return None
        if op.kind == "neg":
            inner = self._inner(op, "neg")
            return None if inner is None else inner.inputs[0]
        if op.kind == "cast":
            inner = self._inner(op, "cast")
            if inner is not None and _is_exact(inner):
                source = inner.inputs[0]
            return source if source.dtype is op.outputs[0].dtype else None
        views = definition.moves and (definition.view or definition.strided is not None)
        if views and source.shape == op.outputs[0].shape:
            kept = keeps_order(op.kind, dict(op.attrs), source.shape, source.shape)
            return source if kept else None
        return None

    def _simpler(self, op: Op) -> Op:
        """An op that makes the same with less; the op itself where none is known."""
        rule = _CHAINS.get(op.kind)
        if rule is not None:
            inner = self._inner(op, op.kind)
            attrs = None if inner is None else rule(inner, op, self._reads_once(inner))
            if inner is not None and attrs is not None:
                return replace(op, inputs=inner.inputs, attrs=freeze_attrs(attrs))
        elif op.kind in ("mul", "div"):
            for position in (1, 0) if op.kind == "mul" else (1,):
                number = self._fill(op.inputs[position])
                other = op.inputs[1 - position]
                if number is not None and other.shape == op.outputs[0].shape:
                    return replace(
                        op,
                        kind=f"{op.kind}_scalar",
                        inputs=(other,),
                        attrs=freeze_attrs({"scalar": number}),
                    )
        return op

    def _reads_once(self, op: Op) -> bool:
        return len(self._readers.get(op.outputs[0].name, ())) == 1


def _plain(number: object) -> bool | int | float:
    assert isinstance(number, (bool, int, float)), number
    return number


def _is_exact(cast: Op) -> bool:
    """Whether a cast keeps every value: from a floating dtype to a wider one."""
    source, target = cast.inputs[0].dtype, cast.outputs[0].dtype
    wider = target is source or target.itemsize > source.itemsize
    return source.is_floating and target.is_floating and wider


# --- chains: the attributes of one op for two of its kind, or None --------------------------------

Chain = Callable[[Op, Op, bool], dict[str, AttrValue] | None]
"""`(inner, outer, whether only the outer op reads the inner's output)`."""


def _reshapes(inner: Op, outer: Op, once: bool) -> dict[str, AttrValue] | None:
    return {"shape": outer.outputs[0].shape}


def _transposes(inner: Op, outer: Op, once: bool) -> dict[str, AttrValue] | None:
    first, second = inner.attr("axes"), outer.attr("axes")
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    return {"axes": tuple(int(first[int(axis)]) for axis in second)}


def _casts(inner: Op, outer: Op, once: bool) -> dict[str, AttrValue] | None:
    return dict(outer.attrs) if _is_exact(inner) else None


def _factors(inner: Op, outer: Op, once: bool) -> dict[str, AttrValue] | None:
    # In float16 the order of two factors may decide whether something overflows.
    if not once or outer.outputs[0].dtype not in _WIDE:
        return None
    first, second = inner.attr("scalar"), outer.attr("scalar")
    assert isinstance(first, (int, float))
    assert isinstance(second, (int, float))
    product = float(first) * float(second)
    least, most = outer.outputs[0].dtype.range
    fits = least <= abs(product) <= most
    return {"scalar": product} if fits else None


_CHAINS: dict[str, Chain] = {
    "reshape": _reshapes,
    "transpose": _transposes,
    "cast": _casts,
    "mul_scalar": _factors,
}
