"""The driver's own process: signals that end a job in good order, and the memory of all that it started."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import psutil


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a job as Ctrl-C does; one that is ignored (``nohup``) stays ignored."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Samples the resident memory of this process and all that it started; yields a getter of the peak, bytes."""
    peak = 0
    stop = threading.Event()

    def sample() -> None:
        nonlocal peak
        me = psutil.Process()
        while not stop.wait(2.0):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
            peak = max(peak, total)

    thread = threading.Thread(target=sample, daemon=True, name="peak-memory")
    thread.start()
    try:
        yield lambda: peak
    finally:
        stop.set()
        thread.join()
