"""What is done when launched work has run: outputs delivered, other ranks told, steps counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from plancompiler.errors import DeadlineError
from plancompiler.executor.cuda.interface import Device, DeviceEvent
from plancompiler.executor.threads import await_threads


class Completions:
    """Calls back in the order of launching, each time after an event, from a thread of its own.

    In plan order nothing waits for what comes later, so that waiting for one event at a time holds
    up nobody for good. `failed` is called with the first error of an event or a callback; nothing
    is called back after it.
    """

    def __init__(self, device: Device, name: str, failed: Callable[[BaseException], None]) -> None:
        self._device = device
        self._failed = failed
        self._queue: SimpleQueue[tuple[DeviceEvent, Callable[[], object]] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._steps: deque[int] = deque()
        """Steps that were launched and have not ended."""
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        # A device whose work never ends must not keep the process from ending, hence the daemon.
        self._thread.start()

    def after(self, event: DeviceEvent, call: Callable[[], object]) -> None:
        """Call when an event has come, and everything before it was called."""
        self._queue.put((event, call))

    def step(self, event: DeviceEvent, number: int) -> None:
        """A step was launched; it ends with this event."""
        with self._changed:
            self._steps.append(number)
        self.after(event, self._step_ended)

    def wait(self, ahead: int, deadline: float) -> None:
        """Return when at most `ahead` launched steps have not ended.

        Returns at once after a failure. Raises DeadlineError where no step ends in `deadline`
        seconds.
        """
        with self._changed:
            while len(self._steps) > ahead and not self._stopped:
                oldest = self._steps[0]
                ended = self._changed.wait_for(partial(self._is_past, oldest), deadline)
                if not ended:
                    raise DeadlineError(
                        f"the device has not finished step {oldest} within {deadline:g} s",
                        got=f"{len(self._steps)} steps launched and not finished",
                        hint="a rank of a communicator may be missing, or the step is long: allow "
                        "more time with a longer deadline",
                    )

    def _is_past(self, step: int) -> bool:
        """Whether a step that was the oldest has ended, or nobody waits any more."""
        return self._stopped or not self._steps or self._steps[0] != step

    def stop(self) -> None:
        """Call back no more; let go of all who wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._queue.put(None)

    def close(self, seconds: float) -> None:
        """Stop, and give the thread some time to end."""
        self.stop()
        await_threads([self._thread], seconds)

    def _step_ended(self) -> None:
        with self._changed:
            self._steps.popleft()
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            self._device.use()
            while (entry := self._queue.get()) is not None and not self._stopped:
                event, call = entry
                self._device.synchronize(event)
                if not self._stopped:
                    call()
        except BaseException as error:
            self.stop()
            self._failed(error)
