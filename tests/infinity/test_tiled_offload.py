"""Offload that tiles large layers on the way in, and gives them back on the way out."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import infinity
from infinity import TiledLinear
from infinity.commands.foreign.exporting import check_exportable
from infinity.parameters.records import records_of
from infinity.tiling.layers import Tiling
from tests.support.models import is_in_tiles
from tests.support.proof import by_turns, matrix
from tests.support.training import same_values, values_of

pytestmark = pytest.mark.usefixtures("one_thread")


BOUND = 256 * 1024
AMPLE = "1GiB"
SMALL = "16MiB"


class Net(nn.Module):
    """A table whose weight is tied to the head, and three large layers, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 256)
        self.up = nn.Linear(256, 900)
        self.middle = nn.Linear(900, 900)
        self.down = nn.Linear(900, 256, bias=False)
        self.head = nn.Linear(256, 300, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        y = F.gelu(self.middle(F.gelu(self.up(x))))
        y = y + F.gelu(self.middle(y))
        return self.head(x + self.down(y))


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, offloaded: infinity.OffloadedModel, steps: range) -> None:
    for step in steps:
        model(tokens(step)).float().square().mean().backward()
        offloaded.step()


@pytest.mark.parametrize("dtype", matrix([torch.float32, torch.bfloat16], usual=[torch.bfloat16]))
def test_tiled_model_has_the_same_bits_under_every_budget(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    results = []
    for budget in (AMPLE, SMALL):
        model = make_net(dtype)
        with infinity.offload(
            model, tmp_path, host_memory=budget, max_parameter_bytes=BOUND
        ) as offloaded:
            train(model, offloaded, range(4))
            with offloaded.gathered():
                results.append(values_of(model))
            on_nvme = offloaded.report().planned_bytes["state on nvme"]
        assert (on_nvme > 0) == (budget == SMALL)
    assert same_values(*results)


def test_tiled_model_in_offload_is_that_of_plain_modules(tmp_path: Path) -> None:
    """The same tiles, made by hand, in memory, without the library's offload in between."""
    model = make_net()
    with infinity.offload(
        model, tmp_path, host_memory=SMALL, max_parameter_bytes=BOUND
    ) as offloaded:
        loss = model(tokens(0)).square().mean()
        loss.backward()
        found = {n: offloaded.gradient(p) for n, p in model.named_parameters()}
    plain = make_net()
    with Tiling(plain, records_of(plain, None), BOUND, None):
        assert is_in_tiles(plain.up)
        plain_loss = plain(tokens(0)).square().mean()
        plain_loss.backward()
        assert torch.equal(loss, plain_loss)
        assert found.keys() == dict(plain.named_parameters()).keys()
        for name, parameter in plain.named_parameters():
            gradient = found[name]
            assert gradient is not None
            assert parameter.grad is not None
            assert torch.equal(gradient, parameter.grad)


def test_no_tile_exceeds_the_bound_and_the_least_budget_falls(tmp_path: Path) -> None:
    model = make_net()
    least = {}
    for bound in (None, BOUND):
        with pytest.raises(infinity.BudgetError) as refused:
            infinity.offload(
                model, tmp_path, host_memory="1MiB", max_parameter_bytes=bound
            ).__enter__()
        least[bound] = refused.value.least_host_bytes
        planned = infinity.plan(model, host_memory="1MiB", max_parameter_bytes=bound)
        assert planned.least_host_bytes == least[bound]
    assert least[BOUND] < least[None]
    with infinity.offload(model, tmp_path, host_memory=least[BOUND], max_parameter_bytes=BOUND):
        largest = {name: p.numel() * 4 for name, p in model.named_parameters()}
        assert [name for name, nbytes in largest.items() if nbytes > BOUND] == []
    assert infinity.plan(10**9, max_parameter_bytes="1MiB").num_parameters == 10**9


def test_leaving_gives_the_same_layers_with_the_same_parameters_trained(tmp_path: Path) -> None:
    model = make_net()
    layers, parameters = list(model.modules()), dict(model.named_parameters())
    before = values_of(model)
    with infinity.offload(
        model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND
    ) as offloaded:
        assert is_in_tiles(model.up)
        assert is_in_tiles(model.middle)
        assert list(map(id, model.modules()))[:2] == list(map(id, layers))[:2]
        assert model.up.weight is parameters["up.weight"]
        assert isinstance(model.up.weight, nn.Parameter)
        train(model, offloaded, range(2))
        model.eval()
        with offloaded.gathered():
            trained = model.middle.weight.detach().clone()
            assert model.up.bias is not None
    assert list(map(id, model.modules())) == list(map(id, layers))
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    assert torch.equal(model.middle.weight, trained)
    assert not any(torch.equal(after[name], before[name]) for name in after)
    assert not any(module.training for module in model.modules())
    model(tokens(0)).sum().backward()


def test_failing_to_enter_leaves_the_model_where_it_was(tmp_path: Path) -> None:
    model = make_net()
    before = values_of(model)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    layers = list(map(id, model.modules()))
    with (
        pytest.raises(infinity.BudgetError),
        infinity.offload(model, tmp_path, host_memory="1MiB", max_parameter_bytes=BOUND),
    ):
        pass
    with (
        pytest.raises(FileNotFoundError),
        infinity.offload(model, tmp_path / "nowhere", host_memory=SMALL, max_parameter_bytes=BOUND),
    ):
        pass
    assert list(map(id, model.modules())) == layers
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert same_values(values_of(model), before)
    model(tokens(0)).sum().backward()


def test_exception_in_the_block_gives_the_layers_back(tmp_path: Path) -> None:
    model = make_net()
    before = values_of(model)
    with (
        pytest.raises(KeyError),
        infinity.offload(model, tmp_path, host_memory=SMALL, max_parameter_bytes=BOUND),
    ):
        raise KeyError
    assert same_values(values_of(model), before)


def test_model_on_meta_is_initialised_as_without_tiles_and_stays_on_meta(tmp_path: Path) -> None:
    expected = {}
    for bound in (None, BOUND):
        with torch.device("meta"):
            model = Net()
        torch.manual_seed(3)
        with infinity.offload(
            model, tmp_path, host_memory=SMALL, max_parameter_bytes=bound
        ) as offloaded:
            offloaded.export(tmp_path / f"export-{bound}")
        assert all(p.is_meta for p in model.parameters())
        assert type(model.up) is nn.Linear
        expected[bound] = load_file(tmp_path / f"export-{bound}" / "model.safetensors")
    assert same_values(expected[None], expected[BOUND])


@pytest.mark.parametrize("on_meta", [False, True])
def test_weights_are_taken_from_files_of_whole_layers(on_meta: bool, tmp_path: Path) -> None:
    source = make_net()
    save_file(
        {k: v.clone() for k, v in source.state_dict().items() if k != "head.weight"},
        tmp_path / "weights.safetensors",
    )
    with torch.device("meta" if on_meta else "cpu"):
        model = Net()
    with infinity.offload(
        model,
        tmp_path,
        host_memory=SMALL,
        max_parameter_bytes=BOUND,
        weights=tmp_path / "weights.safetensors",
    ) as offloaded:
        assert torch.equal(model(tokens(0)), tile_by_hand(source)(tokens(0)))
        offloaded.export(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert same_values(exported, values_of(make_net()))


def tile_by_hand(model: Net) -> Net:
    for name in ("up", "middle", "down"):
        setattr(model, name, TiledLinear.from_linear(getattr(model, name), BOUND))
    return model


@pytest.mark.parametrize(
    ("bounds", "dtypes"),
    by_turns(
        [(BOUND, None), (None, BOUND), (BOUND, 2 * BOUND)],
        [(None, None), (torch.bfloat16, torch.float32)],
    ),
)
def test_checkpoints_load_under_other_tiles(
    bounds: tuple[int | None, int | None], dtypes: Any, tmp_path: Path
) -> None:
    nvme, path = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()
    model = make_net()
    with infinity.offload(
        model, nvme, host_memory=SMALL, max_parameter_bytes=bounds[0], compute_dtype=dtypes[0]
    ) as offloaded:
        train(model, offloaded, range(2))
        offloaded.save(path)
    expected = values_of(model)
    model = make_net()
    with infinity.offload(
        model, nvme, host_memory=SMALL, max_parameter_bytes=bounds[1], compute_dtype=dtypes[1]
    ) as offloaded:
        train(model, offloaded, range(5, 6))
        offloaded.load(path)
        assert set(offloaded._training.steps) == {2}
        offloaded.save(tmp_path / "again")
    assert same_values(values_of(model), expected)
    if dtypes[0] is dtypes[1]:
        import checkpoint

        first, second = (
            checkpoint.load(folder, only=["model.*", "optimizer.*"])
            for folder in (path, tmp_path / "again")
        )
        for part, other in ((first["model"], second["model"]), *components(first, second)):
            assert same_values(part, other)


def components(first: Any, second: Any) -> list[tuple[Any, Any]]:
    assert first["optimizer"].keys() == second["optimizer"].keys()
    return [(first["optimizer"][k], second["optimizer"][k]) for k in first["optimizer"]]


def test_checkpoint_of_another_optimizer_under_other_tiles_is_refused(tmp_path: Path) -> None:
    nvme, path = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(params)

    model = make_net()
    with infinity.offload(
        model, nvme, optimizer=make, host_memory=AMPLE, max_parameter_bytes=BOUND
    ) as offloaded:
        train(model, offloaded, range(1))
        offloaded.save(path)
        offloaded.load(path)
    with (
        infinity.offload(model, nvme, optimizer=make, host_memory=AMPLE) as offloaded,
        pytest.raises(ValueError, match="tiled in another way"),
    ):
        offloaded.load(path)


@pytest.mark.parametrize("optimizer", [infinity.AdamW(), torch.optim.Adam], ids=["ours", "torch"])
@pytest.mark.parametrize("way", ["checkpoint", "snapshot"])
def test_tiles_that_took_other_numbers_of_steps_go_on_as_they_were(
    way: str, optimizer: Any, tmp_path: Path
) -> None:
    nvme, path, model = tmp_path / "nvme", tmp_path / "saved", make_net()
    layers: Any = model
    nvme.mkdir()
    options: Any = {"optimizer": optimizer, "host_memory": AMPLE, "max_parameter_bytes": BOUND}
    with infinity.offload(model, nvme, **options) as offloaded:
        for step in range(2):
            model(tokens(step)).square().mean().backward()
            layers.middle.weight.tiles[step].grad = layers.up.weight.tiles[0].grad = None
            offloaded.step()
        if way == "snapshot":
            offloaded.snapshot("last")
        offloaded.save(path)
        train(model, offloaded, range(2, 4))
    other = make_net()
    with infinity.offload(other, nvme, **options) as offloaded:
        if way == "snapshot":
            offloaded.restore("last")
        else:
            offloaded.load(path)
        train(other, offloaded, range(2, 4))
    assert same_values(values_of(other), values_of(model))
    with infinity.offload(other, nvme, **{**options, "max_parameter_bytes": None}) as offloaded:
        with pytest.raises(ValueError, match=r"up\.weight.* different numbers"):
            offloaded.restore("last") if way == "snapshot" else offloaded.load(path)
        train(other, offloaded, range(4, 5))
    with pytest.raises(ValueError, match=r"one for a parameter|not of AdamW"):
        check_exportable(path, tmp_path / "optimizer.pt")
    with infinity.offload(other, nvme, optimizer=None, weights=path, host_memory=AMPLE):
        pass


def test_what_cannot_be_tiled_stays_whole_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Twice(nn.Linear):
        pass

    model: Any = nn.Sequential(
        nn.Linear(300, 300), Twice(300, 300), nn.Linear(300, 300), nn.Bilinear(1, 300, 300)
    )
    model[2].weight.register_hook(lambda _: None)
    model[3].weight = nn.Parameter(torch.ones(300, 1, 300))
    model.append(Twice(300, 300))
    model[4].weight = model[0].weight
    with (
        caplog.at_level(logging.WARNING),
        infinity.offload(model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND),
    ):
        assert not any(map(is_in_tiles, model.modules()))
    (record,) = caplog.records
    text = record.getMessage()
    other = "a Twice, which is none of nn.Linear, nn.Embedding and nn.MultiheadAttention"
    assert f"0.weight (351.56 KiB, tied: 0 and 4 share it, and 4 is {other})" in text
    assert f"1.weight (351.56 KiB, of {other})" in text
    assert "3.weight (351.56 KiB, of a Bilinear" in text
    assert "2.weight (351.56 KiB, a parameter with hooks)" in text


def test_layer_reached_by_an_old_reference_is_in_tiles(tmp_path: Path) -> None:
    model: Any = make_net()
    old, x = model.up, torch.ones(1, 256)
    before = old(x)
    with infinity.offload(model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND):
        by_hand: Any = tile_by_hand(make_net())
        assert torch.equal(old(x), by_hand.up(x))
    assert torch.equal(old(x), before)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (0, "not a positive number of bytes"),
        ("much", "is not a size"),
        (1000, "max_parameter_bytes=1000 is less than 262144"),
    ],
)
def test_bounds_that_cannot_be_are_refused(bound: Any, message: str, tmp_path: Path) -> None:
    model = make_net()
    with (
        pytest.raises(ValueError, match=message),
        infinity.offload(model, tmp_path, host_memory=AMPLE, max_parameter_bytes=bound),
    ):
        pass


def test_row_larger_than_the_bound_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(100_000, 3))
    with (
        pytest.raises(ValueError, match="less than one row of the weight, 400000 bytes"),
        infinity.offload(model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND),
    ):
        pass
    assert type(model[0]) is nn.Linear


def test_tiles_of_a_tiled_linear_are_not_cut_again(
    nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(infinity.TiledLinear(272, 272, tiles=1), nn.Linear(272, 16))
    with infinity.offload(model, nvme, max_parameter_bytes=270_000) as offloaded:
        model(torch.ones(2, 272)).sum().backward()
        offloaded.step()
        offloaded.save(tmp_path / "saved")
    assert "0.tiles.0.weight (289.00 KiB, a tile of a TiledLinear, which is cut once" in caplog.text
