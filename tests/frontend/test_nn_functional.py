"""`pc.nn.functional` against formulas of NumPy, on two ranks in several layouts: results, and the
slope along a random direction against a difference."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import AttributeValueError, ExecutionError, ShapeError, UsageError

F = pc.nn.functional
PAIR = pc.Placement("cpu", [0, 1])
RANDOM = np.random.default_rng(16)
SPLITS = {"B": None, "S(0)": 0, "S(1)": 1}
LABELS = np.array([1, 3, -100, 0])
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])


def real(*shape):
    return RANDOM.normal(size=shape)


def unit(*shape):
    return RANDOM.uniform(0.1, 0.9, shape)


X, Y, Z, W = real(4, 5), real(4, 5), real(4, 5), unit(5)
IMAGES = real(2, 3, 6, 7)


# --- references -----------------------------------------------------------------------------------


def log_softmax(x, axis=1):
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def class_loss(logs, labels, weight, smoothing=0.0):
    """Row by row, as Szegedy et al. (2016) describe smooth labels; the mean by weights."""
    total = divisor = 0.0
    for row, label in zip(logs, labels, strict=True):
        if label >= 0:
            smooth = -(row * weight).sum() / len(row)
            total += -(1 - smoothing) * weight[label] * row[label] + smoothing * smooth
            divisor += weight[label]
    return total / divisor


def spelling_paths(logs, target):
    """Minus the logarithm of the probability of all paths that spell a target, one by one."""
    total = 0.0
    for path in itertools.product(range(logs.shape[1]), repeat=len(logs)):
        merged = [each for each, _ in itertools.groupby(path)]
        if [each for each in merged if each] == list(target):
            total += math.exp(sum(logs[time, each] for time, each in enumerate(path)))
    return -math.log(total)


def resampled(x, size, weights):
    """The last axis, by a function from a new place to old places and their weights."""
    made = np.zeros((*x.shape[:-1], size))
    for new in range(size):
        for old, weight in weights(new):
            made[..., new] += weight * x[..., min(max(old, 0), x.shape[-1] - 1)]
    return made


def linear(step, align=False):
    def weights(new):
        at = new * step if align else max((new + 0.5) * step - 0.5, 0.0)
        return (math.floor(at), 1 - at % 1), (math.floor(at) + 1, at % 1)

    return weights


def cubic(step):
    def weights(new):
        at = (new + 0.5) * step - 0.5
        for old in range(math.floor(at) - 1, math.floor(at) + 3):
            d, a = abs(at - old), -0.75
            near = (a + 2) * d**3 - (a + 3) * d**2 + 1
            yield old, near if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4)

    return weights


def both_axes(x, sizes, weights):
    turned = np.moveaxis(resampled(x, sizes[1], weights[1]), -2, -1)
    return np.moveaxis(resampled(turned, sizes[0], weights[0]), -1, -2)


def pooled(x, size, stride, reduce, ceil=False):
    """Over the last axis, windows beyond the end cut short."""
    count = (math.ceil if ceil else math.floor)((x.shape[-1] - size) / stride) + 1
    cut = [x[..., at * stride : at * stride + size] for at in range(count)]
    return np.stack([reduce(each, -1) for each in cut if each.shape[-1]], -1)


def columns(x, kernel):
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=(2, 3))
    n, c, h, w, *_ = windows.shape
    return windows.transpose(0, 1, 4, 5, 2, 3).reshape(n, c * math.prod(kernel), h * w)


def sampled(x, grid):
    """Bilinear, zeros beyond the image, corners not aligned: pixel by pixel."""
    n, c, h, w = x.shape
    made = np.zeros((n, c, *grid.shape[1:3]))
    for at in np.ndindex(n, *grid.shape[1:3]):
        gx, gy = grid[at]
        px, py = (gx + 1) * w / 2 - 0.5, (gy + 1) * h / 2 - 0.5
        for row, column in itertools.product(
            *(range(math.floor(p), math.floor(p) + 2) for p in (py, px))
        ):
            if 0 <= row < h and 0 <= column < w:
                share = (1 - abs(py - row)) * (1 - abs(px - column))
                made[(at[0], slice(None), *at[1:])] += share * x[at[0], :, row, column]
    return made


def normalized(x, axes):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def cosine(x, y):
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def distance(x, y, p=2):
    return (np.abs(x - y + 1e-6) ** p).sum(-1) ** (1 / p)


def hinge(x):
    return np.maximum(x, 0)


def multi_margin(x, labels, weight):
    rows = [
        weight[label] * sum(hinge(1 - row[label] + row[j]) for j in range(len(row)) if j != label)
        for row, label in zip(x, labels, strict=True)
    ]
    return np.mean(rows) / x.shape[1]


def multilabel_margin(x, labels):
    rows = []
    for row, given in zip(x, labels, strict=True):
        named = list(itertools.takewhile(lambda each: each >= 0, given))
        others = [j for j in range(len(row)) if j not in named]
        rows.append(sum(hinge(1 - row[j] + row[i]) for j in named for i in others))
    return np.mean(rows) / x.shape[1]


SOME = np.array([[3, 0, -1, 1, 1], [1, -1, 2, 2, 2], [-1, 0, 1, 2, 3], [4, 3, 2, 1, 0]])
LOGS = log_softmax(real(4, 3, 3), 2)
GRID = RANDOM.uniform(-1.3, 1.3, (2, 3, 4, 2))
TARGET = unit(4, 5)

# Name, the call on tensors, its arrays (those that are differentiated first), and the result.
CASES = [
    ("weights", F.cross_entropy, (X, LABELS, W), lambda x, t, w: class_loss(log_softmax(x), t, w)),
    (
        "smooth",
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.3),
        (X, LABELS, W),
        lambda x, t, w: class_loss(log_softmax(x), t, w, 0.3),
    ),
    (
        "split classes",
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.3, split_classes=True),
        (X, LABELS, W),
        lambda x, t, w: class_loss(log_softmax(x), t, w, 0.3),
    ),
    (
        "probabilities",
        F.cross_entropy,
        (X, TARGET),
        lambda x, t: -(log_softmax(x) * t).sum(1).mean(),
    ),
    (
        "space",
        F.cross_entropy,
        (real(2, 5, 3), np.array([[1, 2, 0], [4, 4, 3]])),
        lambda x, t: -np.take_along_axis(log_softmax(x), t[:, None], 1).mean(),
    ),
    ("nll", F.nll_loss, (X, LABELS, W), class_loss),
    (
        "ours",
        lambda x, t, w: pc.cross_entropy(x, t, axis=1, weight=w, label_smoothing=0.3),
        (X, LABELS, W),
        lambda x, t, w: class_loss(log_softmax(x), t, w, 0.3),
    ),
    (
        "ctc",
        lambda x, t, n, s: F.ctc_loss(x, t, n, s, reduction="sum"),
        (LOGS, np.array([[1, 1], [2, 0], [0, 0]]), np.array([4, 3, 2]), np.array([2, 1, 0])),
        lambda x, t, n, s: sum(spelling_paths(x[: n[i], i], t[i, : s[i]]) for i in range(3)),
    ),
    (
        "ctc of lists",
        lambda x, t: F.ctc_loss(x, t, [4, 3, 2], (2, 1, 0), reduction="sum"),
        (LOGS, np.array([[1, 1], [2, 0], [0, 0]])),
        lambda x, t: sum(
            spelling_paths(x[:n, i], t[i, :s]) for i, (n, s) in enumerate([(4, 2), (3, 1), (2, 0)])
        ),
    ),
    (
        "one number for all axes",
        lambda x: F.avg_pool2d(x, [2], stride=(1,)),
        (IMAGES,),
        lambda x: (x[..., 1:, 1:] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., :-1, :-1]) / 4,
    ),
    (
        "true counts more",
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        (X, TARGET, W),
        lambda x, t, w: np.mean(w * t * np.log1p(np.exp(-x)) + (1 - t) * np.log1p(np.exp(x))),
    ),
    (
        "log target",
        lambda x, t: F.kl_div(x, t, log_target=True, reduction="batchmean"),
        (X, Y),
        lambda x, t: (np.exp(t) * (t - x)).sum() / 4,
    ),
    (
        "soft margin",
        F.soft_margin_loss,
        (X, np.sign(Y)),
        lambda x, t: np.log1p(np.exp(-x * t)).mean(),
    ),
    (
        "hinge",
        F.hinge_embedding_loss,
        (X, np.sign(Y)),
        lambda x, t: np.where(t > 0, x, hinge(1 - x)).mean(),
    ),
    (
        "ranking",
        lambda x, y, t: F.margin_ranking_loss(x, y, t, 0.2),
        (X[:, 0], Y[:, 0], SIGNS),
        lambda x, y, t: hinge(-t * (x - y) + 0.2).mean(),
    ),
    (
        "cosine",
        lambda x, y, t: F.cosine_embedding_loss(x, y, t, 0.1),
        (X, Y, SIGNS),
        lambda x, y, t: np.where(t > 0, 1 - cosine(x, y), hinge(cosine(x, y) - 0.1)).mean(),
    ),
    (
        "triplet",
        lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True),
        (X, Y, Z),
        lambda x, y, z: hinge(
            1 + distance(x, y) - np.minimum(distance(x, z), distance(y, z))
        ).mean(),
    ),
    (
        "multi margin",
        lambda x, t, w: F.multi_margin_loss(x, t, weight=w),
        (X, abs(LABELS) % 5, W),
        multi_margin,
    ),
    ("multilabel margin", F.multilabel_margin_loss, (X, SOME), multilabel_margin),
    ("poisson", F.poisson_nll_loss, (X, 3 * TARGET), lambda x, t: (np.exp(x) - t * x).mean()),
    (
        "gaussian",
        F.gaussian_nll_loss,
        (X, Y, TARGET),
        lambda x, t, v: (np.log(v) + (x - t) ** 2 / v).mean() / 2,
    ),
    (
        "bilinear",
        lambda x: F.interpolate(x, (9, 4), mode="bilinear"),
        (IMAGES,),
        lambda x: both_axes(x, (9, 4), (linear(6 / 9), linear(7 / 4))),
    ),
    (
        "corners",
        lambda x: F.interpolate(x, (9, 4), mode="bilinear", align_corners=True),
        (IMAGES,),
        lambda x: both_axes(x, (9, 4), (linear(5 / 8, True), linear(2.0, True))),
    ),
    (
        "bicubic",
        lambda x: F.interpolate(x, (9, 4), mode="bicubic"),
        (IMAGES,),
        lambda x: both_axes(x, (9, 4), (cubic(6 / 9), cubic(7 / 4))),
    ),
    (
        "nearest",
        lambda x: F.interpolate(x, scale_factor=1.5),
        (IMAGES,),
        lambda x: x[:, :, np.arange(9) * 2 // 3][..., np.arange(10) * 2 // 3],
    ),
    ("grid", F.grid_sample, (IMAGES, GRID), sampled),
    (
        "affine",
        lambda t: F.affine_grid(t, (2, 1, 2, 3)),
        (real(2, 2, 3),),
        lambda t: np.einsum(
            "nij,hwj->nhwi", t, [[[x, y, 1] for x in (-2 / 3, 0, 2 / 3)] for y in (-0.5, 0.5)]
        ),
    ),
    (
        "ceiling",
        lambda x: F.max_pool1d(x, 3, 2, ceil_mode=True),
        (real(2, 3, 8),),
        lambda x: pooled(x, 3, 2, np.max, True),
    ),
    (
        "average to the ceiling",
        lambda x: F.avg_pool1d(x, 3, 2, ceil_mode=True),
        (real(2, 3, 8),),
        lambda x: pooled(x, 3, 2, np.mean, True),
    ),
    (
        "greatest to a size",
        lambda x: F.adaptive_max_pool1d(x, 3),
        (real(2, 3, 8),),
        lambda x: np.stack(
            [x[..., low:high].max(-1) for low, high in ((0, 3), (2, 6), (5, 8))], -1
        ),
    ),
    (
        "norms of windows",
        lambda x: F.lp_pool1d(x, 2.0, 4),
        (unit(2, 3, 8),),
        lambda x: pooled(x, 4, 4, lambda each, axis: np.sqrt((each**2).sum(axis))),
    ),
    (
        "reflect",
        lambda x: F.pad(x, (2, 1, 1, 0), "reflect"),
        (IMAGES,),
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 0), (2, 1)), "reflect"),
    ),
    (
        "replicate",
        lambda x: F.pad(x, (2, 1, 1, 0), "replicate"),
        (IMAGES,),
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 0), (2, 1)), "edge"),
    ),
    (
        "circular",
        lambda x: F.pad(x, (2, 1, -1, 2), "circular"),
        (IMAGES,),
        lambda x: np.pad(x[:, :, 1:], ((0, 0), (0, 0), (0, 2), (2, 1)), "wrap"),
    ),
    ("unfold", lambda x: F.unfold(x, (2, 3)), (IMAGES,), lambda x: columns(x, (2, 3))),
    (
        "fold",
        lambda x: F.fold(F.unfold(x, (2, 3)), (6, 7), (2, 3)),
        (IMAGES,),
        lambda x: x * np.minimum([[1, 2, 2, 2, 2, 1]], 2).T * [[1, 2, 3, 3, 3, 2, 1]],
    ),
    (
        "shuffle",
        lambda x: F.pixel_shuffle(x, 2),
        (real(2, 4, 2, 3),),
        lambda x: x.reshape(2, 2, 2, 2, 3).transpose(0, 3, 1, 4, 2).reshape(2, 1, 4, 6),
    ),
    (
        "two axes",
        lambda x, g, b: F.layer_norm(x, (6, 7), g, b),
        (IMAGES, real(6, 7), real(6, 7)),
        lambda x, g, b: normalized(x, (2, 3)) * g + b,
    ),
    (
        "neighbours",
        lambda x: F.local_response_norm(x, 3, alpha=0.5),
        (IMAGES,),
        lambda x: (
            x
            / (
                1
                + 0.5
                / 3
                * sum(
                    np.pad(x**2, ((0, 0), (1, 1), (0, 0), (0, 0)))[:, i : i + 3] for i in range(3)
                )
            )
            ** 0.75
        ),
    ),
    (
        "bags",
        lambda w, i, o: F.embedding_bag(i, w, o),
        (real(5, 3), np.array([1, 1, 4, 0]), np.array([0, 2, 2])),
        lambda w, i, o: np.stack([w[[1, 1]].mean(0), np.zeros(3), w[[4, 0]].mean(0)]),
    ),
    (
        "two inputs",
        F.bilinear,
        (X, real(4, 3), real(2, 5, 3), real(2)),
        lambda x, y, w, b: np.einsum("ni,oij,nj->no", x, w, y) + b,
    ),
]
CASES = {name: rest for name, *rest in CASES}


def placed(array, axis):
    sbp = "B" if axis is None or axis >= array.ndim else f"S({axis})"
    return pc.tensor(array, PAIR, sbp)


def run_all():
    """Each case in each layout: its value, and its slope along a direction in all real arrays."""
    results = {}
    for name, (function, arrays, _) in CASES.items():
        for layout, axis in SPLITS.items():
            tensors = [placed(array, axis) for array in arrays]
            if tensors[0].dtype.is_floating:
                tensors[0].requires_grad = True
            made = function(*tensors)
            weight = placed(weights(made.shape), None)
            (made * weight).sum().backward()
            results[name, layout] = made.numpy(), tensors[0].grad.numpy()
    return results


def weights(shape):
    return np.linspace(-1.0, 2.0, math.prod(shape)).reshape(shape)


@pytest.fixture(scope="module")
def results():
    return spawn(run_all, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_slopes(results, name):
    _, (first, *others), reference = CASES[name]
    expected = reference(first, *others)
    direction = np.random.default_rng(1).normal(size=first.shape) * 1e-6
    ahead, behind = (reference(first + by, *others) for by in (direction, -direction))
    slope = ((ahead - behind) / 2e-6 * weights(np.shape(expected))).sum()
    for layout in SPLITS:
        value, grad = results[name, layout]
        np.testing.assert_allclose(value, expected, 1e-7, 1e-7, err_msg=layout)
        np.testing.assert_allclose(
            (grad * direction).sum() * 1e6, slope, 1e-4, 1e-5, err_msg=layout
        )


def test_resampling_exchanges_only_the_rows_that_are_needed():
    def rank():
        x = pc.tensor(real(1, 1, 8, 4), PAIR, "S(2)")
        with pc.comm_trace() as trace:
            y = F.interpolate(x, scale_factor=2.0, mode="bilinear")
            assert str(y.sbp) == "[S(2)]"
        return trace.collectives

    moved = spawn(rank, 2)[0]
    assert [each.nbytes for each in moved] == [4 * 8]  # this rank sends a row of four numbers


def test_places_of_greatest_elements_and_back():
    """Of equal elements the first; whole numbers from 0 to 3 are often equal."""
    x = RANDOM.integers(0, 4, (2, 3, 6, 7)).astype(np.float32)

    def rank():
        for layout in ("B", "S(0)", "S(2)"):
            given = pc.tensor(x, PAIR, layout)
            made, places = F.max_pool2d(given, (2, 3), return_indices=True)
            made, places = made.numpy(), places.numpy()
            for at in np.ndindex(made.shape):
                top, left = 2 * at[2], 3 * at[3]
                window = x[at[0], at[1], top : top + 2, left : left + 3]
                row, column = np.unravel_index(window.argmax(), window.shape)
                assert (made[at], places[at]) == (window.max(), (top + row) * 7 + left + column)
            pooled = F.max_pool2d(given, 2, return_indices=True)
            back = F.max_unpool2d(*pooled, 2, output_size=(6, 7)).numpy()
            kept = back != 0
            np.testing.assert_array_equal(back[kept], x[kept])
            assert kept.sum() == (F.max_pool2d(given, 2).numpy() != 0).sum()
            fitted, where = F.adaptive_max_pool2d(given, (4, 3), return_indices=True)
            flat = x.reshape(2, 3, 42)
            taken = np.take_along_axis(flat, where.numpy().reshape(2, 3, 12), 2)
            np.testing.assert_array_equal(taken.reshape(2, 3, 4, 3), fitted.numpy())

    spawn(rank, 2)


def test_vectors_in_linear():
    weight, x = real(3, 5), real(5)

    def rank():
        w, v = (pc.tensor(each, PAIR, "B") for each in (weight, x))
        np.testing.assert_allclose(F.linear(v, w).numpy(), weight @ x)
        np.testing.assert_allclose(F.linear(v, w[0]).numpy(), weight[0] @ x)
        np.testing.assert_allclose(F.linear(w, v).numpy(), weight @ x)

    spawn(rank, 2)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (AttributeValueError, lambda x: F.interpolate(x, 4, mode="linear")),
        (UsageError, F.interpolate),
        (AttributeValueError, lambda x: F.interpolate(x, scale_factor=-1.0)),
        (AttributeValueError, lambda x: F.interpolate(x, 4, align_corners=True)),
        (ShapeError, lambda x: F.interpolate(x, (4, 4, 4))),
        (ShapeError, lambda x: F.pad(x, (9, 0), "reflect")),
        (AttributeValueError, lambda x: F.pad(x, (1, 0), "mirror")),
        (AttributeValueError, lambda x: F.pad(x, (1,))),
        (ShapeError, lambda x: F.unfold(x, 9)),
        (ShapeError, lambda x: F.pixel_shuffle(x, 2)),
        (ShapeError, lambda x: F.max_unpool2d(x, x[0], 2)),
        (AttributeValueError, lambda x: F.mse_loss(x, x, reduction="average")),
        (AttributeValueError, lambda x: F.cross_entropy(x, x, label_smoothing=2.0)),
        (ShapeError, lambda x: F.cross_entropy(x, x, x[0, 0, 0])),
        (ShapeError, lambda x: F.layer_norm(x, (7, 6))),
        (ShapeError, lambda x: F.grid_sample(x, x)),
        (AttributeValueError, lambda x: F.dropout(x, 1.5)),
        (UsageError, F.batch_norm),
    ],
)
def test_wrong_calls_are_refused_with_the_line(error, call):
    def rank():
        with pytest.raises(error, match=r"test_nn_functional\.py"):
            call(pc.tensor(IMAGES, pc.Placement("cpu", [0]), "B"))

    spawn(rank, 1)


@pytest.mark.parametrize(
    ("labels", "lengths", "sizes"),
    [([[1, 9]], [4], [2]), ([[0, 1]], [4], [2]), ([[1, 2]], [5], [2]), ([[1, 2]], [4], [3])],
)
def test_wrong_alignments_fail(labels, lengths, sizes):
    def rank():
        alone = pc.Placement("cpu", [0])
        given = (LOGS[:, :1], *map(np.array, (labels, lengths, sizes)))
        with pytest.raises(ExecutionError, match="ctc_loss"):
            F.ctc_loss(*(pc.tensor(each, alone, "B") for each in given))

    spawn(rank, 1)


def test_losses_without_a_possible_path():
    def rank():
        alone = pc.Placement("cpu", [0])
        given = (LOGS[:, :1], *map(np.array, ([[1, 1]], [2], [2])))
        logs, *rest = (pc.tensor(each, alone, "B") for each in given)
        logs.requires_grad = True
        assert F.ctc_loss(logs, *rest).item() == math.inf
        loss = F.ctc_loss(logs, *rest, zero_infinity=True)
        loss.backward()
        return loss.item(), logs.grad.numpy()

    loss, grad = spawn(rank, 1)[0]
    assert loss == 0
    assert (grad == 0).all()


def test_dropout_of_channels_and_alpha_dropout():
    def rank():
        pc.manual_seed(5)
        ones = pc.ones((50, 40, 2, 2), "float64", PAIR, "S(0)")
        dropped = F.dropout2d(ones, 0.3).numpy()
        assert ((dropped == 0) | np.isclose(dropped, 1 / 0.7)).all()
        assert (dropped == dropped[:, :, :1, :1]).all()
        assert abs((dropped == 0).mean() - 0.3) < 0.05
        normal = pc.normal((200, 200), dtype="float64", placement=PAIR, sbp="S(0)")
        kept = F.alpha_dropout(normal, 0.4, training=True).numpy()
        assert abs(kept.mean()) < 0.03
        assert abs(kept.std() - 1) < 0.03

    spawn(rank, 2)


def test_unpooling_passes_gradients_to_all_windows_of_a_place():
    """As in PyTorch: windows that overlap may have one greatest element."""
    image = pc.tensor(np.array([[[1.0, 3.0, 2.0, 0.0]]]), pc.Placement("cpu", [0]))
    values, places = F.max_pool1d(image, 2, 1, return_indices=True)
    values = values.detach()
    values.requires_grad = True
    back = F.max_unpool1d(values, places, 2, 1)
    (back * pc.tensor(np.array([1.0, 5.0, 7.0, 9.0]), back.placement)).sum().backward()
    assert back.tolist() == [[[0.0, 3.0, 2.0, 0.0]]]
    assert values.grad.tolist() == [[[5.0, 5.0, 7.0]]]


@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize("per_image", [False, True])
def test_running_statistics_take_a_share_of_those_of_the_batch(per_image, sbp):
    axes = (2, 3) if per_image else (0, 2, 3)
    means, spread = IMAGES.mean(axes), IMAGES.var(axes, ddof=1)
    means, spread = (each.mean(0) if per_image else each for each in (means, spread))
    mean, variance = np.array([1.0, 2.0, 3.0]), np.ones(3)
    for _ in range(2):
        mean, variance = 0.7 * mean + 0.3 * means, 0.7 * variance + 0.3 * spread

    def program():
        x = pc.tensor(IMAGES, PAIR, sbp)
        running = [pc.tensor(np.array(each), PAIR) for each in ([1.0, 2.0, 3.0], [1.0] * 3)]
        for _ in range(2):
            made = (
                F.instance_norm(x, *running, momentum=0.3)
                if per_image
                else F.batch_norm(x, *running, training=True, momentum=0.3)
            )
        F.batch_norm(x, *running, training=True, momentum=0.0)  # changes nothing
        return made.numpy(), *(each.numpy() for each in running)

    for made, *running in spawn(program, 2):
        centred = IMAGES - IMAGES.mean(axes, keepdims=True)
        np.testing.assert_allclose(
            made, centred / np.sqrt(IMAGES.var(axes, keepdims=True) + 1e-5), 1e-9
        )
        np.testing.assert_allclose(running[0], mean)
        np.testing.assert_allclose(running[1], variance)


def test_a_job_keeps_running_statistics_of_a_function():
    with pc.job("running") as job:
        x = pc.input("x", IMAGES.shape, "float64", PAIR, "S(0)")
        kept = pc.nn.Buffer((3,), "float64").place(PAIR), pc.nn.Buffer((3,), "float64").place(PAIR)
        y = F.batch_norm(x, kept[0].value, kept[1].value, training=True, momentum=0.5)
        pc.output("y", y.sum())
    with pc.run(job) as session:
        session.step(x=IMAGES)
        names = sorted(session.variables())
        values = [session.variables()[name] for name in names]
    np.testing.assert_allclose(values[0], IMAGES.mean((0, 2, 3)) / 2)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6)),
        ((1, 1, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
        ((2, 2, 3, 4), (2, 5, 4), (2, 1, 5, 4)),
        ((3, 4), (2, 5, 4), (5, 4)),
    ],
)
def test_batch_axes_of_attention_broadcast(query, key, value):
    arrays = [np.random.default_rng(at).normal(size=s) for at, s in enumerate((query, key, value))]
    q, k, v = arrays
    scores = q @ np.swapaxes(k, -1, -2) / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    made = spawn(
        lambda: F.scaled_dot_product_attention(
            *(pc.tensor(each, PAIR, f"S({each.ndim - 1})") for each in arrays)
        ).numpy(),
        2,
    )
    np.testing.assert_allclose(made[0], expected, 1e-9)
