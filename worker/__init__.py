"""The worker: compiles and runs one rank's part of a job."""

if not __name__.startswith("plancompiler."):
    raise ImportError(
        f"this folder is the package plancompiler.worker; import that, not {__name__!r}"
    )
