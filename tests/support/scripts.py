"""Scripts in processes of their own that need not import torch again, see ``tests.support.forks``.

What belongs to the end of an interpreter, such as ``atexit``, runs in those alone that are told to
end as one, which takes them a while.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from tests.support.forks import FORKS

_PATIENCE_SECONDS = 60.0


class Script:
    """One that runs ``code`` with ``arguments`` in ``sys.argv``; ``stdout`` and ``stderr`` are what
    it prints.

    ``inject`` is what strace does to its system calls, as in ``pwrite64:error=EIO``. With
    ``ends_interpreter`` it ends as ``python`` does behind a script.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        inject: str | None = None,
        ends_interpreter: bool = False,
    ) -> None:
        out, out_end = FORKS.Pipe(duplex=False)
        err, err_end = FORKS.Pipe(duplex=False)
        words = [str(argument) for argument in arguments]
        run: Callable[..., None] = _run
        if ends_interpreter:
            run = _run_to_the_end
        self._process = FORKS.Process(
            target=run, args=(code, words, out_end, err_end, inject is not None)
        )
        self._process.start()
        self.stdout, self.stderr = _text(out), _text(err)
        for end in (out_end, err_end):
            end.close()
        assert self._process.pid is not None
        self._pid: int = self._process.pid
        self._strace = None if inject is None else _attach(inject, self._pid)

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def end(self) -> tuple[str, str]:
        """What else it prints, on stdout and stderr, when it has ended."""
        with self.stdout, self.stderr:
            printed = self.stdout.read(), self.stderr.read()
        self._process.join()
        if self._strace is not None:
            self._strace.wait()
        return printed

    @property
    def returncode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.exitcode


def _text(pipe: Connection) -> TextIO:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()))


def _attach(inject: str, process: int) -> subprocess.Popen[bytes]:
    call = inject.partition(":")[0]
    options = ["-f", "--quiet=all", "-o", "/dev/null", "-e", f"trace={call}"]
    return subprocess.Popen(["strace", *options, "-e", f"inject={inject}", "-p", str(process)])


def _run(
    code: str, arguments: list[str], out: Connection, err: Connection, is_traced: bool
) -> None:
    for number, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.argv = ["-c", *arguments]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_traced and "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        if time.monotonic() > deadline:
            raise TimeoutError("strace has not attached to this process")
        os.sched_yield()
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<script>", "exec"), vars(main))


def _run_to_the_end(*arguments: Any) -> NoReturn:
    """A process of multiprocessing leaves out most of what an interpreter does at its end."""
    gc.freeze()  # what was imported before is not looked through again
    status = 1
    try:
        _run(*arguments)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("the interpreter did not end")
