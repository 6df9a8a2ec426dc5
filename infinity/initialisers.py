"""The first values that modules give themselves: by ``reset_parameters``, and by the model's
``_init_weights(module)`` if it has one (the convention of GPT implementations and Hugging Face).

A module on the meta device is initialised as a lone copy on the CPU, so that a model is never in
memory as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_FILLS = (0, 1)
"""What bytes of a buffer are before it is computed: what is the same after both was computed."""


class Initialisers:
    """Of one model, which does not change."""

    def __init__(self, model: nn.Module) -> None:
        self._initialise: Any = getattr(model, "_init_weights", None)
        # Kept now: layers may leave the model while it is offloaded, see ``tiling``.
        self._modules = dict(model.named_modules())
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}

    def can_initialise(self, module: nn.Module) -> bool:
        return callable(self._initialise) or _resets(module) is not None

    @torch.no_grad()
    def parameters(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The parameters of ``module`` itself, by name."""
        alone = _lone_copy(module)
        self._run(alone)
        return {name: p for name, p in alone._parameters.items() if p is not None}

    def buffer(self, name: str, *, not_in: Path | None = None) -> torch.Tensor:
        """A buffer on meta as its module computes it, such as rotary frequencies.

        ``not_in``: weights that would hold it if it was saved with the model. Raises ``ValueError``
        if it was, and if the module does not compute all of it.
        """
        path, _, own_name = name.rpartition(".")
        module = self._modules[path]
        if not_in is not None and own_name not in module._non_persistent_buffers_set:
            raise ValueError(f"buffer {name} is on the meta device and not in {not_in}")
        if path not in self._buffers:
            self._buffers[path] = self._computed_buffers(module)
        found = self._buffers[path].get(own_name)
        if found is None:
            raise ValueError(
                f"buffer {name} is on the meta device and has no values: {type(module).__name__} "
                "does not set it in reset_parameters(), nor the model in _init_weights(); pass "
                "weights= that hold it, or build it with a real device: `with "
                "torch.device('cpu')` around its creation"
            )
        return found

    @torch.no_grad()
    def _computed_buffers(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Those that are the same whatever was there before. Random states and what is not on meta
        stay as they are.
        """
        if not self.can_initialise(module):
            return {}
        copies = [_lone_copy(module) for _ in _FILLS]
        for alone, fill in zip(copies, _FILLS, strict=True):
            alone._buffers = {
                name: None if buffer is None else _scratch(buffer, fill)
                for name, buffer in module._buffers.items()
            }
            with torch.random.fork_rng(devices=[]):
                self._run(alone)
        first, second = (alone._buffers for alone in copies)
        return {
            name: value
            for name, value in first.items()
            if value is not None and _same_bytes(value, second[name])
        }

    def _run(self, alone: nn.Module) -> None:
        reset = _resets(alone)
        if reset is not None:
            reset()
        if callable(self._initialise):
            self._initialise(alone)


def _resets(module: nn.Module) -> Callable[[], Any] | None:
    found: Any = getattr(module, "reset_parameters", None)
    return found if callable(found) else None


def _lone_copy(module: nn.Module) -> nn.Module:
    """``module`` without its children, with real parameters and the same buffers."""
    alone = copy.copy(module)
    alone._modules = {}
    alone._parameters = {
        name: None
        if p is None
        else nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
        for name, p in module._parameters.items()
    }
    return alone


def _scratch(buffer: torch.Tensor, fill: int) -> torch.Tensor:
    """To be written to: a copy, or bytes of ``fill`` where there are no values."""
    if not buffer.is_meta:
        return buffer.clone()
    real = torch.empty(buffer.shape, dtype=buffer.dtype)
    real.reshape(-1).view(torch.uint8).fill_(fill)
    return real


def _same_bytes(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
