"""Views of stored tensors, loaded alone: their bytes, at every edge, and no more memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import CRC_BLOCK_BYTES

NBYTES = 2 * CRC_BLOCK_BYTES + 12345 * 8
EDGE = CRC_BLOCK_BYTES


@pytest.fixture(scope="module")
def base() -> torch.Tensor:
    return torch.arange(NBYTES // 8, dtype=torch.int64)


def views_of(base: torch.Tensor) -> dict[str, torch.Tensor]:
    raw = base.view(torch.uint8)
    return {
        "head": base[:5],
        "tail": base[-5:],
        "across": raw[EDGE - 3 : EDGE + 4],
        "block": raw[EDGE : 2 * EDGE],
        "most": raw[8 : 2 * EDGE + 8].view(torch.float32),
        "within": raw[4096:8192],
        "empty": raw[EDGE:EDGE],
        "number": base[EDGE // 8],
        "turned": base[1000 : 1000 + (1 << 20)].view(1 << 10, 1 << 10).t(),
        "twice turned": base[: 6 << 10].view(2, 3, 1 << 10).permute(2, 0, 1),
        "columns": base[: 1 << 20].view(1 << 10, 1 << 10)[:, 3:7],
        "half": raw[4 : 4 + (1 << 10)].view(torch.bfloat16),
    }


NAMES = list(views_of(torch.empty(NBYTES // 8, dtype=torch.int64)))


@pytest.fixture(scope="module", params=[0, 3], ids=["one disk", "three stripes"])
def path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base: torch.Tensor
) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    stripes = [folder / f"ssd{k}" for k in range(request.param)]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save({"base": base, **views_of(base)}, folder / "step", stripes or None)
    return folder / "step"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_view_alone_has_its_values(
    path: Path, base: torch.Tensor, name: str, verify: bool
) -> None:
    expected = views_of(base)[name]
    loaded = checkpoint.load(path, only=name, verify=verify)[name]
    assert loaded.stride() == expected.stride()
    assert torch.equal(bits(loaded), bits(expected))
    span = expected.numel() * expected.element_size() if name != "columns" else 8 << 20
    assert loaded.untyped_storage().nbytes() <= span + 4096
    live = {name: torch.zeros_like(expected)}
    checkpoint.load(path, into=live, verify=verify)
    assert torch.equal(bits(live[name]), bits(expected))


def test_views_together_share_what_they_shared(path: Path, base: torch.Tensor) -> None:
    loaded = checkpoint.load(path, only=["across", "half", "within"])
    for name, expected in views_of(base).items():
        if name in loaded:
            assert torch.equal(bits(loaded[name]), bits(expected))
    gap = loaded["within"].data_ptr() - loaded["half"].data_ptr()
    assert gap == 4092, "as they lay in memory"


def test_all_views_at_once_are_read_into_live_tensors(path: Path, base: torch.Tensor) -> None:
    expected = views_of(base)
    live = {name: torch.zeros_like(view) for name, view in expected.items()}
    checkpoint.load(path, into=live)
    for name, view in expected.items():
        assert torch.equal(bits(live[name]), bits(view)), name


class Sink:
    def __init__(self, like: torch.Tensor) -> None:
        self.dtype, self.shape = like.dtype, tuple(like.shape)
        self.data = bytearray(like.numel() * like.element_size())

    def write(self, start: int, data: memoryview) -> None:
        assert start % self.dtype.itemsize == 0
        assert len(data) % self.dtype.itemsize == 0
        self.data[start : start + len(data)] = data


def test_sinks_take_views_in_whole_elements(path: Path, base: torch.Tensor) -> None:
    expected = views_of(base)
    sinks = {name: Sink(view) for name, view in expected.items()}
    checkpoint.load(path, into=sinks)
    for name, view in expected.items():
        assert bytes(sinks[name].data) == bits(view).numpy().tobytes(), name


def test_as_many_views_as_tensors_are_no_whole_tensors(tmp_path: Path) -> None:
    weight = torch.arange(1 << 19).view(1 << 10, 1 << 9)
    state: dict[str, Any] = {"w": weight, "b": torch.ones(3), "rows": weight[5:9]}
    checkpoint.save(state, tmp_path / "step")
    live = {"rows": torch.zeros_like(weight[5:9]), "b": torch.zeros(3)}
    checkpoint.load(tmp_path / "step", into=live)
    assert torch.equal(live["rows"], weight[5:9])
    assert torch.equal(live["b"], torch.ones(3))


def test_damage_counts_where_a_view_has_bytes(tmp_path: Path, base: torch.Tensor) -> None:
    checkpoint.save({"base": base, **views_of(base)}, tmp_path / "step")
    (file,) = (tmp_path / "step").glob("*/*.safetensors")
    raw = bytearray(file.read_bytes())
    at = raw.index(bits(base[EDGE // 8 : EDGE // 8 + 512]).numpy().tobytes())
    raw[at + 4000] ^= 1
    file.write_bytes(raw)
    checkpoint.load(tmp_path / "step", only=["head", "within"])
    for options in ({"only": "across"}, {"into": {"number": torch.zeros((), dtype=torch.int64)}}):
        with pytest.raises(CorruptCheckpointError, match="CRC-32C"):
            checkpoint.load(tmp_path / "step", **options)
