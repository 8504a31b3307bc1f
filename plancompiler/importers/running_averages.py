"""Batch norm with `momentum=None`, whose running statistics are the averages of all batches.

PyTorch reads how many batches there were as a number, and an export has no values of tensors. While
a module is exported in this context, the statistics are computed from the count as a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch  # it sets attributes of PyTorch, and always sets them back


@contextmanager
def averages_of_all_batches(torch: Any) -> Iterator[None]:
    """While modules are exported: the count of batches stays a tensor."""
    # What batch norm of all kinds has in common has no public name.
    norm = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001
    forward = norm.forward

    def counted(self: Any, x: Any) -> Any:
        known = self.momentum is not None or not (self.training and self.track_running_stats)
        if known or type(self).forward is not norm.forward:
            return forward(self, x)
        old = self.running_mean.clone(), self.running_var.clone()
        with patch.object(self, "momentum", 1.0):  # running statistics become those of this batch
            made = forward(self, x)
        for before, running in zip(old, (self.running_mean, self.running_var), strict=True):
            running.copy_(before + (running - before) / self.num_batches_tracked)
        return made

    with patch.object(norm, "forward", counted):
        yield
