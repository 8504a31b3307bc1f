"""Views and changes in place against NumPy's storage: random programs, and what gradients see.

A program takes views of a tensor and of its views, changes any of them in place and reads them.
NumPy says what every read must give: in every layout, on any number of ranks, eager and compiled.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import GradientError, InplaceError

LAYOUTS = ("S(0)", "S(1)", "B", "P")
SHAPE = (5, 4)
START = np.arange(1.0, 21.0).reshape(SHAPE)


# --- programs -------------------------------------------------------------------------------------


def take(kind, argument, x):
    """A view of a DistTensor or of an array."""
    eager = isinstance(x, pc.DistTensor)
    if kind == "index":
        return x[argument]
    if kind == "transpose":
        return x.transpose(argument)
    if kind == "reshape":
        return x.reshape(argument)
    if kind == "expand":
        return pc.expand(x, argument) if eager else np.broadcast_to(x, argument)
    return x.detach() if eager else x[...]


def alter(kind, argument, x, other):
    """Change a DistTensor or an array in place."""
    eager = isinstance(x, pc.DistTensor)
    if kind == "fill":
        x.fill_(argument) if eager else x.fill(argument)
    elif kind == "add":
        x += argument
    elif kind == "mul":
        x *= argument
    elif kind == "add tensor":
        x += other
    elif kind == "relu":
        x.relu_() if eager else np.maximum(x, 0.0, out=x)
    elif kind == "copy":
        x.copy_(other * 2.0) if eager else np.copyto(x, other * 2.0)
    elif kind == "out":
        pc.sub(x, other, out=x) if eager else np.subtract(x, other, out=x)
    elif kind == "set":
        x[argument] = 3.0
    elif kind == "add at":
        x[argument] += 1.0


def run(program, base, layouts=None):
    """What each step of a program reads; arrays where `base` is one."""
    known, seen = [base], []
    for at, (what, source, kind, argument) in enumerate(program):
        x = known[source]
        if what == "view":
            known.append(take(kind, argument, x))
        elif what == "change":
            values = np.arange(float(np.prod(x.shape))).reshape(x.shape) - at
            other = values
            if layouts is not None:
                sbp = layouts[at % len(layouts)]
                if sbp.startswith("S") and int(sbp[2]) >= len(x.shape):
                    sbp = "B"
                other = pc.tensor(values, base.placement, sbp)
            alter(kind, argument, x, other)
        else:
            seen.append(x * 1.0)
    return [*seen, *(each * 1.0 for each in known)]


@st.composite
def indices(draw, shape):
    indices = []
    for extent in shape[: draw(st.integers(1, len(shape)))]:
        if draw(st.integers(0, 3)) == 0:
            indices.append(draw(st.integers(-extent, extent - 1)))
            continue
        start = draw(st.integers(0, extent - 1))
        step = draw(st.sampled_from((None, 1, 2, 3)))
        indices.append(slice(start, draw(st.integers(start + 1, extent)), step))
    return tuple(indices)


@st.composite
def programs(draw):
    """Steps as (what, of which tensor, kind, argument)."""
    arrays, steps = [START.copy()], []
    for _ in range(draw(st.integers(3, 8))):
        source = draw(st.integers(0, len(arrays) - 1))
        x = arrays[source]
        what = draw(st.sampled_from(("view", "view", "change", "change", "read")))
        kind, argument = "", None
        if what == "view":
            kind = draw(st.sampled_from(("index", "index", "transpose", "reshape", "detach")))
            if kind == "index" and x.ndim and x.size:
                argument = draw(indices(x.shape))
            elif kind == "transpose":
                argument = tuple(draw(st.permutations(range(x.ndim))))
            elif kind == "reshape":
                flat = [(x.size,), (1, x.size), (x.size, 1), (*x.shape, 1)]
                halves = [(2, x.size // 2)] if x.size % 2 == 0 else []
                argument = draw(st.sampled_from(flat + halves))
            else:
                kind = "detach"
            made = take(kind, argument, x)
            arrays.append(made if isinstance(made, np.ndarray) else np.array(made))
        elif what == "change":
            kinds = ["fill", "add", "mul", "add tensor", "relu", "copy", "out"]
            if x.ndim:
                kinds += ["set", "add at"]
            kind = draw(st.sampled_from(kinds))
            argument = draw(st.sampled_from((-2.0, 0.5, 7.0)))
            if kind in ("set", "add at"):
                argument = draw(indices(x.shape))
        steps.append((what, source, kind, argument))
    return steps


def scalars_become_arrays(program):
    """NumPy's `x[1, 2]` is a number, not a view; with `...` it is an array."""
    return [
        (what, source, kind, (*argument, ...) if kind == "index" else argument)
        for what, source, kind, argument in program
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "examples"), [(1, 25), (2, 25), (3, 25)], ids=["1 rank", "2 ranks", "3 ranks"]
)
def test_programs_of_views_and_changes_do_what_numpy_does(ranks, examples):
    mesh = pc.Placement("cpu", list(range(ranks)))

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(programs(), st.integers(0, 3), st.booleans())
    def check(program, first, compiled):
        program = scalars_become_arrays(program)
        expected = run(program, START.copy())

        def rank():
            for layout in LAYOUTS if not compiled else LAYOUTS[first : first + 1]:
                x = pc.tensor(START, mesh, layout)

                def function(x):
                    return run(program, x, LAYOUTS[first:] + LAYOUTS[:first])

                if compiled:
                    function = pc.compile(function)
                actual = function(x)
                for at, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
                    np.testing.assert_allclose(
                        got.numpy(), wanted, err_msg=f"{at} of {program} as {layout}"
                    )
                np.testing.assert_allclose(x.numpy(), expected[-_tensors(program)])
                if compiled:
                    function.close()

        spawn(rank, ranks)

    check()


def _tensors(program):
    return 1 + sum(what == "view" for what, *_ in program)


# --- gradients ------------------------------------------------------------------------------------


def weighed(tensors):
    """A number out of the last two tensors and the base, each element with a weight of its own."""
    total = 0.0
    for at, x in enumerate((tensors[0], *tensors[-2:])):
        weights = np.cos(np.arange(float(np.prod(x.shape))) + at).reshape(x.shape)
        if isinstance(x, pc.DistTensor):
            weights = pc.tensor(weights, x.placement)
        total = (x * weights).sum() + total
    return total


def slopes(program):
    """The gradient of what NumPy makes of a program: it is linear between the kinks of relu."""
    slopes = np.zeros(SHAPE)
    for at in np.ndindex(SHAPE):
        ends = []
        for step in (1e-4, -1e-4):
            base = START * 1.01
            base[at] += step
            ends.append(weighed(run(program, base)))
        slopes[at] = (ends[0] - ends[1]) / 2e-4
    return slopes


def gradient(program, x, layouts):
    """The gradient, or why there is none."""
    w = pc.tensor(START * 1.01, x.placement, x.sbp, requires_grad=True)
    base = w * 1.0
    try:
        loss = weighed(run(program, base, layouts))
        (gradient,) = pc.eager.grad(loss, [w])
        return np.zeros(SHAPE) if gradient is None else gradient.numpy()
    except (GradientError, InplaceError) as refused:
        return refused.report.what


@pytest.mark.slow
def test_gradients_of_programs_are_right_or_refused_alike():
    mesh = pc.Placement("cpu", [0, 1])
    answered = []

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(programs(), st.booleans())
    def check(program, compiled):
        program = [step for step in scalars_become_arrays(program) if step[0] != "read"]
        if any(kind == "detach" for _, _, kind, _ in program):
            return
        expected = slopes(program)

        def rank():
            starts = [pc.tensor(START, mesh, layout) for layout in LAYOUTS]
            results = [gradient(program, x, LAYOUTS) for x in starts]
            if compiled and not isinstance(results[0], str):

                @pc.compile
                def step(w):
                    loss = weighed(run(program, w * 1.0, LAYOUTS))
                    (grads,) = pc.eager.grad(loss, [w])
                    return w * 0.0 if grads is None else grads

                w = pc.tensor(START * 1.01, mesh, "S(0)", requires_grad=True)
                results.append(step(w).numpy())
                step.close()
            return results

        for of_rank in spawn(rank, 2):
            for got in of_rank:
                if isinstance(of_rank[0], str):
                    assert got == of_rank[0], program
                else:
                    np.testing.assert_allclose(got, expected, 1e-5, 1e-6, err_msg=str(program))
        answered.append(not isinstance(of_rank[0], str))

    check()
    assert sum(answered) * 2 > len(answered)
