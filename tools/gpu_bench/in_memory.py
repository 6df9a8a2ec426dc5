"""Training with everything in the memory of the device: what offloading is compared with.

Weights and gradients in the compute dtype, float32 masters and both moments, 16 bytes a parameter
in 16 bits. ``ExactUpdate`` takes steps of the library's arithmetic, for its bits. ``FusedUpdate``
is the fastest that torch has, for its time; it rounds in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from gpu_bench.exact_adamw import Moments, Options
from tests.support.training import nearest

_GRADIENT_BYTES = 1 << 30
"""Float32 gradients that are in memory at once."""
_SUMMED_ELEMENTS = 16 << 20
"""Elements that are squared in double at once."""


class Update(Protocol):
    """A step over all gradients, which are gone then. Returns their norm before clipping."""

    def __call__(self, grad_scale: float = 1.0) -> torch.Tensor: ...


MakeUpdate = Callable[[Sequence[nn.Parameter], Options, float | None], Update]


class ExactUpdate:
    """Steps with the bits that offloaded training has, see ``exact_adamw``.

    ``masters``: float32 values that the parameters in fewer bits are rounded from, their own by
    default.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        options: Options,
        max_grad_norm: float | None,
        masters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._max_grad_norm = max_grad_norm
        self._parameters = parameters
        self._masters = [
            p.detach() if p.dtype == torch.float32 else m.detach().float()
            for p, m in zip(parameters, masters or parameters, strict=True)
        ]
        self._moments = [Moments(master, options) for master in self._masters]
        self._round()

    def __call__(self, grad_scale: float = 1.0) -> torch.Tensor:
        """``grad_scale``: what the loss was multiplied by. A step that overflowed is none."""
        norm = math.sqrt(math.fsum(self._squares())) / grad_scale
        factor = 1.0 / grad_scale
        if self._max_grad_norm is not None:
            factor *= min(1.0, self._max_grad_norm / (norm + 1e-6))
        for parameter, master, moments in zip(
            self._parameters, self._masters, self._moments, strict=True
        ):
            if parameter.grad is not None and math.isfinite(norm):
                moments.update(master, parameter.grad, factor)
            parameter.grad = None
        self._round()
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def _squares(self) -> Iterator[float]:
        for parameter in self._parameters:
            if parameter.grad is not None:
                for part in parameter.grad.reshape(-1).split(_SUMMED_ELEMENTS):
                    yield part.double().square().sum().item()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter.dtype != torch.float32:
                parameter.copy_(nearest(master, parameter.dtype))


class FusedUpdate:
    """Steps of ``torch.optim.AdamW(fused=True)``; nothing in it waits for the device."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], options: Options, max_grad_norm: float | None
    ) -> None:
        self._max_grad_norm = max_grad_norm
        self._groups = [_Group(part, options) for part in _parts(parameters)]

    @torch.no_grad()
    def __call__(self, grad_scale: float = 1.0) -> torch.Tensor:
        gradients = [g for group in self._groups for g in group.gradients()]
        norms = torch._foreach_norm(gradients, 2, torch.float32)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) / grad_scale
        factor = torch.full_like(norm, 1.0 / grad_scale)
        if self._max_grad_norm is not None:
            factor = factor * torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
        for group in self._groups:
            group.step(factor)
        return norm


class _Group:
    """Parameters that are updated at once, with their masters."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: Options) -> None:
        self._parameters = parameters
        self._masters = [p.detach().float().requires_grad_() for p in parameters]
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def step(self, factor: torch.Tensor) -> None:
        scaled = [gradient.float() for gradient in self.gradients()]
        torch._foreach_mul_(scaled, factor)
        for parameter, master, gradient in zip(
            self._parameters, self._masters, scaled, strict=True
        ):
            master.grad, parameter.grad = gradient, None
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_([*self._parameters], self._masters)


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """``parameters`` in runs of some ``_GRADIENT_BYTES`` of float32."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        if part and 4 * (sum(p.numel() for p in part) + parameter.numel()) > _GRADIENT_BYTES:
            yield part
            part = []
        part.append(parameter)
    yield part
