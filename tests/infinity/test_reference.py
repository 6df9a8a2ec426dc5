"""Training under a budget against plain PyTorch: the same losses, gradients, norms and updates."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import LowGpt as Gpt
from tests.support.models import Zoo, seeded, token_loss
from tests.support.proof import matrix
from tests.support.training import Plain, least_budget, same_bits, ulps_between

LR = 3e-3
ULPS_PER_STEP = {"fused": 2.0, "single tensor": 4.0}
"""Units in the last place of the larger of the weight and what a step may change it by, ``LR``.

Ours rounds as torch's fused loop does; torch's own two loops lie up to 4 apart.
"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ADAMW = infinity.AdamW(lr=LR, betas=(0.8, 0.95), weight_decay=0.1)
MASTERS = [*product((torch.bfloat16, torch.float16), (Gpt, Zoo), (None, 0.5))]
USUAL = [(torch.bfloat16, Zoo, 0.5)]
LOOPS = [*product(ULPS_PER_STEP, (None, 0.5))]
TORCH_ADAMW = partial(torch.optim.AdamW, lr=LR, betas=(0.8, 0.95), weight_decay=0.1)


@pytest.mark.parametrize(("loop", "max_grad_norm"), matrix(LOOPS, usual=[("fused", 0.5)]))
def test_float32_steps_are_those_of_torch_adamw(
    loop: str, max_grad_norm: float | None, nvme: Path
) -> None:
    """Each step starts from equal weights, so that nothing adds up over the steps but moments."""
    model = seeded(Gpt)
    factory = partial(TORCH_ADAMW, fused=loop == "fused")
    plain = Plain(seeded(Gpt), factory, max_grad_norm=max_grad_norm)
    with infinity.offload(
        model,
        nvme,
        optimizer=ADAMW,
        host_memory=least_budget(Gpt, nvme),
        max_grad_norm=max_grad_norm,
    ) as offloaded:
        for step in range(10):
            scale = {name: p.detach().abs().clamp(min=LR) for name, p in plain.masters.items()}
            _same_gradients(model, offloaded, plain.model, step)
            offloaded.step()
            norm = plain.step()
            assert offloaded.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
            with offloaded.gathered():
                for name, parameter in model.named_parameters():
                    master = plain.masters[name]
                    error = ulps_between(parameter.detach(), master.detach(), scale[name])
                    assert error <= ULPS_PER_STEP[loop], (step, name)
                    master.data.copy_(parameter)
            plain.round_masters()


@pytest.mark.parametrize(("dtype", "make", "max_grad_norm"), matrix(MASTERS, usual=USUAL))
def test_masters_of_16_bit_weights_follow_torch_adamw(
    dtype: torch.dtype, make: Callable[[], nn.Module], max_grad_norm: float | None, nvme: Path
) -> None:
    """Both compute with the same weights in every step; masters are compared at the end."""
    steps, taken = 12, 0
    model = seeded(make)
    factory = partial(TORCH_ADAMW, fused=True)
    plain = Plain(seeded(make), factory, dtype=dtype, max_grad_norm=max_grad_norm)
    largest = {name: p.detach().abs().clamp(min=LR) for name, p in plain.masters.items()}
    options: dict[str, Any] = {
        "compute_dtype": dtype,
        "max_grad_norm": max_grad_norm,
        "optimizer": ADAMW,
    }
    least = least_budget(make, nvme, **options)
    with infinity.offload(model, nvme, host_memory=least, **options) as offloaded:
        for step in range(steps):
            scale = offloaded.loss_scale
            _same_gradients(model, offloaded, plain.model, step, scale=scale)
            offloaded.step()
            if not offloaded.grad_norm.isfinite():
                assert dtype == torch.float16
                assert offloaded.loss_scale == scale / 2
                plain.model.zero_grad()
                continue
            norm = plain.step(grad_scale=scale)
            assert offloaded.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
            taken += 1
            for name, master in plain.masters.items():
                largest[name] = torch.maximum(largest[name], master.detach().abs())
            with offloaded.gathered():
                theirs = dict(plain.model.named_parameters())
                for name, parameter in model.named_parameters():
                    theirs[name].data = parameter.detach().clone()
    assert taken >= steps - 4
    for name, parameter in model.named_parameters():
        error = ulps_between(parameter.detach(), plain.masters[name].detach(), largest[name])
        assert error <= ULPS_PER_STEP["fused"] * steps, name


def _same_gradients(
    model: nn.Module,
    offloaded: infinity.OffloadedModel,
    plain: nn.Module,
    step: int,
    *,
    scale: float = 1.0,
) -> None:
    """Forward and backward of both, which must agree in every bit: losses, gradients, buffers."""
    losses = []
    for one in (model, plain):
        torch.manual_seed(step)
        losses.append(token_loss(one, step))
    assert same_bits(*losses)
    offloaded.backward(losses[0])
    (losses[1] * scale).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = offloaded.gradient(ours)
        assert (gradient is None) == (theirs.grad is None), name
        if gradient is not None and theirs.grad is not None:
            assert same_bits(gradient, theirs.grad), name
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert same_bits(mine, other), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_torch(dtype: torch.dtype, nvme: Path) -> None:
    model = seeded(Gpt)
    with infinity.offload(model, nvme, compute_dtype=dtype) as offloaded:
        offloaded.backward(token_loss(model, 0))
        gradients = [offloaded.gradient(parameter) for parameter in model.parameters()]
        doubles = [g.double() / offloaded.loss_scale for g in gradients if g is not None]
        expected = nn.utils.get_total_norm(doubles)
        clipped = offloaded.clip_grad_norm_(0.1)
        offloaded.step()
        assert clipped.shape == offloaded.grad_norm.shape == ()
        assert clipped.dtype == offloaded.grad_norm.dtype == torch.float32
        assert clipped.item() == pytest.approx(expected.item(), rel=1e-6)
        assert same_bits(offloaded.grad_norm, clipped), "the norm is that before clipping"


def test_clip_grad_norm_is_max_grad_norm(nvme: Path) -> None:
    results = []
    for by_option in (True, False):
        model = seeded(Gpt)
        with infinity.offload(
            model, nvme, max_grad_norm=0.3 if by_option else None, optimizer=ADAMW
        ) as offloaded:
            for step in range(3):
                token_loss(model, step).backward()
                if not by_option:
                    offloaded.clip_grad_norm_(0.3)
                offloaded.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_was_given_up_leaves_no_trace(bad: float, nvme: Path) -> None:
    """The usual guard: look at the norm, and clear the gradients if it is not finite."""
    results = []
    for with_bad in (False, True):
        model = seeded(Gpt)
        with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)) as offloaded:
            for step in range(4):
                if with_bad and step % 2:
                    (token_loss(model, 9) * bad).backward()
                    assert not offloaded.clip_grad_norm_(1.0).isfinite()
                    offloaded.optimizer.zero_grad()
                token_loss(model, step).backward()
                assert offloaded.clip_grad_norm_(1.0).isfinite()
                offloaded.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_loss_that_is_not_a_number_does_what_it_does_in_torch(
    max_grad_norm: float | None, nvme: Path
) -> None:
    """Garbage in, the same garbage out: nothing hangs, and nothing is hidden."""
    model = seeded(Gpt)
    plain = Plain(seeded(Gpt), TORCH_ADAMW, max_grad_norm=max_grad_norm)
    least = least_budget(Gpt, nvme)
    with infinity.offload(
        model, nvme, optimizer=ADAMW, host_memory=least, max_grad_norm=max_grad_norm
    ) as offloaded:
        for one in (model, plain.model):
            (token_loss(one, 0) * float("nan")).backward()
        offloaded.step()
        plain.step()
        assert offloaded.grad_norm.isnan()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.isnan(), plain.masters[name].isnan()), name


def test_overflowing_float16_steps_are_skipped_and_halve_the_scale(nvme: Path) -> None:
    model = seeded(Gpt)
    with infinity.offload(model, nvme, compute_dtype=torch.float16) as offloaded:
        before = offloaded.loss_scale
        with offloaded.gathered():
            weights = [parameter.detach().clone() for parameter in model.parameters()]
        offloaded.backward(token_loss(model, 0) * 1e30)
        offloaded.step()
        assert not offloaded.grad_norm.isfinite()
        assert offloaded.loss_scale == before / 2
        with offloaded.gathered():
            assert all(map(same_bits, weights, model.parameters()))
        offloaded.backward(token_loss(model, 0))
        offloaded.step()
        assert offloaded.grad_norm.isfinite()
        assert offloaded.loss_scale == before / 2
        with offloaded.gathered():
            assert not any(map(same_bits, weights, model.parameters()))
