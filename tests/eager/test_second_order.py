"""Second derivatives of every op kind that has a gradient: against central differences of the first
ones on one rank, and the same on two ranks whatever the layouts."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.eager.tensor import Leaf
from plancompiler.ops import infer_types, op_table
from tests.eager.test_ops import STRUCTURE, layout
from tests.ops.dense import SEED, STEP, gradients_of
from tests.ops.sample import Sample
from tests.ops.samples import samples
from tests.ops.sharding import run_dense, type_of

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
LAYOUTS = ("S(0)", "P", "S(last)", "B")
LEAST_KINDS = 205
STEP_SIZE = 1e-5

WITHOUT = {
    "an update of a variable, which is no step of what is differentiated": {
        "adafactor_direction",
        "adafactor_moments",
        "clip_addends",
        "flat_lamb_update",
        "segment_square_sums",
        *(
            kind
            for kind, each in op_table().items()
            if each.mutates and kind != "loss_scale_update"
        ),
    },
    "chosen from all numbers at once": {"unique"},
    "steps from number to number": {"nextafter"},
    "a series without a formula of its slope": {"zeta"},
    "steers the scale of a loss": {"found_inf", "loss_scale_update"},
    "made by a pass, after gradients": {
        "accumulate",
        "collect_pieces",
        "fused_elementwise",
        "take_piece",
    },
    "inference from a cache of keys; training has `attention`": {"cached_attention"},
}
"""Kinds from floats to floats without a gradient, by why. All others can be differentiated as often
as one likes: their gradients are made of kinds that have gradients."""


@pytest.fixture(scope="module")
def all_samples(tmp_path_factory):
    return samples(tmp_path_factory.mktemp("data"))


def differentiable(all_calls: list[Sample]) -> list[Sample]:
    table = op_table()
    return [
        sample
        for sample in all_calls
        if sample.inputs
        and sample.differentiable
        and sample.kind not in STRUCTURE
        and table[sample.kind].gradient is not None
    ]


@pytest.fixture(scope="module")
def calls(all_samples):
    return differentiable(all_samples)


def test_the_kinds_without_a_gradient_are_those_named_here(all_samples):
    table = op_table()
    ungraded = set()
    for sample in all_samples:
        types = tuple(map(type_of, sample.inputs))
        outputs = infer_types(sample.kind, types, sample.attrs)
        between_floats = all(any(each.dtype.is_floating for each in s) for s in (types, outputs))
        if between_floats and table[sample.kind].gradient is None:
            ungraded.add(sample.kind)
    named = [kind for kinds in WITHOUT.values() for kind in kinds]
    assert sorted(named) == sorted(ungraded)


def numbers_for(sample: Sample, seed: int) -> np.random.Generator:
    """Random numbers that do not depend on which other samples there are."""
    return np.random.default_rng([seed, zlib.crc32(str(sample).encode())])


def weights_of(sample: Sample, rng: np.random.Generator) -> tuple[np.ndarray, list[np.ndarray]]:
    """The gradient of the first output, and what the gradients of the inputs are weighed by."""
    made = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)
    weight, *pulls = (
        np.asarray(rng.normal(size=array.shape), array.dtype if array.dtype.kind == "f" else None)
        for array in (made[0], *sample.inputs)
    )
    return weight, pulls


def score(sample: Sample, inputs: list[np.ndarray], weight: np.ndarray, pulls: list[np.ndarray]):
    """The weighed sum of the gradients of the inputs, without any tape."""
    made = run_dense(sample.kind, inputs, sample.attrs, seed=SEED, step=STEP)
    grads = gradients_of(sample.kind, inputs, sample.attrs, [weight] + [None] * (len(made) - 1))
    pairs = zip(pulls, grads, strict=True)
    return sum(float(np.sum(pull * grad)) for pull, grad in pairs if grad is not None)


def stuck_kinds(grads):
    """Kinds behind recorded gradients through which no gradient passes."""
    pending, seen = [grad.node for grad in grads if grad is not None], set()
    while pending:
        node = pending.pop()
        if node is None or isinstance(node, Leaf) or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op.kind in op_table() and op_table()[node.op.kind].gradient is None:
            yield node.op.kind
        pending += [tensor.node for tensor in node.inputs]


def second_order(calls, weights, placement):
    """Of each call the gradients of `score` by its inputs and by the weight, and the kinds on the
    tape of the first gradients that have no gradient."""
    generator = pc.manual_seed(SEED)
    gradients, stuck = [], []
    for number, (sample, (weight, pulls)) in enumerate(zip(calls, weights, strict=True)):
        generator.start_step(STEP)

        def placed(array, position, number=number):
            choice = LAYOUTS[(number + position) % len(LAYOUTS)]
            return pc.tensor(array, placement, layout(choice, array, 1))

        tensors = [placed(array, position) for position, array in enumerate(sample.inputs)]
        seed = pc.tensor(weight, placement)
        leaves = [tensor for tensor in tensors if tensor.dtype.is_floating]
        for leaf in (*leaves, seed):
            leaf.requires_grad = True
        output = tensors[0]._apply(sample.kind, tensors, sample.attrs)[0]
        if not output.requires_grad:
            gradients.append([None] * (len(leaves) + 1))
            continue
        firsts = pc.eager.grad(output, leaves, seed, create_graph=True)
        stuck += stuck_kinds(firsts)
        floats = [pull for pull, each in zip(pulls, tensors, strict=True) if each.dtype.is_floating]
        total = None
        for first, pull in zip(firsts, floats, strict=True):
            if first is not None:
                part = (first * pc.tensor(pull, placement)).sum().cast("float64")
                total = part if total is None else total + part
        if total is None or not total.requires_grad:
            gradients.append([None] * (len(leaves) + 1))
            continue
        seconds = pc.eager.grad(total, [*leaves, seed])
        gradients.append([None if each is None else each.numpy() for each in seconds])
    return gradients, stuck


def differences(sample, weight, pulls, along):
    """The derivative of `score` along a direction of all float inputs and the weight: central
    differences of two steps, by which the term of the step's square is gone.
    """
    slopes, sizes = [], []
    for size in (STEP_SIZE, STEP_SIZE / 2):
        ends = []
        for step in (size, -size):
            inputs = [
                array + step * change if array.dtype.kind == "f" else array
                for array, change in zip(sample.inputs, along, strict=False)
            ]
            ends.append(score(sample, inputs, weight + step * along[-1], pulls))
        slopes.append((ends[0] - ends[1]) / (2 * size))
        sizes += map(abs, ends)
    return (4 * slopes[1] - slopes[0]) / 3, max(sizes)


@pytest.mark.slow
def test_second_derivatives_match_differences_of_first_ones(calls, record_property):
    weights = [weights_of(sample, numbers_for(sample, 6)) for sample in calls]
    gradients, stuck = second_order(calls, weights, ALONE)
    assert stuck == []
    checked = set()
    for sample, (weight, pulls), seconds in zip(calls, weights, gradients, strict=True):
        rng = numbers_for(sample, 7)
        floats = [slot for slot, one in enumerate(sample.inputs) if one.dtype.kind == "f"]
        # All elements take part in one random direction: an error in any of them shows in it.
        along = [np.asarray(rng.normal(size=one.shape)) for one in (*sample.inputs, weight)]
        expected, size = differences(sample, weight, pulls, along)
        got = sum(
            float(np.sum(second * along[slot]))
            for slot, second in zip((*floats, -1), seconds, strict=True)
            if second is not None
        )
        bound = 1e-6 * max(1.0, size)
        np.testing.assert_allclose(got, expected, 1e-6, bound, err_msg=str(sample))
        checked.add(sample.kind)
    record_property("second_derivatives_of_op_kinds", f"{len(checked)}, in {len(calls)} calls")
    assert len(checked) >= LEAST_KINDS
    (parts, _), _ = spawn(second_order, 2, calls, weights, PAIR)
    for sample, wanted, got in zip(calls, gradients, parts, strict=True):
        for left, right in zip(wanted, got, strict=True):
            assert (left is None) == (right is None), str(sample)
            if left is not None:
                np.testing.assert_allclose(right, left, 1e-9, 1e-9, err_msg=str(sample))


@pytest.mark.slow
def test_second_derivatives_keep_halves(tmp_path):
    rng = np.random.default_rng(7)
    calls = differentiable(samples(tmp_path, "float16"))
    weights = [weights_of(sample, rng) for sample in calls]
    with np.errstate(all="ignore"):  # some are beyond what halves hold
        gradients, _ = second_order(calls, weights, ALONE)
    halves = 0
    for sample, (weight, _), seconds in zip(calls, weights, gradients, strict=True):
        dtypes = [one.dtype for one in (*sample.inputs, weight) if one.dtype.kind == "f"]
        for dtype, second in zip(dtypes, seconds, strict=True):
            assert second is None or second.dtype == dtype, str(sample)
            halves += second is not None and dtype == np.float16
    assert halves > 900


def test_a_product_with_zeros_has_its_second_derivatives():
    x = pc.tensor([0.0, 2.0, 3.0], ALONE, requires_grad=True)
    (first,) = pc.eager.grad(pc.prod(x), [x], create_graph=True)
    assert first.numpy().tolist() == [6, 0, 0]
    (second,) = pc.eager.grad(first.sum(), [x])
    assert second.numpy().tolist() == [5, 3, 2]


def test_an_arc_margin_bends_as_its_formula():
    angle = np.array([[0.4], [1.0], [2.2]])
    attrs = {"margin1": 1.0, "margin2": 0.5, "margin3": 0.0, "scale": 3.0}
    x = pc.tensor(np.cos(angle), ALONE, requires_grad=True)
    labels = pc.tensor(np.zeros(3, np.int64), ALONE)
    y = x._apply("margin_logits", (x, labels), attrs)[0]
    (first,) = pc.eager.grad(y.sum(), [x], create_graph=True)
    (second,) = pc.eager.grad(first.sum(), [x])
    # Of cos(t + m) by x = cos t: sin(t + m) / sin t; of that: sin m / sin³ t.
    np.testing.assert_allclose(first.numpy(), 3 * np.sin(angle + 0.5) / np.sin(angle))
    np.testing.assert_allclose(second.numpy(), 3 * np.sin(0.5) / np.sin(angle) ** 3)


def test_the_norm_of_a_gradient_is_differentiated_through_a_normalised_attention():
    """What a gradient penalty needs: through layer_norm's and attention's kept side results."""
    rng = np.random.default_rng(8)
    data = rng.normal(size=(2, 2, 3, 4))
    width = np.ones(4)

    def norm_of_gradient(x, ones, zeros):
        y = x._apply("layer_norm", (x, ones, zeros), {"eps": 1e-5})[0]
        z = y._apply("attention", (y, y, y), {"scale": 0.5, "causal": True})[0]
        (first,) = pc.eager.grad((z * z * z).sum(), [x], create_graph=True)
        return (first * first).sum()

    def given(array, placement):
        x = pc.tensor(array, placement, layout("S(0)", array, 1), requires_grad=True)
        return x, pc.tensor(width, placement), pc.tensor(0 * width, placement)

    def second(x, *others):
        return pc.eager.grad(norm_of_gradient(x, *others), [x])[0]

    eager = second(*given(data, ALONE)).numpy()
    along = rng.normal(size=data.shape)
    ends = [
        float(norm_of_gradient(*given(data + step * along, ALONE)).numpy())
        for step in (STEP_SIZE, -STEP_SIZE)
    ]
    expected = (ends[0] - ends[1]) / (2 * STEP_SIZE)
    np.testing.assert_allclose(np.sum(eager * along), expected, 1e-6)

    def compiled():
        function = pc.compile(second)
        made = function(*given(data, PAIR)).numpy()
        function.close()
        return made

    for made in spawn(compiled, 2):
        np.testing.assert_allclose(made, eager, 1e-10)
