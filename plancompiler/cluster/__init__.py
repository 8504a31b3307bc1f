"""What client, master and workers share: their messages, the wire form of those, gRPC settings."""

from plancompiler import blas_kernels as blas_kernels  # before NumPy
