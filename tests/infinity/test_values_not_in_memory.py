"""Weights and gradients whose memory is not their values train as they do in plain PyTorch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from tests.support.training import same_bits

LR = 0.125


def _through_imaginary(weight: torch.Tensor) -> torch.Tensor:
    """The gradient of one element is a negative view."""
    values = torch.complex(torch.ones_like(weight), weight)
    return (values.conj() * (1 + 1j)).real.sum()


def _through_sign(weight: torch.Tensor) -> torch.Tensor:
    """The gradient is a ZeroTensor."""
    return torch.sgn(weight).sum()


def _negative_weight(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.complex(torch.ones(shape), torch.full(shape, 1.5)).conj().imag


CASES = [
    pytest.param(_through_imaginary, (1,), id="negative"),
    pytest.param(_through_imaginary, (), id="negative-scalar"),
    pytest.param(_through_sign, (96, 64), id="zero"),
]


@pytest.mark.parametrize(("loss", "shape"), CASES)
def test_adamw_steps_by_the_values_of_a_gradient(
    loss: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], nvme: Path
) -> None:
    ours, theirs = (nn.Parameter(torch.full(shape, 0.5)) for _ in range(2))
    plain = torch.optim.AdamW([theirs], lr=LR)
    with infinity.OffloadedAdamW([ours], lr=LR, nvme=nvme, host_memory="64MiB") as offloaded:
        for _ in range(3):
            for weight, optimizer in ((ours, offloaded), (theirs, plain)):
                optimizer.zero_grad()
                loss(weight).backward()
                optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("dtype"), [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_steps_weights_that_are_negative_views(dtype: torch.dtype, tmp_path: Path) -> None:
    shape = (700, 500)  # more than is copied at once
    values = torch.randn(shape).to(dtype)
    ours = nn.Parameter(torch._neg_view(-values))
    theirs = nn.Parameter(values.clone())
    memory = ours.untyped_storage()._cdata
    for each, folder in ((ours, tmp_path / "a"), (theirs, tmp_path / "b")):
        folder.mkdir()
        with infinity.OffloadedAdamW([each], lr=LR, nvme=folder, host_memory="64MiB") as optimizer:
            for step in range(2):
                gradient = torch.full(shape, 0.5 + step).to(dtype)
                each.grad = torch._neg_view(-gradient) if each is ours else gradient
                optimizer.step()
                saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
    assert same_bits(ours.detach().clone(), theirs.detach())
    assert ours.is_neg()
    assert ours.untyped_storage()._cdata == memory


def test_adamw_loads_moments_that_are_not_in_memory(nvme: Path) -> None:
    weight = nn.Parameter(torch.ones(8))
    with infinity.OffloadedAdamW([weight], lr=LR, nvme=nvme, host_memory="64MiB") as optimizer:
        weight.grad = torch.ones(8)
        optimizer.step()
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"] = torch._neg_view(torch.full((8,), 2.0))
        saved["state"][0]["exp_avg_sq"] = torch._efficientzerotensor(8)
        optimizer.load_state_dict(saved)
        assert optimizer.state[weight]["exp_avg"].tolist() == [-2.0] * 8
        assert not optimizer.state[weight]["exp_avg_sq"].any()


class _Model(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 0.5))
        self.loss = loss

    def forward(self) -> torch.Tensor:
        return self.loss(self.weight)


@pytest.mark.parametrize(("loss", "shape"), CASES)
def test_offloaded_model_steps_by_the_values_of_a_gradient(
    loss: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], nvme: Path
) -> None:
    ours, theirs = _Model(loss, shape), _Model(loss, shape)
    plain = torch.optim.AdamW(theirs.parameters(), lr=LR)
    for _ in range(2):
        plain.zero_grad()
        (theirs() + theirs()).backward()  # torch itself adds nothing to a ZeroTensor
        plain.step()
    with infinity.offload(
        ours, nvme, optimizer=infinity.AdamW(lr=LR, weight_decay=0.01), host_memory="64MiB"
    ) as offloaded:
        for _ in range(2):
            offloaded.backward(ours())
            offloaded.backward(ours())
            offloaded.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (256, 256)])
def test_negative_weights_keep_their_sign_and_identity(
    compute_dtype: torch.dtype | None, shape: tuple[int, ...], nvme: Path
) -> None:
    model = nn.Linear(256, 256)
    weight = model.weight = nn.Parameter(_negative_weight(shape))
    model.bias = nn.Parameter(torch._efficientzerotensor(256))
    with infinity.offload(model, nvme, compute_dtype=compute_dtype) as offloaded:
        with offloaded.gathered():
            assert torch.equal(model.weight.detach().float(), torch.full(shape, -1.5))
            assert not model.bias.any()
        with offloaded.gathered(modify=True), torch.no_grad():
            model.weight.data = torch._neg_view(torch.full(shape, 2.5).to(model.weight.dtype))
    assert model.weight is weight
    assert torch.equal(weight.detach(), torch.full(shape, -2.5))
    assert not model.bias.any()
    model.bias.data.add_(1.0)  # memory of its own now


def test_a_parameter_without_memory_is_refused_by_name(nvme: Path) -> None:
    model = nn.Linear(64, 64)
    model.weight.untyped_storage().resize_(0)
    with (
        pytest.raises(ValueError, match=r"weight reaches to byte .* its memory has been freed"),
        infinity.offload(model, nvme),
    ):
        pass


@pytest.mark.parametrize("holder", ["weight", "gradient"])
def test_adamw_refuses_what_has_no_memory_by_name(holder: str, nvme: Path) -> None:
    weight = nn.Parameter(torch.ones(64))
    with infinity.OffloadedAdamW([weight], nvme=nvme, host_memory="64MiB") as optimizer:
        weight.grad = torch.ones(64)
        freed = weight if holder == "weight" else weight.grad
        freed.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="its memory has been freed"):
            optimizer.step()
        freed.untyped_storage().resize_(256)


class _SavesZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch._efficientzerotensor(1 << 20), x)
        return x * 2

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> torch.Tensor:
        zeros, x = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0] * 2 + zeros.sum() + 0 * x


def test_saved_zeros_without_memory_come_back(nvme: Path) -> None:
    model = nn.Linear(1024, 1024)
    with infinity.offload(model, nvme, activations="nvme") as offloaded:
        out = _SavesZeros.apply(model(torch.ones(512, 1024)))
        offloaded.backward(out.sum())
        gradient = offloaded.gradient(model.bias)
        assert gradient is not None
        assert torch.equal(gradient, torch.full((1024,), 1024.0))
