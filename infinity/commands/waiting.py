"""What a command that takes long shows meanwhile, apart from what it prints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE_SECONDS = 1.0
"""What is over by then shows nothing."""


@contextmanager
def told(text: str, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """While the body runs, say ``text`` on standard error: with the time that has passed on a
    terminal, as one line elsewhere.
    """
    console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(text)

    def show() -> None:
        if console.is_terminal:
            progress.start()
        else:
            console.print(f"{text} ...")

    timer = threading.Timer(patience_seconds, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be showing just now
        if console.is_terminal:
            progress.stop()
