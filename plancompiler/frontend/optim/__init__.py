"""Optimizers: they differentiate a loss and append the update of every parameter to the job.

A schedule gives the learning rate as a function of the step; it is computed inside the job, once
per placement. State (momentum, moments) lives in variables named after their parameter, on the
same devices and with the same SBP.
"""

from plancompiler.frontend.optim import lr_scheduler
from plancompiler.frontend.optim.elementwise import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    NAdam,
    RAdam,
    RMSprop,
)
from plancompiler.frontend.optim.fused_lamb import DistributedFusedLamb
from plancompiler.frontend.optim.optimizer import Optimizer
from plancompiler.frontend.optim.parameter_group import ParameterGroup
from plancompiler.frontend.optim.schedule import Schedule, constant, cosine, linear
from plancompiler.frontend.optim.whole import LAMB, LARS, Adafactor

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "DistributedFusedLamb",
    "Lion",
    "NAdam",
    "Optimizer",
    "ParameterGroup",
    "RAdam",
    "RMSprop",
    "Schedule",
    "constant",
    "cosine",
    "linear",
    "lr_scheduler",
]
