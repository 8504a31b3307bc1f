"""Calls of fused elementwise programs and of updates with a factor on their gradient."""

from __future__ import annotations

import numpy as np

from tests.ops.sample import Maker, Sample


def samples(make: Maker) -> list[Sample]:
    real, positive = make.real, make.positive
    samples = []
    for shape in ((5, 3), (1,), (), (0, 4)):
        x, y, z = real(*shape), positive(*shape), real(*shape)
        programs = {
            "one op": ((x,), ("tanh 0",)),
            "a chain": ((x,), ("mul 0,0", 'mul_scalar 1 {"scalar":0.5}', "tanh 2", "mul 3,0")),
            "a tree": ((x, y, z), ("exp 0", "log 1", "mul 3,4", "sub 5,2")),
            "linear": ((x, y), ('mul_scalar 0 {"scalar":3.0}', "neg 2", "add 3,1")),
            "extremes": ((x, y), ("maximum 0,1", 'minimum_scalar 2 {"scalar":0.75}')),
            "truth values": ((x, y), ("greater 0,1", "where 2,0,1", "mul 3,1")),
            # The last op reads the input whose memory it may be given where it must not write.
            "read apart": ((x, y, z), ("sigmoid 1", "lerp 2,0,3")),
            "buffers used again": (
                (x, y),
                ("square 0", "square 1", "add 2,3", "sqrt 4", "neg 2", "add 5,6", "div 7,1"),
            ),
        }
        samples += [
            Sample("fused_elementwise", inputs, {"program": program}, differentiable=False)
            for inputs, program in programs.values()
        ]
    rate = np.array(0.1, make.dtype)
    w, g, m, v = real(5, 3), real(5, 3), real(5, 3), positive(5, 3)
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    for decay in (0.0, 0.1):
        attrs = {"weight_decay": decay, "grad_scale": 0.25}
        momentum = {"momentum": 0.9, "nesterov": True}
        samples += [
            Sample("sgd_update", (w, g, rate), attrs, differentiable=False),
            Sample("momentum_update", (w, g, m, rate), {**momentum, **attrs}, False),
            Sample("adam_update", (w, g, m, v, rate), {**adam, **attrs}, False),
        ]
    return samples
