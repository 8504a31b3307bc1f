"""Small programs of PyTorch in which an importer can go wrong without an error: where gradients
stop, what changes in place, which dtype a result has, what happens at zero, at ties and at borders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.importers.models import torch

nn, F = torch.nn, torch.nn.functional
ROWS, WIDTH = 4, 6
"""Of inputs."""


class Program(nn.Module):
    """A function of this module and of inputs."""

    def __init__(self, function: Callable[..., Any], parts: dict[str, nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.v = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.linspace(0.5, 2.0, WIDTH))
        self.register_buffer("count", torch.tensor(3))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Callable[[], Any]]]] = {}
"""By name: a function, its inputs, and the modules that it needs."""


def real(*shape: int) -> Any:
    return torch.tensor(
        np.random.default_rng(len(PROGRAMS)).normal(size=shape), dtype=torch.float32
    )


def add(name: str, function: Callable[..., Any], *inputs: Any, **parts: Callable[[], Any]) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = (function, inputs or (real(ROWS, WIDTH),), parts)


def program(*inputs: Any, **parts: Callable[[], Any]) -> Callable[..., Any]:
    """Decorates a function: a program of its name."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        add(function.__name__, function, *inputs, **parts)
        return function

    return define


def numbers(*values: float, dtype: Any = torch.float32) -> Any:
    return torch.tensor(values, dtype=dtype)


INTS = torch.tensor(
    [[-7, -4, -1, 0, 1, 5], [7, 4, 1, 3, -3, 2], [9, -9, 8, -8, 6, -6], [2, 3, 4, 5, 6, 7]]
)
EDGES = torch.tensor(
    [
        [-0.0, 0.0, 1.0, -1.0, 6.0, -6.0],
        [0.5, -0.5, 1.5, -1.5, 2.5, -2.5],
        [3.0, -3.0, 0.25, -0.25, 20.0, -20.0],
        [1.0, 1.0, 2.0, 2.0, 0.0, -0.0],
    ]
)

PLACES = torch.tensor([[0, 0, 1], [2, 1, 2], [3, 3, 3], [0, 1, 2]])
"""With repeats."""

# --- where gradients stop -------------------------------------------------------------------------


@program()
def no_grad(m, x):
    with torch.no_grad():
        scale = m.w * 2
    return x @ (scale * m.w)


@program()
def no_grad_in_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            scale = m.w * 2
        return (x @ scale).float() * m.v


@program()
def autocast_in_no_grad(m, x):
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            scale = x @ m.w
        scale = scale.float() + 1
    return scale * m.v


@program()
def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, m.w, m.v)
        z = F.layer_norm(y.float(), (WIDTH,), m.v)
        with torch.autocast("cpu", enabled=False):
            z = z @ m.w
        return torch.softmax(y, -1), z


@program()
def autocast_twice(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ m.w
        with torch.no_grad():
            a = m.v * 2
            with torch.enable_grad():
                b = m.v * 3
            c = b * m.v
    return y.float(), a, b, c


@program()
def enable_grad_in_no_grad(m, x):
    with torch.no_grad():
        a = m.w * 2
        with torch.enable_grad():
            b = m.w * 3
        c = b + m.w
    return x @ a, x @ b, x @ c


@program()
def set_grad_enabled_in_no_grad(m, x):
    with torch.no_grad(), torch.set_grad_enabled(True):
        a = m.w.sin() * x.sum()
    with torch.set_grad_enabled(False):
        b = m.w.cos() * a
    return a, b


@program()
def no_grad_twice(m, x):
    with torch.no_grad():
        with torch.no_grad():
            a = m.w * 2
        b = a + m.w
    return x @ a * m.v, x @ b


@program()
def no_grad_returns_what_it_is_given(m, x):
    with torch.no_grad():
        a = m.w
        b = m.w.view(-1)
    return x @ a, b * 2


@program()
def no_grad_of_inputs(m, x):
    with torch.no_grad():
        a = x * 2
    return a * m.v, x * a


@program()
def no_grad_reads_places(m, x):
    with torch.no_grad():
        best = (x @ m.w).argmax(-1)
    return F.embedding(best, m.w)


@program()
def in_place_without_gradients(m, x):
    y = x * m.v
    with torch.no_grad():
        y.mul_(3)
    return y * m.v


@program()
def in_place_without_gradients_in_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x * m.v
        with torch.no_grad():
            y.add_(m.v)
        return y * m.v


@program()
def copied_without_gradients(m, x):
    y = torch.zeros_like(x)
    with torch.no_grad():
        y.copy_(x * m.v)
    return y * m.v


@program()
def inference_mode(m, x):
    with torch.no_grad():
        a = torch.relu(m.v)
    return a.detach() * x * m.v


@program()
def checkpointed(m, x):
    def block(y):
        return torch.tanh(y @ m.w) * m.v

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


@program()
def checkpointed_with_no_grad(m, x):
    def block(y):
        with torch.no_grad():
            scale = m.w.sum()
        return torch.tanh(y @ m.w) * scale

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


@program()
def checkpointed_in_autocast(m, x):
    def block(y):
        return torch.tanh(y @ m.w) * m.v.detach()

    with torch.autocast("cpu", torch.bfloat16):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).float()


@program()
def reentrant_checkpoint(m, x):
    return torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(y * m.v), x, use_reentrant=True)


add("detach", lambda m, x: (x * m.v).detach() * m.v)
add("detach_in_place", lambda m, x: (x * m.v).detach_() * m.v)
add("data", lambda m, x: (x * m.v).data * m.v)
add("data_of_a_parameter", lambda m, x: x * m.v.data + m.v)
add("straight_through", lambda m, x: x + ((x * m.v).round() - x).detach())
add("frozen_parameter", lambda m, x: x * m.frozen + m.v)
add("requires_grad_of_a_result", lambda m, x: (x * m.v).detach().requires_grad_(True) * 2)


@program()
def detached_view_in_place(m, x):
    y = x * m.v
    y.detach()[0] = 0
    return y * m.v


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.5, 0.5)


add("own_gradient", lambda m, x: Clipped.apply(x * m.v) * m.v)


class WrittenOut(torch.autograd.Function):
    """Its gradient is the derivative, so nothing is lost without it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh() * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.tanh() + x * (1 - x.tanh() ** 2))


add("derivative_written_out", lambda m, x: WrittenOut.apply(x * m.v) * m.v)


class Bounded(torch.autograd.Function):
    """A gradient that only large values show to be another one."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-100, 100)


add("bounded_gradient", lambda m, x: Bounded.apply(x * m.v) * m.v)


class Saturated(torch.autograd.Function):
    """A gradient that only large arguments show to be another one: it goes past the bounds."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-10, 10)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


add("saturated_gradient", lambda m, x: Saturated.apply(x * m.v) * m.v)


@program()
def hook_on_a_result(m, x):
    y = x * m.v
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * m.v


def hooked():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_backward_hook(lambda m, given, wanted: tuple(2 * each for each in given))
    return layer


add("hook_on_a_module", lambda m, x: m.layer(x * m.v), layer=hooked)


@program()
def hook_on_an_operation(m, x):
    y = x * m.v
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: tuple(2 * each for each in gradients))
    return y * m.v


@program()
def hooks_of_saved_tensors(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda kept: kept * 2):
        return x * m.v * m.v


@program()
def frozen_for_a_while(m, x):
    m.w.requires_grad_(False)
    y = x @ m.w
    m.w.requires_grad = True
    return y * m.v + x @ m.w


@program()
def inferred(m, x):
    with torch.inference_mode():
        best = (x.detach() @ m.w.detach()).argmax(-1)
    return F.embedding(best.clone(), m.w)


# --- changes in place -----------------------------------------------------------------------------


@program()
def buffer_without_gradients(m, x):
    with torch.no_grad():
        m.seen.mul_(0.9).add_(x.mean(0) * 0.1)
    return x * m.seen * m.v


@program()
def buffer_changed_and_read_before(m, x):
    y = x * m.seen.clone()
    m.seen.copy_(x.detach().mean(0))
    m.count += 1
    return y * m.v, x / m.seen, m.count * m.v


@program()
def buffer_returned(m, x):
    m.seen.add_(1)
    return x * m.v, m.seen


@program()
def row_to_zero(m, x):
    y = x * m.v
    y[1] = 0
    y[:, 2] = m.v.sum()
    return y


@program()
def slices_in_place(m, x):
    y = x * m.v
    y[:, 1:3] += m.v[:2]
    y[1:, ::2] *= 2
    y[-1].neg_()
    return y


@program()
def views_in_place(m, x):
    y = x * m.v
    y.view(-1)[::5].mul_(2)
    y.t()[0].add_(m.v[:ROWS])
    y.unsqueeze(0).transpose(1, 2)[0, 1:3, 1].zero_()
    return y


@program()
def chunks_in_place(m, x):
    y = x * m.v
    a, b = y[:, :3], y[:, 3:]
    a.mul_(b.detach().clone())
    y[1].add_(y[0].clone())
    return y, a


@program()
def base_changed_after_a_view(m, x):
    y = x * m.v
    z = y[:, :3]
    y.mul_(2)
    return z * 1.5, y


@program()
def mask_of_columns(m, x):
    return x[:, [True, False, True, True, False, False]] * m.v[0]


@program()
def diagonal_in_place(m, x):
    y = m.w * 1.0
    y.fill_diagonal_(0.5)
    y.diagonal().add_(m.v)
    return x @ y


@program()
def masked_in_place(m, x):
    y = x * m.v
    y[x > 0] = 0.5
    y[:, 3:].masked_fill_(x[:, 3:] < -0.5, 2.0)
    return y


@program()
def placed_by_indices(m, x):
    y = x * m.v
    y[torch.tensor([0, 2])] = m.v
    y[:, torch.tensor([1, 4])] += 1
    return y


@program()
def added_by_indices(m, x):
    y = x * m.v
    y.index_add_(0, torch.tensor([0, 0, 1]), x[:3] * 2)
    y.scatter_add_(1, torch.tensor([[0, 0, 1]] * ROWS), x[:, :3])
    return y


@program()
def scattered(m, x):
    y = (x * m.v).scatter(1, torch.tensor([[5, 0]] * ROWS), x[:, :2] * 3)
    return y.scatter(1, torch.tensor([[1]] * ROWS), 0.25)


add(
    "accumulated",
    lambda m, x: (x * m.v).index_put((torch.tensor([0, 0]),), m.w[:2], accumulate=True),
)
add("index_fill", lambda m, x: (x * m.v).index_fill(1, torch.tensor([0, 3]), 0.5))
add("index_copy", lambda m, x: (x * m.v).index_copy(0, torch.tensor([3, 0]), x[:2] * 2))


@program()
def rows_swapped(m, x):
    y = x * m.v
    y[[0, 1]] = y[[1, 0]]
    return y


@program()
def mask_of_values_in_place(m, x):
    y = x * m.v
    y[x > 0] *= 2
    return y


@program()
def row_where_a_mask_is_true(m, x):
    y = x * m.v
    y[x[:, 0] > 0] = m.v
    return y


@program()
def index_pairs_in_place(m, x):
    y = x * m.v
    y[[0, 1, 1], [2, 3, 4]] += m.v[:3]
    y[[0, 3], :2] = m.w[:2, :2]
    y.index_put_((torch.tensor([0, 0, 1]), torch.tensor([2, 2, 3])), m.v[:3], accumulate=True)
    y[1:, [0, 5]] -= 2
    return y


@program()
def steps_in_place(m, x):
    y = x * m.v
    y[:, ::2] = m.w[:4, :3]
    y[1::2, 1::3] = x[::2, ::3] * m.v[:2]
    y[:, 1:] = y[:, :-1].clone() * 2
    y.view(2, 2, 6)[1].t()[2:4].mul_(m.v[:2])
    return y


@program()
def diagonals_in_place(m, x):
    y = x * m.v
    y.diagonal(1).mul_(2)
    y.diagonal(-1).copy_(m.v[:3])
    return y, m.w.clone().fill_diagonal_(0.5)


@program()
def kept_views_of_what_changes(m, x):
    y = x * m.v
    turned, diagonal, joined = y.t(), y.diagonal(), torch.cat([y, y])
    y += 1
    y[0] = 0
    return turned * 1.5, diagonal * 2, joined


@program()
def filled_in_turns(m, x):
    out = x.new_empty(ROWS, 3, WIDTH)
    for turn in range(3):
        out[:, turn] = x * m.v ** (turn + 1) + (out[:, turn - 1] if turn else 0)
    return out


@program()
def floats_into_integers(m, x):
    whole, truth = torch.zeros(ROWS, WIDTH, dtype=torch.long), torch.zeros(ROWS).bool()
    half = torch.zeros(ROWS, WIDTH).half()
    whole[:] = x * 3
    whole[0] = 2.9
    truth[:] = x[:, 0]
    half.copy_(x * m.v)
    half += x
    return whole, truth, half


@program()
def buffer_at_its_counter(m, x):
    m.seen.index_fill_(0, m.count.view(1), 7.0)
    m.count.add_(1).remainder_(WIDTH)
    m.seen.copy_(m.seen.roll(1))
    m.seen[:2] = x[0, :2].detach()
    return x * m.seen * m.v, m.count


class Unsaved(nn.Module):
    """A buffer that is in no state dict, and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        self.steps.add_(x.detach().mean(0))
        return x * self.steps


add("unsaved_buffer", lambda m, x: m.cache(x * m.v), cache=Unsaved)
for _how in ("sum", "prod", "mean", "amax", "amin"):
    add(
        f"scatter_reduce_{_how}",
        lambda m, x, how=_how: tuple(
            (x * m.v).scatter_reduce(0, PLACES, x[:, :3] * 2 + 1, how, include_self=kept)
            for kept in (True, False)
        ),
    )
add(
    "more_places",
    lambda m, x: (
        (x * m.v).put(torch.tensor([0, 7, 7]), m.v[:3], accumulate=True),
        (x * m.v).index_reduce(0, torch.tensor([0, 0, 2]), x[:3], "amax"),
        x.detach().scatter(0, PLACES[:1], 3.0, reduce="multiply"),
        x.diagonal_scatter(m.v[:4]),
        (x * m.v).as_strided((5, 4), (2, 1), 1),
    ),
)
add("strided_and_turned", lambda m, x: (x * m.v).t().as_strided((3, 4), (6, 1)))


@program()
def relu_in_place(m, x):
    y = x * m.v
    z = y + 1
    F.relu_(y)
    F.hardtanh_(z, -0.5, 0.5)
    return y, z, F.leaky_relu_(z * 2, 0.2)


@program()
def expanded_then_changed(m, x):
    y = m.v.expand(ROWS, WIDTH).clone()
    y[0] = x[0]
    return y * x


@program()
def results_that_are_one_tensor(m, x):
    y = x * m.v
    return y, y.view(2, -1), y, x, m.w, x[0]


@program()
def result_written_after_it_is_kept(m, x):
    kept = []
    y = x * m.v
    for _ in range(3):
        kept.append(y)
        y = y * 1.5
        y += 1
    return kept


add("out_argument", lambda m, x: torch.add(m.v.detach(), 1, out=torch.empty(WIDTH)) * m.v * x)
add("set_of_one", lambda m, x: torch.where(x > 0, x, x.new_zeros(())) * m.v)


@program(norm=lambda: nn.BatchNorm1d(WIDTH))
def batch_norm(m, x):
    return m.norm(x * m.v)


@program(norm=lambda: nn.BatchNorm1d(WIDTH, momentum=None))
def batch_norm_of_all_batches(m, x):
    return m.norm(x * m.v)


@program(norm=lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False, affine=False))
def batch_norm_without_statistics(m, x):
    return m.norm(x * m.v)


@program(norm=lambda: nn.BatchNorm1d(WIDTH, momentum=0.3))
def batch_norm_twice(m, x):
    return m.norm(m.norm(x * m.v) * 2 + x)


@program(norm=lambda: nn.BatchNorm1d(WIDTH).eval())
def batch_norm_of_another_mode(m, x):
    return m.norm(x * m.v)


@program(real(4, 6, 5), norm=lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True))
def instance_norm(m, x):
    return m.norm(x) * m.v[:5]


@program(first=lambda: nn.Linear(WIDTH, WIDTH))
def layer_used_twice(m, x):
    return m.first(torch.tanh(m.first(x)))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric():
    layer = nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@program(layer=symmetric)
def parametrized(m, x):
    with nn.utils.parametrize.cached():
        return m.layer(m.layer(x * m.v))


for _make in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
    add(
        f"spectral_norm_in_training_by_{_make.__module__.rpartition('.')[2]}",
        lambda m, x: m.layer(x * m.v),
        layer=lambda make=_make: make(nn.Linear(WIDTH, 3)),
    )
add(
    "weight_norms",
    lambda m, x: (m.old(x), m.whole(x), m.columns(x * m.v), m.turned(x)),
    old=lambda: nn.utils.weight_norm(nn.Linear(WIDTH, 3)),
    whole=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3), dim=None),
    columns=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3), dim=1),
    turned=lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
)


@program(
    lstm=lambda: nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True),
    gru=lambda: nn.GRU(WIDTH, 3, bidirectional=True),
)
def recurrent(m, x):
    y, state = m.gru(x.view(2, 2, WIDTH))
    return m.lstm(x.view(2, 2, WIDTH) * m.v), m.gru(y @ m.w, state)


@program()
def weight_tied_to_its_transpose(m, x):
    return F.linear(torch.tanh(F.linear(x, m.w)), m.w.t(), m.v)


@program(layer=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)))
def weight_norm(m, x):
    return m.layer(x)


@program(layer=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 3)).eval())
def spectral_norm(m, x):
    return m.layer(x)


# --- dropout --------------------------------------------------------------------------------------

add("dropout_of_nothing", lambda m, x: F.dropout(x, 0.0, True) * m.v)
add("dropout_of_all", lambda m, x: F.dropout(x * m.v, 1.0, True))
add("dropout_in_evaluation", lambda m, x: F.dropout(x * m.v, 0.5, False))
add("feature_dropout_of_all", lambda m, x: F.dropout1d(x[None] * m.v, 1.0, True))
add("alpha_dropout_of_nothing", lambda m, x: F.alpha_dropout(x * m.v, 0.0, True))

# --- whole numbers and dtypes ---------------------------------------------------------------------

OTHER = torch.tensor([[2, -3, 4, 5, -2, 3]] * ROWS)
add("true_division", lambda m, n, k: (n / k, n / 2, 3 / k, n / 2.5), INTS, OTHER)
add("floor_division", lambda m, n, k: (n // k, n // -2, n // 2.5, 7 // k), INTS, OTHER)
add(
    "division_to_zero",
    lambda m, n, k: (
        torch.div(n, k, rounding_mode="trunc"),
        torch.div(n, -2, rounding_mode="trunc"),
        torch.div(n, 2.5, rounding_mode="trunc"),
    ),
    INTS,
    OTHER,
)
add(
    "division_to_the_floor",
    lambda m, n, k: (
        torch.div(n, k, rounding_mode="floor"),
        torch.div(n, 2.5, rounding_mode="floor"),
    ),
    INTS,
    OTHER,
)
add(
    "remainders",
    lambda m, n, k: (
        n % k,
        n % -4,
        n % 2.5,
        torch.fmod(n, k),
        torch.fmod(n, -4),
        torch.fmod(n, 2.5),
        torch.remainder(5, k),
    ),
    INTS,
    OTHER,
)
add(
    "float_remainders",
    lambda m, x: (
        x % 1.5,
        x % -1.5,
        torch.fmod(x, -1.5),
        x % m.v,
        torch.fmod(x, m.v),
        torch.remainder(x, float("inf")),
    ),
)
add(
    "float_division",
    lambda m, x: (
        torch.div(x, m.v, rounding_mode="trunc"),
        torch.div(x, -0.3, rounding_mode="floor"),
    ),
)
add(
    "division_by_zero",
    lambda m, x: (
        x / 0,
        torch.div(x, 0.0, rounding_mode="floor"),
        1 / (x * 0),
        x / x.new_zeros(WIDTH),
    ),
)
add(
    "number_with_integers",
    lambda m, n: (n * 2.5, n + 1, n + True, 2 ** (n % 5), n**2, n * 1.0 * m.v),
    INTS,
)
add(
    "bools",
    lambda m, n: (
        ((n > 0) + (n < 3)),
        (n > 0) * n,
        (n > 0) * 2,
        (n > 0) * 1.5,
        (n > 0).sum(),
        (n > 0).sum(0),
        (n > 0).float().mean(),
        ~(n > 0),
        (n > 0) ^ (n < 3),
        (n > 0) & (n > 2),
        (n > 0).cumsum(0),
    ),
    INTS,
)
add(
    "single_numbers",
    lambda m, x: (
        x * torch.tensor(2.0, dtype=torch.float64),
        x * torch.tensor(3),
        torch.tensor(2.5, dtype=torch.float64) + m.v,
        x + m.count,
        m.count * 1.5,
        m.count / 2,
    ),
)
add(
    "single_float_with_integers",
    lambda m, n, x: (
        n * x[0, 0],
        n + m.v.sum(),
        n * torch.tensor(2.5, dtype=torch.float64),
        n.int() + torch.tensor(3),
        n.int() * n,
    ),
    INTS,
    real(ROWS, WIDTH),
)
add(
    "half_and_single",
    lambda m, x: (
        x.bfloat16() * x,
        x.half() + 1.5,
        x.bfloat16() + x.half(),
        x.half() * INTS,
        x.half() * torch.tensor(2.0),
        (x.bfloat16() * m.v).sum(-1),
    ),
)
add(
    "double_and_single",
    lambda m, x: (x.double() * m.v, x.double() + 1, (x.double() @ m.w.double()).float()),
)
add(
    "compared",
    lambda m, n, x: (
        n > 2.5,
        n == 2.0,
        n >= x,
        x <= 1,
        n == (n > 1),
        n < torch.tensor(2.5),
        x == x.double(),
        n.int() != n,
        (n > 0) == torch.tensor(True),
        x.half() < x,
    ),
    INTS,
    real(ROWS, WIDTH),
)
add(
    "large_integers_compared",
    lambda m, n: (n == n + 1, (n + 1) > n, n.float() == (n + 1).float(), n == 2.0**53),
    torch.tensor([2**53, 2**24, 2**31]),
)
add(
    "where_of_numbers",
    lambda m, x: (
        torch.where(x > 0, x, 0.0),
        torch.where(x > 0, 1, 0),
        torch.where(x > 0, 1.5, 2),
        torch.where(x > 0, x, 1),
        torch.where(x > 0, m.v, x),
        torch.where(x > 0, True, False),
    ),
)
add(
    "where_of_dtypes",
    lambda m, n, x: (
        torch.where(n > 0, n, 0.5),
        torch.where(n > 0, n, x),
        torch.where(n > 0, x.double(), x),
        torch.where(n > 0, n, m.count),
        torch.where(n > 0, x.half(), torch.tensor(2.0)),
    ),
    INTS,
    real(ROWS, WIDTH),
)
add(
    "casts",
    lambda m, x: (
        (x * 3).int(),
        (x * 3).long(),
        x.bool(),
        (x * 50).abs().to(torch.uint8),
        (x > 0).float(),
        x.int().float() * m.v,
        (x * 3).to(torch.int8),
        x.type_as(m.count),
    ),
)
add(
    "integers_that_wrap",
    lambda m, n: (
        n.to(torch.int8) * 37,
        n.to(torch.uint8) + 200,
        n.to(torch.int16) * 9000,
        -n.to(torch.uint8),
        n.int() * 2**30,
    ),
    INTS,
)
add(
    "clamped_integers",
    lambda m, n: (
        n.clamp(-2, 3),
        n.clamp(-2.5, 3.5),
        n.clamp(min=1),
        n.clamp(max=torch.tensor(2)),
        n.clamp_min(2.5),
        n.float().clamp(torch.tensor(-1), torch.tensor(2)),
    ),
    INTS,
)
add("shifted", lambda m, n: (n << 2, n >> 1, n & 3, n | 8, n ^ 5, ~n, n.int() >> 1), INTS)
add(
    "integer_totals",
    lambda m, n: (
        n.sum(),
        n.int().sum(0),
        n.prod(1),
        n.cumsum(1),
        n.int().cumsum(0),
        n.sum(dtype=torch.float32),
        n.float().mean(),
        n.amax(0),
        n.max(),
        n.int().cumprod(1),
    ),
    INTS,
)
add(
    "powers",
    lambda m, x: (
        x.abs() ** 0.5,
        x**3,
        x**0,
        x**1,
        x**-1,
        x**4,
        2.0**x,
        x.abs() ** m.v,
        (-2.0) ** INTS,
        x**-2,
        x**2.5,
        0.0 ** x.abs(),
    ),
)
add(
    "joined_dtypes",
    lambda m, n, x: (
        torch.cat([n, x]),
        torch.cat([x.half(), x]),
        torch.stack([n, x.double()]),
        torch.cat([n > 0, n]),
    ),
    INTS,
    real(ROWS, WIDTH),
)
add(
    "constants_made_here",
    lambda m, x: (
        torch.arange(6) * x,
        torch.linspace(0, 1, 6) * x,
        torch.full((6,), 2) * m.v,
        torch.eye(6) @ m.w,
        torch.tensor([1, 2, 3, 4, 5, 6]) * x,
        x.new_full((6,), 3) * x,
        torch.ones_like(x, dtype=torch.int64) * 2,
        torch.arange(0.5, 3.5, 0.5) + x,
    ),
)

# --- zero, ties and borders -----------------------------------------------------------------------

add(
    "negative_zero",
    lambda m, x: (
        1 / torch.round(x),
        1 / -x,
        1 / x.abs(),
        torch.copysign(x + 1, x),
        torch.sign(x),
        torch.atan2(x, -x.abs()),
        1 / torch.trunc(x),
        1 / (x * -1),
        1 / x.sqrt(),
        torch.signbit(x),
        1 / (x + 0),
        1 / (0 - x),
    ),
    EDGES,
)
add(
    "rounded",
    lambda m, x: (
        x.round(),
        (x * 10.05).round(decimals=1),
        x.floor(),
        x.ceil(),
        x.trunc(),
        x.frac(),
    ),
    EDGES,
)


def _one_and_a_half(call, m, x):
    return call(x) * 1.5


@program(real(4, 2, 3, 6))
def products_of_merged_heads(m, x):
    merged = x.reshape(8, 3, 6)
    bias = torch.tanh(merged[:, :1, :3])
    scores = bias.baddbmm(merged, merged.transpose(-1, -2), beta=0.5, alpha=2.0)
    once = bias[:1].baddbmm(merged, merged.transpose(1, 2))
    weights = scores.view(4, 2, 3, 3).softmax(-1)
    made = torch.bmm(weights.view(8, 3, 3), merged).view(4, 2, 3, 6)
    other = torch.bmm(merged.transpose(1, 2), merged).view(4, 2, 6, 6)
    crossed = torch.bmm(merged, merged.transpose(0, 2).reshape(8, 6, 3)).view(4, 2, 3, 3)
    return made @ m.w, once.view(4, 2, 3, 3), other, crossed


@program(real(5, 3))
def pseudo_inverses(m, x):
    x = x @ numbers(3.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.1).reshape(3, 3)
    batch = torch.stack([x, x * 0.5])
    return (
        torch.linalg.pinv(x, atol=0.5),
        torch.linalg.pinv(x, rtol=0.2, atol=1e-6),
        torch.linalg.pinv(batch, rtol=numbers(0.2, 1e-5)),
        torch.linalg.pinv(batch, atol=numbers(0.5, 0.0)),
        torch.linalg.pinv(batch, atol=numbers(1e-7, 0.5), rtol=numbers(0.2, 1e-7)),
    )


@program(real(5, 3))
def householder(m, x):
    return torch.linalg.householder_product(x, torch.sigmoid(x[0]))


for _name in (
    "relu",
    "relu6",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "softsign",
    "tanhshrink",
    "hardshrink",
    "softshrink",
    "logsigmoid",
    "softplus",
):
    add(f"{_name}_at_its_borders", partial(_one_and_a_half, getattr(F, _name)), EDGES)
add(
    "more_activations",
    lambda m, x: (
        F.threshold(x, 0.5, -1),
        F.softplus(x, 2, 3),
        F.softplus(x, 0.5, 20),
        F.elu(x, 1.3),
        F.gelu(x, approximate="tanh"),
        F.glu(x),
        F.rrelu(x, training=False),
        F.prelu(x, m.v),
        F.relu(x - 1) ** 2,
        F.hardshrink(x, 0.25),
        F.softshrink(x, 0.5),
    ),
    EDGES,
)
add(
    "gradients_at_zero",
    lambda m, x: (
        x.abs(),
        x.norm(dim=-1),
        x.square().sum(-1).add(1).sqrt(),
        (x * 0).norm(),
        x.norm(1),
        x.norm(float("inf"), -1),
        F.normalize(x * 0, dim=-1),
        x.sign() * x,
    ),
    EDGES,
)
add(
    "clamped",
    lambda m, x: (
        x.clamp(-1, 1),
        x.clamp(min=0),
        x.clamp(max=1.5),
        x.clamp(m.v, m.v + 1),
        x.clip(1, -1),
        x.clamp(torch.zeros(()), None),
    ),
    EDGES,
)
add(
    "ties",
    lambda m, x: (
        x.amax(-1),
        x.max(),
        x.max(-1).values,
        x.amin(0),
        x.min(0).values,
        torch.maximum(x, x.flip(0)),
        torch.minimum(x, x * 1),
        torch.max(x, m.v * 0),
        x.argmax(-1),
        x.min(-1).indices,
        x.argmin(0),
        x.max(-1, keepdim=True).indices,
    ),
    EDGES,
)
add(
    "extremes_with_nan",
    lambda m, x: (
        x.detach().amax(-1),
        x.detach().max(),
        torch.maximum(x.detach(), m.v.detach()),
        x.detach().argmax(-1),
        F.relu(x.detach()),
        x.detach().clamp(-1, 1),
        x.detach() > 0,
        x.detach() == x.detach(),
        torch.nan_to_num(x.detach()),
        torch.nan_to_num(x.detach(), 1.0, 2.0, -2.0),
        x.detach().isnan(),
        x.detach().nansum(),
    ),
    torch.tensor([[1.0, float("nan"), 2.0, float("inf"), -float("inf"), 0.0]] * ROWS),
)
add(
    "products_with_zeros",
    lambda m, x: (x.prod(-1), (x[:, 2:] * m.v[2:]).prod(0), x.cumprod(-1), x.prod()),
    EDGES,
)
add(
    "spreads",
    lambda m, x: (
        x.var(),
        x.std(0),
        x.var(-1, unbiased=False),
        torch.var_mean(x, -1)[0],
        x.std(-1, correction=2),
        x.var(0, keepdim=True),
        torch.std_mean(x)[1],
        (x * m.v).std(),
    ),
)
add(
    "softmax_of_infinities",
    lambda m, x: (
        F.softmax(x.masked_fill(x < 0.5, float("-inf")), -1),
        torch.logsumexp(x.masked_fill(x < -1, float("-inf")), -1),
        F.log_softmax(x * 100, 0),
        F.softmax(x, -1, dtype=torch.float64),
        F.softmin(x, -1),
    ),
)
add(
    "sorted_ties",
    lambda m, x: (
        x.sort(dim=-1, stable=True)[0],
        x.argsort(dim=-1, stable=True),
        x.detach().topk(3)[0],
        x.sort(dim=0, descending=True, stable=True)[1],
        x.detach().kthvalue(2)[0],
        x.detach().median(-1)[0],
        x.detach().median(),
    ),
    EDGES,
)
add(
    "special_numbers",
    lambda m, x: (
        torch.xlogy(x, x.abs()),
        torch.logit(x.abs(), 0.1),
        torch.sinc(x),
        torch.heaviside(x.detach(), m.v.detach()),
        torch.hypot(x, m.v),
        torch.logaddexp(x, m.v),
        torch.lerp(x, m.v, 0.3),
        torch.erfc(x),
        torch.special.expit(x),
        torch.log1p(x.abs()),
        torch.expm1(x),
    ),
    EDGES,
)
add(
    "masked_gradients",
    lambda m, x: (
        torch.where(x > 0, x.abs().sqrt(), 0.0),
        torch.where(x != 0, 1 / torch.where(x != 0, x, 1.0), 0.0),
        (x > 0) * x.log1p().nan_to_num(),
    ),
    EDGES.abs(),
)

# --- losses and layers ----------------------------------------------------------------------------

LABELS = torch.tensor([1, -100, 0, 5])
add(
    "cross_entropy",
    lambda m, x, n: (
        F.cross_entropy(x * m.v, n),
        F.cross_entropy(x, n, m.seen),
        F.cross_entropy(x, n, reduction="sum", label_smoothing=0.1),
        F.cross_entropy(x, n.clamp(0), ignore_index=5, reduction="none"),
    ),
    real(ROWS, WIDTH),
    LABELS,
)
add("all_labels_ignored", lambda m, x: F.cross_entropy(x * m.v, torch.tensor([-100] * ROWS)))
add(
    "probabilities_as_labels",
    lambda m, x: F.cross_entropy(x * m.v, F.softmax(x.detach(), -1), label_smoothing=0.1),
)
add(
    "binary_losses",
    lambda m, x: (
        F.binary_cross_entropy_with_logits(x * m.v, (x > 0).float()),
        F.binary_cross_entropy(torch.sigmoid(x), (x > 0).float(), m.seen),
        F.mse_loss(x, x.detach() * 2),
        F.smooth_l1_loss(x, x.detach() * 2, beta=0.5),
        F.huber_loss(x, m.v.expand(ROWS, WIDTH), delta=0.3),
        F.l1_loss(x, x.detach()),
        F.kl_div(F.log_softmax(x, -1), F.softmax(x.detach() * 2, -1), reduction="batchmean"),
        F.nll_loss(F.log_softmax(x, -1), LABELS),
    ),
)
add(
    "padded_embedding",
    lambda m, n: (F.embedding(n, m.w, padding_idx=2), F.embedding(n, m.w, padding_idx=-1)),
    torch.tensor([[0, 2, 5], [2, 2, 1], [3, 4, 5], [0, 0, 0]]),
)
add(
    "norms",
    lambda m, x: (
        F.layer_norm(x, (WIDTH,)),
        F.layer_norm(x, (ROWS, WIDTH)),
        F.layer_norm(x, (WIDTH,), m.v),
        F.layer_norm(x, (WIDTH,), None, m.v),
        F.rms_norm(x, (WIDTH,), m.v),
        F.rms_norm(x * 1e-4, (WIDTH,)),
        F.group_norm(x, 3, m.v, m.v),
        F.normalize(x, 1.0),
        F.local_response_norm(x[None], 3),
        F.layer_norm(x.bfloat16(), (WIDTH,)),
    ),
)
add(
    "products",
    lambda m, x: (
        torch.addmm(m.v, x, m.w, beta=0.5, alpha=2),
        torch.addmm(m.v.detach() * float("nan"), x, m.w, beta=0),
        torch.einsum("ij,kj", x, m.w),
        torch.einsum("ij->j", x),
        torch.einsum("...i,i", x, m.v),
        x @ m.v,
        m.v @ m.w,
        torch.tensordot(x, m.w, 1),
        torch.outer(m.v, m.v),
        m.v.dot(m.v),
        torch.addmv(m.v, m.w, m.v, beta=2),
        torch.baddbmm(x[None], x[None, :, :4], x[None], alpha=0.5),
        torch.trace(m.w),
        INTS @ INTS.T,
    ),
)
add(
    "lines_of_einsum",
    lambda m, x: (
        torch.einsum("ii->i", m.w),
        torch.einsum("ii", m.w),
        torch.einsum("ii,ij->j", m.w, m.w),
        torch.einsum("iji->j", m.w[:, None].expand(6, 6, 6)),
        torch.einsum("...ij->...ji", x.view(2, 2, 6)),
        torch.einsum(x, [0, 1], m.w, [1, 2], [2, 0]),
        torch.addr(m.w, m.v, m.v, beta=0.5, alpha=2),
        torch.addbmm(m.w[:2, :2], x.view(2, 2, 6), x.view(2, 6, 2)),
    ),
)
add(
    "linear_algebra",
    lambda m, x: (
        torch.linalg.inv(m.w + 5 * torch.eye(6)),
        torch.linalg.solve(m.w + 5 * torch.eye(6), m.v),
        torch.linalg.solve_triangular(m.w.tril() + 5 * torch.eye(6), x.t(), upper=False),
        torch.linalg.cholesky(m.w @ m.w.t() + torch.eye(6)),
        torch.linalg.cholesky(m.w * 0.1 + torch.eye(6)),
        torch.linalg.cholesky(m.w * 0.1 + torch.eye(6), upper=True),
        torch.linalg.det(m.w),
        torch.linalg.slogdet(m.w)[1],
        torch.linalg.qr(m.w)[1].abs(),
        torch.linalg.svdvals(m.w),
        torch.linalg.eigvalsh(m.w + m.w.t()),
        torch.linalg.eigvalsh(m.w, UPLO="U"),
        torch.linalg.matrix_exp(m.w * 0.1),
    ),
)
add(
    "similarity_of_nothing",
    lambda m, x: (F.cosine_similarity(x * 0, m.v), F.cosine_similarity(x, m.v * 0, 0)),
)
add("constant_views", lambda m, x: torch.ones(1, 6).expand(4, 6).view(2, 2, 6) * x.view(2, 2, 6))
add(
    "bilinear_and_distances",
    lambda m, x: (
        torch.cdist(x, m.w),
        F.cosine_similarity(x, m.v),
        F.pairwise_distance(x, m.v),
        (x @ m.w.t()).softmax(-1) @ m.w,
        torch.linalg.vector_norm(x, 3, -1),
        torch.linalg.matrix_norm(x),
        x.norm(p=2, dim=(0, 1)),
        torch.dist(x[0], m.v),
    ),
)

Q = real(2, 4, 5, 8)
SHORT = real(2, 2, 3, 8)
HIDDEN = torch.full((5, 3), torch.finfo(torch.float32).min)
HIDDEN[2:, 0] = 0
MASK = torch.tensor([[True, False, True]] * 4 + [[False] * 3])


def attend(m, q, k, **how):
    return F.scaled_dot_product_attention(q * m.v[0], k, k * 0.5, **how)


add("attention", attend, Q, real(2, 4, 3, 8))
add(
    "attention_causal_with_fewer_keys",
    lambda m, q, k: attend(m, q, k, is_causal=True),
    Q,
    real(2, 4, 3, 8),
)
add(
    "attention_causal_with_more_keys",
    lambda m, q, k: attend(m, q, k, is_causal=True),
    Q,
    real(2, 4, 7, 8),
)
add("attention_of_groups", lambda m, q, k: attend(m, q, k, enable_gqa=True, scale=0.3), Q, SHORT)
add(
    "attention_masked",
    lambda m, q, k: (
        attend(m, q, k, attn_mask=MASK[:1]),
        attend(m, q, k, attn_mask=MASK),
        attend(m, q, k, attn_mask=MASK.float()),
    ),
    Q,
    real(2, 4, 3, 8),
)
add(
    "attention_with_a_learnt_bias",
    lambda m, q, k: attend(m, q, k, attn_mask=m.w[:5, :3] * 2),
    Q,
    real(2, 4, 3, 8),
)
add(
    "attention_with_a_computed_mask",
    lambda m, q, k: attend(m, q, k, attn_mask=q[:, :1, :, :3] > 0),
    Q,
    real(2, 4, 3, 8),
)
add(
    "attention_whose_mask_has_only_the_least_number",
    lambda m, q, k: attend(m, q, k, attn_mask=HIDDEN),
    Q,
    real(2, 4, 3, 8),
)
add("attention_of_three_axes", lambda m, q: attend(m, q[0], q[1], is_causal=True), Q)
add(
    "attention_written_out",
    lambda m, q: (
        torch.softmax(
            (q @ q.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9),
            -1,
        )
        @ q
        * m.v[0]
    ),
    Q,
)

# --- shapes and places ----------------------------------------------------------------------------

add(
    "indexed",
    lambda m, x: (
        x[-1],
        x[:, -2],
        x[None, 1:, ::2],
        x[..., -3:-1],
        x[torch.tensor([-1, 0])],
        x[:, torch.tensor([[0, -1]])],
        x[torch.tensor([0, 1]), torch.tensor([2, -3])],
        x[1:1],
        x[x.new_tensor([1, 2], dtype=torch.long)],
        x[[0, 2]],
    ),
)
add(
    "indexed_apart",
    lambda m, x: x.view(2, 2, 6)[torch.tensor([0, 1]), :, torch.tensor([2, 3])] * m.v[0],
)
add(
    "places_of_a_pool",
    lambda m, x: F.adaptive_max_pool2d(x.view(1, 4, 6) * m.v, 2, return_indices=True),
)
add(
    "taken",
    lambda m, x: (
        x.gather(1, torch.tensor([[5, 0]] * 3)),
        torch.take_along_dim(x, x.argsort(-1), -1),
        x.index_select(1, torch.tensor([3, 3])),
        x.take(torch.tensor([0, -1, 7])),
        F.one_hot(torch.tensor([1, 0, 3]), 6) * m.v,
    ),
)
add(
    "reshaped",
    lambda m, x: (
        x.unflatten(1, (2, -1)),
        x.movedim(0, 1),
        x[:, None].squeeze(),
        x.squeeze(0),
        x.view(1, 4, 1, 6).squeeze((0, 2)),
        x.expand(2, -1, -1),
        x.repeat(2, 1, 3),
        x.repeat_interleave(2, 1),
        x.roll((1, -2), (0, 1)),
        x.roll(3),
        x.flip(0, 1),
        x.rot90(),
        x.tile(2),
        x.swapaxes(0, 1),
        x.ravel(),
        x.T,
        torch.atleast_3d(x),
    ),
)
add(
    "windows",
    lambda m, x: (
        x.unfold(1, 3, 2),
        x.tril(-1),
        x.triu(2),
        x.diagonal(1),
        torch.diag(m.v),
        torch.diag_embed(x),
        torch.block_diag(x, m.w),
        torch.kron(x, m.v),
        (x > 0).tril(),
    ),
)
add(
    "padded",
    lambda m, x: (
        F.pad(x, (1, 2)),
        F.pad(x, (-1, 1), value=0.5),
        F.pad(x[None], (1, 1), "reflect"),
        F.pad(x[None], (2, 1), "replicate"),
        F.pad(x[None], (1, 2), "circular"),
        F.pad(x, (0, 0, 1, 0)),
    ),
)
add(
    "joined",
    lambda m, x: (
        torch.cat([x, x * m.v], -1),
        torch.stack([x, x], 1),
        torch.cat([torch.empty(0), x]),
        torch.hstack([x, x]),
        torch.vstack([x, m.v]),
        torch.meshgrid(m.v, x[0], indexing="ij")[1],
        torch.cartesian_prod(m.v, m.seen),
    ),
)
add(
    "cut",
    lambda m, x: (
        x.split(4, -1),
        x.split([1, 2, 3], -1)[1],
        x.chunk(4, -1),
        x.tensor_split(4, -1),
        x.unbind(1)[2],
        torch.narrow(x, 1, 2, 3),
    ),
)
add(
    "added_up",
    lambda m, x: (
        x.sum(()),
        x.sum((0, 1), keepdim=True),
        x.mean((0, -1)),
        x.cumsum(-1),
        x.logcumsumexp(0),
        x.cumsum(0).flip(0),
        x.diff(dim=-1),
        x.sum(dtype=torch.float64),
        x.count_nonzero(),
        (x > 0).any(0),
        (x > 0).all(-1),
        x.cummax(0)[0],
    ),
)
add(
    "places",
    lambda m, x: (
        torch.bucketize(x, m.seen),
        torch.searchsorted(m.seen, x),
        torch.isin(INTS, torch.tensor([1, 2])),
        torch.histc(x, 4, -2, 2),
    ),
)
add("shape_arithmetic", lambda m, x: x.view(x.shape[0] // 2, -1) * (x.numel() / x.size(1)) + len(x))
add("nothing", lambda m, x: (x, x.contiguous(), x.to(torch.float32), x.clone() * m.v))


@program()
def rotation_by_complex_numbers(m, x):
    angles = torch.arange(12.0).view(1, 4, 3) / 7
    turned = (
        torch.view_as_complex(x.view(2, -1, 3, 2)) * torch.polar(torch.ones(1, 4, 3), angles)[:, :2]
    )
    return torch.view_as_real(turned * turned).flatten(2).view_as(x) @ m.w


@program()
def sum_of_complex_numbers(m, x):
    pairs = torch.view_as_complex(x.view(-1, 3, 2))
    return torch.view_as_real(pairs + 2 * pairs), m.w


@program()
def complex_result(m, x):
    return torch.view_as_complex(x.view(-1, 3, 2)), m.w
