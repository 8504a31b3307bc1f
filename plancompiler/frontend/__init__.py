"""How a user writes a job: tracing, functions, modules, optimizers, data."""
