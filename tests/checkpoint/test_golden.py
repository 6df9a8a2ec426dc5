"""What an earlier version wrote still loads: `golden/nodes` has the bytes of `state`."""

from __future__ import annotations

import gzip
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from tests.checkpoint.trees import assert_same

GOLDEN = Path(__file__).parent / "golden" / "nodes"


def state() -> dict[str, Any]:
    """One of each kind of node, of tensors in all their relations."""
    flat = torch.arange(100.0)
    versions: OrderedDict[str, Any] = OrderedDict(w=torch.nn.Parameter(flat[:6].view(2, 3)))
    versions._metadata = OrderedDict(w={"version": 2})  # type: ignore[attr-defined]
    return {
        "whole": flat[:40],
        "part": flat[8:12],
        "bytes": flat[4:6].view(torch.uint8),
        "turned": flat[:40].view(5, 8).t(),
        "evens": flat[60:80:2],
        "odds": flat[61:80:2],
        "twin": flat[61:80:2],
        "dense": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "half": torch.tensor([0.5, -2.0], dtype=torch.bfloat16).requires_grad_(),
        "eighth": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
        "empty": torch.empty(3, 0, 2),
        "scalar": torch.tensor(7),
        "array": np.arange(3, dtype=">i4"),
        "record": np.array([(1, 2.5)], [("a", "<i2"), ("b", "<f8")]),
        "module": versions,
        "plain": [1, -(1 << 70), 0.1, float("inf"), 1 - 2j, None, True, "text", b"\0bytes"],
        "types": (torch.float16, torch.Size([2, 3]), torch.device("cpu"), np.float32(0.1)),
        "keys": {1: "one", (2, "two"): {None, 3.5}, np.datetime64("2020-02-02"): np.str_("ab")},
    }


def unpacked(folder: Path) -> Path:
    """The files as they were on disk."""
    for packed in GOLDEN.rglob("*.gz"):
        file = folder / packed.relative_to(GOLDEN).with_suffix("")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    path, expected = unpacked(tmp_path / "step"), state()
    loaded = checkpoint.load(path)
    assert_same(expected, loaded)
    assert vars(loaded["module"]) == vars(expected["module"])
    assert type(loaded["module"]["w"]) is torch.nn.Parameter
    storages = {loaded[name].untyped_storage().data_ptr() for name in ("whole", "odds", "twin")}
    assert len(storages) == 1
    assert loaded["dense"].stride() == (1, 3)
    assert checkpoint.verify(path).ok
    live = state()
    for tensor in (live["whole"], live["evens"], live["dense"]):
        tensor.zero_()
    assert_same(expected, checkpoint.load(path, into=live))
