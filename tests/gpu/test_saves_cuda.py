"""Saves and loads of tensors on a GPU: what other streams and devices are doing does not matter."""

from pathlib import Path

import pytest
import torch

import checkpoint
from tests.support.device_checks import check_guarded_save, check_saves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
_ELEMENTS = 1 << 24


def _computed_late(value: float) -> torch.Tensor:
    """What the current stream has written when it has done all else that it was given."""
    late = torch.zeros(_ELEMENTS, device="cuda")
    square = torch.ones(2048, 2048, device="cuda")
    for _ in range(50):
        square = square @ square / 2048
    return late.add_(square[0, 0]).mul_(value)


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    check_saves("cuda", tmp_path)


def test_tensors_of_a_gpu_come_back_where_they_are_wanted(tmp_path: Path) -> None:
    state = {"x": torch.randn(3_000_000, device="cuda"), "y": torch.randn(5, 4, device="cuda").t()}
    checkpoint.save(state, tmp_path / "step")
    for place, kind in (("cpu", "cpu"), (None, "cuda"), ("cuda:0", "cuda")):
        loaded = checkpoint.load(tmp_path / "step", map_location=place)
        assert loaded["x"].device.type == kind
        assert torch.equal(loaded["x"].cpu(), state["x"].cpu())
        assert torch.equal(loaded["y"].cpu(), state["y"].cpu())
    live = {"x": torch.zeros_like(state["x"]), "y": torch.zeros(5, 4, device="cuda").t()}
    checkpoint.load(tmp_path / "step", into=live)
    assert torch.equal(live["x"], state["x"])
    assert torch.equal(live["y"], state["y"])


def test_guarded_save_reads_before_the_next_step(tmp_path: Path) -> None:
    check_guarded_save("cuda", tmp_path)


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_save_on_a_side_stream_has_what_that_stream_was_to_write(call: str, tmp_path: Path) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        late = _computed_late(3.0)
        if call == "save":
            checkpoint.save({"late": late}, tmp_path / "a")
        else:
            pending = checkpoint.save_async({"late": late}, tmp_path / "a")
            late.zero_()
            pending.result()
    loaded = checkpoint.load(tmp_path / "a")["late"]
    assert torch.equal(loaded, torch.full((_ELEMENTS,), 3.0))


def test_load_on_a_side_stream_comes_after_what_that_stream_was_to_write(tmp_path: Path) -> None:
    checkpoint.save({"values": torch.full((_ELEMENTS,), 2.0)}, tmp_path / "a")
    with torch.cuda.stream(torch.cuda.Stream()):
        late = _computed_late(3.0)
        checkpoint.load(tmp_path / "a", into={"values": late})
        doubled = late * 2
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), torch.full((_ELEMENTS,), 4.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second CUDA device")
def test_tensors_of_a_device_that_is_not_the_current_one_are_saved_and_loaded(
    tmp_path: Path,
) -> None:
    state = {"there": torch.arange(_ELEMENTS, device="cuda:1")}
    with torch.cuda.device(0):
        checkpoint.save(state, tmp_path / "a")
        checkpoint.save_async(state, tmp_path / "b").result()
        for name in ("a", "b"):
            loaded = checkpoint.load(tmp_path / name, map_location="cuda:1")["there"]
            assert loaded.device == torch.device("cuda:1")
            assert torch.equal(loaded, state["there"])
