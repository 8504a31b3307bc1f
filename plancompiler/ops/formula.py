"""Gradients of ops that a formula of other ops describes: the formula is walked back.

The gradient of an op is one fast kernel. Its own derivative, for second and higher derivatives, is
seldom asked for and need not be as fast; it is found by the chain rule (reverse accumulation,
S. Linnainmaa, 1970) from the same function written with ops that have gradients. Layouts, eager and
compiled execution and still higher derivatives follow from those ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plancompiler.errors import GradientError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import AttrValue
from plancompiler.ir.operators import Scalar, TensorOperators, filled
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp
from plancompiler.ops.gradient import widened
from plancompiler.ops.registry import AttrMap, Formula, Gradient, Tensors, op_def


class _Term(TensorOperators):
    """A tensor inside a formula, and whether it depends on what is differentiated."""

    __slots__ = ("steps", "tensor", "varies")

    def __init__(self, tensor: Any, steps: list[_Step], varies: bool) -> None:
        self.tensor = tensor
        self.steps = steps
        self.varies = varies and tensor.dtype.is_floating

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # the mixin has an attribute
        shape: tuple[int, ...] = self.tensor.shape
        return shape

    @property
    def dtype(self) -> DType:  # type: ignore[override]  # likewise
        dtype: DType = self.tensor.dtype
        return dtype

    def _apply(
        self, kind: str, inputs: Sequence[_Term], attrs: Mapping[str, AttrValue]
    ) -> tuple[_Term, ...]:
        varies = any(each.varies for each in inputs)
        given = [each.tensor for each in inputs]
        made = self.tensor._apply(kind, given, attrs)  # noqa: SLF001  # what every tensor has
        outputs = tuple(_Term(each, self.steps, varies) for each in made)
        if any(each.varies for each in outputs):
            self.steps.append((kind, attrs, tuple(inputs), outputs))
        return outputs

    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> _Term:
        made = filled(self.tensor, value, shape, dtype)
        return _Term(made, self.steps, False)

    def _source(self, kind: str, attrs: Mapping[str, AttrValue]) -> tuple[_Term, ...]:
        made = self.tensor._source(kind, attrs)  # noqa: SLF001  # what every tensor has
        return tuple(_Term(each, self.steps, False) for each in made)

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> _Term:
        raise GradientError("a formula of a gradient leaves layouts to its ops")


_Step = tuple[str, Mapping[str, AttrValue], tuple[_Term, ...], tuple[_Term, ...]]
"""Kind, attributes, inputs and outputs of an op in a formula."""


def by_formula(formula: Formula) -> Gradient:
    """The gradient of an op that gives what `formula` gives; of 16 bits, what it gives in float32.

    GradientError where the formula uses an op without a gradient.
    """

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        steps: list[_Step] = []
        given = [_Term(each, steps, True) for each in inputs]
        made = formula(attrs, *map(widened, given))
        terms = made if isinstance(made, tuple) else (made,)
        by_term: dict[int, Any] = {}
        for term, output, grad in zip(terms, outputs, grads, strict=True):
            _add(by_term, term if term.dtype is output.dtype else term.cast(output.dtype), grad)
        for kind, options, sources, results in reversed(steps):
            arrived = [by_term.pop(id(term), None) for term in results]
            if all(grad is None for grad in arrived):
                continue
            passed = op_def(kind).gradients(
                options,
                [term.tensor for term in sources],
                [term.tensor for term in results],
                arrived,
            )
            for term, grad in zip(sources, passed, strict=True):
                _add(by_term, term, grad)
        return [by_term.get(id(term)) for term in given]

    return gradient


def _add(by_term: dict[int, Any], term: _Term, grad: Any) -> None:
    if grad is not None and term.varies:
        earlier = by_term.get(id(term))
        by_term[id(term)] = grad if earlier is None else earlier + grad


def unless_first(usual: Gradient, formula: Formula) -> Gradient:
    """`usual` where only the first output has a gradient; else that of the formula.

    For ops whose other outputs are what their gradient op needs: only second derivatives give these
    gradients.
    """
    general = by_formula(formula)

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        usually = grads[0] is not None and all(grad is None for grad in grads[1:])
        return (usual if usually else general)(attrs, inputs, outputs, grads)

    return gradient
