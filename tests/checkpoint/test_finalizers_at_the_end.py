"""Finalizers that run when the interpreter has ended, beside which no thread runs any more."""

from pathlib import Path

import pytest

from tests.support.scripts import Script

_SCRIPT = """
import sys
import torch, checkpoint
from aio import Engine
folder, action = sys.argv[1:]
state = {"x": torch.ones(1 << 20)}
checkpoint.save(state, folder + "/step")

class Saver:
    def __init__(self):
        self.itself = self  # found by the garbage collector alone
        self.checkpoint, self.engine = checkpoint, Engine
        self.manager = checkpoint.Manager(folder + "/run")
        self.path, self.state = folder + "/step", state
        self.log = checkpoint.open_stream(folder + "/log", "wb")
        self.log.write(b"text")
    def __del__(self, action=action, say=print):
        actions = {
            "save": lambda: self.checkpoint.save(self.state, self.path),
            "save_async": lambda: self.checkpoint.save_async(self.state, self.path),
            "manager": lambda: self.manager.save(1, self.state),
            "load": lambda: self.checkpoint.load(self.path),
            "open": lambda: self.checkpoint.open(self.path),
            "export": lambda: self.checkpoint.write_safetensors(self.state, self.path + "-export"),
            "stream": self.log.close,
            "engine": self.engine,
        }
        try:
            actions[action]()
        except OSError as error:
            say(error, flush=True)

saver = Saver()
del saver
"""


@pytest.mark.parametrize(
    "action", ["save", "save_async", "manager", "load", "open", "export", "stream", "engine"]
)
@pytest.mark.timeout(60)
def test_what_needs_a_thread_is_refused_by_name_at_the_end_of_the_interpreter(
    tmp_path: Path, action: str
) -> None:
    """Before 3.12 Python waits for such a thread for ever."""
    script = Script(_SCRIPT, tmp_path, action, ends_interpreter=True)
    printed, errors = script.end()
    assert script.returncode == 0, errors
    assert "the interpreter has ended" in printed
    assert "atexit" in printed
