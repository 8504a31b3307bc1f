"""The master: registers workers, compiles jobs and drives them through their phases."""

if not __name__.startswith("plancompiler."):
    raise ImportError(
        f"this folder is the package plancompiler.master; import that, not {__name__!r}"
    )
