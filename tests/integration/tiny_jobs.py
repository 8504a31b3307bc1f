"""Tiny jobs for tests of long and troubled runs, with ops that worker processes import."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import numpy as np

import plancompiler as pc

ENTERED, OPENED = threading.Event(), threading.Event()
"""Where `held` is, and what it waits for."""


@pc.op(rule="n ... -> n ...", linear=0)
def burdened(x, *, count, context):
    """x; all ranks but the first do a counted amount of work first."""
    if context.input_regions[0][0][0] > 0:
        numbers = np.ones(1 << 16, np.float32)
        for _ in range(count):
            numbers.sum()
    return x


@pc.op(rule="n ... -> n ...", linear=0)
def held(x, *, step, context):
    """x; in one step all ranks but the first wait for an event."""
    if context.input_regions[0][0][0] > 0 and context.step == step:
        ENTERED.set()
        OPENED.wait()
    return x


@pc.op(rule="n ... -> n ...", linear=0)
def stopping(x, *, step, context):
    """x; in one step the processes of all ranks but the first stop themselves."""
    if context.input_regions[0][0][0] > 0 and context.step == step:
        os.kill(os.getpid(), signal.SIGSTOP)
    return x


@pc.op(rule="n ... -> n ...", linear=0)
def hogging(x, *, seconds, context):
    """x; in the first step all ranks but the first hold their interpreter for some seconds."""
    if context.input_regions[0][0][0] > 0 and context.step == 0:
        ctypes.PyDLL(None).sleep(seconds)  # unlike CDLL it keeps other threads from running
    return x


def regression(ranks: int, through=None) -> pc.Job:
    """Least squares on noisy random rows, new ones in every step, split over the ranks.

    The rows go through a function first.
    """
    mesh = pc.Placement("cpu", list(range(ranks)))
    with pc.job("regression", seed=5) as job:
        x = pc.normal((8, 6), placement=mesh, sbp="S(0)")
        if through is not None:
            x = through(x)
        y = x @ pc.ones((6, 2), "float32", mesh) + pc.normal((8, 2), placement=mesh, sbp="S(0)")
        error = pc.nn.Linear(6, 2).place(mesh)(x) - y
        loss = (error * error).mean()
        pc.optim.Adam(lr=0.01).minimize(loss)
        pc.output("loss", loss)
    return job
