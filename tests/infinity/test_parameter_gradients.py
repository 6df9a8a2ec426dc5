"""The gradient of a parameter inside the block: its presence, its values, assignment, hooks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.offloaded.parameter import take_grad
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import same_bits


def test_the_gradient_says_truly_whether_it_is_there(host_memory: int, nvme: Path) -> None:
    model = Stack()
    everything = {name for name, _ in model.named_parameters()}
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight = model.layer(0).weight
        assert _have_gradients(model) == set()
        assert offloaded.gradient(weight) is None
        vector_loss(model, 0).backward()
        assert _have_gradients(model) == everything
        assert weight.grad is not None
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
        weight.grad = None
        assert _have_gradients(model) == everything - {"layers.0.weight"}
        model.zero_grad()
        assert _have_gradients(model) == set()
        offloaded.step()
        vector_loss(model, 0).backward()
        offloaded.optimizer.step()
        assert _have_gradients(model) == everything, "as in PyTorch, until they are cleared"
        offloaded.optimizer.zero_grad()
        assert _have_gradients(model) == set()


def _have_gradients(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_are_those_of_the_plain_model(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    plain = copy.deepcopy(model)
    for step in range(2):
        vector_loss(plain, step).backward()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(2):
            vector_loss(model, step).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = offloaded.gradient(ours)
            assert gradient is not None
            assert theirs.grad is not None
            assert same_bits(gradient, theirs.grad)


def test_gradients_from_before_the_block_are_accumulated_to(host_memory: int, nvme: Path) -> None:
    """A plain loop that ends without ``zero_grad`` leaves them."""
    model = seeded(Stack)
    plain = copy.deepcopy(model)
    for step in range(2):
        vector_loss(plain, step).backward()
    vector_loss(model, 0).backward()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        assert model.layer(0).weight.grad is not None
        vector_loss(model, 1).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = offloaded.gradient(ours)
            assert gradient is not None
            assert theirs.grad is not None
            assert same_bits(gradient, theirs.grad)


def test_a_gradient_can_be_assigned(host_memory: int, nvme: Path) -> None:
    model, plain = seeded(Stack), seeded(Stack)
    vector_loss(plain, 0).backward()
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    reference.step()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight = model.layer(0).weight
        for shape in ((3,), (256, 255), (512, 512)):
            with pytest.raises(ValueError, match=r"\(256, 256\)"):
                weight.grad = torch.ones(shape)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.grad = theirs.grad
        offloaded.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-8)


def test_hooks_of_the_program_see_and_change_gradients(host_memory: int, nvme: Path) -> None:
    def halve(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2

    def negate(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.neg_()

    def replace(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = torch.ones_like(parameter.grad)

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model = seeded(Stack)
    for hooked in (model, plain := copy.deepcopy(model)):
        hooked.layer(0).weight.register_hook(halve)
        for layer, hook in ((1, negate), (2, replace), (3, drop)):
            hooked.layer(layer).weight.register_post_accumulate_grad_hook(hook)
    vector_loss(plain, 0).backward()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        vector_loss(model, 0).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = offloaded.gradient(ours)
            if theirs.grad is None:
                assert gradient is None
            else:
                assert gradient is not None
                assert same_bits(gradient, theirs.grad)


def test_a_hook_that_returns_a_tensor_is_refused_as_by_torch(nvme: Path) -> None:
    model = seeded(Stack)

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        return parameter.grad.mul_(0.5)  # type: ignore[return-value]

    model.layer(0).weight.register_post_accumulate_grad_hook(hook)
    with infinity.offload(model, nvme, host_memory="1GiB") as offloaded:
        refused = "^a hook that register_post_accumulate_grad_hook .* let it return nothing"
        with pytest.raises(RuntimeError, match=refused):
            vector_loss(model, 0).backward()
        offloaded.optimizer.zero_grad()


def test_a_gradient_can_be_deleted(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        weight = model.layer(0).weight
        vector_loss(model, 0).backward()
        del weight.grad
        assert weight.grad is None


def test_gradients_leave_host_memory_where_torch_has_swapped_the_parameters_between_blocks(
    nvme: Path,
) -> None:
    model = seeded(Stack)
    values = copy.deepcopy(model.state_dict())
    for _ in range(3):
        with infinity.offload(model, nvme, host_memory="1GiB") as offloaded:
            vector_loss(model, 0).backward()
            assert all(take_grad(each) is None for each in model.parameters())
            offloaded.step()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(values)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("max_parameter_bytes", [None, 1 << 18])
def test_hooks_that_come_after_a_block_and_a_swap_are_called(
    nvme: Path, max_parameter_bytes: int | None
) -> None:
    model = nn.Linear(512, 512)
    options: dict[str, Any] = {"max_parameter_bytes": max_parameter_bytes}
    with infinity.offload(model, nvme, host_memory="1GiB", **options) as offloaded:
        model(torch.ones(1, 512)).sum().backward()
        offloaded.step()
    torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach().clone()))
    called = []
    model.weight.register_hook(lambda _: called.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    model(torch.ones(1, 512)).sum().backward()
    assert called == ["gradient", "accumulated"]
