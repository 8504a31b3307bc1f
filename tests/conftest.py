"""What the suite says at its end: figures that tests recorded."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every recorded property, such as the number of signatures proved."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            terminalreporter.write_line(f"{name.replace('_', ' ')}: {value}")
