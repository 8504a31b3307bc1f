"""The executor: runs one rank's plan with actors on streams. See README.md in this folder."""

if not __name__.startswith("plancompiler."):
    raise ImportError(
        f"this folder is the package plancompiler.executor; import that, not {__name__!r}"
    )
