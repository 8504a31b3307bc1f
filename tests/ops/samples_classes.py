"""Calls of ops over classes and groups that are cut into shards."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample

# Classes of each shard, and how many of them are sampled.
RANGES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((4, 3), (3, 3)),
    ((3, 2, 2), (2, 2, 2)),
    ((3, 2, 2), (3, 2, 2)),
    ((1, 0, 6), (1, 0, 4)),
    ((7,), (5,)),
)
LABELS = (
    np.array([6, 1, 1, 4, 6]),
    np.array([6, 1, 1, -100, 6], np.int32),
    np.array([[6, 4, 1], [0, 9, 4]], np.uint8),
    np.array([6, 3, 0, -100, 4]),
    np.array([2, 4, 6, 5]),
)


def samples(make: Maker) -> list[Sample]:
    return [*_sampling(make), *_margins(make), *_groups(make)]


def _sampling(make: Maker) -> list[Sample]:
    samples = []
    for key, ((counts, sizes), labels) in enumerate(zip(RANGES, LABELS, strict=True)):
        ranges = {"counts": counts, "sizes": sizes}
        drawn = {**ranges, "key": key}
        if labels.dtype == np.uint8:
            drawn["ignore_index"] = 9
        samples.append(Sample("class_center_sample", (labels,), drawn, differentiable=False))
        rows = [
            make.rng.permutation(count)[:size] for count, size in zip(*RANGES[key], strict=True)
        ]
        sampled = np.concatenate(rows).astype(np.int32 if key == 1 else np.int64)
        shape = ((3,), (2, 2), ())[key % 3]
        samples += [
            Sample("class_center_rows", (make.real(7, *shape), sampled), ranges),
            Sample("class_center_rows_grad", (sampled, make.real(len(sampled), *shape)), ranges),
        ]
    twice = np.array([1, 1, 2, 0, 0, 0])
    ranges = {"counts": (4, 3), "sizes": (3, 3)}
    samples.append(Sample("class_center_rows_grad", (twice, make.real(6, 2)), ranges))
    return samples


MARGINS = (
    {"margin1": 1.0, "margin2": 0.5, "margin3": 0.0, "scale": 8.0},
    {"margin1": 1.0, "margin2": 0.0, "margin3": 0.35, "scale": 4.0},
    {"margin1": 0.9, "margin2": 0.4, "margin3": 0.15, "scale": 3.0},
)


def _margins(make: Maker) -> list[Sample]:
    some, all_rows = np.array([2, -100, 0, -100, 3]), make.whole(3, 2, 5).astype(np.uint8)
    samples = []
    for attrs in MARGINS:
        cosines, dy = (make.real(5, 4) * np.asarray(0.45, make.dtype) for _ in range(2))
        samples.append(Sample("margin_logits", (cosines, some), attrs))
        samples.append(Sample("margin_logits_grad", (cosines, some, dy), attrs))
    cosines = make.real(2, 5, 3) * np.asarray(0.45, make.dtype)
    samples.append(Sample("margin_logits", (cosines, all_rows), {**MARGINS[0], "ignore_index": 1}))
    return samples


def _groups(make: Maker) -> list[Sample]:
    samples = []
    for mean in (False, True):
        for rows, groups, shape in ((5, 2, (3,)), (7, 3, (2, 2)), (3, 3, ()), (4, 1, (2,))):
            x, state = make.real(rows, *shape), make.real(groups, *shape)
            samples += [
                Sample("group_sums", (x,), {"groups": groups, "mean": mean}),
                Sample("group_rows", (state,), {"rows": rows, "mean": mean}),
            ]
    for shape in ((5, 3), (4,), ()):
        for decay in (0.9, 1.0):
            inputs = (make.real(*shape), make.real(*shape))
            samples.append(Sample("decayed_sum_update", inputs, {"decay": decay}))
    return samples
