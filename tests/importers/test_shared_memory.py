"""Tensors of PyTorch modules that lie in the same memory: they are one, or they are refused."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import ModelImportError
from tests.importers.models import torch
from tests.importers.training import ADAM, ONE, RATE

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
nn = torch.nn
EXAMPLE = torch.linspace(-1, 1, 18).reshape(3, 6)


class Pair(nn.Module):
    """Two matrices; `tie` makes the second, and what else reads the memory of the first."""

    def __init__(self, tie) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 6))
        self.second = None
        self.register_buffer("kept", torch.arange(6.0))
        self.more = torch.zeros(6)
        self.changes = False
        tie(self)
        if self.second is None:
            self.second = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        if self.changes:
            self.kept.add_(1)
        hidden = torch.tanh(x @ self.first.t())
        scale = (self.second * torch.arange(self.second.shape[1])).sin().mean()
        return (hidden * scale).square().mean() + (x * (self.kept + self.more)).mean()


def parameter(of, **how):
    return lambda m: setattr(m, "second", nn.Parameter(of(m.first), **how))


def attribute(of):
    def tie(m):
        del m.second
        m.second = of(m.first)

    return tie


def changing_slice(m):
    m.more, m.changes = m.kept[:1], True


def frozen(m):
    m.first.requires_grad_(False)
    parameter(torch.t, requires_grad=False)(m)


def tied(m):
    m.second = m.first


def columns_of_one(m):
    whole = torch.randn(24, 2)
    m.first = nn.Parameter(whole[:, 0].view(4, 6))
    m.second = nn.Parameter(whole[:, 1].view(6, 4))


@pytest.mark.parametrize(
    ("tie", "said"),
    [
        (parameter(torch.t), r"first float32\[4, 6\] and second float32\[6, 4\]"),
        (parameter(lambda w: w.view(6, 4)), r"first float32\[4, 6\] and second float32\[6, 4\]"),
        (parameter(lambda w: w[:, :4]), r"first float32\[4, 6\] and second float32\[4, 4\]"),
        (parameter(lambda w: w), r"first float32\[4, 6\] and second float32\[4, 6\]"),
        (attribute(torch.t), r"second float32\[6, 4\] by TBackward0"),
        (attribute(lambda w: (w * 2).t()), r"second float32\[6, 4\] by TBackward0"),
        (attribute(lambda w: w.detach().t()), "first .* and second"),
        (lambda m: m.register_buffer("kept", m.first.detach()[0]), "first .* and kept"),
        (changing_slice, r"kept float32\[6\] and more float32\[1\]"),
    ],
)
def test_tensors_that_change_together_are_refused(tie, said):
    """In PyTorch an optimizer changes one by the gradients of both, or after the other."""
    module = Pair(tie)
    with pytest.raises(ModelImportError, match=said):
        pc.from_torch(module, (EXAMPLE,))


def constant(m):
    del m.second
    m.second = torch.ones(6, 4)


@pytest.mark.parametrize("tie", [tied, frozen, columns_of_one, constant])
def test_tensors_that_do_not_train_as_in_pytorch(tie):
    """One under two names, two that never change, and parts of one memory without an element in
    common.
    """
    module = Pair(tie)
    model = pc.from_torch(module, (EXAMPLE,))
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, **ADAM) if trained else None
    with pc.job("shared") as job:
        loss = model.place(ONE)(pc.input("x", (3, 6), "float32", ONE))
        if trained:
            pc.optim.AdamW(RATE, **ADAM).minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, ranks=1, cache=False) as session:
        for _ in range(3):
            expected = module(EXAMPLE)
            if optimizer is not None:
                optimizer.zero_grad()
                expected.backward()
                optimizer.step()
            made = session.step(x=EXAMPLE.numpy())["loss"]
            np.testing.assert_allclose(made, expected.item(), rtol=1e-5)


def test_a_program_in_a_file_has_its_ties_still(tmp_path):
    """PyTorch's file has a tensor for each name of a parameter."""
    program = torch.export.export(Pair(tied), (EXAMPLE,), strict=False)
    torch.export.save(program, tmp_path / "m.pt2")
    for source in (program, tmp_path / "m.pt2"):
        model = pc.from_torch(source)
        assert model.second is model.first


def test_a_change_in_place_that_pytorch_cannot_export():
    class Counting(Pair):
        def forward(self, x):
            self.more.add_(1)
            return super().forward(x)

    with pytest.raises(ModelImportError, match="is mutated in the forward method"):
        pc.from_torch(Counting(lambda m: None), (EXAMPLE,))
