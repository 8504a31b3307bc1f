"""Programs of PyTorch's users run on this package: the same text gives the same values, on one rank
and with all tensors split over two.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from tests.importers.user_programs import PROGRAMS

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: scripts/test --importers installs it"
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LAYOUTS = {"whole": 1, "first axis": 2, "last axis": 2}


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of a parameter of this name, the same in both packages."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.normal(size=shape).astype(np.float32) * np.float32(0.3)


class OnTorch:
    """PyTorch as a program sees it."""

    torch, m, on, bool = True, torch, {}, torch.bool

    def dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, value: Any, grad: bool = False) -> Any:
        made = torch.tensor(np.array(value))
        return made.requires_grad_() if grad else made

    def init(self, model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.tensor(weights(name, tuple(parameter.shape))))
        return model

    def p(self, parameter: Any) -> Any:
        return parameter

    def freeze(self, module: Any) -> None:
        module.requires_grad_(False)

    def trains(self, parameter: Any) -> bool:
        return parameter.requires_grad

    def grad(self, output: Any, inputs: Any, **options: Any) -> Any:
        return torch.autograd.grad(output, inputs, **options)


class OnRanks:
    """This package as a program sees it, with tensors in a layout."""

    torch, m, bool = False, pc, "bool"

    def __init__(self, layout: str) -> None:
        self.layout, self.mesh = layout, pc.Placement("cpu", list(range(LAYOUTS[layout])))
        self.on = {"placement": self.mesh}

    def dtype(self, name: str) -> Any:
        return name

    def tensor(self, value: Any, grad: bool = False) -> Any:
        array = np.array(value)
        axis = {"whole": None, "first axis": 0, "last axis": array.ndim - 1}[self.layout]
        sbp = "B" if axis is None or not array.ndim else f"S({axis})"
        return pc.tensor(array, self.mesh, sbp, requires_grad=grad)

    def init(self, model: Any) -> Any:
        model.place(self.mesh)
        with pc.no_grad():
            for name, parameter in model.named_parameters():
                if not isinstance(parameter, pc.nn.Buffer):
                    parameter.value.copy_(pc.tensor(weights(name, parameter.shape), self.mesh))
        return model

    def p(self, parameter: Any) -> Any:
        return parameter.value

    def freeze(self, module: Any) -> None:
        module.freeze()

    def trains(self, parameter: Any) -> bool:
        return parameter.trainable

    def grad(self, output: Any, inputs: Any, **options: Any) -> Any:
        return pc.eager.grad(output, inputs, **options)


def plain(value: Any) -> Any:
    """Results of a program as arrays and texts."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return value
    if hasattr(value, "detach"):
        return np.array(value.detach().numpy())
    return np.array(value)


def compare(got: Any, expected: Any, label: str) -> None:
    if isinstance(expected, list):
        assert len(got) == len(expected), label
        for place, pair in enumerate(zip(got, expected, strict=True)):
            compare(*pair, f"{label}[{place}]")
    elif isinstance(expected, str):
        assert got == expected, label
    else:
        assert got.shape == expected.shape, label
        np.testing.assert_allclose(got, expected, 2e-4, 2e-5, err_msg=label)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_on_pytorch(name: str) -> None:
    expected = plain(PROGRAMS[name](OnTorch()))
    for layout, ranks in LAYOUTS.items():
        for got in spawn(lambda layout=layout: plain(PROGRAMS[name](OnRanks(layout))), ranks):
            compare(got, expected, f"{name}, {layout}")
