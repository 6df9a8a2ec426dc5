"""TiledLinear against nn.Linear, and offload that tiles large layers on the way in."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import infinity
from infinity import TiledLinear
from infinity.tiling.tiled_linear import rows_of, tiles_within

BOUND = 256 * 1024
AMPLE = "1GiB"
SMALL = "16MiB"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models compute faster so, when tests share a machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Values whose products and sums are exact in float32, so that no order of adding matters."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


# The layer.


@pytest.mark.parametrize(("out_features", "tiles"), [(1, 1), (7, 3), (64, 64), (900, 7)])
def test_rows_cover_all_outputs_once_in_near_equal_parts(out_features: int, tiles: int) -> None:
    ranges = rows_of(out_features, tiles)
    assert [row for start, stop in ranges for row in range(start, stop)] == [*range(out_features)]
    sizes = {stop - start for start, stop in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("bound", [40, 41, 79, 80, 4000, 10**9])
def test_tiles_within_are_the_fewest_that_keep_the_bound(bound: int) -> None:
    tiles = tiles_within(97, 40, bound)
    assert max(stop - start for start, stop in rows_of(97, tiles)) * 40 <= bound
    assert tiles == 1 or -(-97 // (tiles - 1)) * 40 > bound


def test_bound_below_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="39 is less than one row of the weight, 40 bytes"):
        tiles_within(97, 40, 39)


@pytest.mark.parametrize("tiles", [0, 8])
def test_number_of_tiles_that_cannot_be_is_refused(tiles: int) -> None:
    with pytest.raises(ValueError, match=f"tiles={tiles} is not between 1 and out_features=7"):
        TiledLinear(3, 7, tiles=tiles)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tiles", [1, 3, 64])
def test_exact_sums_give_the_bits_of_linear_forward_and_backward(bias: bool, tiles: int) -> None:
    linear = nn.Linear(48, 65, bias)
    with torch.no_grad():
        for seed, parameter in enumerate(linear.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=seed))
    tiled = TiledLinear.cut(copy.deepcopy(linear), tiles)
    first = whole_numbers(2, 5, 48, seed=2).requires_grad_()
    second = first.detach().clone().requires_grad_()
    gradient = whole_numbers(2, 5, 65, seed=3)
    outputs = linear(first), tiled(second)
    for output in outputs:
        output.backward(gradient)
    assert torch.equal(*outputs)
    assert first.grad is not None
    assert second.grad is not None
    assert torch.equal(first.grad, second.grad)
    assert linear.weight.grad is not None
    grads = [tile.weight.grad for tile, _ in tiled.rows() if tile.weight.grad is not None]
    assert torch.equal(linear.weight.grad, torch.cat(grads))
    if bias:
        biases = [tile.bias.grad for tile, _ in tiled.rows() if tile.bias.grad is not None]
        assert linear.bias.grad is not None
        assert torch.equal(linear.bias.grad, torch.cat(biases))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_values_are_as_close_as_another_order_of_adding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(300, 500, dtype=dtype)
    tiled = TiledLinear.cut(linear, 7)
    first = torch.randn(9, 300, dtype=dtype, requires_grad=True)
    second = first.detach().clone().requires_grad_()
    linear(first).sum().backward()
    tiled(second).sum().backward()
    torch.testing.assert_close(tiled(second), linear(first))
    assert first.grad is not None
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (0.02, 0.05)
    torch.testing.assert_close(second.grad, first.grad, rtol=rtol, atol=atol)


def test_from_linear_shares_memory_and_to_linear_gives_the_values_back() -> None:
    linear = nn.Linear(30, 40).eval()
    linear.weight.requires_grad_(False)
    tiled = TiledLinear.from_linear(linear, 1000)
    assert len(tiled.tiles) == 5
    assert not tiled.training
    assert all(p.numel() * 4 <= 1000 for p in tiled.parameters())
    assert tiled.rows()[0][0].weight.data_ptr() == linear.weight.data_ptr()
    back = tiled.to_linear()
    assert type(back) is nn.Linear
    assert [p.requires_grad for p in back.parameters()] == [False, True]
    assert same(values(back), values(linear))
    assert back.weight.data_ptr() != linear.weight.data_ptr()
    assert "in_features=30, out_features=40, bias=True" in repr(tiled)


def test_from_linear_of_a_subclass_is_refused() -> None:
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(TypeError, match=r"is not nn\.Linear itself"):
        TiledLinear.from_linear(attention.out_proj, 100)


def test_load_state_dict_takes_that_of_the_whole_layer_and_its_own() -> None:
    linear = nn.Linear(30, 40)
    tiled = copy.deepcopy(nn.Sequential(TiledLinear(30, 40, tiles=3)))
    tiled.load_state_dict(nn.Sequential(linear).state_dict())
    assert isinstance(tiled[0], TiledLinear)
    assert same(values(tiled[0].to_linear()), values(linear))
    other = nn.Sequential(TiledLinear(30, 40, tiles=3))
    other.load_state_dict(tiled.state_dict())
    assert same(values(other), values(tiled))
    with pytest.raises(RuntimeError, match="Missing key"):
        tiled.load_state_dict(nn.Sequential(nn.Linear(30, 41)).state_dict())


def test_weight_is_differentiable() -> None:
    tiled = TiledLinear(3, 5, tiles=2)
    F.linear(torch.ones(1, 3), tiled.weight, tiled.bias).sum().backward()
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in tiled.parameters())


# Within offload.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
                results.append(values(model))
            on_nvme = offloaded.report().planned_bytes["state on nvme"]
        assert (on_nvme > 0) == (budget == SMALL)
    assert same(*results)


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
    for name in ("up", "middle", "down"):
        setattr(plain, name, TiledLinear.from_linear(getattr(plain, name), BOUND))
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
        assert [name for name, nbytes in largest.items() if nbytes > BOUND] == ["table.weight"]
    assert infinity.plan(10**9, max_parameter_bytes="1MiB").num_parameters == 10**9


def test_leaving_gives_the_same_layers_with_the_same_parameters_trained(tmp_path: Path) -> None:
    model = make_net()
    layers, parameters = list(model.modules()), dict(model.named_parameters())
    before = values(model)
    with infinity.offload(
        model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND
    ) as offloaded:
        assert isinstance(model.up, TiledLinear)
        assert isinstance(model.middle, TiledLinear)
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
    before = values(model)
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
    assert same(values(model), before)
    model(tokens(0)).sum().backward()


def test_exception_in_the_block_gives_the_layers_back(tmp_path: Path) -> None:
    model = make_net()
    before = values(model)
    with (
        pytest.raises(KeyError),
        infinity.offload(model, tmp_path, host_memory=SMALL, max_parameter_bytes=BOUND),
    ):
        raise KeyError
    assert same(values(model), before)


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
    assert same(expected[None], expected[BOUND])


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
    assert same(exported, values(make_net()))


def tile_by_hand(model: Net) -> Net:
    for name in ("up", "middle", "down"):
        setattr(model, name, TiledLinear.from_linear(getattr(model, name), BOUND))
    return model


@pytest.mark.parametrize("bounds", [(BOUND, None), (None, BOUND), (BOUND, 2 * BOUND)])
@pytest.mark.parametrize("dtypes", [(None, None), (torch.bfloat16, torch.float32)])
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
    expected = values(model)
    model = make_net()
    with infinity.offload(
        model, nvme, host_memory=SMALL, max_parameter_bytes=bounds[1], compute_dtype=dtypes[1]
    ) as offloaded:
        train(model, offloaded, range(5, 6))
        offloaded.load(path)
        assert set(offloaded.steps) == {2}
        offloaded.save(tmp_path / "again")
    assert same(values(model), expected)
    if dtypes[0] is dtypes[1]:
        import checkpoint

        first, second = (
            checkpoint.load(folder, only=["model.*", "optimizer.*"])
            for folder in (path, tmp_path / "again")
        )
        for part, other in ((first["model"], second["model"]), *planes(first, second)):
            assert same(part, other)


def planes(first: Any, second: Any) -> list[tuple[Any, Any]]:
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


def test_what_cannot_be_tiled_stays_whole_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Twice(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(300, 300), Twice(300, 300), nn.Linear(300, 300), nn.Linear(300, 300)
    )
    model[2].register_forward_hook(lambda *_: None)
    model[3].weight = model[0].weight
    with (
        caplog.at_level(logging.WARNING),
        infinity.offload(model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND),
    ):
        assert not any(isinstance(module, TiledLinear) for module in model.modules())
    (record,) = caplog.records
    text = record.getMessage()
    assert "0.weight (351.56 KiB, tied: 0 and 3 share it)" in text
    assert "1.weight (351.56 KiB, of a Twice, which is not nn.Linear itself)" in text
    assert "2.weight (351.56 KiB, of a layer with hooks or a forward of its own)" in text


def test_layer_reached_by_an_old_reference_says_so(tmp_path: Path) -> None:
    model = make_net()
    old = model.up
    with (
        infinity.offload(model, tmp_path, host_memory=AMPLE, max_parameter_bytes=BOUND),
        pytest.raises(RuntimeError, match="up is a TiledLinear while the model is offloaded"),
    ):
        old(torch.ones(1, 256))
    assert old(torch.ones(1, 256)).shape == (1, 900)


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
