"""Stopping a run between two steps."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

# wrappers such as timeout(1) signal the process and its group: the same request arrives twice
_SAME_REQUEST_S = 5.0


class StopRequest:
    """Remember the first SIGINT or SIGTERM; one that comes more than 5 s later acts at once.

    Use as a context manager around a loop that checks `signal`.

    Attributes:
        signal: Number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came_at_s = 0.0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._came_at_s = number, now
        elif now - self._came_at_s > _SAME_REQUEST_S:
            handler = self._old[number]
            self._restore()
            if callable(handler):  # at once: a signal raised here would be handled some time later
                handler(number, frame)
            else:
                signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
