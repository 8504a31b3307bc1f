"""Leaf types of the compiler: dtypes, placements, SBP, values, ops and jobs."""

from plancompiler.ir.dtype import DType
from plancompiler.ir.job import Job, verify_job
from plancompiler.ir.op import (
    UNKNOWN_SOURCE,
    Attrs,
    AttrValue,
    SourceLine,
    TensorType,
    freeze_attrs,
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
    "PARTIAL_SUM",
    "UNKNOWN_SOURCE",
    "AttrValue",
    "Attrs",
    "Broadcast",
    "DType",
    "Job",
    "NdSbp",
    "Op",
    "Partial",
    "Placement",
    "Reduction",
    "Sbp",
    "SourceLine",
    "Split",
    "TensorType",
    "Value",
    "freeze_attrs",
    "parse_sbp",
    "verify_job",
]
