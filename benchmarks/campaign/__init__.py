"""Long campaigns of faults: kills, broken connections, damaged inputs, hostile clients, mistakes
and random ops. `python -m benchmarks.campaign --help` says how to run them.
"""
