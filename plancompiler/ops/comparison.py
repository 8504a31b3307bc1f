"""Comparisons of two tensors, or of a tensor with a Python scalar, and logical not."""

from __future__ import annotations

import numpy as np

from plancompiler.ir.dtype import DType
from plancompiler.ops.attributes import Bool, Float
from plancompiler.ops.check import ANY, NUMBERS
from plancompiler.ops.elementwise import (
    BINARY_RULE,
    SCALAR,
    UNARY_RULE,
    Dtypes,
    binary_infer,
    register_unary,
    scalar_infer,
    scalar_kernel,
    ufunc_kernel,
)
from plancompiler.ops.registry import Arrays, KernelContext, define_op


def _register_comparison(
    kind: str, ufunc: np.ufunc, dtypes: Dtypes, doc: str, mirrored: str
) -> None:
    code = f"({{0}} {doc} {{1}})"
    define_op(
        kind,
        infer=binary_infer(kind, dtypes, DType.BOOL),
        rule=BINARY_RULE,
        kernel=ufunc_kernel(ufunc),
        elementwise=True,
        mirrored=mirrored,
        code=code,
        doc=f"x {doc} y.",
    )
    name = f"{kind}_scalar"
    define_op(
        name,
        infer=scalar_infer(name, dtypes, DType.BOOL),
        attrs=SCALAR,
        rule=UNARY_RULE,
        kernel=scalar_kernel(ufunc),
        elementwise=True,
        code=code,
        doc=f"x {doc} scalar.",
    )


_register_comparison("less", np.less, NUMBERS, "<", "greater")
_register_comparison("less_equal", np.less_equal, NUMBERS, "<=", "greater_equal")
_register_comparison("greater", np.greater, NUMBERS, ">", "less")
_register_comparison("greater_equal", np.greater_equal, NUMBERS, ">=", "less_equal")
_register_comparison("equal", np.equal, ANY, "==", "equal")
_register_comparison("not_equal", np.not_equal, ANY, "!=", "not_equal")


def _isclose(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # NumPy's own, but on broadcast operands of any dtype without warnings of infinities.
    with np.errstate(invalid="ignore", over="ignore"):
        outputs[0][...] = np.isclose(inputs[0], inputs[1], **context.attrs)


define_op(
    "isclose",
    infer=binary_infer("isclose", NUMBERS, DType.BOOL),
    attrs=(Float("rtol"), Float("atol"), Bool("equal_nan", False)),
    rule=BINARY_RULE,
    kernel=_isclose,
    elementwise=True,
    doc="Where |x - y| <= atol + rtol · |y|; infinities only where they are equal, NaN only with "
    "`equal_nan` and where both are.",
)

register_unary(
    "logical_not",
    np.logical_not,
    None,
    dtypes=frozenset({DType.BOOL}),
    code="(!{0})",
    doc="True where x is False.",
)
