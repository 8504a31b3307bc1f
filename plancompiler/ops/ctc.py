"""Connectionist temporal classification (A. Graves et al., 2006): labels without their times.

A path names a class or a blank at each time; it spells the labels that remain when repetitions are
merged and blanks are dropped. The loss is minus the logarithm of the probability of all paths that
spell the target, found by recursion over time: along the target with a blank around each label, a
path stays, goes on by one place, or skips a blank between labels that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError
from plancompiler.ir.operators import filled
from plancompiler.ops.attributes import Int
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import in_float32
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, apply, define_op

_FAR_BELOW = -1e30
"""A logarithm of nothing whose slope is a number, for formulas."""


def _refuse(what: str, got: int, expected: str) -> ExecutionError:
    return ExecutionError(f"{what} of ctc_loss is wrong", got=got, expected=expected)


class _Alignment:
    """Targets with blanks around their labels, and where paths may be."""

    def __init__(self, arrays: Any, given: Arrays, blank: int) -> None:
        """`arrays` is the namespace of what is given. What is wrong fails the run on the host; on
        a device, which would have to be awaited, it makes the loss of its row not a number.
        """
        logs, targets, lengths, sizes = given
        steps, batch, classes = logs.shape
        if not blank < classes:
            raise _refuse("the blank", blank, f"a class below {classes}")
        self._wrong: Array | None = None
        """On a device: the rows whose loss is not a number."""
        for what, values, most in (
            ("an input length", lengths, steps),
            ("a target length", sizes, targets.shape[1]),
        ):
            wrong = (values < 0) | (values > most)
            if arrays is not np:
                self._wrong = wrong if self._wrong is None else self._wrong | wrong
            elif wrong.any():
                raise _refuse(what, int(values[np.argmax(wrong)]), f"0 to {most}")
        used = arrays.arange(targets.shape[1]) < sizes[:, None]
        labels = np.where(used, targets, blank).astype(np.int64)
        wrong = (labels < 0) | (labels >= classes) | (used & (labels == blank))
        if self._wrong is not None:
            self._wrong = self._wrong | wrong.any(axis=1)
            labels = np.where(wrong, 0, labels)
        elif wrong.any():
            expected = f"a class below {classes}, and not the blank {blank}"
            raise _refuse("a label", int(labels[wrong][0]), expected)
        self._arrays = arrays
        self.places = arrays.full((batch, 2 * targets.shape[1] + 1), blank, np.int64)
        np.copyto(self.places[:, 1::2], labels)
        self.skips = arrays.zeros(self.places.shape, np.bool_)
        np.copyto(self.skips[:, 3::2], labels[:, 1:] != labels[:, :-1])
        self.logs, self.lengths, self.ends = (
            logs,
            lengths.astype(np.int64),
            2 * sizes.astype(np.int64),
        )

    def emitted(self, time: int) -> Array:
        """Logarithms of the probabilities of the places' classes at a time."""
        return np.take_along_axis(self.logs[time], self.places, 1)

    def forward(self) -> Iterator[Array]:
        """By time: logarithms of the probability of all beginnings of paths that end in a place."""
        sums = self._nothing()
        sums[:, :1].fill(0)
        for time in range(len(self.logs)):
            reached = sums if time else sums.copy()
            if time:
                reached = np.logaddexp(sums, self._moved(sums, 1))
                skipped = np.logaddexp(reached, self._moved(sums, 2))
                reached = np.where(self.skips, skipped, reached)
            else:
                reached[:, 1:2].fill(0)
            alive = (time < self.lengths)[:, None]
            sums = np.where(alive, reached + self.emitted(time), sums)
            yield sums

    def backward(self) -> Iterator[Array]:
        """From the last time on: those of all rests of paths after a place."""
        sums = self.finished()
        skips = np.zeros_like(self.skips)
        np.copyto(skips[:, :-2], self.skips[:, 2:])
        for time in range(len(self.logs) - 1, -1, -1):
            yield sums
            later = sums + self.emitted(time)
            reached = np.logaddexp(later, self._moved(later, -1))
            reached = np.where(skips, np.logaddexp(reached, self._moved(later, -2)), reached)
            sums = np.where((time < self.lengths)[:, None], reached, sums)

    def finished(self) -> Array:
        """0 where a path may end, else the logarithm of 0."""
        place, ends = self._arrays.arange(self.places.shape[1]), self.ends[:, None]
        may = (place == ends) | (place == ends - 1)
        return np.where(may, 0.0, -np.inf).astype(self.logs.dtype)

    def loss(self) -> Array:
        last = self._nothing()
        last[:, :1].fill(0)
        for sums in self.forward():
            last = sums
        return -self.total(last)

    def total(self, last: Array) -> Array:
        """The logarithm of the probability of all paths, from that of those that end in a place."""
        ended = last + self.finished()
        top = ended.max(axis=1)
        level = np.where(np.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            total: Array = np.log(np.exp(ended - level[:, None]).sum(axis=1)) + level
        return total if self._wrong is None else np.where(self._wrong, np.nan, total)

    def _nothing(self) -> Array:
        nothing: Array = self._arrays.full(self.places.shape, -np.inf, self.logs.dtype)
        return nothing

    def _moved(self, sums: Array, by: int) -> Array:
        """Places moved on, with nothing in those that become free."""
        moved = self._nothing()
        if by > 0:
            np.copyto(moved[:, by:], sums[:, :-by])
        else:
            np.copyto(moved[:, :by], sums[:, -by:])
        return moved


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    loss = _Alignment(context.arrays, inputs, context.attrs["blank"]).loss()
    np.copyto(outputs[0], loss, casting="same_kind")


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *given, dloss = inputs
    (out,) = outputs
    alignment = _Alignment(context.arrays, given, context.attrs["blank"])
    beginnings = list(alignment.forward())
    out.fill(0)
    if not beginnings:
        return
    total = alignment.total(beginnings[-1])[:, None]
    rows = context.arrays.arange(out.shape[1])
    # Where nothing is passed back, a loss may be infinite.
    passed = dloss != 0
    for back, rest in enumerate(alignment.backward()):
        time = len(beginnings) - 1 - back
        alive = passed & (time < alignment.lengths)
        with np.errstate(invalid="ignore"):
            share = np.exp(beginnings[time] + rest - total)
        share = np.where(alive[:, None], share * -dloss[:, None], 0)
        for place in range(share.shape[1]):
            at = (time, rows, alignment.places[:, place])
            out[at] = out[at] + share[:, place]


def _formula(attrs: AttrMap, logs: Any, targets: Any, lengths: Any, sizes: Any) -> Any:
    """The loss by ops, step by step."""
    steps, batch, _ = logs.shape
    count = targets.shape[1]

    def full(shape: tuple[int, ...], value: float, like: Any) -> Any:
        return filled(like, value, shape)

    def column(x: Any) -> Any:
        return x.reshape((batch, 1))

    numbers = apply("cumsum", full((batch, count), 1, targets), axis=1, reverse=False)
    used = apply("less_equal", numbers, column(sizes).cast(numbers.dtype))
    labels = apply("where", used, targets, full((), attrs["blank"], targets))
    blanks = full((batch, count, 1), attrs["blank"], targets)
    pairs = apply("concat", blanks, labels.reshape((batch, count, 1)), axis=2)
    places = apply(
        "concat",
        pairs.reshape((batch, 2 * count)),
        blanks[:, 0] if count else full((batch, 1), attrs["blank"], targets),
        axis=1,
    )
    width = 2 * count + 1

    def moved(x: Any, by: int, value: float | bool) -> Any:
        if by >= width:
            return full(x.shape, value, x)
        return apply("concat", full((batch, by), value, x), x[:, : width - by], axis=1)

    skips = apply("not_equal", places, moved(places, 2, attrs["blank"])) & (
        places.not_equal(attrs["blank"])
    )
    start = full((batch, width), _FAR_BELOW, logs)
    sums = (
        apply("concat", full((batch, 1), 0.0, logs), start[:, 1:], axis=1)
        if count
        else full((batch, 1), 0.0, logs)
    )
    nothing = full((), _FAR_BELOW, logs)
    for time in range(steps):
        reached = apply("logaddexp", sums, moved(sums, 1, _FAR_BELOW))
        if time:
            skipped = apply("where", skips, moved(sums, 2, _FAR_BELOW), nothing)
            reached = apply("logaddexp", reached, skipped)
        emitted = apply("take_along_axis", logs[time], places.cast("int64"), axis=1)
        alive = column(lengths > time)
        sums = apply("where", alive, reached + emitted, sums)
    end = column(sizes).cast("int64") * 2
    at_end = apply("take_along_axis", sums, end, axis=1)
    earlier = apply("take_along_axis", sums, apply("maximum_scalar", end - 1, scalar=0), axis=1)
    at_label = apply("where", end > 0, earlier, nothing)
    return -apply("logaddexp", at_end, at_label).reshape((batch,))


def _grad_formula(attrs: AttrMap, *inputs: Any) -> Any:
    *given, dloss = inputs
    return by_formula(_formula)(attrs, given, given[:1], (dloss,))[0]


_OPERANDS = "logs F t n c, targets I n s, lengths I n, sizes I n"
define_op(
    "ctc_loss",
    infer=f"{_OPERANDS} -> loss F n",
    rule="[t] n [c], n [s], n, n -> n",
    attrs=(Int("blank", 0, least=0),),
    kernel=in_float32(_kernel),
    gradient=by_op("ctc_loss", "ctc_loss_grad"),
    flops=4,
    doc="Connectionist temporal classification of log-probabilities [t, n, c] against targets "
    "[n, s], of which the first `sizes` [n] count, in the first `lengths` [n] steps: a loss each.",
)
define_op(
    "ctc_loss_grad",
    infer=f"{_OPERANDS}, dloss F n -> dlogs F t n c",
    rule="[t] n [c], n [s], n, n, n -> [t] n [c]",
    attrs=(Int("blank", 0, least=0),),
    kernel=in_float32(_grad_kernel),
    gradient=by_formula(_grad_formula),
    linear=((4,),),
    flops=8,
    doc="The gradient of ctc_loss: (logs, targets, lengths, sizes, dloss) -> dlogs.",
)
