"""From a slice to a plan, and the four modes."""

from plancompiler import blas_kernels as blas_kernels  # before NumPy
