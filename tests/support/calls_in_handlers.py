"""A program that trains while handlers of signals call the library in the midst of its own work.

To be run in a process of its own, which ends with the stacks of its threads where something waits
for ever.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import infinity
from infinity.model import training_of
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, shallow, train

PATIENCE_SECONDS = 60.0
WHEN = ("forward", "backward", "step", "locked")


def calls(offloaded: infinity.OffloadedModel, root: Path) -> dict[str, Callable[[], object]]:
    weight = next(iter(offloaded.model.parameters()))

    def gather() -> None:
        with offloaded.gathered():
            pass

    def drop_last() -> None:
        errors: list[Exception] = []

        def flush() -> None:
            try:
                offloaded.flush()
            except Exception as error:
                errors.append(error)

        held = nn.Module()
        weakref.finalize(held, flush)
        del held
        if errors:
            raise errors.pop()

    return {
        "nothing": lambda: None,
        "snapshot": lambda: offloaded.snapshot("b"),
        "snapshot behind": lambda: offloaded.snapshot("b", block=False),
        "snapshots": offloaded.snapshots,
        "restore": lambda: offloaded.restore("a"),
        "drop": lambda: offloaded.drop_snapshot("a"),
        "save": lambda: offloaded.save(root / "b"),
        "save behind": lambda: offloaded.save(root / "b", block=False),
        "save snapshot": lambda: offloaded.save(root / "b", snapshot="a"),
        "load": lambda: offloaded.load(root / "a"),
        "flush": offloaded.flush,
        "gathered": gather,
        "export": lambda: offloaded.export(root / "exported"),
        "gradient": lambda: offloaded.gradient(weight),
        "clip": lambda: offloaded.clip_grad_norm_(1.0),
        "step": offloaded.step,
        "optimizer step": offloaded.optimizer.step,
        "zero_grad": offloaded.optimizer.zero_grad,
        "report": offloaded.report,
        "trace": lambda: offloaded.trace(root / "trace.json"),
        "finalizer": drop_last,
    }


def reads(model: nn.Module) -> dict[str, Callable[[], object]]:
    weight = next(iter(model.parameters()))
    return {"weights": weight.detach, "set gradient": lambda: setattr(weight, "grad", None)}


class _Probe:
    """A lock within which a signal comes, once, on the main thread."""

    def __init__(self, lock: Any, come: Callable[[], None]) -> None:
        self._lock, self._come = lock, come

    def __enter__(self) -> None:
        self._lock.acquire()
        if threading.current_thread() is threading.main_thread():
            try:
                self._come()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _places(offloaded: infinity.OffloadedModel, when: str) -> tuple[Any, str]:
    training = training_of(offloaded)
    return {
        "forward": (training.residency, "_take"),
        "backward": (training.gradients, "take"),
        "step": (training.state, "step"),
        "locked": (training.state.timeline, "_lock"),
    }[when]


def _run(offloaded: infinity.OffloadedModel, when: str, call: Callable[[], object]) -> str:
    """One step of training, in which a handler makes ``call``: its error, or ``worked``."""
    told: list[str] = []
    left = [True]

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            call()
            told.append("worked")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    def come() -> None:
        if left:
            left.clear()
            signal.raise_signal(signal.SIGUSR1)

    owner, name = _places(offloaded, when)
    real = getattr(owner, name)

    def broken_into(*args: Any, **options: Any) -> Any:
        come()
        return real(*args, **options)

    signal.signal(signal.SIGUSR1, handle)
    setattr(owner, name, _Probe(real, come) if when == "locked" else broken_into)
    try:
        train(offloaded, 0, 1)
    finally:
        setattr(owner, name, real)
    return told[0] if told else "never came"


def main(when: str, root: Path) -> None:
    (nvme := root / "nvme").mkdir()
    least = infinity.plan(seeded(shallow), nvme=nvme, optimizer=ADAMW).least_host_bytes
    model: Net = seeded(shallow)
    with infinity.offload(model, nvme, optimizer=ADAMW, host_memory=least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        offloaded.save(root / "a")
        chosen = calls(offloaded, root)
        if when == "locked":  # where weights or gradients are moved
            chosen = chosen | reads(model)
        for name, call in chosen.items():
            faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
            offloaded.restore("a")
            outcome = _run(offloaded, when, call)
            total = sum(p.detach().double().sum().item() for p in model.parameters())
            sys.stdout.write(f"{name}; {total}; {outcome}\n")
        faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
        offloaded.drop_snapshot("a")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
