"""Calls of every op kind: sizes that do not divide, and axes shorter than the mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.ops import (
    samples_classes,
    samples_conv,
    samples_elementwise,
    samples_fused,
    samples_guarded,
    samples_indexing,
    samples_learning,
    samples_linalg,
    samples_microbatch,
    samples_routing,
    samples_search,
    samples_sequence,
    samples_special,
    samples_transformer,
)
from tests.ops.sample import Maker as _Maker
from tests.ops.sample import Sample

UNARY = ("neg", "abs", "sign", "exp", "square", "relu", "tanh", "sigmoid", "gelu")
POSITIVE_UNARY = ("log", "sqrt", "rsqrt")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")


def samples(directory: Path, dtype: str = "float64", seed: int = 20240229) -> list[Sample]:
    """All calls, with floating inputs of `dtype`; data files are written to `directory`."""
    make = _Maker(dtype, seed)
    plain = [
        *_elementwise(make),
        *_matrix(make),
        *_shape(make),
        *_reduce(make),
        *_learning(make),
        *_structural(make, directory),
        *samples_conv.samples(make),
        *samples_learning.samples(make),
        *samples_elementwise.samples(make),
        *samples_indexing.samples(make),
        *samples_fused.samples(make),
        *samples_linalg.samples(make),
        *samples_microbatch.samples(make),
        *samples_routing.samples(make),
        *samples_special.samples(make),
        *samples_classes.samples(make),
        *samples_transformer.samples(make),
        *samples_search.samples(make),
        *samples_sequence.samples(make),
    ]
    return [*plain, *samples_guarded.samples(make, plain)]


def _elementwise(make: _Maker) -> list[Sample]:
    real, positive, whole = make.real, make.positive, make.whole
    samples = [Sample(kind, (real(*shape),)) for kind in UNARY for shape in ((5, 3), (1,), ())]
    samples += [Sample(kind, (positive(5, 2),)) for kind in POSITIVE_UNARY]
    samples += [Sample(kind, (whole(9, 5),), differentiable=False) for kind in ("neg", "square")]
    pairs = [((5, 3), (5, 3)), ((2, 1, 3), (5, 1)), ((4, 3), ()), ((1,), (4,))]
    samples += [Sample(kind, (real(*a), real(*b))) for kind in BINARY for a, b in pairs]
    samples += [Sample(kind, (real(*a), positive(*b))) for kind in ("div",) for a, b in pairs]
    samples += [Sample("pow", (positive(*a), real(*b))) for a, b in pairs]
    samples += [
        Sample(kind, (whole(9, 5), whole(9, 3, 5)), differentiable=False)
        for kind in ("add", "mul", "maximum")
    ]
    for kind in ("add", "sub", "mul", "maximum", "minimum"):
        samples.append(Sample(f"{kind}_scalar", (real(5, 3),), {"scalar": 0.251}))
        samples.append(
            Sample(f"{kind}_scalar", (whole(9, 5),), {"scalar": 3}, differentiable=False)
        )
    samples.append(Sample("sub_scalar", (real(5, 3),), {"scalar": 0.5, "swapped": True}))
    samples.append(Sample("div_scalar", (real(5, 3),), {"scalar": 3}))
    samples.append(Sample("div_scalar", (positive(5, 3),), {"scalar": 3.0, "swapped": True}))
    samples += [
        Sample("pow_scalar", (positive(5, 3),), {"scalar": scalar})
        for scalar in (2, 3, 0.5, -1, 1.7, 1)
    ]
    samples.append(Sample("pow_scalar", (real(5, 3),), {"scalar": 1.5, "swapped": True}))
    for kind in COMPARISONS:
        samples.append(Sample(kind, (whole(3, 5, 3), whole(3, 3)), differentiable=False))
        samples.append(Sample(kind, (real(5, 1), real(3)), differentiable=False))
        samples.append(
            Sample(f"{kind}_scalar", (whole(3, 5),), {"scalar": 1}, differentiable=False)
        )
        samples.append(
            Sample(
                f"{kind}_scalar",
                (real(5),),
                {"scalar": 0.5, "swapped": True},
                differentiable=False,
            )
        )
    samples.append(Sample("logical_not", (make.truth(5, 3),), differentiable=False))
    samples += [
        Sample("where", (make.truth(5, 3), real(5, 3), real(5, 3))),
        Sample("where", (make.truth(3), real(5, 1), real())),
        Sample("masked", (real(5, 3), make.truth(5, 3))),
        Sample("masked", (real(5, 1), make.truth(2, 1, 3))),
        Sample("zeros_like", (real(5, 3),)),
        Sample("cast", (real(5, 3),), {"dtype": "float64"}),
        Sample("cast", (real(5, 3),), {"dtype": "float32"}, differentiable=False),
        Sample("cast", (real(5, 3),), {"dtype": "int32"}, differentiable=False),
        Sample("cast", (whole(9, 5),), {"dtype": "float32"}, differentiable=False),
        Sample("cast", (whole(2, 5),), {"dtype": "bool"}, differentiable=False),
    ]
    samples += [
        Sample(kind, (real(5, 3), real(5, 3)))
        for kind in ("relu_grad", "tanh_grad", "sigmoid_grad", "gelu_grad")
    ]
    samples += [
        Sample("dropout", (real(5, 3),), {"rate": 0.4, "key": 11}),
        Sample("dropout", (real(3, 1, 7),), {"rate": 0.5, "key": 12}),
        Sample("dropout", (real(7),), {"rate": 0.5, "key": 12}),
        Sample("dropout", (real(),), {"rate": 0.0, "key": 1}),
    ]
    return samples


def _matrix(make: _Maker) -> list[Sample]:
    real = make.real
    samples = []
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            for batch_a, batch_b in (
                ((), ()),
                ((3,), ()),
                ((2, 1), (3,)),
                ((), (2,)),
                ((1,), (2,)),
            ):
                a = (4, 3) if transpose_a else (3, 4)
                b = (5, 4) if transpose_b else (4, 5)
                attrs = {"transpose_a": transpose_a, "transpose_b": transpose_b}
                samples.append(Sample("matmul", (real(*batch_a, *a), real(*batch_b, *b)), attrs))
    samples += [
        Sample("matmul", (real(1, 1), real(1, 5))),
        Sample("matmul", (make.whole(5, 3, 4), make.whole(5, 4, 2)), differentiable=False),
        Sample("contract_leading", (real(5, 3), real(5, 2))),
        Sample("contract_leading", (real(2, 5, 3), real(2, 5, 4))),
    ]
    return samples


def _shape(make: _Maker) -> list[Sample]:
    real = make.real
    reshapes = [
        ((5, 3), (5, 3)),
        ((6, 5), (30,)),
        ((12,), (4, 3)),
        ((4, 6, 5), (24, 5)),
        ((8, 3, 4), (8, 12)),
        ((5, 6), (5, 2, 3)),
        ((4, 3, 2), (2, 3, 4)),
        ((1, 6), (6, 1)),
        ((6, 1, 5), (6, 5)),
        ((12, 5), (2, 6, 5)),
        ((2, 2, 3), (-1, 3)),
        ((0, 3), (3, 0)),
        ((), (1, 1)),
        ((1,), ()),
    ]
    samples = [Sample("reshape", (real(*old),), {"shape": new}) for old, new in reshapes]
    samples += [
        Sample("transpose", (real(5, 3),), {"axes": (1, 0)}),
        Sample("transpose", (real(2, 5, 3),), {"axes": (2, 0, 1)}),
        Sample("transpose", (real(),), {"axes": ()}),
        Sample("expand_to", (real(5, 1),), {"shape": (2, 5, 3)}),
        Sample("expand_to", (real(),), {"shape": (5,)}),
        Sample("concat", (real(5, 2), real(5, 3)), {"axis": 1}),
        Sample("concat", (real(2, 5), real(3, 5), real(1, 5)), {"axis": 0}),
        Sample("slice", (real(5, 7),), {"starts": (0, 2), "stops": (5, 6)}),
        Sample("slice", (real(5, 3),), {"starts": (1, 0), "stops": (4, 3)}),
        Sample("slice", (real(5, 3),), {"starts": (2, 0), "stops": (2, 3)}),
        Sample("slice_grad", (real(5, 4),), {"shape": (5, 7), "starts": (0, 2)}),
        Sample("slice_grad", (real(3, 3),), {"shape": (5, 3), "starts": (1, 0)}),
    ]
    return samples


def _reduce(make: _Maker) -> list[Sample]:
    real = make.real
    samples = []
    for kind in ("sum", "max", "min"):
        for shape, axes in (
            ((5, 3), (0,)),
            ((5, 3), (1,)),
            ((2, 5, 3), (0, 2)),
            ((5,), (0,)),
            ((5, 3), ()),
            ((1, 4), (0,)),
        ):
            for keepdims in (False, True):
                attrs = {"axes": axes, "keepdims": keepdims}
                samples.append(Sample(kind, (real(*shape),), attrs))
        samples.append(Sample(kind, (make.whole(9, 5, 2),), {"axes": (0,)}, differentiable=False))
    for axis, keepdims in ((0, False), (1, True)):
        attrs = {"axis": axis, "keepdims": keepdims}
        samples.append(Sample("argmax", (make.whole(3, 5, 4),), attrs, differentiable=False))
    return samples


def _learning(make: _Maker) -> list[Sample]:
    real, positive, whole = make.real, make.positive, make.whole
    samples = []
    for kind in ("softmax", "log_softmax"):
        for axis in (0, 1):
            y = np.exp(real(5, 3))
            y /= y.sum(axis, keepdims=True)
            if kind == "log_softmax":
                y = np.log(y)
            samples.append(Sample(kind, (real(5, 3),), {"axis": axis}))
            samples.append(Sample(f"{kind}_grad", (y, real(5, 3)), {"axis": axis}))
        samples.append(Sample(kind, (real(2, 5, 4),), {"axis": 1}))
    labels = whole(4, 5)
    some = np.array([2, -100, 0, -100, 3])
    samples += [
        Sample("cross_entropy", (real(5, 4), labels)),
        Sample("cross_entropy", (real(5, 4), some)),
        Sample("cross_entropy", (real(2, 3, 4), whole(4, 2, 3).astype(np.uint8))),
        Sample("cross_entropy", (real(5, 4), np.where(some < 0, 9, some)), {"ignore_index": 9}),
        Sample("cross_entropy_grad", (real(5, 4), some, real(5))),
        Sample("cross_entropy_grad", (real(2, 3, 4), whole(4, 2, 3), real(2, 3))),
    ]
    for shape in ((5, 3), (2, 3, 4), (4,)):
        width = shape[-1:]
        x = real(*shape)
        mean = x.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + np.asarray(1e-3, x.dtype))
        samples.append(Sample("layer_norm", (x, real(*width), real(*width)), {"eps": 1e-3}))
        samples.append(
            Sample(
                "layer_norm_grad",
                (x, real(*width), mean, rstd, real(*shape)),
            )
        )
    samples += [
        Sample("embedding", (real(7, 3), whole(7, 5))),
        Sample("embedding", (real(5, 2), whole(5, 2, 3).astype(np.int32))),
        Sample("embedding", (real(5, 2), np.array(3))),
        Sample("embedding_grad", (whole(7, 5), real(5, 3)), {"vocabulary": 7}),
        Sample("embedding_grad", (whole(3, 5, 4), real(5, 4, 3)), {"vocabulary": 3}),
        Sample("embedding_grad", (whole(50, 6), real(6, 2)), {"vocabulary": 50}),
    ]
    rate = np.array(0.1, make.dtype)
    state = {"differentiable": False}
    for shape in ((5, 3), ()):
        w, g, m, v = real(*shape), real(*shape), real(*shape), positive(*shape)
        for decay in (0.0, 0.1):
            samples.append(Sample("sgd_update", (w, g, rate), {"weight_decay": decay}, **state))
            for nesterov in (False, True):
                attrs = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": decay}
                samples.append(Sample("momentum_update", (w, g, m, rate), attrs, **state))
            for decoupled in (False, True):
                attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
                attrs |= {"weight_decay": decay, "decoupled": decoupled}
                samples.append(Sample("adam_update", (w, g, m, v, rate), attrs, **state))
    return samples


def _structural(make: _Maker, directory: Path) -> list[Sample]:
    declared = {"name": "w", "shape": (5, 3), "dtype": str(make.dtype)}
    variable = {**declared, "trainable": True}
    tokens, arrays = str(directory / "tokens.bin"), str(directory / "arrays.npz")
    make.whole(200, 500).astype(np.uint8).tofile(tokens)
    np.savez(arrays, rows=make.real(11, 3))
    stored = {"file": str(directory / f"stored_{make.dtype}.safetensors"), "key": "w"}
    save_file({"w": make.real(5, 3)}, stored["file"])
    batch = {"paths": (arrays,), "key": "rows", "batch": 5, "shape": (3,), "dtype": str(make.dtype)}
    return [
        Sample("input", (), declared),
        Sample("variable", (), {**variable, "init": "normal", "init_args": (0.0, 0.5)}),
        Sample("variable", (), {**variable, "init": "ones", "init_args": ()}),
        Sample("variable", (), {**variable, "init": "stored", "init_args": (), **stored}),
        Sample("output", (make.real(5, 3),), {"name": "loss", "finite": True}),
        Sample("redistribute", (make.real(5, 3),)),
        Sample("assign", (make.real(5, 3), make.real(5, 3)), differentiable=False),
        Sample("fill", (), {"shape": (5, 3), "dtype": "float32", "value": 1.5}),
        Sample("fill", (), {"shape": (), "dtype": "int64", "value": 3}),
        Sample("causal_mask", (), {"size": 5}),
        Sample(
            "learning_rate",
            (),
            {"schedule": "cosine", "base": 0.1, "warmup": 2, "total": 9, "final": 0.01},
        ),
        Sample("arrays_batch", (), {**batch, "start": 1, "stop": 11, "shuffle": True, "seed": 3}),
        Sample("arrays_batch", (), {**batch, "start": 0, "stop": 4, "shuffle": False, "seed": 3}),
        Sample(
            "token_batch",
            (),
            {"path": tokens, "dtype": "uint8", "batch": 5, "length": 7, "shift": 1, "seed": 1},
        ),
        Sample(
            "constant",
            (),
            {"shape": (5, 2), "dtype": "float32", "values": tuple(map(float, range(10)))},
        ),
        Sample("stored_constant", (), {"shape": (5, 3), "dtype": str(make.dtype), **stored}),
    ]
