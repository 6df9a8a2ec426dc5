"""Parts of a weight in tiles: rows, chunks and matrices of it, computed with alone, or kept."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import infinity
from aio import AioError
from swap.tiered import TieredState
from tests.support.models import seeded
from tests.support.training import WHOLE, same_values

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, BOUND = 64, 1 << 18
Part = Callable[[Any], torch.Tensor]
PARTS: dict[str, Part] = {
    "chunk": lambda weight: weight.chunk(4)[1],
    "split": lambda weight: weight.split(1024)[-1],
    "rows": lambda weight: weight[1024:2048],
    "row": lambda weight: weight[7:8],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, WIDTH)
        self.wide = nn.Linear(WIDTH, 4096)

    @property
    def weights(self) -> list[Any]:
        return [self.table.weight, self.wide.weight]


def _stack_of_experts(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_local_experts=8,
        experts_implementation=kind,
    )
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.05)
    return nn.Sequential(experts)


def _trained(
    model: Any, nvme: Path, loss_of: Callable[[Any], torch.Tensor], bound: int | None
) -> dict[str, torch.Tensor]:
    """After steps with a decay, which passes over what has no gradient."""
    optimizer = infinity.AdamW(lr=1e-2, weight_decay=0.5)
    options: Any = {"host_memory": WHOLE, "optimizer": optimizer, "max_parameter_bytes": bound}
    with infinity.offload(model, nvme, **options) as offloaded:
        for _ in range(2):
            offloaded.backward(loss_of(model))
            offloaded.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", PARTS)
def test_what_a_part_leaves_out_has_gradients_of_zeros(name: str, nvme: Path) -> None:
    def loss_of(model: Net) -> torch.Tensor:
        x = torch.arange(3.0 * WIDTH).view(3, WIDTH) / WIDTH
        parts = [PARTS[name](weight) for weight in model.weights]
        return torch.stack([F.linear(x, part).square().mean() for part in parts]).sum()

    runs = [_trained(seeded(Net), nvme, loss_of, bound) for bound in (None, BOUND)]
    assert same_values(*runs)


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_matrix_of_a_stack_outside_of_its_module_leaves_the_others_zeros(
    kind: str, nvme: Path
) -> None:
    def loss_of(model: Any) -> torch.Tensor:
        matrix = model[0].gate_up_proj[5]
        return F.linear(torch.ones(3, WIDTH), matrix).square().mean()

    models = [seeded(lambda: _stack_of_experts(kind)) for _ in range(2)]
    runs = [
        _trained(model, nvme, loss_of, bound)
        for model, bound in zip(models, (None, BOUND), strict=True)
    ]
    assert same_values(*runs)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_parts_keep_their_values_where_other_data_is_assigned(
    name: str, history: bool, nvme: Path
) -> None:
    model = seeded(Net)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        for weight in model.weights:
            with offloaded.gathered([weight], modify=True), torch.set_grad_enabled(history):
                part = PARTS[name](weight)
                before = part.detach().clone()
                weight.data = torch.zeros(weight.shape)
                assert torch.equal(part.detach(), before)
            with offloaded.gathered([weight]):
                assert not weight.detach().any()


def test_data_made_in_inference_mode_is_taken_as_any_other(nvme: Path) -> None:
    model = seeded(Net)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        for weight in model.weights:
            with offloaded.gathered([weight], modify=True):
                with torch.inference_mode():
                    weight.data = torch.full(weight.shape, 2.0)
                assert weight.sum() == 2 * weight.numel()
            with offloaded.gathered([weight], modify=True), torch.no_grad():
                weight.mul_(2)
            F.linear(torch.ones(3, WIDTH), weight).mean().backward()
            offloaded.step()
            with offloaded.gathered([weight]):
                assert weight.shape == (4096, WIDTH)
                assert torch.allclose(weight, torch.tensor(4.0), atol=0.1)


def test_values_with_history_are_written_into_data(nvme: Path) -> None:
    """As adapters are merged, and weights of another model copied: autograd refused the view."""
    model, plain = seeded(Net), seeded(Net)
    values = nn.Parameter(torch.rand(4096, WIDTH))

    def write(net: Net) -> None:
        for weight in net.weights:
            weight.data.copy_(values)
            weight.data += values
            weight.data[3:9].mul_(values[3:9])
            weight.data.t().sub_(values.t())
        net.wide.state_dict()["weight"].add_(values)

    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        with offloaded.gathered(modify=True):
            write(model)
            with pytest.raises(RuntimeError):  # of what is trained: as torch says of a leaf
                model.wide.weight.add_(1)
        write(plain)
        with offloaded.gathered():
            assert same_values(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_change_of_which_one_tile_cannot_be_written_is_kept_of_none(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles before it had it: half of the weight was of after."""
    model, plain = seeded(Net), seeded(Net)
    fill, left = TieredState.fill, [1]

    def fill_or_fail(state: TieredState, index: int, values: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise AioError("full", errno=errno.ENOSPC, filename="state.swap")
        fill(state, index, values)

    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        with monkeypatch.context() as patched:
            patched.setattr(TieredState, "fill", fill_or_fail)
            with (
                pytest.raises(AioError, match="full"),
                offloaded.gathered([model.wide.weight], modify=True),
            ):
                model.wide.weight.data.fill_(1)
        with offloaded.gathered():
            assert same_values(dict(model.state_dict()), dict(plain.state_dict()))
        with offloaded.gathered([model.wide.weight], modify=True):
            model.wide.weight.data.fill_(1)
        with offloaded.gathered():
            assert bool((model.wide.weight == 1).all())


def _forward_derivative(layer: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(torch.ones(3, WIDTH), torch.full((3, WIDTH), 2.0)))
        return torch.stack(forward_ad.unpack_dual(y))


def _nested(layer: nn.Module) -> torch.Tensor:
    rows = torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.zeros(3, WIDTH)])
    return torch.cat([*layer(rows).unbind()])


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.torch.jit")
@pytest.mark.parametrize(
    "use",
    [
        _forward_derivative,
        _nested,
        lambda layer: layer(torch.ones(WIDTH)),
        lambda layer: layer(torch.ones(0, WIDTH)),
        lambda layer: layer(torch.eye(WIDTH).to_sparse()),
    ],
)
def test_layers_take_what_they_take_without_tiles(
    use: Callable[[nn.Module], torch.Tensor], nvme: Path
) -> None:
    found = []
    for bound in (None, BOUND):
        model = seeded(Net)
        with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=bound):
            found.append(use(model.wide).detach().clone())
    assert torch.equal(*found)


def _last_of_tiles(weight: Any) -> None:
    weight.tiles[-1].mul_(2)


def _last_rows(weight: Any) -> None:
    weight[-5:].mul_(2)


@pytest.mark.parametrize("change", [_last_of_tiles, _last_rows])
@pytest.mark.parametrize("frozen", [False, True])
def test_backward_through_a_whole_after_a_change_of_some_rows_is_refused(
    change: Callable[[Any], None], frozen: bool, nvme: Path
) -> None:
    model = seeded(Net).requires_grad_(not frozen)
    with infinity.offload(
        model, nvme, host_memory=WHOLE, optimizer=None, max_parameter_bytes=BOUND
    ) as offloaded:
        for weight in model.weights:
            x = torch.ones(3, WIDTH, requires_grad=True)
            with offloaded.gathered([weight], modify=True):
                loss = (x @ weight.T).sum()
                with torch.no_grad():
                    change(weight)
                with pytest.raises(RuntimeError, match="changed in place"):
                    torch.autograd.grad(loss, x)


def test_backward_through_one_matrix_after_a_change_of_the_whole_is_refused(nvme: Path) -> None:
    """By whatever the change was counted."""
    model = seeded(lambda: _stack_of_experts("eager"))
    x, chosen = torch.ones(2, WIDTH, requires_grad=True), torch.tensor([[6], [7]])
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        weight = model[0].gate_up_proj
        loss = model[0](x, chosen, torch.ones(2, 1)).sum()
        with offloaded.gathered([weight], modify=True), torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()
        with offloaded.gathered([weight], modify=True):
            loss = model[0](x, chosen, torch.ones(2, 1)).sum()
            with torch.no_grad():
                weight[7].mul_(2)
            with pytest.raises(RuntimeError, match="changed in place"):
                loss.backward()


def test_backward_after_gathered_without_a_change_works(nvme: Path) -> None:
    model = seeded(Net)
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        for weight in model.weights:
            loss = F.linear(torch.ones(3, WIDTH), weight).sum()
            with offloaded.gathered([weight], modify=True):
                assert weight.shape == (4096, WIDTH)
            loss.backward()
