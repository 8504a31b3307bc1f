"""Products of tensors: einsum and what is said with it."""

from __future__ import annotations

import string
from collections.abc import Sequence

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.shape import diagonal, squeeze
from plancompiler.frontend.out import takes_out
from plancompiler.ir import AttrValue
from plancompiler.ir.operators import Scalar, normalize_axes, whole_numbers
from plancompiler.ops.check import broadcast_shapes
from plancompiler.ops.registry import apply, apply_one

__all__ = [
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "dot",
    "einsum",
    "inner",
    "kron",
    "linear",
    "matmul",
    "outer",
    "tensordot",
]


@takes_out
def einsum(equation: str, *tensors: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums of products by an equation, as in NumPy: `pc.einsum("bij,bjk->bik", a, b)`.

    Without `->` the output has the letters that occur once, in alphabetical order. `...` stands for
    leading axes, which broadcast. A letter that occurs twice in a tensor
    takes its diagonal, and an axis of extent 1 broadcasts. The equation is the sharding rule: an
    axis whose letter is split is split everywhere, and one that is summed away leaves partial sums.
    """
    if not tensors:
        raise ShapeError("einsum needs at least one tensor")
    left, arrow, output = _spelled_out(equation, tensors).partition("->")
    parts = left.split(",")
    operands = list(tensors)
    if len(parts) == len(operands) and all(
        len(part) == each.ndim for part, each in zip(parts, operands, strict=True)
    ):
        pairs = [_on_diagonals(*pair) for pair in zip(operands, parts, strict=True)]
        pairs = _without_stretched(pairs)
        operands, parts = [each for each, _ in pairs], [part for _, part in pairs]
    return apply_one("einsum", *operands, equation=f"{','.join(parts)}{arrow}{output}")


def _on_diagonals(x: Tensor, letters: str) -> tuple[Tensor, str]:
    """A tensor in which each letter names one axis: of two axes with one letter the diagonal."""
    for letter in dict.fromkeys(letters):
        while letters.count(letter) > 1:
            first, second = letters.index(letter), letters.rindex(letter)
            if x.shape[first] != x.shape[second]:
                raise ShapeError(
                    f"letter {letter!r} of an einsum stands for different extents",
                    got=f"{x.shape[first]} and {x.shape[second]} in one tensor",
                )
            x = diagonal(x, 0, first, second)
            rest = letters[:first] + letters[first + 1 : second] + letters[second + 1 :]
            letters = rest + letter
    return x, letters


def _without_stretched(pairs: Sequence[tuple[Tensor, str]]) -> list[tuple[Tensor, str]]:
    """Tensors without axes of extent 1 whose letters stand for more elsewhere."""
    extents: dict[str, int] = {}
    for each, part in pairs:
        for letter, extent in zip(part, each.shape, strict=True):
            extents[letter] = max(extent, extents.get(letter, 1))
    kept = []
    for each, part in pairs:
        axes = [at for at, n in enumerate(each.shape) if n == 1 != extents[part[at]]]
        if axes:
            each = squeeze(each, axes)
            part = "".join(letter for at, letter in enumerate(part) if at not in axes)
        kept.append((each, part))
    return kept


def _spelled_out(equation: str, tensors: Sequence[Tensor]) -> str:
    """The equation with letters for `...` and with an output."""
    text = equation.replace(" ", "")
    left, arrow, output = text.partition("->")
    parts = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        output = "..." * ("..." in left) + "".join(
            sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        )
    if "..." in text and len(parts) == len(tensors):
        leading = [
            tensor.ndim - len(part) + 3
            for part, tensor in zip(parts, tensors, strict=True)
            if "..." in part
        ]
        if min(leading, default=0) < 0:
            raise ShapeError(
                "a tensor of an einsum has fewer axes than letters",
                got=f"{equation!r} for {' and '.join(str(tensor.shape) for tensor in tensors)}",
            )
        most = max(leading, default=0)
        free = [letter for letter in string.ascii_letters if letter not in text]
        if len(free) < most:
            raise AttributeValueError("an einsum has more axes than there are letters")
        stand_in, counts = "".join(free[:most]), iter(leading)
        parts = [
            part.replace("...", stand_in[most - next(counts) :]) if "..." in part else part
            for part in parts
        ]
        output = output.replace("...", stand_in)
    return f"{','.join(parts)}->{output}"


@takes_out
def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a [b, m, k] times b [b, k, n], matrix by matrix: [b, m, n]."""
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0]:
        raise ShapeError(
            "bmm needs two stacks of equally many matrices", got=f"{a.shape} and {b.shape}"
        )
    return matmul(a, b)


@takes_out
def dot(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sum of the products of two vectors."""
    return einsum("i,i->", a, b)


@takes_out
def inner(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sums of products over the last axes: [..., k] and [k], or two vectors or matrices [m, k] and
    [n, k] as [m, n]. A scalar multiplies the other.
    """
    if not a.ndim or not b.ndim:
        return a * b
    return tensordot(a, b, ((-1,), (-1,)))


@takes_out
def outer(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """All products of two vectors [m] and [n]: [m, n]."""
    return einsum("i,j->ij", a, b)


@takes_out
def tensordot(
    a: Tensor, b: Tensor, axes: int | Sequence[Sequence[int]] = 2, *, out: Tensor | None = None
) -> Tensor:
    """Sums of products over pairs of axes: ((axes of a), (axes of b)), or the last `axes` of a with
    the first of b. The other axes of a come first, then those of b.
    """
    if not isinstance(axes, (list, tuple)):
        count = sum(whole_numbers("axes", axes))
        if not 0 <= count <= min(a.ndim, b.ndim):
            raise AttributeValueError(
                "tensordot sums over more axes than a tensor has",
                got=count,
                expected=f"0 to {min(a.ndim, b.ndim)}",
            )
        left: Sequence[int] = range(a.ndim - count, a.ndim)
        right: Sequence[int] = range(count)
    else:
        if len(axes) != 2:
            raise AttributeValueError(
                "tensordot needs axes of both tensors", got=axes, expected="a pair of lists"
            )
        left, right = (whole_numbers("axes", each) for each in axes)
    left = [axis + a.ndim if axis < 0 else axis for axis in left]
    right = [axis + b.ndim if axis < 0 else axis for axis in right]
    normalize_axes(left, a.ndim)
    normalize_axes(right, b.ndim)
    if len(left) != len(right):
        raise AttributeValueError("tensordot needs axes in pairs", got=axes)
    if a.ndim + b.ndim > len(string.ascii_letters):
        raise AttributeValueError("a tensordot has more axes than there are letters")
    of_a = list(string.ascii_letters[: a.ndim])
    of_b = list(string.ascii_letters[a.ndim : a.ndim + b.ndim])
    for one, other in zip(left, right, strict=True):
        of_b[other] = of_a[one]
    kept = [letter for axis, letter in enumerate(of_a) if axis not in left]
    kept += [letter for axis, letter in enumerate(of_b) if axis not in right]
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", a, b)


@takes_out
def matmul(
    a: Tensor,
    b: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """a [..., m, k] times b [..., k, n]; leading axes broadcast. `transpose_*` swaps the last two
    axes of an operand first. Without them a vector on the left is a row, and one on the right a
    column, as in NumPy.
    """
    if not transpose_a and not transpose_b:
        return a @ b
    attrs: dict[str, AttrValue] = {}
    if transpose_a:
        attrs["transpose_a"] = True
    if transpose_b:
        attrs["transpose_b"] = True
    return a._apply("matmul", (a, b), attrs)[0]  # noqa: SLF001  # as `apply`, and quicker


@takes_out
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]: [..., out]."""
    product: Tensor = apply("matmul", x, weight, transpose_b=True)
    return product if bias is None else product + bias


# --- sums with products ---------------------------------------------------------------------------


def _sum_with(x: Tensor, product: Tensor, beta: Scalar, alpha: Scalar) -> Tensor:
    """beta * x + alpha * product; without x where beta is 0, so that NaN in it does not count."""
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        shape = broadcast_shapes("a sum", [x.shape, product.shape])
        return scaled if scaled.shape == shape else apply_one("expand_to", scaled, shape=shape)
    return (x if beta == 1 else x * beta) + scaled


@takes_out
def addmm(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """beta * x + alpha * (a [m, k] times b [k, n]); x broadcasts to [m, n]."""
    return _sum_with(x, matmul(a, b), beta, alpha)


@takes_out
def addmv(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """beta * x + alpha * (a [m, k] times the vector b [k]); x broadcasts to [m]."""
    return _sum_with(x, matmul(a, b), beta, alpha)


@takes_out
def addr(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """beta * x + alpha * (all products of vectors a [m] and b [n]); x broadcasts to [m, n]."""
    return _sum_with(x, outer(a, b), beta, alpha)


@takes_out
def baddbmm(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """beta * x + alpha * `bmm` of a [b, m, k] and b [b, k, n]; x broadcasts to [b, m, n]."""
    return _sum_with(x, bmm(a, b), beta, alpha)


@takes_out
def addbmm(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """beta * x + alpha * the sum of the products of `bmm`; x broadcasts to [m, n]."""
    return _sum_with(x, bmm(a, b).sum(0), beta, alpha)


@takes_out
def kron(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Kronecker product: each element of a times the whole of b, in blocks (L. Kronecker)."""
    count = max(a.ndim, b.ndim)
    left, right = ((1,) * (count - each.ndim) + each.shape for each in (a, b))
    apart = a.reshape([n for extent in left for n in (extent, 1)])
    blocks = b.reshape([n for extent in right for n in (1, extent)])
    return (apart * blocks).reshape([m * n for m, n in zip(left, right, strict=True)])
