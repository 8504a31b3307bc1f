"""Names of NumPy and PyTorch: each is here, or its error says what is, or that nothing is."""

from __future__ import annotations

import re

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import UnknownNameError, UsageError
from plancompiler.frontend.other_names import _CALLED, meaning
from tests.suites.names_of_others import names

MESH = pc.Placement("cpu", [0])
OWNERS = {
    "numpy": ("pc", pc),
    "numpy.ndarray": ("x", None),
    "torch": ("pc", pc),
    "torch.Tensor": ("x", None),
    "torch.nn": ("pc.nn", pc.nn),
    "torch.nn.functional": ("pc.nn.functional", pc.nn.functional),
}


@pytest.mark.parametrize("namespace", OWNERS)
def test_every_name_is_here_or_has_an_answer(namespace):
    title, owner = OWNERS[namespace]
    if owner is None:
        owner = pc.tensor(np.ones(2), MESH)
    absent = [name for name in names()[namespace] if not hasattr(owner, name)]
    assert [name for name in absent if meaning(title, name) is None] == []


def test_answers_name_what_exists():
    """Each `pc.X` and `x.X` in the table is there."""
    x = pc.tensor(np.ones(2), MESH)
    for name, answer in _CALLED.items():
        for path in re.findall(r"\b(?:pc|x)(?:\.[A-Za-z_]\w*)+", answer):
            at = x if path.startswith("x.") else pc
            for part in path.split(".")[1:]:
                at = getattr(at, part)
            assert at is not None, (name, path)
        assert not (hasattr(pc, name) and hasattr(x, name)), name


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: pc.concatenate, r"plancompiler has no 'concatenate'.*pc\.concat\(tensors, axis\)"),
        (lambda: pc.clamp, r"use pc\.clip"),
        (lambda: pc.relu_, r"use x\.relu_"),
        (lambda: pc.Linear, r"use pc\.nn\.Linear"),
        (lambda: pc.solve, r"use pc\.linalg\.solve"),
        (lambda: pc.Adam, r"use pc\.optim\.Adam"),
        (lambda: pc.fft, "complex numbers and Fourier transforms do not exist"),
        (lambda: pc.matmull, r"did you mean pc\.matmul"),
        (lambda: pc.nn.BatchNorm3D, r"did you mean pc\.nn\.BatchNorm"),
        (lambda: pc.nn.functional.sin, r"use pc\.sin"),
        (lambda: pc.linalg.eig, "complex numbers"),
        (lambda: pc.Tensor, r"use pc\.DistTensor"),
        (lambda: pc.device, r"use pc\.Placement"),
        (lambda: pc.zzzz, "docs/compatibility.md says"),
        (lambda: pc.nn.Linear(2, 3).weight.copy_, r"a parameter has no 'copy_'.*p\.value\.copy_"),
        (lambda: pc.nn.Linear(2, 3).weight.requires_grad_, r"module\.freeze\(\)"),
        (lambda: pc.nn.Linear(2, 3).to, r"a Linear has no 'to'.*module\.place\(placement\)"),
        (lambda: pc.nn.Linear(2, 3).wieght, "a Linear has no 'wieght'"),
    ],
)
def test_the_error_says_what_is_meant(ask, words):
    with pytest.raises(AttributeError, match=words) as raised:
        ask()
    assert isinstance(raised.value, UnknownNameError)
    assert "test_other_names.py" in str(raised.value.report.source)


def test_tensors_of_both_kinds_say_so():
    def asked(x):
        with pytest.raises(
            UnknownNameError, match=r"a tensor has no 'stride'.*no layout in memory"
        ):
            x.stride()
        with pytest.raises(UnknownNameError, match=r"use x\.trunc_\(\)"):
            x.fix_()
        with pytest.raises(UnknownNameError, match=r"did you mean x\.reshape"):
            x.reshap(3)
        assert not hasattr(x, "__nothing__")
        return x

    asked(pc.tensor(np.ones(3), MESH))
    with pc.job("names"):
        pc.output("y", asked(pc.input("x", (3,), "float32", MESH)))


@pytest.mark.parametrize(
    "compute",
    [
        *(lambda x, p: p * 2.0, lambda x, p: 1.0 - p, lambda x, p: p[0], lambda x, p: -p),
        *(lambda x, p: x @ p, pc.matmul, lambda x, p: np.asarray(p)),
    ],
)
def test_parameters_are_no_operands(compute):
    layer = pc.nn.Linear(2, 3).place(MESH)
    with pytest.raises(UsageError, match=r"p\.value"):
        compute(pc.tensor(np.ones((4, 2), np.float32), MESH), layer.weight)
