"""Snapshots that are taken, replaced, dropped, restored and listed, each in a block of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinity
from failures.attempts import unnamed
from failures.interposed import Interposer, Kind, Outcome
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train
from tests.support.training import least_budget

SNAPSHOT_ACTIONS = ("take", "replace", "drop", "restore", "list", "behind", "replace behind")
_TAKEN, _REPLACED = ("take", "behind"), ("replace", "replace behind")
State = dict[str, Any]


class SnapshotAttempts:
    """Beside ``base``, which is replaced, dropped and restored, there is ``other``: taken at the
    same moment, so that they share what is on NVMe, and right to the end.
    """

    def __init__(self, folder: Path, action: str, interposer: Interposer) -> None:
        self._folder, self._action, self._interposer = folder, action, interposer
        self._nvme = [folder / "a", folder / "b"]
        for directory in self._nvme:
            directory.mkdir()
        self._least = least_budget(_net, self._nvme, optimizer=ADAMW)
        with self._block() as offloaded:
            train(offloaded, 0, 1)
            offloaded.snapshot("base")
            offloaded.snapshot("other")
            self._other = everything(offloaded)
        self._base: State | None = self._other

    def attempt(self, kind: Kind, number: int) -> tuple[Outcome, list[str]]:
        with self._block() as offloaded:
            train(offloaded, number % 7, number % 7 + 1)
            before = everything(offloaded)
            outcome = self._interposer.attempt(self._act(offloaded), kind, number)
            faults = unnamed(outcome.error, kind, self._folder)
            is_done, outcome = outcome.error is None, outcome.without_error()
            try:
                self._check(offloaded, before, is_done)
                self._check_snapshots(offloaded, before, is_done)
            except Exception as error:
                faults.append(f"then {type(error).__name__}: {error}")
        try:
            with self._block() as offloaded:
                for name, state in (("other", self._other), ("base", self._base)):
                    offloaded.restore(name)
                    assert_same(state or {}, everything(offloaded))
        except Exception as error:
            faults.append(f"in the next block {type(error).__name__}: {error}")
        return outcome, faults

    def _block(self) -> Any:
        options: dict[str, Any] = {"host_memory": self._least, "optimizer": ADAMW}
        return infinity.offload(_net(), self._nvme, **options)

    def _act(self, offloaded: infinity.OffloadedModel) -> Callable[[], object]:
        return {
            "take": lambda: offloaded.snapshot("new"),
            "replace": lambda: offloaded.snapshot("base"),
            "drop": lambda: offloaded.drop_snapshot("base"),
            "restore": lambda: offloaded.restore("base"),
            "list": offloaded.snapshots,
            "behind": lambda: offloaded.snapshot("new", block=False).result(),
            "replace behind": lambda: offloaded.snapshot("base", block=False).result(),
        }[self._action]

    def _check(self, offloaded: infinity.OffloadedModel, before: State, is_done: bool) -> None:
        """What is trained is as it was, or as it is in the snapshot."""
        try:
            now = everything(offloaded)
        except infinity.MixedStateError:
            if self._action != "restore" or is_done:
                raise
            return
        restored = [self._base] if self._action == "restore" else []
        _assert_any(now, restored if is_done and restored else [before, *restored])

    def _check_snapshots(
        self, offloaded: infinity.OffloadedModel, before: State, is_done: bool
    ) -> None:
        names = {one.name for one in offloaded.snapshots()}
        base, new = {"base"} & names, {"new"} & names
        if self._action != "drop" and not base:
            raise RuntimeError("the snapshot base is gone")
        if is_done and ((self._action in _TAKEN and not new) or (self._action == "drop" and base)):
            raise RuntimeError(f"it was done, and there are {names}")
        for name in sorted(base | new):
            states: list[State | None] = [before]
            if name == "base" and not (self._action in _REPLACED and is_done):
                states = [self._base, *(states if self._action in _REPLACED else [])]
            offloaded.restore(name)
            now = everything(offloaded)
            _assert_any(now, states)
            if name == "base":
                self._base = now
        for name in new:
            offloaded.drop_snapshot(name)
        if not base:
            offloaded.snapshot("base")
            self._base = everything(offloaded)


def _net() -> Net:
    return seeded(lambda: Net(2), 0)


def _assert_any(found: State, states: list[State | None]) -> None:
    for state in states[:-1]:
        try:
            assert_same(state or {}, found)
        except AssertionError:
            continue
        return
    assert_same(states[-1] or {}, found)
