"""Loads within `torch.inference_mode()`: what the thread of a reader converts or scatters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoint

_KINDS = {
    "plain": torch.arange(24.0).view(4, 6),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "channels_last": torch.arange(120.0)
    .view(2, 3, 4, 5)
    .contiguous(memory_format=torch.channels_last),
    "conjugated": torch.arange(8.0).to(torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_new_tensors_are_loaded_in_inference_mode(
    kind: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    checkpoint.save({"w": _KINDS[kind]}, tmp_path / "saved")
    with torch.inference_mode():
        loaded = checkpoint.load(tmp_path / "saved", dtype=dtype)["w"]
    assert loaded.is_inference()
    converts = dtype is not None and loaded.is_floating_point()
    assert loaded.dtype == (dtype if converts else _KINDS[kind].dtype)
    assert torch.equal(loaded, _KINDS[kind].to(loaded.dtype))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mode_of_tensor", [False, True])
@pytest.mark.parametrize("mode_of_load", [False, True])
def test_tensors_of_either_mode_are_loaded_into_in_either_mode(
    kind: str, mode_of_tensor: bool, mode_of_load: bool, tmp_path: Path
) -> None:
    checkpoint.save({"w": _KINDS[kind]}, tmp_path / "saved")
    with torch.inference_mode(mode_of_tensor):
        into = {
            "w": torch.zeros(_KINDS[kind].shape[::-1], dtype=_KINDS[kind].dtype).permute(
                *reversed(range(_KINDS[kind].dim()))
            )
        }
    with torch.inference_mode(mode_of_load):
        checkpoint.load(tmp_path / "saved", into=into)
    assert torch.equal(into["w"], _KINDS[kind])
