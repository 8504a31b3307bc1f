"""plancompiler: from a Python program with placements to one static plan per rank, run by actors.

    import plancompiler as pc

    mesh = pc.Placement("cpu", [0, 1])
    with pc.job("mean") as job:
        x = pc.input("x", (8,), "float32", mesh, "S(0)")
        pc.output("mean", x.mean())
    with pc.run(job) as session:
        session.step(x=...)

What traces a job is imported here; what compiles and runs one (`run`, `Session`, `Client`) is
imported when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from plancompiler import errors
from plancompiler.errors import (
    AttributeValueError,
    DataError,
    DTypeError,
    FeedError,
    GradientError,
    JobError,
    NonFiniteError,
    PlacementError,
    PlacementMismatchError,
    PlanCompilerError,
    ShapeError,
    TracingError,
    UsageError,
)
from plancompiler.frontend import data, nn, optim
from plancompiler.frontend.autodiff import gradients
from plancompiler.frontend.functional import (
    abs,  # noqa: A004  # used as pc.abs
    accuracy,
    add,
    argmax,
    cast,
    causal_attention,
    concat,
    cross_entropy,
    div,
    dropout,
    embedding,
    equal,
    exp,
    full_like,
    gelu,
    greater,
    greater_equal,
    layer_norm,
    less,
    less_equal,
    linear,
    log,
    log_softmax,
    matmul,
    max,  # noqa: A004
    maximum,
    mean,
    min,  # noqa: A004
    minimum,
    mul,
    neg,
    not_equal,
    pow,  # noqa: A004
    redistribute,
    relu,
    reshape,
    rsqrt,
    sigmoid,
    slice,  # noqa: A004
    softmax,
    sqrt,
    square,
    sub,
    sum,  # noqa: A004
    tanh,
    transpose,
    where,
)
from plancompiler.frontend.trace import (
    as_job,
    constant,
    full,
    input,  # noqa: A004
    job,
    ones,
    output,
    zeros,
)
from plancompiler.ir import DType, Job, NdSbp, Placement, Sbp, Value

if TYPE_CHECKING:
    from plancompiler.client import Client
    from plancompiler.session import Session, run

    __version__: str

_LATER = {
    "run": "plancompiler.session",
    "Session": "plancompiler.session",
    "Client": "plancompiler.client",
}


def __getattr__(name: str) -> Any:
    """Import what runs jobs when it is first asked for: tracing needs neither gRPC nor threads."""
    if name in _LATER:
        found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return found
    if name == "__version__":
        return importlib.metadata.version("plancompiler")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "__version__"})


__all__ = [
    "AttributeValueError",
    "Client",
    "DType",
    "DTypeError",
    "DataError",
    "FeedError",
    "GradientError",
    "Job",
    "JobError",
    "NdSbp",
    "NonFiniteError",
    "Placement",
    "PlacementError",
    "PlacementMismatchError",
    "PlanCompilerError",
    "Sbp",
    "Session",
    "ShapeError",
    "TracingError",
    "UsageError",
    "Value",
    "__version__",
    "abs",
    "accuracy",
    "add",
    "argmax",
    "as_job",
    "cast",
    "causal_attention",
    "concat",
    "constant",
    "cross_entropy",
    "data",
    "div",
    "dropout",
    "embedding",
    "equal",
    "errors",
    "exp",
    "full",
    "full_like",
    "gelu",
    "gradients",
    "greater",
    "greater_equal",
    "input",
    "job",
    "layer_norm",
    "less",
    "less_equal",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mul",
    "neg",
    "nn",
    "not_equal",
    "ones",
    "optim",
    "output",
    "pow",
    "redistribute",
    "relu",
    "reshape",
    "rsqrt",
    "run",
    "sigmoid",
    "slice",
    "softmax",
    "sqrt",
    "square",
    "sub",
    "sum",
    "tanh",
    "transpose",
    "where",
    "zeros",
]
