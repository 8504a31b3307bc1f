"""The jobs that calibration records: perceptrons and transformers of many sizes.

Sizes are drawn evenly over the logarithms of their ranges, by points that fill space evenly (J. H.
Halton, 1960), and rounded to multiples of 8: so each more job fills a gap between those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.frontend import methods as _methods  # noqa: F401  # tensors get theirs
from plancompiler.frontend import nn
from plancompiler.frontend.data import Arrays, TokenFile
from plancompiler.frontend.optim import SGD, AdamW, cosine
from plancompiler.frontend.trace import job as tracing
from plancompiler.frontend.trace import output
from plancompiler.ir import Job, Placement, Value
from plancompiler.ir.whole_file import write_whole
from plancompiler.passes import Config

ROWS, TESTED, FEATURES, CLASSES = 1536, 384, 64, 10
"""Of the data: rows, those of them that only tests read, columns, kinds of rows."""
TEXT_BYTES = 1 << 18
"""Of them vocabularies have at least 128."""
SAMPLES = "samples.npz"
TEXT = "text.txt"
_PRIMES = (2, 3, 5, 7, 11)


def write_data(folder: Path) -> None:
    """The data that the jobs read, drawn at random."""
    draw = np.random.default_rng(0)
    np.savez(
        folder / SAMPLES,
        images=draw.integers(0, 17, (ROWS, FEATURES), np.uint8),
        labels=draw.integers(0, CLASSES, ROWS, np.uint8),
    )
    write_whole(folder / TEXT, (draw.integers(32, 127, TEXT_BYTES, np.uint8).tobytes(),))


def calibration_jobs(folder: Path, ranks: int, count: int) -> Iterator[Job]:
    """So many perceptrons, as many transformers, and half as many jobs of other ops."""
    for number in range(1, count + 1):
        yield _perceptron(folder, number, ranks)
        yield _transformer(folder, number, ranks)
        if number % 2:
            yield _others(number, ranks)


def _drawn(number: int, axis: int, low: int, high: int) -> int:
    """The size of a job along an axis of what is varied: a multiple of 8."""
    part, scale, base = 0.0, 1.0, _PRIMES[axis]
    while number:
        scale /= base
        number, digit = divmod(number, base)
        part += scale * digit
    size = low * math.pow(high / low, part)
    return max(8, round(size / 8) * 8)


def _perceptron(folder: Path, number: int, ranks: int) -> Job:
    width = _drawn(number, 0, 64, 2720)  # the first dozen have at most 1,704
    batch = _drawn(number, 1, 24, 416) * ranks
    tested = _drawn(number, 2, 64, TESTED)
    split = ranks > 1 and number % 3 == 0
    mesh = Placement("cpu", list(range(ranks)), ("tp",) if split else ("dp",))
    layouts = {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"} if split else {}
    sbp = "B" if split else "S(0)"
    rate = cosine(0.001, warmup=20, total=1000, final=0.0001)
    with tracing(f"calibration-perceptron-{number}") as job:
        model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.Tanh() if number % 3 == 1 else nn.ReLU(),
            nn.Linear(width, CLASSES),
        ).place(mesh, layouts)

        def rows(first: int, last: int, count: int, shuffle: bool) -> tuple[Value, Value]:
            images, labels = Arrays(
                folder / SAMPLES,
                ("images", "labels"),
                batch=count,
                split=(first, last),
                shuffle=shuffle,
                placement=mesh,
                sbp=sbp,
            )
            return images.cast("float32") * (1.0 / 16.0), labels

        images, labels = rows(0, ROWS - TESTED, batch, True)
        loss = f.cross_entropy(model(images), labels, ignore_index=None)
        optimizer = SGD(rate, momentum=0.9) if number % 4 == 0 else AdamW(rate)
        optimizer.minimize(loss)
        output("loss", loss)
        images, labels = rows(ROWS - TESTED, ROWS, tested, False)
        output("accuracy", f.accuracy(model(images), labels))
    return job


_OF_TWO = ("dp", "tp", "pp", "zero 1", "dp", "tp", "zero 3")
"""Layouts of transformers on two ranks, in turn."""
_SCHEDULES = ("1f1b", "gpipe", "zero_bubble")


def _transformer(folder: Path, number: int, ranks: int) -> Job:
    heads = (4, 2, 8)[number % 3]
    dim = max(heads * 8, _drawn(number, 0, 32, 288) // (2 * heads) * (2 * heads))
    length, batch = _drawn(number, 1, 24, 112), 4 * max(1, _drawn(number, 2, 8, 32) // 8)
    vocabulary = _drawn(number, 3, 128, 512)
    way = _OF_TWO[number % len(_OF_TWO)] if ranks > 1 else "dp"
    config = Config()
    meshes = [Placement("cpu", np.arange(ranks).reshape(-1, 1), ("dp", "tp"))]
    if way == "pp":
        schedule = _SCHEDULES[number // len(_OF_TWO) % len(_SCHEDULES)]
        config = Config(microbatches=4, schedule=schedule)
        meshes = [Placement("cpu", [[rank]], ("dp", "tp")) for rank in range(ranks)]
    elif way == "tp":
        meshes = [Placement("cpu", [list(range(ranks))], ("dp", "tp"))]
    elif way.startswith("zero"):
        config = Config(zero=int(way[-1]))
    elif ranks == 1 and number % 4 == 3:
        config = Config(microbatches=2)
    by_output, by_input = ["B", "S(0)"], ["B", "S(1)"]
    layouts = {
        **{f"attention.{part}.weight": by_output for part in ("query", "key", "value")},
        **{f"attention.{part}.bias": by_output for part in ("query", "key", "value")},
        "attention.projection.weight": by_input,
        "mlp.fc1.weight": by_output,
        "mlp.fc1.bias": by_output,
        "mlp.fc2.weight": by_input,
    }
    with tracing(f"calibration-transformer-{number}", config=config) as job:
        first, last = meshes[0], meshes[-1]
        token = nn.Embedding(vocabulary, dim).place(first)
        position = nn.Parameter((length, dim), "float32", "normal", (0, 0.02)).place(first)
        blocks = [nn.TransformerBlock(dim, heads).place(mesh, layouts) for mesh in (first, last)]
        norm, head = nn.LayerNorm(dim).place(last), nn.Linear(dim, vocabulary, bias=False)
        head.place(last)

        def texts(mesh: Placement) -> TokenFile:
            return TokenFile(folder / TEXT, batch, length, placement=mesh, sbp=["S(0)", "B"])

        x = token(texts(first).tokens) + position.value
        for block, mesh in zip(blocks, (first, last), strict=True):
            x = block(x.redistribute(placement=mesh))
        loss = f.cross_entropy(head(norm(x)), texts(last).targets, ignore_index=None)
        AdamW(
            cosine(0.001, warmup=20, total=1000, final=0.0001),
            betas=(0.9, 0.95),
            weight_decay=0.01,
        ).minimize(loss)
        output("loss", loss)
    return job


def _others(number: int, ranks: int) -> Job:
    """Ops that imported models and losses bring, each with its gradient."""
    rows, columns = _drawn(number, 0, 32, 1024), _drawn(number, 1, 32, 512)
    mesh = Placement("cpu", list(range(ranks)), ("dp",))
    with tracing(f"calibration-others-{number}") as job:
        weight = nn.Parameter((columns,), "float32", "normal", (0, 1)).place(mesh)
        drawn = f.normal((ranks * rows, columns), placement=mesh).redistribute(sbp="S(0)")
        x = drawn * weight.value
        positive = f.exp(x * 0.1)
        values = [
            f.sigmoid(x),
            f.silu(x),
            f.sqrt(positive),
            f.log(positive),
            f.softmax(x),
            x / positive,
            x - positive,
            f.maximum(x, positive),
            f.where(x > 0.0, x, positive),
            f.rms_norm(x, weight.value),
            f.concat([x[:, : columns // 2], positive[:, columns // 2 :]], 1),
            f.pad(x, (0, 0), (0, 8))[:, 8:],
            (x - f.mean(x, axis=1, keepdims=True)) ** 2.0,
            f.square(x),
        ]
        loss = f.mean(sum(values[1:], values[0]))
        AdamW(0.001).minimize(loss)
        output("loss", loss)
    return job
