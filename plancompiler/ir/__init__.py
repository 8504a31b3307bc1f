"""Leaf types of the compiler: dtypes, placements, SBP, values, ops and jobs."""

from plancompiler.ir.dtype import DType
from plancompiler.ir.job import Job, verify_job
from plancompiler.ir.op import (
    NO_ORIGIN,
    UNKNOWN_SOURCE,
    Attrs,
    AttrValue,
    Micro,
    Origin,
    Phase,
    SourceLine,
    TensorType,
    freeze_attrs,
    plain_value,
)
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import (
    BROADCAST,
    PARTIAL_SUM,
    Broadcast,
    NdSbp,
    Partial,
    Reduction,
    Sbp,
    Split,
    parse_sbp,
)
from plancompiler.ir.value import Op, Value

__all__ = [
    "BROADCAST",
    "NO_ORIGIN",
    "PARTIAL_SUM",
    "UNKNOWN_SOURCE",
    "AttrValue",
    "Attrs",
    "Broadcast",
    "DType",
    "Job",
    "Micro",
    "NdSbp",
    "Op",
    "Origin",
    "Partial",
    "Phase",
    "Placement",
    "Reduction",
    "Sbp",
    "SourceLine",
    "Split",
    "TensorType",
    "Value",
    "freeze_attrs",
    "parse_sbp",
    "plain_value",
    "verify_job",
]
