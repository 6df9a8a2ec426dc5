"""State trees in one piece of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.errors import CorruptCheckpointError
from checkpoint.interop.packing import pack, unpack
from tests.checkpoint.trees import assert_same


def trees() -> dict[str, Any]:
    base = torch.arange(24.0)
    return {
        "nothing": None,
        "scalars": {"step": 7, "lr": (0.1, None), "name": b"\x00", "set": {1, 2}},
        "tensors": [torch.randn(3, 5), torch.empty(0, 2), torch.tensor(4, dtype=torch.bfloat16)],
        "shared": {"all": base, "rows": base.view(4, 6)[1:], "turned": base.view(4, 6).t()},
        "arrays": np.arange(7, dtype=">i2"),
        "bits": {"x": torch.randn(3, dtype=torch.complex64).conj(), "f8": torch.ones(9).half()},
    }


@pytest.mark.parametrize("name", trees())
def test_a_packed_tree_comes_back_equal(name: str) -> None:
    tree = trees()[name]
    assert_same(tree, unpack(pack(tree)))


def test_equal_trees_give_equal_bytes_and_others_do_not() -> None:
    one, other = torch.arange(5.0), torch.arange(5.0)
    assert torch.equal(pack({"w": one, "step": 1}), pack({"w": other, "step": 1}))
    other[3] = 0
    assert not torch.equal(pack({"w": one, "step": 1}), pack({"w": other, "step": 1}))


def test_what_is_cut_off_or_changed_is_refused() -> None:
    data = pack({"w": torch.arange(5000.0)})
    for damaged in (data[:4], data[:100], data[:-1], torch.cat([data, data]), data.roll(3)):
        with pytest.raises(CorruptCheckpointError):
            unpack(damaged.clone())
