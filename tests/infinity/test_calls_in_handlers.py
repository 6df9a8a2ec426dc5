"""What the handler of a signal may not do in the midst of a step or a forward pass."""

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import infinity
from infinity.model import training_of
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train


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
