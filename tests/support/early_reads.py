"""What a test does before a save reads anything of an offloaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infinity.snapshots.sources import HostBytes
from infinity.values.component_bytes import ComponentBytes


def before_reads(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """From now on ``then`` is called before bytes are read: by a source itself, or from where they
    lie, which is looked at before.
    """
    for kind in (HostBytes, ComponentBytes):
        _call_before(monkeypatch, kind, "read", then)
        _call_before(monkeypatch, kind, "is_there", then)


def _call_before(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, then: Callable[[], object]
) -> None:
    real = getattr(kind, name)

    def called(*arguments: Any) -> Any:
        then()
        return real(*arguments)

    monkeypatch.setattr(kind, name, called)
