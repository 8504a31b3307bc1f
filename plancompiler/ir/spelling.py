"""Keywords of functions and methods as NumPy and PyTorch spell them, for all of them alike.

`pc.sum(x, dim=0, keepdim=True)` is `pc.sum(x, axis=0, keepdims=True)`. A function says its own
spelling in its signature; what others call the same is in the table here, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from plancompiler.errors import UsageError

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "dim": ("axis", "axes"),
    "dims": ("axes", "axis"),
    "axes": ("axis",),
    "axis": ("axes",),
    "keepdim": ("keepdims",),
    "axis0": ("first",),
    "dim0": ("first",),
    "axis1": ("first",),
    "axis2": ("second",),
    "dim1": ("second", "axis1"),
    "dim2": ("axis2",),
    "start_dim": ("start",),
    "end_dim": ("stop",),
    "x1": ("x", "a"),
    "x2": ("y", "b"),
    "other": ("y", "b"),
    "end": ("y",),
    "index": ("indices",),
    "src": ("updates", "piece"),
    "source": ("updates",),
    "values": ("updates",),
    "tensor": ("updates",),
    "reduce": ("mode",),
    "mat1": ("a",),
    "mat2": ("b",),
    "batch1": ("a",),
    "batch2": ("b",),
    "vec1": ("a",),
    "vec2": ("b",),
    "tensor1": ("a",),
    "tensor2": ("b",),
    "min": ("low",),
    "max": ("high",),
    "a_min": ("low",),
    "a_max": ("high",),
    "size": ("shape",),
    "newshape": ("shape",),
    "fill_value": ("value",),
    "reps": ("repeats",),
    "output_size": ("total",),
    "shift": ("shifts",),
    "indices_or_sections": ("parts", "sizes"),
    "split_size_or_sections": ("sizes",),
    "split_size": ("sizes",),
    "test_elements": ("elements",),
    "sorted_sequence": ("edges",),
    "boundaries": ("edges",),
    "v": ("values",),
    "outputs": ("output",),
    "grad_outputs": ("seed",),
    "k": ("offset", "diagonal"),
    "diagonal": ("offset",),
    "ddof": ("correction",),
    "unbiased": ("correction",),
    "weight": ("gamma",),
    "bias": ("beta",),
    "running_mean": ("mean",),
    "running_var": ("variance",),
    "num_groups": ("groups",),
    "num_classes": ("classes",),
    "kernel_size": ("kernel",),
    "count_include_pad": ("count_padding",),
    "negative_slope": ("slope",),
    "min_val": ("low",),
    "max_val": ("high",),
    "is_causal": ("causal",),
    "attn_mask": ("mask",),
    "dropout_p": ("dropout",),
    "steps": ("count",),
    "num_samples": ("count",),
    "method": ("interpolation",),
    "mat": ("a",),
    "vec": ("b",),
}
"""Keywords of others, and what a function of ours may call the same: the first that it has."""
_FIRST = ("input", "self", "a", "array")
"""What others call the first argument."""


def spellings_of(signature: inspect.Signature) -> dict[str, str]:
    """A function's keywords by the spelling of others."""
    names = [name for name in signature.parameters if name != "out"]
    first = next((name for name in names if name != "self"), None)
    spelled = {} if first is None else {theirs: first for theirs in _FIRST if theirs not in names}
    for theirs, ours in _SPELLINGS.items():
        own = next((each for each in ours if each in names), None)
        if theirs not in names and own is not None:
            spelled[theirs] = own
    return spelled


def respelled(
    function: Callable[..., Any], spelled: Mapping[str, str], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords in our own spelling. UsageError for one that is given in both."""
    ours = {spelled.get(name, name): value for name, value in named.items()}
    if len(ours) < len(named):
        twice = sorted(name for name in named if spelled.get(name) in named)
        raise UsageError(
            "an argument is given in two spellings",
            op=function.__name__,
            got=" and ".join(f"{name}, {spelled[name]}" for name in twice),
            expected="one of them",
        )
    return ours


def takes_spellings(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a method of tensors that takes keywords as others spell them."""
    spelled = spellings_of(inspect.signature(method))

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        if named and not spelled.keys().isdisjoint(named):
            named = respelled(method, spelled, named)
        return method(*args, **named)

    return call
