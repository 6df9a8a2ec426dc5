"""What the handler of a signal may not do in the midst of what the library does."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import infinity
from infinity.model import training_of
from infinity.parameters.offloaded import handlers
from tests.support import calls_in_handlers, interrupts
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train


@pytest.mark.parametrize("place", sorted({*handlers.PLACES, *interrupts.CRITICAL}))
def test_files_that_are_told_apart_by_their_names_are_there(place: str) -> None:
    """A file that was moved would be told apart no more, and nothing else might say so."""
    assert Path(place).exists()


@pytest.mark.parametrize("call", ["restore", "load"])
def test_state_that_a_handler_would_replace_in_a_step_stays_and_the_step_can_be_taken(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the refusal, the call waits for ever: the step has a lock that it needs."""
    (nvme := tmp_path / "nvme").mkdir()
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        offloaded.save(tmp_path / "run")
        before = everything(offloaded)
        train(offloaded, 1, 2)
        after = everything(offloaded)
        offloaded.load(tmp_path / "run")
        assert_same(before, everything(offloaded))

        def replace(number: int, frame: FrameType | None) -> None:
            offloaded.restore("a") if call == "restore" else offloaded.load(tmp_path / "run")

        versions: Any = training_of(offloaded).versions
        real = versions._now

        def now() -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return real()

        previous = signal.signal(signal.SIGUSR1, replace)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(versions, "_now", now)
                with pytest.raises(RuntimeError, match="in the midst of a step or a forward pass"):
                    train(offloaded, 1, 2)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        offloaded.optimizer.zero_grad()
        train(offloaded, 1, 2)
        assert_same(after, everything(offloaded))
        offloaded.drop_snapshot("a")


@pytest.mark.parametrize(
    "when",
    [
        when if when == "backward" else pytest.param(when, marks=pytest.mark.proof)
        for when in calls_in_handlers.WHEN
    ],
)
def test_calls_of_a_handler_within_our_work_are_refused_by_name_and_change_nothing(
    when: str, tmp_path: Path
) -> None:
    """Without the refusal most of them wait for ever, for locks that their own thread holds."""
    command = [sys.executable, "-m", calls_in_handlers.__name__, when, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = [line.split("; ", 2) for line in ended.stdout.splitlines()]
    (nothing, total, worked), *others = outcomes
    assert (nothing, worked) == ("nothing", "worked")
    assert len(others) == (22 if when == "locked" else 20)
    for name, after, outcome in others:
        assert outcome.startswith("RuntimeError: "), name
        assert "by the handler of a signal (or a finalizer)" in outcome, name
        assert outcome.endswith("between steps"), name
        assert after == total, name


def test_calls_from_hooks_and_closures_of_the_program_are_none_of_a_handler(
    nvme: Path, tmp_path: Path
) -> None:
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        seen: list[str] = []

        def look(*_: Any) -> None:
            str(offloaded.report())
            offloaded.trace(tmp_path / "trace.json")
            with offloaded.gathered(offloaded.model.get_submodule("norm")):
                seen.append("looked")

        offloaded.optimizer.register_step_pre_hook(look)
        offloaded.optimizer.register_step_post_hook(look)
        norm = offloaded.model.get_submodule("norm")
        norm.register_forward_hook(look)
        norm.register_full_backward_hook(look)
        train(offloaded, 0, 1)
        assert len(seen) == 4

        def closure() -> float:
            offloaded.flush()
            out = offloaded.model(torch.ones(8, 256))
            offloaded.backward(out.square().mean())
            look()
            return 0.0

        offloaded.optimizer.step(closure)
        assert len(seen) == 4 + 5


def test_a_call_is_refused_while_its_thread_keeps_others_from_beginning(nvme: Path) -> None:
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        lock: Any = vars(threading)["_active_limbo_lock"]
        with lock, pytest.raises(RuntimeError, match="starts or lists threads"):
            offloaded.snapshots()
        assert offloaded.snapshots() == []
