"""Methods of tensors: NumPy's and PyTorch's spelling, on eager tensors and on those of a job."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, TracingError, UsageError
from plancompiler.frontend import methods
from plancompiler.ir.operators import TensorOperators

MESH = pc.Placement("cpu", [0])
X = np.array([[3.0, -1.0, 2.0], [0.5, 4.0, -2.0]], np.float32)

CALLS = {
    "view": (lambda x: x.view(3, -1), X.reshape(3, 2)),
    "view_as": (lambda x: x.view_as(x.view(6)), X.ravel()),
    "permute": (lambda x: x.permute(1, 0), X.T),
    "permute by list": (lambda x: x.permute((1, 0)), X.T),
    "transpose two axes": (lambda x: x.transpose(0, 1), X.T),
    "transpose from the end": (lambda x: x[None].transpose(-1, -2), X.T[None]),
    "transpose as NumPy": (lambda x: x.transpose((0, 1)), X),
    "transpose function": (lambda x: pc.transpose(x, 0, 1), X.T),
    "t": (lambda x: x.t(), X.T),
    "unsqueeze": (lambda x: x.unsqueeze(dim=1), X[:, None]),
    "squeeze": (lambda x: x[None].squeeze(0), X),
    "flatten": (lambda x: x[None].flatten(start_dim=1), X.reshape(1, 6)),
    "unflatten": (lambda x: x.unflatten(1, (3, 1)), X[..., None]),
    "expand": (lambda x: x[:1].expand(2, -1), X[[0, 0]]),
    "expand_as": (lambda x: x[:1].expand_as(x), X[[0, 0]]),
    "repeat as PyTorch": (lambda x: x.repeat(2, 1), np.tile(X, (2, 1))),
    "repeat as NumPy": (lambda x: x.repeat(2, axis=1), X.repeat(2, 1)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2), X.repeat(2)),
    "tile": (lambda x: x.tile(1, 2), np.tile(X, (1, 2))),
    "flip": (lambda x: x.flip(0, 1), X[::-1, ::-1]),
    "roll": (lambda x: x.roll(1, dims=1), np.roll(X, 1, 1)),
    "chunk": (lambda x: x.chunk(3, dim=1)[1], X[:, 1:2]),
    "split": (lambda x: x.split(2, dim=1)[1], X[:, 2:]),
    "unbind": (lambda x: x.unbind(1)[2], X[:, 2]),
    "narrow": (lambda x: x.narrow(1, 1, 2), X[:, 1:]),
    "sum": (lambda x: x.sum(dim=1, keepdim=True), X.sum(1, keepdims=True)),
    "sum with dtype": (lambda x: x.sum(0, dtype="float64"), X.sum(0, dtype=np.float64)),
    "mean": (lambda x: x.mean(dim=(0, 1)), X.mean()),
    "max": (lambda x: x.max(dim=1), X.max(1)),
    "amin": (lambda x: x.amin(dim=1), X.min(1)),
    "prod": (lambda x: x.prod(dim=0), X.prod(0)),
    "std": (lambda x: x.std(dim=1, unbiased=True), X.std(1, ddof=1)),
    "var": (lambda x: x.var(0, ddof=1), X.var(0, ddof=1)),
    "norm": (lambda x: x.norm(), np.linalg.norm(X)),
    "norm of rows": (lambda x: x.norm(p=1, dim=1), abs(X).sum(1)),
    "argmax": (lambda x: x.argmax(), X.argmax()),
    "argmax of rows": (lambda x: x.argmax(dim=1), X.argmax(1)),
    "cumsum": (lambda x: x.cumsum(dim=1), X.cumsum(1)),
    "cumsum as NumPy": (lambda x: x.cumsum(), X.cumsum()),
    "softmax": (lambda x: x.softmax(dim=1).sum(1), np.ones(2, np.float32)),
    "topk": (lambda x: x.topk(2, dim=1)[1], np.array([[0, 2], [1, 0]])),
    "sort": (lambda x: x.sort(descending=True)[0], -np.sort(-X)),
    "clamp": (lambda x: x.clamp(min=0, max=2.5), X.clip(0, 2.5)),
    "clamp by tensors": (lambda x: x.clamp(max=x[:1]), np.minimum(X, X[:1])),
    "clamp_min": (lambda x: x.clamp_min(0), np.maximum(X, 0)),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 7.0), np.where(X < 0, 7, X)),
    "where": (lambda x: x.where(x > 0, 0.0), np.where(X > 0, X, 0)),
    "gather": (lambda x: x.gather(1, x.argmax(1, keepdim=True)), X.max(1, keepdims=True)),
    "add": (lambda x: x.add(x, alpha=2), 3 * X),
    "sub": (lambda x: x.sub(1, alpha=2), X - 2),
    "div": (lambda x: x.div(1.5, rounding_mode="trunc"), np.trunc(X / np.float32(1.5))),
    "div of whole numbers": (
        lambda x: x.mul(2).long().div(-4, rounding_mode="trunc"),
        np.trunc((2 * X).astype(np.int64) / -4).astype(np.int64),
    ),
    "eq": (lambda x: x.eq(3.0), X == 3),
    "ge": (lambda x: x.ge(2.0), X >= 2),
    "mm": (lambda x: x.mm(x.t()), X @ X.T),
    "mv": (lambda x: x.mv(x[0]), X @ X[0]),
    "to": (lambda x: x.to("int64"), X.astype(np.int64)),
    "to another tensor": (lambda x: x.long().to(x), np.trunc(X)),
    "float": (lambda x: x.double().float(), X),
    "bool": (lambda x: x.gt(0).bool(), X > 0),
    "type_as": (lambda x: x.type_as(x.int()), X.astype(np.int32)),
    "astype": (lambda x: x.astype("float64"), X.astype(np.float64)),
    "new_zeros": (lambda x: x.new_zeros(2, 1), np.zeros((2, 1), np.float32)),
    "new_full": (lambda x: x.new_full((2,), 3, dtype="int64"), np.full(2, 3)),
    "clone": (lambda x: x.clone().contiguous(), X),
    "detach": (lambda x: x.detach(), X),
    "scalar along an axis": (lambda x: x.sum().cumsum(dim=0), X.sum()),
    "scalar reduced": (lambda x: x.sum().sum(dim=-1).softmax(0), np.float32(1)),
    "rows": (lambda x: sum(row.sum() for row in x), X.sum()),
    "det": (lambda x: x[:, :2].det(), np.linalg.det(X[:, :2])),
    "unfold": (lambda x: x.unfold(1, 2, 1), np.stack([X[:, :2], X[:, 1:]], 1)),
    "diagonal": (lambda x: x[None].diagonal(dim1=1, dim2=2), np.diagonal(X)[None]),
}
"""What a user types, and what NumPy makes of it."""


def compared(made, wanted):
    wanted = np.asarray(wanted)
    assert made.dtype == wanted.dtype
    assert made.shape == wanted.shape
    np.testing.assert_allclose(made, wanted, rtol=2e-6)


@pytest.mark.parametrize("name", CALLS)
def test_methods_of_eager_tensors(name):
    call, wanted = CALLS[name]
    compared(call(pc.tensor(X, MESH)).numpy(), wanted)


def test_methods_of_values_of_a_job():
    with pc.job("methods") as job:
        x = pc.input("x", X.shape, "float32", MESH)
        for name, (call, _) in CALLS.items():
            pc.output(name.replace(" ", "_"), call(x))
    with pc.run(job) as session:
        made = session.step(x=X)
    for name, (_, wanted) in CALLS.items():
        compared(np.asarray(made[name.replace(" ", "_")], np.asarray(wanted).dtype), wanted)


def test_every_function_of_a_tensor_is_a_method():
    for name in pc.__all__:
        if methods.takes_a_tensor_first(getattr(pc, name)):
            assert callable(getattr(TensorOperators, name)), name


def test_changes_in_place_by_both_names():
    x = pc.tensor(X, MESH)
    assert x.add_(x, alpha=1).mul_(0.5) is x
    np.testing.assert_allclose(x.numpy(), X)
    x.clamp_(min=0).masked_fill_(x > 3, 3.0)
    np.testing.assert_allclose(x.numpy(), X.clip(0, 3))
    x.cumsum_(dim=1).zero_().requires_grad_()
    assert x.requires_grad
    assert {"add_", "clamp_", "normal_", "unsqueeze_"} <= set(dir(x))
    assert not {"add_", "normal_"} & set(dir(pc.Value))


def test_numbers_of_a_tensor():
    x = pc.tensor(X, MESH)
    assert (x.dim(), x.numel(), len(x), x.size(0), tuple(x.size())) == (2, 6, 2, 2, (2, 3))
    assert x.sum().item() == pytest.approx(6.5)
    assert f"{x.sum():.4f} {x.mean():8.3e}" == f"{X.sum():.4f} {X.mean():8.3e}"
    assert [row.tolist() for row in x] == X.tolist()
    assert x.is_floating_point()
    assert x.element_size() == 4
    with pc.job("none"):
        value = pc.input("x", (), "float32", MESH)
        for read in (
            lambda: f"{value:.4f}",
            value.item,
            value.tolist,
            value.numpy,
            lambda: float(value),
        ):
            with pytest.raises(TracingError, match="a symbolic value is no"):
                read()
        assert f"{value}" == str(value)
        pc.output("y", value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: x.repeat(2), UsageError, "repeat needs a number for each axis"),
        (lambda x: x.view("int32"), UsageError, "not read as another dtype"),
        (lambda x: x.to("cuda"), UsageError, "a placement says on which devices"),
        (lambda x: x.unsqueeze(0).t(), AttributeValueError, "t transposes a matrix"),
        (lambda x: x.sum(axis=0, dim=0), UsageError, "given in two spellings"),
        (lambda x: x.cumsum(axis=(0, 1)), AttributeValueError, "one axis is needed"),
        (lambda x: x.new_zeros(2, device="cuda"), UsageError, "a placement says on which devices"),
        (lambda x: x.new_zeros(2, names="n"), UsageError, "does not know this keyword"),
        (lambda x: x.div(2, rounding_mode="up"), AttributeValueError, "rounded in another way"),
        (lambda x: x.sum().cumsum(2), AttributeValueError, "axes must be distinct and within"),
    ],
)
def test_what_means_nothing_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(pc.tensor(X, MESH))


def test_type_checkers_know_the_methods_that_there_are():
    script = Path(__file__).resolve().parents[2] / "scripts" / "generate_methods"
    arguments, sys.argv = sys.argv, [str(script), "--check"]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = arguments
    assert ended.value.code == 0
