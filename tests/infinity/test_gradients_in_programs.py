"""What programs and frameworks do to gradients, done to those of an offloaded model: the same bits
as in memory, or an error that names the call to use.
"""

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.offloaded.gradient import OffloadedGradient
from tests.support.models import LowStack as Stack
from tests.support.models import low_vector_loss as vector_loss
from tests.support.models import seeded
from tests.support.proof import matrix
from tests.support.training import WHOLE, least_budget, same_bits, values_of

Act = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def _make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _scale_each(model: nn.Module, *_: object) -> None:
    for gradient in _gradients(model):
        gradient.data.mul_(0.5)
        gradient += 1e-3
        gradient.detach().clamp_(-1e-2, 1e-2)
        gradient[0] = 0


def _add_to(model: nn.Module, *_: object) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += torch.full(parameter.shape, 1e-3)
        parameter.grad = parameter.grad * 2


def _clip_a_part(model: nn.Module, *_: object) -> Any:
    return nn.utils.clip_grad_norm_(list(model.parameters())[1:4], 1e-3)


def _norm_only(model: nn.Module, *_: object) -> Any:
    norms = [p.grad.view(-1).float().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).sum(), nn.utils.get_total_norm(_gradients(model), float("inf"))


def _vectors(model: nn.Module, *_: object) -> Any:
    gradients = _gradients(model)
    vector = nn.utils.parameters_to_vector(gradients)
    nn.utils.vector_to_parameters(vector * 2, gradients)
    torch.mul(gradients[0].clone(), 3, out=gradients[0])
    return vector


def _operator(model: nn.Module, *_: object) -> None:
    for gradient in _gradients(model):
        torch.ops.aten.mul_(gradient, 2)


def _copies(model: nn.Module, *_: object) -> Any:
    first = _gradients(model)[0]
    return (
        copy.deepcopy(first),
        first.clone(),
        torch.from_numpy(first.numpy().copy()),
        first.sum(),
        torch.cat([g.reshape(-1) for g in _gradients(model)]),
        first.tolist()[0],
        torch.stack([g.sum() for g in _gradients(model)]),
        1 + first,
        first[0, 0].item(),
        repr(first),
        bool((first == 0).all()),
        first.cpu() * 2,
        _through_a_file(first),
    )


def _through_a_file(gradient: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def _by_name(model: nn.Module, *_: object) -> None:
    """Arguments by their names, and those that are there beside a factor of one."""
    gradients = _gradients(model)
    torch._foreach_add_(gradients, other=[torch.ones_like(g) for g in gradients], alpha=1e-3)
    torch._foreach_mul_(self=gradients, scalar=0.5)
    torch._foreach_copy_(gradients[:2], src=[g * 2 for g in gradients[:2]])
    scalars = torch.linspace(1e-3, 1e-2, len(gradients))
    ones = [torch.ones_like(g) for g in gradients]
    torch._foreach_addcmul_(gradients, ones, ones, scalars)
    torch._foreach_mul_(gradients, torch._foreach_pow(2.0, gradients))
    torch._foreach_mul_(gradients, torch._foreach_pow(self=0.5, exponent=gradients))
    gradients[0].mul_(1e3).div_(1, rounding_mode="floor")


def _fused(model: nn.Module, *_: object) -> list[torch.Tensor]:
    """Torch counts none of what these write."""
    given = [torch.ones_like(g) for g in _gradients(model)]
    moments = _gradients(model)
    options: Any = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(given, [g.clone() for g in given], moments, **options)
    infinite, scale = torch.zeros(1), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(moments, infinite, scale)
    return given


ACTS: dict[str, Act] = {
    "clip_grad_norm_": lambda model, *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "clip_grad_norm_ that does not set in": lambda model, *_: nn.utils.clip_grad_norm_(
        model.parameters(), 1e9
    ),
    "infinity norm": lambda model, *_: nn.utils.clip_grad_norm_(
        model.parameters(), 1e-3, float("inf")
    ),
    "one parameter": lambda model, *_: nn.utils.clip_grad_norm_(next(model.parameters()), 1e-3),
    "a part": _clip_a_part,
    "clip_grad_value_": lambda model, *_: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "clip_grads_with_norm_": lambda model, *_: nn.utils.clip_grads_with_norm_(
        model.parameters(), 0.01, nn.utils.get_total_norm(_gradients(model))
    ),
    "foreach": lambda model, *_: torch._foreach_mul_(_gradients(model), 0.25),
    "foreach of lists": lambda model, *_: torch._foreach_add_(
        _gradients(model), [torch.ones_like(g) for g in _gradients(model)], alpha=1e-3
    ),
    "foreach norms": lambda model, *_: list(torch._foreach_norm(_gradients(model))),
    "in place": _scale_each,
    "augmented": _add_to,
    "norms": _norm_only,
    "vectors": _vectors,
    "an operator itself": _operator,
    "copies": _copies,
    "by name": _by_name,
    "fused": _fused,
}


def _run(act: Act, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    seen = []
    for step in range(6):
        for part in range(2):
            vector_loss(model, 2 * step + part).backward()
            if part == step % 2:
                result = act(model, optimizer, step)
                seen += [] if result is None else [copy.deepcopy(result)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _flat(seen: Any) -> list[Any]:
    if isinstance(seen, (list, tuple)):
        return [leaf for entry in seen for leaf in _flat(entry)]
    return [seen]


@pytest.mark.parametrize("name", matrix(ACTS, usual=[*[*ACTS][::4], "fused"]))
def test_what_is_done_to_gradients_has_the_bits_of_plain_torch(name: str, nvme: Path) -> None:
    plain = seeded(Stack)
    expected = _run(ACTS[name], plain, _make_sgd(plain.parameters()))
    least = least_budget(Stack, nvme, optimizer=_make_sgd)
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least, optimizer=_make_sgd) as offloaded:
        seen = _run(ACTS[name], model, offloaded.optimizer)
    for theirs, ours in zip(_flat(expected), _flat(seen), strict=True):
        if isinstance(theirs, torch.Tensor):
            is_kept = isinstance(ours, OffloadedGradient)  # which has gone with its step
            assert is_kept or same_bits(theirs, ours)
        else:
            assert theirs == ours
    for key, value in values_of(plain).items():
        assert same_bits(value, values_of(model)[key]), key


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_, clip, step"])
def test_a_grad_scaler_has_the_bits_of_plain_torch(unscales: bool, nvme: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", growth_interval=2), []
        for step in range(6):
            loss = vector_loss(model, step) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    plain, model = seeded(Stack), seeded(Stack)
    scales = run(plain, _make_sgd(plain.parameters()))
    assert len(set(scales)) > 1
    least = least_budget(Stack, nvme, optimizer=_make_sgd)
    with infinity.offload(model, nvme, host_memory=least, optimizer=_make_sgd) as offloaded:
        assert run(model, offloaded.optimizer) == scales
    for key, value in values_of(plain).items():
        assert same_bits(value, values_of(model)[key]), key


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_gradients_are_averaged_by_hand(is_async: bool, nvme: Path, tmp_path: Path) -> None:
    world: Any = torch.distributed
    world.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    model = seeded(Stack)
    try:
        with infinity.offload(model, nvme, host_memory=WHOLE):
            vector_loss(model, 0).backward()
            for gradient in _gradients(model):
                before = gradient.clone()
                work = world.all_reduce(gradient, async_op=is_async)
                assert (work is not None) is is_async
                assert torch.equal(gradient, before)
    finally:
        world.destroy_process_group()


def test_a_grad_scaler_over_float16_weights_is_refused_before_a_number_changes(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, compute_dtype=torch.float16) as offloaded:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(vector_loss(model, 0)).backward()
        with pytest.raises(ValueError, match="unscale FP16"):
            scaler.step(offloaded.optimizer)
        assert set(offloaded._training.steps) == {0}


def _view(gradient: torch.Tensor) -> None:
    gradient.view(-1).mul_(2)


def _view_of_a_view(gradient: torch.Tensor) -> None:
    gradient.view(-1)[1:].zero_()


def _array(gradient: torch.Tensor) -> None:
    gradient.numpy()[0] = 1


def _memory(gradient: torch.Tensor) -> None:
    gradient.data_ptr()


def _storage(gradient: torch.Tensor) -> None:
    gradient.untyped_storage()


def _gradient_of_it(gradient: torch.Tensor) -> None:
    gradient.grad = torch.ones_like(gradient)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], None], str]] = {
    "view": (_view, r"mul_ changed a view of the gradient of .*weight.* assign"),
    "view of a view": (_view_of_a_view, "changed a view of the gradient"),
    "array": (_array, "read-only"),
    "data_ptr": (_memory, r"not a tensor in memory.*offloaded\.gradient"),
    "grad": (_gradient_of_it, "not a tensor in memory"),
    "untyped_storage": (_storage, r"not a tensor in memory.*offloaded\.gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_would_be_lost_is_refused_and_none_is_made(name: str, nvme: Path) -> None:
    act, match = REFUSED[name]
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        parameter = model.layer(0).weight
        before = offloaded.gradient(parameter)
        assert before is not None
        assert parameter.grad is not None
        with pytest.raises((RuntimeError, ValueError), match=match):
            act(parameter.grad)
        assert torch.equal(before, parameter.grad)


def test_a_gradient_that_is_gone_is_an_error_by_name(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        parameter = model.layer(0).weight
        vector_loss(model, 0).backward()
        kept = parameter.grad
        assert kept is not None
        model.zero_grad()
        vector_loss(model, 1).backward()
        with pytest.raises(RuntimeError, match=r"weight was cleared or replaced; clone\(\)"):
            kept.sum()
        offloaded.optimizer.step()
        assert parameter.grad is not None
        with pytest.raises(RuntimeError, match=r"used by the step.*offloaded\.grad_norm"):
            parameter.grad.sum()


def test_zero_grad_to_zeros_keeps_gradients_of_zero(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE):
        vector_loss(model, 0).backward()
        model.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_gradient_with_the_loss_scale_is_not_taken_for_a_plain_one(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, compute_dtype=torch.float16) as offloaded:
        offloaded.backward(vector_loss(model, 0))
        with pytest.raises(RuntimeError, match=r"the loss scale, 65536.*clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradients_change_in_place_in_every_mode(mode: Callable[[], Any], nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        parameter = model.layer(0).weight
        before = offloaded.gradient(parameter)
        assert before is not None
        assert parameter.grad is not None
        with mode():
            parameter.grad.mul_(3)
        assert torch.equal(before * 3, parameter.grad)


@pytest.mark.parametrize("budget", ["whole", "least"])
def test_an_option_that_is_there_during_a_backward_pass_alone_costs_no_gradient(
    budget: str, nvme: Path
) -> None:
    """What a step depends on is fixed as it is taken; one that cannot be copied is none of it."""
    host_memory = WHOLE if budget == "whole" else least_budget(Stack, nvme)
    runs = []
    for locks in (False, True):
        model = seeded(Stack)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            group = offloaded.optimizer.param_groups[0]
            for number in range(3):
                if locks:
                    group["lock"] = threading.Lock()
                vector_loss(model, number).backward()
                group.pop("lock", None)
                offloaded.step()
        runs.append(values_of(model))
    assert all(same_bits(runs[1][name], value) for name, value in runs[0].items())
