"""The rules of ONNX's Fourier transforms: products with matrices of cosines and sines.

A complex number is two real ones along the last axis. The matrices are made in float64 when a model
is read, and take time that grows with the square of a length, as audio models' lengths allow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.importers.onnx_rules import as_tensor, at, cut, refused
from plancompiler.importers.rules import onnx_rule
from plancompiler.ir import DType

_MAX_LENGTH = 1 << 14


def _transformed(x: Any, length: int, inverse: bool, onesided: bool) -> Any:
    """[..., n, 1 or 2] as [..., bins, 2], computed in float64: terms cancel each other."""
    if length > _MAX_LENGTH:
        raise refused("Fourier transform", f"{length} elements", f"at most {_MAX_LENGTH}")
    axis, kind = x.ndim - 2, x.dtype
    x = cut(x.cast(DType.FLOAT64), axis, 0, min(length, x.shape[axis]))
    n = x.shape[axis]
    bins = length // 2 + 1 if onesided else length
    angles = 2 * math.pi / length * (np.outer(np.arange(n), np.arange(bins)) % length)
    scale = 1 / length if inverse else 1.0
    cosine, sine = (as_tensor(wave(angles) * scale, x) for wave in (np.cos, np.sin))
    sine = sine if inverse else -sine
    real = f.select(x, axis + 1, 0)
    parts = [f.matmul(real, cosine), f.matmul(real, sine)]
    if x.shape[-1] == 2:
        imaginary = f.select(x, axis + 1, 1)
        parts[0] = parts[0] - f.matmul(imaginary, sine)
        parts[1] = parts[1] + f.matmul(imaginary, cosine)
    return f.stack(parts, axis + 1).cast(kind)


def _real_inverse(x: Any, length: int) -> Any:
    """The real signal [..., length, 1] of the first half of its transform [..., bins, 2]."""
    if length > _MAX_LENGTH:
        raise refused("Fourier transform", f"{length} elements", f"at most {_MAX_LENGTH}")
    axis, kind = x.ndim - 2, x.dtype
    bins = min(x.shape[axis], length // 2 + 1)
    x = cut(x.cast(DType.FLOAT64), axis, 0, bins)
    # The other half has the conjugates of all but the first, and the middle of an even length.
    share = np.full((bins, 1), 2 / length)
    share[0] = 1 / length
    if length % 2 == 0 and bins == length // 2 + 1:
        share[-1] = 1 / length
    angles = 2 * math.pi / length * (np.outer(np.arange(bins), np.arange(length)) % length)
    cosine, sine = (as_tensor(wave(angles) * share, x) for wave in (np.cos, np.sin))
    real, imaginary = (f.select(x, axis + 1, number) for number in (0, 1))
    made = f.matmul(real, cosine) - f.matmul(imaginary, sine)
    return f.unsqueeze(made, axis + 1).cast(kind)


def _number(value: Any, other: int) -> int:
    return other if value is None else int(np.asarray(value).reshape(-1)[0])


def _dft(
    x: Any, dft_length: Any = None, axis: Any = None, inverse: int = 0, onesided: int = 0
) -> Any:
    along = at(x, _number(axis, -2))
    last = x.ndim - 2
    order = [each for each in range(last + 1) if each != along] + [along, last + 1]
    if inverse and onesided:
        length = _number(dft_length, 2 * (x.shape[along] - 1))
        made = _real_inverse(x.transpose(order), length)
    else:
        length = _number(dft_length, x.shape[along])
        made = _transformed(x.transpose(order), length, bool(inverse), bool(onesided))
    return made.transpose([order.index(each) for each in range(x.ndim)])


onnx_rule("DFT", since=20, known=[1, 2])(_dft)
onnx_rule("DFT", known=[1])(
    lambda x, dft_length=None, axis=1, **rest: _dft(x, dft_length, axis, **rest)
)


@onnx_rule("STFT", known=[1, 3])
def _stft(
    signal: Any, frame_step: Any, window: Any = None, frame_length: Any = None, onesided: int = 1
) -> Any:
    """Transforms of windows of a signal [batch, length, 1 or 2]: [batch, windows, bins, 2]."""
    if frame_length is None and window is None:
        raise refused("STFT", "no window and no frame_length", "one of them")
    length = _number(frame_length, 0 if window is None else window.shape[0])
    frames = f.unfold_axis(signal, 1, length, _number(frame_step, 1))  # [batch, windows, 1|2, n]
    frames = frames.transpose([0, 1, 3, 2])
    if window is not None:
        frames = frames * f.unsqueeze(window.cast(signal.dtype), 1)
    return _transformed(frames, length, False, bool(onesided))
