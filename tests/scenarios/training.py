"""A few steps of training of one matrix, through our optimizers and by their formulas in NumPy."""

from __future__ import annotations

import numpy as np

import plancompiler as pc

COUNT = 3
# The learning rates below are exact in float32, the dtype that rates have.


def sgd(w, gradients, rate=0.125, momentum=0.0, nesterov=False, decay=0.0):
    velocity = 0.0
    for g in gradients(w):
        g = g + decay * w
        velocity = momentum * velocity + g
        w = w - rate * (g + momentum * velocity if nesterov else velocity)
        yield w


def adam(w, gradients, rate=0.125, decay=0.0, coupled=True):
    first = second = 0.0
    for count, g in enumerate(gradients(w), 1):
        if coupled:
            g = g + decay * w
        else:
            w = w * (1 - rate * decay)
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        mean, square = first / (1 - 0.9**count), second / (1 - 0.999**count)
        w = w - rate * mean / (np.sqrt(square) + 1e-8)
        yield w


def adagrad(w, gradients, rate=0.125):
    total = 0.0
    for g in gradients(w):
        total = total + g * g
        w = w - rate * g / (np.sqrt(total) + 1e-10)
        yield w


def rmsprop(w, gradients, rate=0.125):
    square = 0.0
    for g in gradients(w):
        square = 0.99 * square + 0.01 * g * g
        w = w - rate * g / (np.sqrt(square) + 1e-8)
        yield w


def adadelta(w, gradients, rate=0.5):
    square = change = 0.0
    for g in gradients(w):
        square = 0.9 * square + 0.1 * g * g
        step = np.sqrt(change + 1e-6) / np.sqrt(square + 1e-6) * g
        change = 0.9 * change + 0.1 * step * step
        w = w - rate * step
        yield w


def adamax(w, gradients, rate=0.125):
    first = greatest = 0.0
    for count, g in enumerate(gradients(w), 1):
        first = 0.9 * first + 0.1 * g
        greatest = np.maximum(0.999 * greatest, abs(g) + 1e-8)
        w = w - rate / (1 - 0.9**count) * first / greatest
        yield w


STEPS = {
    "SGD": (lambda w: pc.optim.SGD([w], lr=0.125), sgd),
    "SGD with momentum": (
        lambda w: pc.optim.SGD([w], lr=0.125, momentum=0.9),
        lambda w, g: sgd(w, g, momentum=0.9),
    ),
    "SGD with Nesterov's momentum and weight decay": (
        lambda w: pc.optim.SGD([w], lr=0.125, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda w, g: sgd(w, g, momentum=0.9, nesterov=True, decay=0.1),
    ),
    "Adam": (lambda w: pc.optim.Adam([w], lr=0.125), adam),
    "Adam with weight decay": (
        lambda w: pc.optim.Adam([w], lr=0.125, weight_decay=0.1),
        lambda w, g: adam(w, g, decay=0.1),
    ),
    "AdamW": (
        lambda w: pc.optim.AdamW([w], lr=0.125, weight_decay=0.1),
        lambda w, g: adam(w, g, decay=0.1, coupled=False),
    ),
    "Adagrad": (lambda w: pc.optim.Adagrad([w], lr=0.125), adagrad),
    "RMSprop": (lambda w: pc.optim.RMSprop([w], lr=0.125), rmsprop),
    "Adadelta": (lambda w: pc.optim.Adadelta([w], lr=0.5), adadelta),
    "Adamax": (lambda w: pc.optim.Adamax([w], lr=0.125), adamax),
}
"""Our optimizer of a tensor, and the formula."""


def steps_of(name):
    """`(x, w)` to w after some steps that lower the mean of (x @ w - 1)²."""
    make, _ = STEPS[name]

    def train(x, w):
        x, w = x.detach(), w.detach().clone()
        w.requires_grad = True
        optimizer = make(w)
        for _ in range(COUNT):
            optimizer.zero_grad()
            (x @ w - 1.0).square().mean().backward()
            optimizer.step()
        return w.detach()

    return train


def dense_steps(name):
    _, formula = STEPS[name]

    def train(x, w):
        current = w

        def gradients(w):
            for _ in range(COUNT):
                error = x @ current - 1
                yield 2 * x.T @ error / error.size

        for value in formula(w, gradients):
            current = value
        return current

    return train
