"""What ``offloaded.optimizer.state_dict()`` holds in the place of the state: which state it is.

The state itself stays where it is, on NVMe or in a checkpoint. It has a name, the run that took the
last step and how many steps that run has taken since it began or loaded something, so that two
states of different histories never have the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.parameters.records import Record
from infinity.tiling.tile import whole_name

KEY = "infinity"
"""Where a ``state_dict`` says which state it is of."""
_FORMAT = 1
_REMEDY = (
    "load the state with offloaded.load(path) from what offloaded.save(path) wrote; the command "
    "`infinity import` makes such a checkpoint of the state of torch.optim.AdamW, DeepSpeed and "
    "torch.distributed.checkpoint; of any other, take the weights alone (weights= of offload)"
)


class StateReference:
    """The name of the optimizer state of one run, and what such names are checked against."""

    def __init__(self, run: str, records: Sequence[Record], kept_by: str | None) -> None:
        """``run``: of this block alone, the same on all ranks; ``kept_by``: the class of the
        optimizer.
        """
        self._run = run
        self._history, self._next, self._loads = run, run, 0
        self._steps = 0
        self._saved_at: str | None = None
        self._names = [record.name for record in records]
        parameters = [
            [record.name, [*record.shape], str(record.spec.dtype), record.spec.trainable]
            for record in records
        ]
        self._fingerprint = _fingerprint([kept_by, parameters])
        self._of_wholes = _fingerprint([kept_by, _wholes(records)])
        self._kept_by = kept_by

    @property
    def name(self) -> str:
        """Of the state as it is now."""
        return f"{self._history}@{self._steps}"

    def stepped(self) -> None:
        """A step was taken."""
        if self._history != self._next:
            self._history, self._steps = self._next, 0
        self._steps += 1
        self._saved_at = None

    def saved(self, path: str | os.PathLike[str]) -> None:
        """The state as it is now goes to ``path``."""
        self._saved_at = str(Path(path).absolute())

    def loaded(self, name: str | None, path: str | os.PathLike[str]) -> None:
        """The state has been replaced by one of that name; None if it has none."""
        self._loads += 1
        self._next = f"{self._run}-{self._loads}"
        history, _, steps = (name or f"{self._next}@0").rpartition("@")
        self._history, self._steps = history, int(steps)
        self._saved_at = str(Path(path).absolute())

    def describe(self, steps: Sequence[int], loss_scale: Sequence[Any] | None) -> dict[str, Any]:
        """What a ``state_dict`` says of the state."""
        return {
            "format": _FORMAT,
            "optimizer_class": self._kept_by,
            "fingerprint": self._fingerprint,
            "fingerprint_of_wholes": self._of_wholes,
            "state": self.name,
            "saved_at": self._saved_at,
            "steps": dict(zip(self._names, steps, strict=True)),
            "loss_scale": None if loss_scale is None else list(loss_scale),
        }

    def check(self, state_dict: Mapping[str, Any], steps: Sequence[int]) -> Mapping[str, Any]:
        """What ``state_dict`` says of its state, which is the one that is here.

        Raises ``ValueError`` saying what to do if it is another.
        """
        told = state_dict.get(KEY)
        if not isinstance(told, Mapping):
            raise ValueError(
                f"this state_dict is {_kind_of(state_dict)}, not one of an offloaded optimizer, "
                f"whose state does not pass through state_dict: {_REMEDY}"
            )
        if told.get("format") != _FORMAT:
            raise ValueError(
                f"this state_dict has format {told.get('format')}; this version reads {_FORMAT}"
            )
        self._check_model(told)
        ours = dict(zip(self._names, steps, strict=True))
        same_steps = told["steps"] == ours or _of_wholes(told["steps"]) == _of_wholes(ours)
        if same_steps and (told["state"] == self.name or not any(steps)):
            return told
        where = "" if told["saved_at"] is None else f", which was saved at {told['saved_at']}"
        raise ValueError(
            f"this state_dict is of the optimizer state after {_most(told['steps'].values())} "
            f"steps{where}, and the model has another, after {_most(steps)} steps: call "
            "offloaded.load(path) with the checkpoint that was saved with it first, which loads "
            "the options of the optimizer too"
        )

    def _check_model(self, told: Mapping[str, Any]) -> None:
        if told["fingerprint"] == self._fingerprint:
            return
        if told.get("fingerprint_of_wholes") == self._of_wholes:
            return  # cut into other tiles
        theirs, ours = told["steps"].keys(), dict.fromkeys(self._names).keys()
        what = "parameters of other shapes, dtypes or training"
        if told["optimizer_class"] != self._kept_by:
            what = f"{told['optimizer_class']}, and the optimizer is {self._kept_by}"
        elif theirs != ours:
            name = next(iter([*(theirs - ours), *(ours - theirs)]))
            has = "has" if name in theirs else "lacks"
            what = f"another model: it {has} {name}"
        raise ValueError(f"this state_dict is of {what}; {_REMEDY}")


def _fingerprint(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _wholes(records: Sequence[Record]) -> list[Any]:
    """What parameters are, tiles together, in the order of their names."""
    rows: dict[tuple[Any, ...], int] = {}
    for record in records:
        first, *rest = record.shape or [-1]
        kind = (whole_name(record.name), *rest, str(record.spec.dtype), record.spec.trainable)
        rows[kind] = rows.get(kind, 0) + first
    return sorted(([*kind, count] for kind, count in rows.items()), key=lambda whole: whole[0])


def _of_wholes(steps: Mapping[str, int]) -> dict[str, set[int]]:
    """The counts of each parameter; one, but where tiles have taken steps of their own."""
    found: dict[str, set[int]] = {}
    for name, count in steps.items():
        found.setdefault(whole_name(name), set()).add(count)
    return found


def _kind_of(state_dict: Mapping[str, Any]) -> str:
    states = state_dict.get("state")
    first = next(iter(states.values()), None) if isinstance(states, Mapping) and states else None
    if isinstance(first, Mapping):
        return f"of an optimizer that keeps {', '.join(map(str, first))} in memory"
    return "of an optimizer that keeps its state in memory"


def _most(steps: Any) -> int:
    return max(steps, default=0)
