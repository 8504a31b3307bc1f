"""How a user writes a job: tracing, functions, modules, optimizers, data."""

from plancompiler import blas_kernels as blas_kernels  # before NumPy
