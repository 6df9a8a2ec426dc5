"""Changes of gradients and weights that torch does not count: kept or refused, never lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.offloaded.changes import _counts_changes
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits, values_of

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def write_past() -> Iterator[Callable[[torch.Tensor], None]]:
    """Writes past the version of a tensor, as collectives do."""
    library = torch.library.Library("infinity_tests", "DEF")
    library.define("write_past(Tensor x) -> ()")
    library.impl("write_past", lambda x: _write(x), "CPU")
    yield torch.ops.infinity_tests.write_past
    library._destroy()


def _write(tensor: torch.Tensor) -> None:
    torch.from_numpy(tensor.detach().numpy()).add_(3)


def _zero_gradients(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _zero_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.detach_()
        parameter.grad.zero_()


def _zero_by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.zero_()


def _copy_zeros(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_copy_(gradients[:2], [torch.zeros(g.shape) for g in gradients[:2]])
    torch._foreach_zero_(gradients[2:4])
    for gradient in gradients[4:]:
        gradient.fill_(0)


CLEARS = {
    "model.zero_grad": _zero_gradients,
    "zero_": _zero_each,
    "data.zero_": _zero_by_data,
    "foreach and fill_": _copy_zeros,
}


@pytest.mark.parametrize("name", CLEARS)
def test_gradients_zeroed_after_the_step_give_the_bits_of_plain_torch(
    name: str, nvme: Path
) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            vector_loss(model, step).backward()
            optimizer.step()
            CLEARS[name](model)

    plain, model = seeded(Stack), seeded(Stack)
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    least = least_budget(Stack, nvme, optimizer=make)
    with infinity.offload(model, nvme, host_memory=least, optimizer=make) as offloaded:
        run(model, offloaded.optimizer)
    for key, value in values_of(plain).items():
        assert same_bits(value, values_of(model)[key]), key


def test_the_data_of_a_gradient_that_is_set_becomes_the_gradient(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        gradient: Any = model.layer(0).weight.grad
        expected = gradient.clone().clamp_(-1e-3, 1e-3)
        gradient.data = torch.clamp(gradient.data, -1e-3, 1e-3)
        taken = offloaded.gradient(model.layer(0).weight)
        assert taken is not None
        assert same_bits(taken, expected)
        with pytest.raises(RuntimeError, match="cannot be of shape"):
            gradient.data = torch.ones(1)
        vectors = [gradient, model.layer(0).bias.grad]
        nn.utils.vector_to_parameters(torch.ones(sum(v.numel() for v in vectors)), vectors)
        assert all(bool((vector == 1).all()) for vector in vectors)


def test_uncounted_change_of_a_gradient_is_kept_and_of_a_view_refused(
    write_past: Change, nvme: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        vector_loss(model, 0).backward()
        gradient: Any = model.layer(0).weight.grad
        expected = gradient.clone() + 3
        write_past(gradient)
        assert torch.equal(gradient, expected)
        with pytest.raises(RuntimeError, match=r"changed a view of the gradient of layers\.0"):
            write_past(gradient.view(-1))
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("budget", [WHOLE, None], ids=["whole", "least"])
def test_uncounted_change_of_weights_is_refused_by_name(
    budget: int | None, write_past: Change, nvme: Path
) -> None:
    model = seeded(Stack)
    before = values_of(model)
    budget = budget or least_budget(Stack, nvme)
    with infinity.offload(model, nvme, host_memory=budget):
        for parameter in model.parameters():
            with pytest.raises(RuntimeError, match=r"would change the weights of .*gathered"):
                write_past(parameter)
    for key, value in values_of(model).items():
        assert same_bits(value, before[key]), key


FUSED: dict[str, Callable[[list[Any]], Any]] = {
    "AdamW": lambda listed: torch.optim.AdamW(listed, fused=True).step(),
    "Adam": lambda listed: torch.optim.Adam(listed, fused=True).step(),
    "SGD": lambda listed: torch.optim.SGD(listed, lr=0.1, fused=True).step(),
    "Adagrad": lambda listed: torch.optim.Adagrad(listed, fused=True).step(),
    "unscale": lambda listed: torch._amp_foreach_non_finite_check_and_unscale_(
        listed, torch.zeros(1), torch.tensor(0.5)
    ),
}
"""What torch writes without counting it."""


@pytest.mark.parametrize("name", FUSED)
def test_what_torch_itself_does_not_count_is_refused_by_name_of_weights(
    name: str, host_memory: int, nvme: Path
) -> None:
    """Under a budget that holds them it would stay, and be lost under any other."""
    model = seeded(Stack)
    before = values_of(model)
    weight = model.layer(0).weight
    with infinity.offload(model, nvme, host_memory=host_memory):
        vector_loss(model, 0).backward()
        message = r"would change the weights of layers\.0\.weight.*gathered.*optimizer="
        with torch.no_grad(), pytest.raises(RuntimeError, match=message):
            FUSED[name]([weight])
        model.zero_grad()
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


def test_an_optimizer_in_the_backward_pass_is_refused(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    weight = model.layer(3).weight
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with infinity.offload(model, nvme, host_memory=host_memory):
        with pytest.raises(RuntimeError, match=r"would change the weights of layers\.3\.weight"):
            vector_loss(model, 0).backward()
        model.zero_grad()


def test_operators_of_torch_that_write_to_lists_are_known_to_count_or_not() -> None:
    """``_foreach_`` ones do; a release may bring others."""
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or base.startswith("_foreach_"):
            continue
        operator = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if operator is None:
            continue
        written = [a for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write]
        if any("List" in str(a.type) for a in written) and base.endswith("_"):
            assert not _counts_changes(operator), name
            assert not _counts_changes(getattr(torch, base)), name
    for function in (torch.mul, torch.Tensor.add_, torch._foreach_mul_, torch.ops.aten.mul_.Tensor):
        assert _counts_changes(function)


def test_what_was_detached_of_a_gradient_does_not_follow_it_to_other_data(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        vector_loss(model, 0).backward()
        first, second = (model.layer(at).weight.grad for at in (0, 1))
        assert first is not None
        assert second is not None
        expected = second.clone()
        detached, same = first.detach(), model.layer(0).weight.grad
        with pytest.raises(RuntimeError, match=r"detached of the gradient of layers\.0\.weight"):
            first.data, second.data = second.data, first.data
        for use in (detached.sum, detached.zero_):
            with pytest.raises(RuntimeError, match=r"given other data.*clone\(\)"):
                use()
        with pytest.raises(RuntimeError, match="assign a copy"):
            model.layer(0).weight.grad = detached
        assert same is not None
        for held in (first, same, first.detach(), second):
            assert same_bits(held, expected)
        with pytest.raises(RuntimeError, match="what was detached"):
            first.detach().data = expected
        model.zero_grad()


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda weight: weight.detach().numpy(),
    "dlpack": lambda weight: np.from_dlpack(weight.detach()),
    "row": lambda weight: weight.detach()[3].numpy(),
    "tensor": lambda weight: torch.from_numpy(weight.detach().numpy()),
}


@pytest.mark.parametrize("modify", [True, False])
@pytest.mark.parametrize("name", KEEPS)
def test_writes_into_what_was_kept_of_lent_memory_are_told(
    name: str, modify: bool, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    weight = model.layer(0).weight
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        with offloaded.gathered(modify=modify):
            kept = KEEPS[name](weight)
        vector_loss(model, 0).backward()
        offloaded.step()  # nothing was written
        kept[:] = 3.0
        del kept
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight was changed in place"):
            offloaded.step()
        vector_loss(model, 0).backward()
        offloaded.step()


@pytest.mark.parametrize("is_written", [True, False])
def test_what_is_kept_of_lent_memory_up_to_the_end_is_looked_at_there(
    is_written: bool, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    before = values_of(model)
    block = infinity.offload(model, nvme, host_memory=host_memory)
    offloaded = block.__enter__()
    with offloaded.gathered():
        kept = [parameter.detach().numpy() for parameter in model.parameters()]
    if is_written:
        kept[0][:] = 3.0
        with pytest.raises(RuntimeError, match="was changed in place"):
            block.__exit__(None, None, None)
    else:
        block.__exit__(None, None, None)
    kept[1][:] = 3.0
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


def test_hook_from_before_the_block_that_assigns_changes_what_arrives_alone(nvme: Path) -> None:
    def train(hook: Callable[[Any], None]) -> torch.Tensor:
        model = seeded(Stack)
        weight = model.layer(0).weight
        weight.register_post_accumulate_grad_hook(hook)
        with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
            for part in range(2):
                vector_loss(model, part).backward()
            gradient = offloaded.gradient(weight)
        assert gradient is not None
        return gradient

    def assign(parameter: Any) -> None:
        parameter.grad = parameter.grad * 0.5

    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    assert same_bits(train(assign), train(halve))


@pytest.mark.parametrize("of", ["weight", "gradient"])
def test_c_code_gets_no_memory_in_the_place_of_values(of: str, nvme: Path) -> None:
    model = seeded(Stack)
    least = least_budget(Stack, nvme)
    with infinity.offload(model, nvme, host_memory=least):
        vector_loss(model, 0).backward()
        faces = [p for p in model.parameters() if p.numel() > 1024]
        for parameter in faces:
            face: Any = parameter if of == "weight" else parameter.grad
            with torch._C.DisableTorchFunctionSubclass():
                is_here = face.numel() == 0 or face.stride() != (0,) * face.dim()
            if not is_here:
                with pytest.raises((RuntimeError, BufferError)):
                    torch._C._to_dlpack(face)


def test_a_gradient_takes_weights_in_place_with_gradients_enabled(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        vector_loss(model, 0).backward()
        weight: Any = model.layer(0).weight
        expected = weight.grad + weight.detach() * 0.1
        weight.grad.add_(weight, alpha=0.1)
        assert torch.allclose(weight.grad.clone(), expected, rtol=1e-6)
