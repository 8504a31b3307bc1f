"""All that `import plancompiler as pc` offers, in one place.

The package takes its names from here when the first of them is asked for. What traces a job is
imported here; what compiles and runs one (`run`, `Session`, `Client`) when it is first used.
"""

from __future__ import annotations

import importlib
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
from plancompiler.frontend import data, layouts, nn, optim
from plancompiler.frontend import functions as _functions
from plancompiler.frontend import methods as _methods  # noqa: F401  # tensors get theirs
from plancompiler.frontend.autodiff import gradients
from plancompiler.frontend.checkpoint import checkpoint
from plancompiler.frontend.functions import *  # noqa: F403  # its __all__ is part of ours
from plancompiler.frontend.functions import linalg
from plancompiler.frontend.trace import (
    as_job,
    collective_stream,
    constant,
    full,
    input,
    job,
    ones,
    output,
    stage,
    zeros,
)
from plancompiler.frontend.weights import load_weights
from plancompiler.ir import DType, Job, NdSbp, Placement, Sbp, TensorType, Value
from plancompiler.ir.promotion import strict_dtypes
from plancompiler.ops.custom import CustomOp, op
from plancompiler.version import VERSION as __version__  # noqa: N811  # its usual name

if TYPE_CHECKING:
    from plancompiler import eager
    from plancompiler.eager import (
        DistTensor,
        Generator,
        allclose,
        array_equal,
        comm_trace,
        default_generator,
        detect_anomaly,
        from_local,
        implicit_broadcast,
        init,
        manual_seed,
        no_grad,
        profile,
        using_generator,
    )
    from plancompiler.eager.creation import tensor  # not the module of that name
    from plancompiler.forecasting import forecast
    from plancompiler.importers.jax_reader import from_jax
    from plancompiler.importers.onnx_reader import from_onnx
    from plancompiler.importers.rules import onnx_rule, stablehlo_rule, torch_rule
    from plancompiler.importers.torch_reader import from_torch
    from plancompiler.jit.compile import compile
    from plancompiler.passes import Config
    from plancompiler.plan.compiled_plans import CompiledPlans, read_plans
    from plancompiler.running.client import Client
    from plancompiler.running.session import Session, run

_LATER = {
    "run": "plancompiler.running.session",
    "Session": "plancompiler.running.session",
    "compile": "plancompiler.jit.compile",
    "Client": "plancompiler.running.client",
    "CompiledPlans": "plancompiler.plan.compiled_plans",
    "read_plans": "plancompiler.plan.compiled_plans",
    "Config": "plancompiler.passes",
    "forecast": "plancompiler.forecasting",
    "from_jax": "plancompiler.importers.jax_reader",
    "from_onnx": "plancompiler.importers.onnx_reader",
    "from_torch": "plancompiler.importers.torch_reader",
    "onnx_rule": "plancompiler.importers.rules",
    "stablehlo_rule": "plancompiler.importers.rules",
    "torch_rule": "plancompiler.importers.rules",
    "eager": "plancompiler.eager",
    **dict.fromkeys(
        (
            "DistTensor",
            "Generator",
            "allclose",
            "array_equal",
            "comm_trace",
            "default_generator",
            "detect_anomaly",
            "from_local",
            "implicit_broadcast",
            "init",
            "manual_seed",
            "no_grad",
            "profile",
            "tensor",
            "using_generator",
        ),
        "plancompiler.eager",
    ),
}


def __getattr__(name: str) -> Any:
    """Import what runs jobs when it is first asked for: tracing needs neither gRPC nor threads."""
    if name in _LATER:
        module = importlib.import_module(_LATER[name])
        value = globals()[name] = module if name == "eager" else getattr(module, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AttributeValueError",
    "Client",
    "CompiledPlans",
    "Config",
    "CustomOp",
    "DType",
    "DTypeError",
    "DataError",
    "DistTensor",
    "FeedError",
    "Generator",
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
    "TensorType",
    "TracingError",
    "UsageError",
    "Value",
    "__version__",
    "allclose",
    "array_equal",
    "as_job",
    "checkpoint",
    "collective_stream",
    "comm_trace",
    "compile",
    "constant",
    "data",
    "default_generator",
    "detect_anomaly",
    "eager",
    "errors",
    "forecast",
    "from_jax",
    "from_local",
    "from_onnx",
    "from_torch",
    "full",
    "gradients",
    "implicit_broadcast",
    "init",
    "input",
    "job",
    "layouts",
    "linalg",
    "load_weights",
    "manual_seed",
    "nn",
    "no_grad",
    "ones",
    "onnx_rule",
    "op",
    "optim",
    "output",
    "profile",
    "read_plans",
    "run",
    "stablehlo_rule",
    "stage",
    "strict_dtypes",
    "tensor",
    "torch_rule",
    "using_generator",
    "zeros",
]
__all__ += _functions.__all__
