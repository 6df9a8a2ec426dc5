"""A run that begins with the weights of a saved run begins with its float32 masters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import checkpoint
import infinity
from checkpoint.loading.opened import OpenCheckpoint
from tests.support.training import same_values, values_of

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 600
"""Of a weight that is read in more than one piece."""
AMPLE = "64MiB"
STILL = infinity.AdamW(lr=0.0, weight_decay=0.0)
HALF_WAY = 1 + 2**-8
"""In the middle between two numbers of bfloat16: torch rounds it down, halves are rounded up."""
HALVES = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.nothing = nn.Parameter(torch.empty(0))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.large(self.frozen(x)))
        return y


def net(seed: int = 0, *, trains: bool = True) -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        model.norm.weight[:] = HALF_WAY
    if not trains:
        model.requires_grad_(False)
    return model


def trained(path: Path, nvme: Path, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Float32 after a run in ``dtype``, of which a checkpoint is at ``path``."""
    model = net()
    with infinity.offload(
        model, nvme, compute_dtype=dtype, host_memory=AMPLE, **options
    ) as offloaded:
        step(model, offloaded)
        offloaded.save(path)
    return model


def step(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
    offloaded.backward(model(torch.ones(2, 8)).float().square().mean())
    offloaded.step()


def exact_weights(path: Path) -> dict[str, torch.Tensor]:
    """Those that were computed with."""
    found: dict[str, torch.Tensor] = checkpoint.load(path, only=["model.*"])["model"]
    return found


@pytest.mark.parametrize("saved", HALVES)
@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_weights_of_a_saved_run_are_its_masters(
    nvme: Path, tmp_path: Path, saved: torch.dtype, dtype: torch.dtype | None
) -> None:
    expected = values_of(trained(tmp_path / "run", nvme, saved))
    weights = exact_weights(tmp_path / "run")
    assert not torch.equal(expected["large.weight"], weights["large.weight"].float())
    model = net(1)
    options: dict[str, Any] = {"optimizer": STILL, "compute_dtype": dtype, "host_memory": AMPLE}
    with infinity.offload(model, nvme, weights=tmp_path / "run", **options) as offloaded:
        if dtype == saved:
            with offloaded.gathered():
                assert same_values({n: p.detach() for n, p in model.named_parameters()}, weights)
        step(model, offloaded)
    found = values_of(model)
    if dtype is not None:  # frozen weights are rounded, as ever
        expected |= {name: v.to(dtype).float() for name, v in expected.items() if "frozen" in name}
    assert same_values(found, expected)


@pytest.mark.parametrize("saved", HALVES)
def test_what_is_frozen_begins_with_the_weights_that_were_computed_with(
    nvme: Path, tmp_path: Path, saved: torch.dtype
) -> None:
    """Or with the masters, where it is kept in float32."""
    masters = values_of(trained(tmp_path / "run", nvme, saved))
    weights = {name: value.float() for name, value in exact_weights(tmp_path / "run").items()}
    for dtype, optimizer, expected in (
        (saved, STILL, weights),
        (saved, None, weights),
        (None, STILL, masters),
        (None, None, masters),
    ):
        model = net(1, trains=optimizer is None)
        with infinity.offload(
            model,
            nvme,
            weights=tmp_path / "run",
            optimizer=optimizer,
            compute_dtype=dtype,
            host_memory=AMPLE,
        ):
            pass
        assert same_values(values_of(model), expected)


@pytest.mark.parametrize("saved", HALVES)
@pytest.mark.parametrize("tiled", ["saved", "begun"])
def test_masters_of_a_weight_in_tiles_are_those_of_the_whole(
    nvme: Path, tmp_path: Path, saved: torch.dtype, tiled: str
) -> None:
    tiles = {"max_parameter_bytes": 300_000}
    model = trained(tmp_path / "run", nvme, saved, **(tiles if tiled == "saved" else {}))
    with torch.device("meta"):
        begun = Net()
    with infinity.offload(
        begun,
        nvme,
        weights=tmp_path / "run",
        optimizer=STILL,
        compute_dtype=saved,
        host_memory=AMPLE,
        **(tiles if tiled == "begun" else {}),  # type: ignore[arg-type]
    ) as offloaded:
        offloaded.save(tmp_path / "again")
    second = net(1)
    with infinity.offload(second, nvme, weights=tmp_path / "again", host_memory=AMPLE):
        pass
    assert same_values(values_of(second), values_of(model))


def test_masters_are_read_piece_by_piece(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", nvme, torch.bfloat16)
    pieces: list[int] = []
    read = OpenCheckpoint.read

    def noted(self: OpenCheckpoint, record: Any, start: int, out: memoryview) -> None:
        pieces.append(len(out))
        read(self, record, start, out)

    monkeypatch.setattr(OpenCheckpoint, "read", noted)
    with infinity.offload(net(1), nvme, weights=tmp_path / "run", host_memory=AMPLE):
        pass
    assert max(pieces) == 512 << 10 < WIDTH * WIDTH * 2


@pytest.mark.parametrize("saved", HALVES)
def test_masters_of_a_saved_run_can_be_exported(
    nvme: Path, tmp_path: Path, saved: torch.dtype
) -> None:
    expected = values_of(trained(tmp_path / "run", nvme, saved))
    with torch.device("meta"):
        model = Net()
    with infinity.offload(
        model, nvme, weights=tmp_path / "run", optimizer=None, host_memory=AMPLE
    ) as offloaded:
        files = offloaded.export(tmp_path / "exported")
    assert same_values(load_file(files[0]), expected)


def test_what_others_call_a_master_is_not_taken_for_one(nvme: Path, tmp_path: Path) -> None:
    model = nn.Linear(8, 8).half()
    state = model.state_dict()
    others = {name: torch.full_like(value, 7.0).float() for name, value in state.items()}
    checkpoint.save({"model": state, "optimizer": {"master": others}}, tmp_path / "others")
    found = nn.Linear(8, 8)
    with infinity.offload(found, nvme, weights=tmp_path / "others", host_memory=AMPLE):
        pass
    assert same_values(values_of(found), {name: value.float() for name, value in state.items()})


def test_weights_of_a_run_that_saved_what_was_trained_alone_are_refused(
    nvme: Path, tmp_path: Path
) -> None:
    with infinity.offload(
        net(), nvme, compute_dtype=torch.bfloat16, host_memory=AMPLE
    ) as offloaded:
        offloaded.save(tmp_path / "run", only_trainable=True)
    with pytest.raises(ValueError, match=r"missing: frozen\.weight, frozen\.bias"):
        infinity.offload(net(), nvme, weights=tmp_path / "run", host_memory=AMPLE).__enter__()


def test_names_of_one_weight_whose_masters_differ_are_refused(nvme: Path, tmp_path: Path) -> None:
    apart = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        for layer, value in zip(apart, (1.0, 1 + 2**-12), strict=True):
            layer.weight.fill_(value)  # type: ignore[operator]
    with infinity.offload(
        apart, nvme, compute_dtype=torch.bfloat16, host_memory=AMPLE
    ) as offloaded:
        offloaded.save(tmp_path / "run")
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0\.weight, 1\.weight are one tied parameter"):
        infinity.offload(tied, nvme, weights=tmp_path / "run", host_memory=AMPLE).__enter__()
