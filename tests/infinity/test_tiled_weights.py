"""What programs see in the place of a parameter that is in tiles, and what they do with it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.tiling.weight import TiledWeight
from tests.support.models import make_tied, seeded
from tests.support.training import WHOLE, least_budget, same_values, values_of

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1 << 18


TOKENS = torch.tensor([[1, 999, 5], [5, 0, 444]])


def loss(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).square().mean()
    return result


@pytest.fixture(params=["whole", "least"])
def budget(request: pytest.FixtureRequest, nvme: Path) -> int:
    return (
        WHOLE
        if request.param == "whole"
        else least_budget(make_tied, nvme, max_parameter_bytes=BOUND)
    )


@pytest.fixture
def block(nvme: Path, budget: int) -> Iterator[tuple[Any, infinity.OffloadedModel]]:
    model = seeded(make_tied)
    options: Any = {"host_memory": budget, "max_parameter_bytes": BOUND}
    with infinity.offload(model, nvme, **options) as offloaded:
        yield model, offloaded


Block = tuple[Any, infinity.OffloadedModel]


def test_weight_in_tiles_looks_like_the_whole(block: Block) -> None:
    model, _ = block
    weight = model[0].weight
    assert isinstance(weight, TiledWeight)
    assert weight is model[2].weight
    assert (weight.shape, weight.dtype, len(weight)) == ((1000, 300), torch.float32, 1000)
    assert weight.device == torch.device("cpu")
    assert weight.requires_grad
    assert "tiles=5" in repr(weight)
    assert sum(p.numel() for p in model.parameters()) == 300 * 1000 + 300 * 301 + 1000


def test_values_and_gradients_of_the_whole_can_be_read(block: Block) -> None:
    model, offloaded = block
    plain = seeded(make_tied)
    loss(model).backward()
    loss(plain).backward()
    gradient, expected = model[0].weight.grad, plain[0].weight.grad
    assert gradient.allclose(expected, atol=1e-6)
    assert torch.equal(offloaded.gradient(model[2].weight), gradient)  # type: ignore[arg-type]
    assert torch.equal(model[0].weight.detach(), plain[0].weight)
    assert torch.equal(copy.deepcopy(model[0].weight), plain[0].weight)
    model[0].weight.grad = None
    assert model[0].weight.grad is None
    assert all(tile.grad is None for tile in model[0].weight.tiles)
    model[0].weight.grad = expected
    assert torch.equal(model[0].weight.grad, expected)


def test_values_are_changed_inside_gathered_and_nowhere_else(block: Block) -> None:
    model, offloaded = block
    with offloaded.gathered([model[2].weight], modify=True), torch.no_grad():
        model[0].weight[3] = 7.0
        model[0].weight.data[4].fill_(8.0)
        model[2].weight.data = model[0].weight + 0.0
        model[2].weight.data *= 2
        model[0].weight.data[999:].copy_(torch.ones(1, 300))
    with offloaded.gathered([model[2].weight]):
        rows = model[0].weight
        assert rows[3].eq(14).all()
        assert rows[4].eq(16).all()
        assert rows[999].eq(1).all()
    assert model(TOKENS).isfinite().all()
    with torch.no_grad():
        model[0].weight[3] = 1.0
    with pytest.raises(RuntimeError, match=r"0\.tiles\.\d\.weight.* was changed in place"):
        model(TOKENS)
    with pytest.raises(RuntimeError, match=r"0\.weight, which is in tiles, can be replaced"):
        model[0].weight.data = torch.zeros(1000, 300)


def test_one_tile_is_changed_inside_gathered_without_the_others(block: Block) -> None:
    model, offloaded = block
    for tile in (model[0].weight.tiles[1], model[1].tiles[1].weight):
        with offloaded.gathered([tile], modify=True), torch.no_grad():
            tile.fill_(2.0)
        with offloaded.gathered():
            assert tile.eq(2).all()
    assert model(TOKENS).isfinite().all()


def test_state_dicts_have_the_names_and_values_of_the_whole(block: Block) -> None:
    model, offloaded = block
    other = seeded(make_tied, 5)
    with offloaded.gathered(modify=True):
        assert {*model.state_dict()} == {*other.state_dict()}
        assert same_values(model.state_dict(), seeded(make_tied).state_dict())
        assert model[2].load_state_dict(other[2].state_dict())
        model.load_state_dict(other.state_dict())
        model.state_dict()["0.weight"][7] = 3.0
        with pytest.raises(RuntimeError, match=r"size mismatch|Unexpected key"):
            model.load_state_dict(nn.Sequential(nn.Embedding(9, 300)).state_dict())
    with offloaded.gathered():
        values = {name: value.clone() for name, value in model.state_dict().items()}
    del values["2.weight"]
    assert values["0.weight"][7].eq(3).all()
    values["0.weight"][7] = other[0].weight.detach()[7]
    assert same_values(values, values_of(other))


def test_use_as_a_whole_works_and_is_warned_of_once(
    block: Block, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = block
    plain = seeded(make_tied)
    with caplog.at_level(logging.WARNING):
        ours = (model[0](TOKENS) @ model[0].weight.T).square().mean() + model[0].weight.sum()
        ours.backward()
        model[0].weight.norm()
    (plain[0](TOKENS) @ plain[0].weight.T).square().mean().add(plain[0].weight.sum()).backward()
    assert model[0].weight.grad.allclose(plain[0].weight.grad, atol=1e-6)
    assert sum("is used as a whole" in record.message for record in caplog.records) == 1


def test_functions_outside_of_the_model_take_it_by_tiles(
    block: Block, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = block
    plain = seeded(make_tied)
    hidden = torch.randn(2, 300)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(F.linear(hidden, model[0].weight), F.linear(hidden, plain[0].weight))
        found = F.embedding(torch.tensor([3, 999]), model[0].weight)
    assert torch.equal(found, plain[0].weight[[3, 999]])
    assert not caplog.records


def test_indices_beyond_the_table_are_refused(block: Block) -> None:
    model, _ = block
    for index in (1000, -1):
        with pytest.raises(IndexError, match=r"index out of range in self: 0\.weight has 1000"):
            model[0](torch.tensor([3, index]))
    assert model[0](torch.empty(0, dtype=torch.long)).shape == (0, 300)


def test_gradients_of_gradients_are_those_of_the_whole(block: Block) -> None:
    model, _ = block
    plain = seeded(make_tied)
    found = []
    for one in (model, plain):
        x = torch.linspace(-1, 1, 300).requires_grad_()
        (first,) = torch.autograd.grad(one[2](x).pow(3).sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append((x.grad, one[0].weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    gradients = torch.autograd.grad(loss(model), [*model.parameters()])
    theirs = torch.autograd.grad(loss(plain), plain[0].weight)[0]
    assert torch.cat([g for g in gradients if g.dim() == 2 and len(g) == 200]).allclose(
        theirs, atol=1e-6
    )


def test_backward_after_a_step_is_refused(block: Block) -> None:
    model, offloaded = block
    old = model[2](torch.ones(2, 300, requires_grad=True)).sum()
    loss(model).backward()
    offloaded.step()
    with pytest.raises(RuntimeError, match="call backward before step"):
        old.backward()


def test_freezing_and_training_rows_reaches_all_tiles(block: Block) -> None:
    model, _ = block
    model.requires_grad_(False)
    assert not model[0].weight.requires_grad
    model[0].weight.requires_grad_(True)
    assert all(tile.requires_grad for tile in model[0].weight.tiles)


@pytest.mark.parametrize("layer", [0, 2])
def test_each_module_of_a_tied_weight_has_its_tiles(block: Block, layer: int) -> None:
    """To freeze the head left the table that it shares in training, without a word."""
    model, offloaded = block
    plain = seeded(make_tied)
    first = plain[0].weight.detach()
    tiles = [*map(id, model[0].tiles.parameters())]
    assert [id(p) for p in model[layer].parameters() if p.dim() == 2] == tiles
    model[layer].requires_grad_(False)
    loss(model).backward()
    offloaded.step()
    with offloaded.gathered():
        assert torch.equal(model[layer].weight, first)
        state = {name: value.clone() for name, value in model[layer].state_dict().items()}
        assert state.keys() == plain[layer].state_dict().keys()
    with offloaded.gathered(modify=True):
        model[layer].load_state_dict({name: value + 1 for name, value in state.items()})
        assert torch.equal(model[2 - layer].weight, first + 1)


def test_what_a_parameter_came_with_outlasts_the_tiles(nvme: Path) -> None:
    model = seeded(make_tied)
    model[0].weight.note = "kept"
    model[2].register_buffer("scale", torch.ones(3))
    loss(model).backward()
    before = model[0].weight.grad
    order = list(model.state_dict())
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        assert model[0].weight.tiles[0].note == "kept"
        assert offloaded.gradient(model[0].weight) is not None
    assert model[0].weight.note == "kept"
    assert list(model.state_dict()) == order
    assert "tiles" not in model[0]._modules
    assert before is not None
    loss(model).backward()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_norm": 1.0}, "Embedding with max_norm"),
        ({"sparse": True}, "Embedding with sparse=True"),
    ],
)
def test_tables_that_tiles_cannot_serve_are_named(
    change: Any, reason: str, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Embedding(1000, 300, **change))
    with (
        caplog.at_level(logging.WARNING),
        infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND),
    ):
        assert [name for name, _ in model.named_parameters()] == ["0.weight"]
    assert f"0.weight (1.14 MiB, of an {reason}" in caplog.text


@pytest.mark.parametrize("value", [torch.ones(512, 256), nn.Parameter(torch.ones(512, 256)), None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bound", [256 << 10, None], ids=["tiled", "untiled"])
def test_weight_in_tiles_cannot_be_replaced(
    bound: int | None, bias: bool, value: torch.Tensor | None, nvme: Path
) -> None:
    """Nor removed, and is there as before then."""
    model: Any = nn.Sequential(nn.Linear(256, 512, bias=bias))
    options: dict[str, Any] = {"host_memory": "64MiB", "max_parameter_bytes": bound}
    with infinity.offload(model, nvme, **options) as offloaded:
        weight = model[0].weight
        is_plain = type(value) is torch.Tensor
        what = "cannot assign" if is_plain else r"0\.weight cannot be replaced while"
        with pytest.raises(TypeError if is_plain else RuntimeError, match=what):
            model[0].weight = value
        with pytest.raises(RuntimeError, match=r"0\.weight cannot be removed while"):
            del model[0].weight
        assert model[0].weight is weight
        model[0].weight = model[0].weight
        with offloaded.gathered([weight], modify=True), torch.no_grad():
            model[0].weight += 1
        assert model[0].weight is weight
        assert isinstance(weight, nn.Parameter)
        assert [name for name, _ in model.named_parameters()][-1] != "0.weight" or bound is None
        model(torch.ones(2, 256)).sum().backward()


class _Kept(torch.autograd.Function):
    """Keeps the weight past ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


FUNCTIONS = [_Kept.apply, _Saved.apply, lambda x, w: checkpoint(F.linear, x, w, use_reentrant=True)]


@pytest.mark.parametrize("layer", [1, 2], ids=["of a layer", "shared"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=["kept", "saved", "recomputed"])
def test_functions_of_autograd_take_a_copy_and_nothing_that_stands_for_tiles(
    block: Block, function: Any, layer: int
) -> None:
    model, offloaded = block
    plain = seeded(make_tied)
    x = torch.ones(2, 300, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\b\d\.weight is in tiles.*give it weight\.clone"):
        function(x, model[layer].weight).sum().backward()
    offloaded.optimizer.zero_grad()
    assert model[layer].weight.grad is None
    function(x, model[layer].weight.clone()).sum().backward()
    function(x, plain[layer].weight).sum().backward()
    assert torch.equal(model[layer].weight.grad, plain[layer].weight.grad)
    offloaded.step()
    loss(model).backward()


def test_functions_of_autograd_leave_nothing_in_parameters_after_the_block(nvme: Path) -> None:
    model = seeded(make_tied)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        model[1].requires_grad_(False)
        _Kept.apply(torch.ones(2, 300), model[1].weight).sum().backward()
        model[1].requires_grad_(True)
    assert model[1].weight.grad is None
    _Kept.apply(torch.ones(2, 300), model[1].weight).sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("thaw", ["model", "layer", "weight"])
@pytest.mark.parametrize("layer", [1, 2], ids=["of a layer", "shared"])
def test_functions_of_autograd_lose_no_gradient_of_what_came_frozen(
    nvme: Path, layer: int, thaw: str
) -> None:
    """It cannot be trained, and was left as it was without a word."""
    model = seeded(make_tied).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        _Kept.apply(torch.ones(2, 300, requires_grad=True), model[layer].weight).sum().backward()
        thawed = {"model": model, "layer": model[layer], "weight": model[layer].weight}[thaw]
        thawed.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"\b\d\.weight is in tiles.*give it weight\.clone"):
            _Kept.apply(torch.ones(2, 300), model[layer].weight).sum().backward()
    assert model[layer].weight.grad is None
    _Kept.apply(torch.ones(2, 300), model[layer].weight).sum().backward()
    assert model[layer].weight.grad is not None


@pytest.mark.parametrize("budget", ["whole"], indirect=True)
def test_vmap_takes_the_whole(block: Block) -> None:
    model, _ = block
    plain = seeded(make_tied)
    x = torch.ones(2, 300)
    for one in (model, plain):
        weight = one[2].weight
        torch.vmap(lambda row, weight=weight: F.linear(row, weight))(x).sum().backward()
        torch.vmap(lambda row, weight=weight: weight @ row)(x).sum().backward()
    assert model[2].weight.grad.allclose(plain[2].weight.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripts_take_a_copy_of_the_whole(block: Block) -> None:
    model, _ = block
    scripted: Any = torch.jit.script(_multiplied)
    with pytest.raises(RuntimeError, match=r"the weight of 0\.weight is in tiles"):
        scripted(torch.ones(2, 300), model[2].weight)
    copied = scripted(torch.ones(2, 300), model[2].weight.clone())
    assert torch.equal(copied, _multiplied(torch.ones(2, 300), seeded(make_tied)[2].weight))


def _multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()
