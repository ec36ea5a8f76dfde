"""How far a long transfer is: an event now and then with bytes and rate."""

import threading

from controller.context import Context

EVERY_SECONDS = 1.0


class Progress:
    """Of one resource; threads may share it. `total` is in bytes, 0 where it is not known."""

    def __init__(self, context: Context, subject: str, total: int = 0) -> None:
        self._context, self._subject, self._total = context, subject, total
        self._began = self._last_event = context.clock.now()
        self._transferred = 0
        self._lock = threading.Lock()

    def expect(self, total: int) -> None:
        """The transfer has so many bytes in all."""
        self._total = total

    def advance(self, size: int) -> None:
        """So many bytes more have been moved (fewer, where some have to be sent again)."""
        with self._lock:
            self._transferred += size
            now = self._context.clock.now()
            if now - self._last_event < EVERY_SECONDS:
                return
            self._last_event = now
            rate = self._transferred / (now - self._began)
        whole = f" of {format_size(self._total)}" if self._total else ""
        message = f"{format_size(self._transferred)}{whole}, {format_size(rate)}/s"
        data = {"bytes": self._transferred, "total": self._total, "bytes_per_second": round(rate)}
        self._context.events.emit("progress", self._subject, message, **data)


def format_size(size: float) -> str:
    """`1.2 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
