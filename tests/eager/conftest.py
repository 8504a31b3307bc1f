"""No test of this folder leaves a thread behind."""

from tests.threads import no_thread_left_behind  # noqa: F401  # a fixture
