"""Calls of losses, norms, attention and optimizer updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.sample import Maker, Sample
from tests.ops.sharding import run_dense


def samples(make: Maker) -> list[Sample]:
    return [
        *_norms(make),
        *_losses(make),
        *_attentions(make),
        *_positions_and_gates(make),
        *_optimizers(make),
    ]


def _norms(make: Maker) -> list[Sample]:
    real, positive = make.real, make.positive
    samples = []
    eps = {"eps": 1e-3}
    for shape in ((5, 3), (2, 3, 4), (4,)):
        x, gamma = real(*shape), real(shape[-1])
        rstd = np.asarray(1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3), make.dtype)
        samples.append(Sample("rms_norm", (x, gamma), eps))
        samples.append(Sample("rms_norm_grad", (x, gamma, rstd, real(*shape))))
    for shape, groups in (((3, 4, 2), 2), ((2, 3, 2, 2), 3), ((2, 4, 3), 1), ((3, 4), 2)):
        x, gamma, beta = real(*shape), real(shape[1]), real(shape[1])
        folded = x.reshape(shape[0], groups, -1)
        mean = folded.mean(-1)
        rstd = np.asarray(1 / np.sqrt(folded.var(-1) + 1e-3), make.dtype)
        samples.append(Sample("group_norm", (x, gamma, beta), {**eps, "groups": groups}))
        samples.append(
            Sample(
                "group_norm_grad",
                (x, gamma, mean, rstd, real(*shape)),
                {"groups": groups},
            )
        )
    for shape in ((3, 2, 2, 3), (5, 3), (2, 3, 4)):
        x, (mean, gamma, beta) = real(*shape), (real(shape[1]) for _ in range(3))
        variance, dy = positive(shape[1]), real(*shape)
        samples += [
            Sample("channel_mean", (x,)),
            Sample("channel_variance", (x, mean)),
            Sample("channel_variance_grad", (x, mean, gamma)),
            Sample("batch_norm", (x, mean, variance, gamma, beta), eps),
            Sample("batch_norm_grad", (x, mean, variance, gamma, dy), eps),
        ]
    return samples


DISTANCES: tuple[tuple[str, dict[str, float]], ...] = (
    ("mse_loss", {}),
    ("l1_loss", {}),
    ("smooth_l1_loss", {"beta": 0.7}),
    ("huber_loss", {"delta": 1.3}),
    ("bce_with_logits", {}),
)


def _losses(make: Maker) -> list[Sample]:
    real, whole = make.real, make.whole
    samples = []
    for kind, attrs in DISTANCES:
        for shape in ((5, 3), ()):
            x, target = real(*shape), real(*shape)
            samples.append(Sample(kind, (x, target), attrs))
            samples.append(Sample(f"{kind}_grad", (x, target, real(*shape)), attrs))
    share = (real(5, 3) + 2) / 4
    share, target = (np.asarray(np.clip(one, 0.05, 0.95), make.dtype) for one in (share, 1 - share))
    samples += [
        Sample("bce_loss", (share, target)),
        Sample("bce_loss_grad", (share, target, real(5, 3))),
        Sample("kl_div", (real(5, 3), target)),
        Sample("kl_div_grad", (real(5, 3), target, real(5, 3))),
    ]
    some, all_rows = np.array([2, -100, 0, -100, 3]), whole(3, 2, 5).astype(np.uint8)
    samples += [
        Sample("nll_loss", (real(5, 4), some)),
        Sample("nll_loss", (real(2, 5, 3), all_rows), {"ignore_index": 1}),
        Sample("nll_loss_grad", (some, real(5)), {"classes": 5}),
        Sample("nll_loss_grad", (all_rows, real(2, 5)), {"ignore_index": 1, "classes": 3}),
        Sample("stop_gradient", (real(5, 3),), differentiable=False),
        Sample("stop_gradient", (whole(3, 5),), differentiable=False),
        Sample("class_sums", (real(5, 4), some, real(5))),
        Sample("class_sums", (real(2, 5, 3), all_rows, real(2, 5)), {"ignore_index": 1}),
        Sample("class_sums_grad", (real(5, 4), some, *(real(5) for _ in range(3)))),
    ]
    return samples


# Shapes of queries, keys and values, and attributes.
ATTENTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]], ...] = (
    ((2, 3, 3, 2), (2, 3, 3, 2), 2, {"causal": True, "scale": 0.7}),
    ((1, 4, 2, 2), (1, 2, 3, 2), 3, {"causal": True, "scale": 1.0}),
    ((1, 2, 3, 2), (1, 2, 4, 2), 2, {"causal": "lower_right", "scale": 1.0}),
    ((2, 2, 3, 1), (2, 1, 2, 1), 1, {"causal": False, "scale": 0.5}),
    ((3, 2, 5, 2), (3, 2, 5, 2), 2, {"scale": 1.0}),
)


def _attentions(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for query_shape, key_shape, width, attrs in ATTENTIONS:
        inputs = (real(*query_shape), real(*key_shape), real(*key_shape[:3], width))
        outputs = run_dense("attention", inputs, attrs)
        dy = real(*outputs[0].shape)
        samples.append(Sample("attention", inputs, attrs))
        samples.append(Sample("attention_grad", (*inputs, *outputs, dy), attrs))
    return samples


def _positions_and_gates(make: Maker) -> list[Sample]:
    real = make.real
    samples = [
        Sample("rotary_embedding", (real(2, 5, 4),), {"base": 100.0}),
        Sample("rotary_embedding", (real(3, 6),), {"base": 10.0, "offset": 7, "interleaved": True}),
        Sample("rotary_embedding", (real(2, 2, 3, 2),), {"base": 10.0, "inverse": True}),
        Sample("rotary_embedding", (real(2, 7, 2),), {"base": 10.0, "zigzag": 2, "offset": 1}),
    ]
    for shape in ((5, 3), ()):
        samples.append(Sample("swiglu", (real(*shape), real(*shape))))
        samples.append(Sample("swiglu_grad", tuple(real(*shape) for _ in range(3))))
    return samples


_BETAS = {"beta1": 0.9, "beta2": 0.99}
UPDATES: dict[str, tuple[int, dict[str, Any]]] = {
    "adagrad_update": (1, {"lr_decay": 0.1, "initial": 0.2}),
    "rmsprop_update": (1, {"alpha": 0.9}),
    "rmsprop_momentum_update": (2, {"alpha": 0.9, "momentum": 0.5}),
    "adadelta_update": (2, {"rho": 0.9}),
    "amsgrad_update": (3, {**_BETAS, "decoupled": True}),
    "adamax_update": (2, _BETAS),
    "nadam_update": (2, {**_BETAS, "momentum_decay": 0.004}),
    "radam_update": (2, _BETAS),
}
"""Updates, their states, and attributes beside eps and the weight decay."""


def _optimizers(make: Maker) -> list[Sample]:
    real, positive = make.real, make.positive
    number = [np.array(value, make.dtype) for value in (0.1, 2.5, 1.5)]
    betas = {"beta1": 0.9, "beta2": 0.99}
    samples = []
    for shape in ((5, 3), (4,), ()):
        w, g, m, v = real(*shape), real(*shape), real(*shape), positive(*shape)
        for attrs in ({}, {"weight_decay": 0.1}):
            moments = {**betas, "eps": 1e-6, **attrs}
            factors = {"clip": 1.0, "relative": bool(attrs), "eps": 1e-3, **attrs}
            samples += [
                Sample("lion_update", (w, g, m, number[0]), {**betas, **attrs}),
                Sample("lamb_direction", (w, g, m, v), moments),
                Sample("adafactor_update", (w, g, *number), factors),
                Sample(
                    "lars_update",
                    (w, g, m, *number),
                    {"momentum": 0.9, "trust": 0.01, "eps": 1e-8, **attrs},
                ),
                *(
                    Sample(
                        kind,
                        (w, g, *(positive(*shape) for _ in range(states)), number[0]),
                        {**own, "eps": 1e-6, **attrs},
                    )
                    for kind, (states, own) in UPDATES.items()
                ),
            ]
        # The spread of what has this second moment and this mean is positive.
        spread = (np.asarray(m**2 + v, make.dtype), m)
        centered = {"alpha": 0.9, "eps": 1e-6, "grad_scale": 0.5}
        samples += [
            Sample("centered_rmsprop_update", (w, g, *spread, number[0]), centered),
            Sample(
                "centered_rmsprop_momentum_update",
                (w, g, *spread, m, number[0]),
                {**centered, "momentum": 0.9},
            ),
            Sample("lamb_update", (w, g, *number)),
            Sample("moving_average_update", (w, g), {"decay": 0.9}),
            Sample("moving_average_update", (w, g), {"power": 0.8}),
            Sample("adafactor_vector_direction", (g, v), {"eps": 1e-3, "power": 0.8}),
            Sample("found_inf", (g,)),
        ]
    broken = real(5, 3)
    broken[3, 1] = np.nan
    samples.append(Sample("found_inf", (broken,)))
    for shape in ((5, 3), (2, 3, 4)):
        rows, columns = positive(*shape[:-1]), positive(*shape[:-2], shape[-1])
        samples.append(Sample("adafactor_moments", (real(*shape),), {"eps": 1e-3}))
        samples.append(
            Sample(
                "adafactor_direction",
                (real(*shape), rows, columns, np.asarray(rows.sum(-1))),
            )
        )
    return samples
