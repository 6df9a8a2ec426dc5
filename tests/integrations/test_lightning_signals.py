"""Signals that Lightning handles by a save, in the midst of a step of an offloaded module."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException

import checkpoint
from infinity.integrations.lightning import REST, STATE, OffloadStrategy
from infinity.model import training_of
from tests.support.lit import ACCUMULATE, Lit, fit, least_of, loader, trainer_of
from tests.support.models import seeded
from tests.support.training import same_bits, values_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:Checkpoint directory",
    "ignore:You're resuming from a checkpoint that ended before",
)
INTERRUPTED = ACCUMULATE + 1
"""A batch in the midst of the second step."""


class Raises(Callback):
    """A signal, once: in a forward or backward pass or in a step, or as a program's own code runs
    in one; or as the last values are read.
    """

    def __init__(self, where: str, number: int = signal.SIGUSR1) -> None:
        self._where, self._number = where, number

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch or index != INTERRUPTED:
            return
        if self._where == "callback":
            signal.raise_signal(self._number)
            return
        training: Any = training_of(trainer.strategy.offloaded)
        owner, name = {
            "forward": (training.residency, "_take"),
            "backward": (training.gradients, "take"),
            "step": (training.state, "step"),
        }[self._where]
        real = getattr(owner, name)

        def broken_into(*args: Any, **options: Any) -> Any:
            setattr(owner, name, real)
            signal.raise_signal(self._number)
            return real(*args, **options)

        setattr(owner, name, broken_into)


class SavesBehind(Callback):
    """The step that is interrupted by others, as a callback of a program does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if not trainer.current_epoch and index == 2 * ACCUMULATE - 1:
            trainer.save_checkpoint(self._path)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that ask SLURM for it."""
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(signal_connector, "call", call)
    for name, value in {
        "SLURM_JOB_ID": "12",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "job",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return commands


def _rest(folder: Path) -> dict[str, Any]:
    rest: dict[str, Any] = torch.load(folder / REST, weights_only=False)
    return {name: rest[name] for name in ("global_step", "epoch", "loops", "lr_schedulers")}


@pytest.mark.parametrize("where", ["forward", "backward", "step", "callback"])
def test_requeue_that_is_asked_for_in_a_step_is_done_when_it_has_ended(
    where: str, nvme: Path, tmp_path: Path, requeued: list[list[str]]
) -> None:
    least, behind = least_of(nvme), tmp_path / "behind.ckpt"
    expected = fit(tmp_path / "a", OffloadStrategy(nvme, host_memory=least))
    fit(tmp_path / "b", OffloadStrategy(nvme, host_memory=least), callbacks=[SavesBehind(behind)])
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    found = fit(
        tmp_path / "c",
        OffloadStrategy(nvme, host_memory=least),
        callbacks=[Raises(where)],
        plugins=[SLURMEnvironment(auto_requeue=True)],
    )
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == before
    assert requeued == [["scontrol", "requeue", "12"]]
    assert found.seen == expected.seen
    assert all(same_bits(value, found.values[name]) for name, value in expected.values.items())
    saved = tmp_path / "c" / "hpc_ckpt_1.ckpt"
    assert _rest(saved) == _rest(behind)
    states = [checkpoint.load(folder / STATE) for folder in (saved, behind)]
    checkpoint.verify(saved / STATE)
    weights = [state["model"] for state in states]
    assert all(same_bits(value, weights[1][name]) for name, value in weights[0].items())
    resumed = [
        fit(tmp_path / folder, OffloadStrategy(nvme, host_memory=least), resume=path)
        for folder, path in {"b": behind, "c": None}.items()  # None: it is found, as by a new job
    ]
    assert resumed[0].seen == resumed[1].seen
    values = resumed[1].values
    assert all(same_bits(value, values[name]) for name, value in resumed[0].values.items())


def test_requeue_that_is_asked_for_is_not_done_at_a_validation_batch_within_the_step(
    nvme: Path, tmp_path: Path, requeued: list[list[str]]
) -> None:
    fit(
        tmp_path,
        OffloadStrategy(nvme, host_memory=least_of(nvme)),
        callbacks=[Raises("callback")],
        plugins=[SLURMEnvironment(auto_requeue=True)],
        accumulate_grad_batches=INTERRUPTED + 3,
        val_check_interval=1,
    )
    assert requeued == [["scontrol", "requeue", "12"]]
    assert _rest(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 1


@pytest.mark.parametrize("where", ["forward", "step"])
def test_sigterm_in_a_step_ends_the_run_behind_it(
    where: str, nvme: Path, tmp_path: Path, requeued: list[list[str]]
) -> None:
    """Also what a program's own handler asks for, which Lightning calls with its own."""
    module = seeded(Lit)
    trainer: Any = trainer_of(
        tmp_path,
        OffloadStrategy(nvme, host_memory=least_of(nvme)),
        callbacks=[Raises(where, signal.SIGTERM)],
        enable_checkpointing=False,
    )
    steps: list[int] = []

    def save(*_: object) -> None:
        steps.append(trainer.global_step)
        trainer.save_checkpoint(tmp_path / "mine.ckpt")

    previous = signal.signal(signal.SIGTERM, save)
    try:
        with pytest.raises(SIGTERMException):
            trainer.fit(module, loader(0, 24), loader(5, 4))
        assert signal.getsignal(signal.SIGTERM) is save
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert steps == [2]
    saved = checkpoint.load(tmp_path / "mine.ckpt" / STATE)["model"]
    values = values_of(module)
    assert all(same_bits(value, values[name]) for name, value in saved.items())


class _AsItEnds(Callback):
    def __init__(self, act: Callable[[Any], None]) -> None:
        self._act = act

    def on_train_start(self, trainer: Any, module: Any) -> None:
        close = trainer.strategy._stack.close

        def closing() -> None:
            self._act(trainer)
            close()

        trainer.strategy._stack.close = closing


def test_requeue_that_is_asked_for_when_the_run_has_ended_is_told(
    nvme: Path, tmp_path: Path, requeued: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    def act(trainer: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)

    fit(
        tmp_path / "run",
        OffloadStrategy(nvme, host_memory=least_of(nvme)),
        callbacks=[_AsItEnds(act)],
        plugins=[SLURMEnvironment(auto_requeue=True)],
        max_epochs=1,
    )
    assert requeued == []
    assert "SIGUSR1 came when the run had ended" in caplog.text
