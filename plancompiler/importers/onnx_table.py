"""All rules of ONNX's operators; importing it fills the table."""

from __future__ import annotations

from plancompiler.importers import (  # noqa: F401  # they define rules
    onnx_attention,
    onnx_fourier,
    onnx_layers,
    onnx_recurrence,
    onnx_resize,
)
from plancompiler.importers.onnx_rules import ONNX_RULES

__all__ = ["ONNX_RULES"]
