"""Calls of recurrent layers and of losses of sequences."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample


def samples(make: Maker) -> list[Sample]:
    return [*_recurrent(make), *_alignments(make)]


def _recurrent(make: Maker) -> list[Sample]:
    real = make.real
    samples = []
    for time, batch, hidden, reverse in ((3, 4, 2, False), (2, 3, 1, True)):
        y, state = (time, batch, hidden), (batch, hidden)

        def gates(count, time=time, batch=batch, hidden=hidden):
            # Small, as gates are: the differences that gradients are compared with stay exact.
            return (0.3 * real(time, batch, count * hidden)).astype(make.dtype)

        def weight(count, hidden=hidden):
            return real(count * hidden, hidden)

        attrs = {"reverse": reverse}
        samples += [
            Sample(
                "lstm",
                (gates(4), weight(4), real(4 * hidden), real(*state), real(*state)),
                attrs,
            ),
            Sample(
                "lstm_grad",
                (weight(4), real(*state), real(*y), gates(4), real(*y), real(*y)),
                attrs,
            ),
            Sample("recurrent_weight_grad", (gates(4), real(*state), real(*y)), attrs),
            Sample("gru", (gates(3), weight(3), real(3 * hidden), real(*state)), attrs),
            Sample(
                "gru_grad",
                (weight(3), real(*state), real(*y), gates(3), real(*y), real(*y)),
                attrs,
            ),
        ]
        for nonlinearity in ("tanh", "relu"):
            chosen = {**attrs, "nonlinearity": nonlinearity}
            samples += [
                Sample("rnn", (gates(1), weight(1), real(*state)), chosen),
                Sample("rnn_grad", (weight(1), real(*state), real(*y), real(*y)), chosen),
            ]
    return samples


def _alignments(make: Maker) -> list[Sample]:
    samples = []
    for steps, classes, targets, lengths, sizes, blank in (
        (4, 3, [[1, 1], [2, 1], [1, 9], [0, 0]], [4, 3, 4, 2], [2, 2, 1, 0], 0),
        (3, 2, [[0], [0], [0]], [3, 3, 2], [1, 1, 1], 1),
    ):
        logs = make.real(steps, len(targets), classes)
        logs = (logs - np.log(np.exp(logs).sum(-1, keepdims=True))).astype(make.dtype)
        given = logs, np.array(targets), np.array(lengths), np.array(sizes, np.int64)
        attrs = {"blank": blank}
        samples.append(Sample("ctc_loss", given, attrs))
        samples.append(Sample("ctc_loss_grad", (*given, make.real(len(targets))), attrs))
    return samples
