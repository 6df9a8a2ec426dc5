"""TiledLinear against nn.Linear: rows, bounds, sums, conversion, state dicts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from infinity import TiledLinear
from infinity.tiling.tiled_linear import rows_of, tiles_within
from tests.support.training import same_values, values_of

pytestmark = pytest.mark.usefixtures("one_thread")


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Values whose products and sums are exact in float32, so that no order of adding matters."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


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
    assert same_values(values_of(back), values_of(linear))
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
    assert same_values(values_of(tiled[0].to_linear()), values_of(linear))
    other = nn.Sequential(TiledLinear(30, 40, tiles=3))
    other.load_state_dict(tiled.state_dict())
    assert same_values(values_of(other), values_of(tiled))
    with pytest.raises(RuntimeError, match="Missing key"):
        tiled.load_state_dict(nn.Sequential(nn.Linear(30, 41)).state_dict())


def test_weight_is_differentiable() -> None:
    tiled = TiledLinear(3, 5, tiles=2)
    F.linear(torch.ones(1, 3), tiled.weight, tiled.bias).sum().backward()
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in tiled.parameters())
