"""Imported programs beside PyTorch: results with their dtypes, gradients of parameters and inputs,
and buffers afterwards, on one rank, with inputs split over two, with parameters split, and both on
four."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import PlanCompilerError
from plancompiler.frontend.nn.module import Buffer
from tests.importers.models import torch
from tests.importers.torch_programs import PROGRAMS, Program

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
]
ONE, PAIR = pc.Placement("cpu", [0]), pc.Placement("cpu", [0, 1])
BOTH = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
LAYOUTS = {
    "whole": (ONE, ["B"], ["B"]),
    "inputs": (PAIR, ["S(0)"], ["B"]),
    "parameters": (PAIR, ["B"], ["S(0)"]),
    "both": (BOTH, ["S(0)", "B"], ["B", "S(0)"]),
}
"""A mesh, and how inputs and parameters are split along their first axis."""
REFUSED = {
    "in_place_without_gradients": r"changed in place where they do not.* Where: .*programs\.py:",
    "in_place_without_gradients_in_autocast": "a change in place without gradients, mul_|add_",
    "detached_view_in_place": "changed in place where they do not",
    "own_gradient": r"Got: Clipped\.backward",
    "bounded_gradient": r"Got: Bounded\.backward",
    "saturated_gradient": r"Got: Saturated\.backward",
    "hook_on_a_result": "a hook of a result",
    "hook_on_a_module": "a backward hook of module layer",
    "hook_on_an_operation": "a hook of a result's MulBackward0",
    "hooks_of_saved_tensors": "hooks of saved tensors",
    "frozen_for_a_while": "requires_grad changes in forward",
    "data": "cannot export",
    "data_of_a_parameter": "cannot export",
    "mask_of_values_in_place": r"depends on the values of tensors\. Where: .*torch_programs\.py:",
    "row_where_a_mask_is_true": "known only when the program runs",
    "places_of_a_pool": "leaves out a result that the model uses",
    "strided_and_turned": "do not lie in order in memory",
    "sum_of_complex_numbers": r"complex\.add\.Tensor",
    "complex_result": "cannot be complex",
}
"""What an importer cannot know, and what its error says."""
DIGITS = {"float64": 1e-9, "float32": 3e-5, "float16": 3e-3, "bfloat16": 3e-2}


def flat(tree):
    if isinstance(tree, (tuple, list)):
        return [leaf for each in tree for leaf in flat(each)]
    return [tree]


def weights(shape, number):
    return np.cos(np.arange(np.prod(shape, dtype=int)) * 1.7 + number).reshape(shape)


def made(name):
    function, inputs, parts = PROGRAMS[name]
    torch.manual_seed(2)
    return Program(function, {each: make() for each, make in parts.items()}), inputs


def by_torch(name):
    """Results, gradients, and buffers after the call."""
    module, inputs = made(name)
    given = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    results = flat(module(*given))
    loss = sum(
        (each * torch.tensor(weights(each.shape, number)).to(each.dtype)).sum().double()
        for number, each in enumerate(results)
        if each.requires_grad
    )
    if torch.is_tensor(loss):
        loss.backward()
    leaves = dict(module.named_parameters())
    leaves |= {f"inputs_{number}": each for number, each in enumerate(given)}
    slopes = {key: each.grad for key, each in leaves.items() if each.grad is not None}
    return (
        [(str(each.dtype)[6:], each.detach().double().numpy()) for each in results],
        {key: each.double().numpy() for key, each in slopes.items()},
        {key: each.double().numpy() for key, each in module.named_buffers()},
    )


def by_us(model, inputs, layout):
    mesh, rows, split = LAYOUTS[layout]
    whole = ["B"] * mesh.ndim
    named = {name: each for name, each in model.named_parameters() if each.shape}
    model = deepcopy(model).place(mesh, dict.fromkeys(named, split))
    given = [pc.tensor(each.numpy(), mesh, rows if each.ndim else whole) for each in inputs]
    for each in given:
        each.requires_grad = each.dtype.is_floating
    results = flat(model(*given))
    loss = sum(
        (each * pc.tensor(weights(each.shape, number), mesh).cast(each.dtype)).sum().cast("float64")
        for number, each in enumerate(results)
        if each.dtype.is_floating and each.requires_grad
    )
    if not isinstance(loss, int) and loss.requires_grad:
        loss.backward()
    named = dict(model.named_parameters())
    leaves = {key: each.value for key, each in named.items() if each.trainable}
    leaves |= {f"inputs_{number}": each for number, each in enumerate(given)}
    slopes = {key: each.grad for key, each in leaves.items() if each.grad is not None}
    buffers = {key: each.value for key, each in named.items() if isinstance(each, Buffer)}
    return (
        [(str(each.dtype), each.cast("float64").numpy()) for each in results],
        {key: each.cast("float64").numpy() for key, each in slopes.items()},
        {key: each.cast("float64").numpy() for key, each in buffers.items()},
    )


def differences(ours, theirs, rough):
    """What differs; with `rough` as if all were bfloat16, in which other programs round less."""
    wrong = []
    if [dtype for dtype, _ in ours[0]] != [dtype for dtype, _ in theirs[0]]:
        wrong.append(f"dtypes {[d for d, _ in ours[0]]}, not {[d for d, _ in theirs[0]]}")
    for number, ((_, mine), (dtype, value)) in enumerate(zip(ours[0], theirs[0], strict=True)):
        digits = DIGITS["bfloat16"] if rough and dtype in DIGITS else DIGITS.get(dtype, 0)
        if mine.shape != value.shape or not np.allclose(
            mine, value, digits, digits, equal_nan=True
        ):
            wrong.append(f"result {number} is {mine.tolist()}, not {value.tolist()}")
    rough = rough or any(dtype in ("float16", "bfloat16") for dtype, _ in theirs[0])
    digits = DIGITS["bfloat16" if rough else "float32"]
    for key in ours[1].keys() | theirs[1].keys():
        mine, value = ours[1].get(key, np.zeros(1)), theirs[1].get(key, np.zeros(1))
        scale = max(1.0, np.max(np.abs(value), initial=0.0, where=np.isfinite(value)))
        if not np.allclose(mine, value, digits, digits * scale, equal_nan=True):
            wrong.append(f"gradient of {key} is {mine.tolist()}, not {value.tolist()}")
    for key, mine in ours[2].items():
        if not np.allclose(mine, theirs[2][key], 1e-5, 1e-6):
            wrong.append(f"buffer {key} is {mine.tolist()}, not {theirs[2][key].tolist()}")
    return wrong


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    module, inputs = made(name)
    if name in REFUSED:
        with pytest.raises(PlanCompilerError, match=REFUSED[name]):
            pc.from_torch(module, inputs)
        return
    theirs = by_torch(name)
    model = pc.from_torch(module, inputs)
    rough = "autocast" in name
    for layout, (mesh, *_) in LAYOUTS.items():
        ours = spawn(lambda layout=layout: by_us(model, inputs, layout), mesh.size)[0]
        assert not differences(ours, theirs, rough), layout
