"""Saves while another thread imports what they look at."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import checkpoint


def test_save_while_another_thread_imports_dtensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is known before it has anything."""
    name = "torch.distributed.tensor"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    checkpoint.save({"x": np.arange(3)}, tmp_path / "saved")
    assert checkpoint.load(tmp_path / "saved")["x"].tolist() == [0, 1, 2]
