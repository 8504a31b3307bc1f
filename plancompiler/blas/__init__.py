"""Pick and limit the BLAS that NumPy loads. Importing this package imports no NumPy."""
