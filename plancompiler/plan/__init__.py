"""The plan, its text, its wire form and its verifier."""

from plancompiler import blas_kernels as blas_kernels  # before NumPy
