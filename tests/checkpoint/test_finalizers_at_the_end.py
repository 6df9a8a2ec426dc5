"""Finalizers that run as the interpreter ends, or when it has, beside which no thread runs."""

from pathlib import Path

import pytest

import checkpoint
from aio import Engine
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


_BEHIND = """
import sys, threading, time, weakref
class Run: pass
run = Run()
weakref.finalize(run, lambda: save())  # the first one: it is called behind handlers of `atexit`
import torch, checkpoint
path, what = sys.argv[1:]
class Source:
    dtype, shape = torch.uint8, (1 << 20,)
    def read(self, start, out):
        if what == "fail":
            raise OSError(5, "the source is gone")
def save():
    state = {"source": Source(), "x": torch.ones(5 << 20)}
    if what == "interrupt":
        return interrupted(state)
    if what == "manager":
        checkpoint.Manager(path).save_async(1, state)
    else:
        checkpoint.save_async(state, path)
def interrupted(state):
    import os, signal
    from checkpoint.sheltered import Worker
    is_stopped, withdraw = threading.Event(), Worker.withdraw
    def withdraw_and_tell(self, interrupt):
        withdraw(self, interrupt)
        is_stopped.set()
    Worker.withdraw = withdraw_and_tell
    def calls():  # of the main thread, the innermost first
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back
    class Interrupting(Source):
        has_been = False
        def read(self, start, out):
            if not self.has_been:
                self.has_been = True
                while not {"wait_at_exit", "wait_for", "_wait_with"} <= {*calls()}:
                    os.sched_yield()
                os.kill(os.getpid(), signal.SIGINT)
                assert is_stopped.wait(10)
    state = {"x": torch.ones(5 << 20), "source": Interrupting()}
    guard = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)
    try:
        checkpoint.save_async(state, path, guard=guard)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["one", "manager", "fail"])
def test_a_save_that_begins_when_the_interpreter_has_waited_for_saves_is_made(
    tmp_path: Path, what: str
) -> None:
    script = Script(_BEHIND, tmp_path / "run", what, ends_interpreter=True)
    _, errors = script.end()
    if what == "fail":
        assert "nobody asked for its result" in errors
        assert "the source is gone" in errors
        return
    assert (script.returncode, errors) == (0, "")
    step = tmp_path / "run" / ("step-1" if what == "manager" else "")
    assert checkpoint.load(step)["x"].sum() == 5 << 20


@pytest.mark.timeout(60)
def test_an_interrupt_of_a_save_that_the_end_of_the_interpreter_waits_for_leaves_nothing(
    tmp_path: Path,
) -> None:
    script = Script(_BEHIND, tmp_path / "run", "interrupt", ends_interpreter=True)
    printed, errors = script.end()
    assert (script.returncode, errors) == (0, "")
    assert "interrupted" in printed
    assert not (tmp_path / "run").exists()


def test_engines_and_files_of_a_generator_close_when_modules_have_lost_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which order they lose them varies: this is what a generator found that ended late."""
    with Engine() as engine, engine.open(tmp_path / "file", "w") as file:
        engine.write(file, 0, b"text").result()
        monkeypatch.setattr("aio.process.unasked._failed", None)
    assert (tmp_path / "file").read_bytes() == b"text"
