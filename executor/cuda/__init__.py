"""The executor on CUDA devices: one thread launches, streams and events order the work.

Only `device.py` imports CuPy; everything else is written against `interface.Device`.
"""
