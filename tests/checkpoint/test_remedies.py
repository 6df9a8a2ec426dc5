"""What errors of a save advise is what helps."""

from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


class Own(torch.Tensor):
    pass


def test_tensor_of_a_class_of_its_own_is_saved_as_the_error_says(tmp_path: Path) -> None:
    own = torch.ones(2).as_subclass(Own)
    with pytest.raises(TypeError, match=r"tensor\.detach\(\)\.as_subclass\(torch\.Tensor\)"):
        checkpoint.save({"x": own}, tmp_path / "step")
    checkpoint.save({"x": own.detach().as_subclass(torch.Tensor)}, tmp_path / "step")


def test_masked_array_is_saved_as_the_error_says(tmp_path: Path) -> None:
    masked = np.ma.MaskedArray([1.0, 2.0], [True, False])
    with pytest.raises(TypeError, match=r"its \.data and its \.mask as two arrays"):
        checkpoint.save({"x": masked}, tmp_path / "step")
    checkpoint.save({"x": (masked.data, masked.mask)}, tmp_path / "step")
