"""Where a run of reductions is cut into buckets, so that communication ends as early as it can.

A bucket is reduced in one call. It starts when its last member is made and the bucket before it is
reduced, and each call costs its start, whatever its size. Few buckets start late; many pay many
starts. Of all cuts of the run, in the order in which its members are made, dynamic programming
gives the earliest end of the last bucket, and the cut is one of few buckets that ends no later:
from the last bucket backwards, each is as large as it can be. (S. Shi et al., "MG-WFBP", 2019, pose
the question and merge greedily.) Where backward takes longer than communication, buckets get
smaller towards its end, because only the last one cannot be hidden; where communication takes
longer, the first ones are small, so that it starts early.

The times are those of a machine file, which are rough, so that two rules of experience stand beside
them: the first bucket is small, as in PyTorch's DistributedDataParallel (1 MiB there, 25 MiB for
the others), no bucket has more than an eighth of a long run, and communication under backward is
taken to cost many times what it does alone. So the cut serves slow networks about as well as fast
ones: of gpt tiny, 11 buckets expose as little communication as 21 of 1 MiB do at estimated costs,
at 10 and 40 times these, and less at 100 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

FIRST_BYTES = 1 << 20
"""Most bytes of the first bucket of a run, unless its first member has more."""
MOST_BYTES = 32 << 20
"""Most bytes of any bucket."""
LEAST_BUCKETS = 8
"""A bucket has at most this part of its run, if that is more than FIRST_BYTES."""
CONTENTION = 16.0
"""How many times as long communication takes under computation, with which it shares cores, memory
and the network; cuts are to hold where it is slower than estimated, too."""
_ROUNDING = 1e-9


def cut(ready: Sequence[float], nbytes: Sequence[int], start: float, per_byte: float) -> list[int]:
    """The end of each bucket of a run: the first takes members 0 to `ends[0]` - 1, and so on.

    `ready` are the seconds at which members are made, in ascending order, and `nbytes` their sizes.
    A call of n bytes takes `start` + `per_byte` * n seconds alone. Time grows with the square of
    the number of members, of which a run has few.
    """
    first = _first_end(nbytes)
    rest = balanced(ready, nbytes, CONTENTION * start, CONTENTION * per_byte)
    return [first, *(end for end in rest if end > first)] if rest[0] > first else rest


def _first_end(nbytes: Sequence[int]) -> int:
    """The end of the longest beginning of at most FIRST_BYTES, or of the first member."""
    return max(1, sum(total <= FIRST_BYTES for total in accumulate(nbytes)))


def balanced(
    ready: Sequence[float], nbytes: Sequence[int], start: float, per_byte: float
) -> list[int]:
    """The ends of few buckets of which the last is done as early as can be."""
    count = len(nbytes)
    sizes = np.concatenate([[0], np.cumsum(np.asarray(nbytes, dtype=np.float64))])
    times = sizes * per_byte
    most = min(MOST_BYTES, max(FIRST_BYTES, sizes[-1] / LEAST_BUCKETS))
    # done[i]: when the first i members can be reduced at the earliest.
    done = np.zeros(count + 1)

    def bucket_ends(end: int) -> npt.NDArray[np.float64]:
        """When members up to `end` are reduced, by where the last bucket begins."""
        ends: npt.NDArray[np.float64]
        ends = np.maximum(done[:end], ready[end - 1]) + start + times[end] - times[:end]
        too_large = sizes[end] - sizes[:end] > most
        too_large[end - 1] = False  # a member alone is a bucket, whatever its size
        ends[too_large] = np.inf
        return ends

    for end in range(1, count + 1):
        done[end] = bucket_ends(end).min()
    ends: list[int] = []
    end, deadline = count, done[count] * (1 + _ROUNDING)
    while end > 0:
        ends.append(end)
        begin = int((bucket_ends(end) <= deadline).argmax())
        deadline -= start + times[end] - times[begin]
        end = begin
    return ends[::-1]
