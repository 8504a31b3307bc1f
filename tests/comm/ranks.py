"""A rank of the suite as a process: a launcher starts it, and it says how much it has proved."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import plancompiler as pc
from plancompiler.errors import TransportError
from plancompiler.executor.comm.context import CHECK
from plancompiler.ir import DType
from tests.comm import link_suite, suite, test_functions, test_rows

transport = sys.argv[1] if len(sys.argv) > 1 else "host"
world = pc.init(deadline=60.0, transport=transport)
# All dtypes take part where ranks are threads; here a few do, as rounds take longer.
suite.DTYPES = (DType.BOOL, DType.BFLOAT16)
proved = suite.run(world.comm)
if world.comm.remote is not None:
    link_suite.run(world.comm.remote("suite of links"), world.size)
if transport == "host":
    # Operators of eager tensors; ranks outside of their placement call them too.
    test_functions.check_mixture(world.rank)
    test_functions.check_region(world.rank)
    test_functions.check_transfer((5, 3), world.rank)
    test_rows.check_gradients()
    os.environ[CHECK] = "1"
    checked = world.comm.context((2, 1, 0))
    with pytest.raises(TransportError, match=r"rank 1: all_reduce max float32\[2\] at .*ranks.py"):
        checked.all_reduce(np.ones(2, np.float32), "max" if world.rank == 1 else "sum")
    assert checked.all_reduce(np.ones(2)).tolist() == [3.0, 3.0]
world.comm.context(range(world.size)).barrier()
# One write, so that lines of ranks do not mix.
sys.stdout.write(f"proved {proved}\n")
sys.stdout.flush()
