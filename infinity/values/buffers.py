"""Buffers of a model (running statistics, masks): small, on the compute device, in the compute
dtype, inside the block.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn

from infinity.parameters.first_values import Values


class BufferConversion:
    """Context manager: converts on entry as ``module.to(device, dtype)`` does, back on exit with
    the values they have. What nothing changed meanwhile, or what was changed in place, is then the
    tensor that it was, so that views of it from before the block have these values, too.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype | None, values: Values
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self._values = values
        self._before: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        """Module, name there, the buffer as it was, and what stood for it inside."""

    def __enter__(self) -> None:
        converted: dict[int, torch.Tensor] = {}
        """By buffer: one that several modules have stays one."""
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                real = self._values.buffer(full, buffer)
                inside = converted.get(id(buffer)) if real is buffer else None
                if inside is None:
                    inside = real.to(self._device, self._target_dtype(real))
                    converted[id(buffer)] = inside
                self._before.append((module, name, buffer, inside))
                module._buffers[name] = inside

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, name, before, inside in self._before:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer is not before:
                module._buffers[name] = self._given_back(buffer, before, buffer is inside)

    def _given_back(
        self, buffer: torch.Tensor, before: torch.Tensor, is_ours: bool
    ) -> torch.Tensor:
        """What the module has after the block; ``is_ours``: not a tensor that a program put in."""
        if not before.is_meta and self._is_as_it_came(buffer, before):
            return before
        is_writable = (
            is_ours
            and not (before.is_meta or before.is_inference())
            and buffer.shape == before.shape
            and before.layout == torch.strided
            and bool(torch.ops.aten.is_non_overlapping_and_dense(before))
        )
        if not is_writable:
            return buffer.to(before.device, before.dtype)
        with torch.no_grad():
            return before.copy_(buffer)

    def _is_as_it_came(self, buffer: torch.Tensor, before: torch.Tensor) -> bool:
        """Whether ``buffer`` is what ``before`` is converted to, bit for bit."""
        came = before.to(self._device, self._target_dtype(before))
        if buffer.shape != came.shape or buffer.dtype != came.dtype or came.layout != torch.strided:
            return False
        return torch.equal(_bits(buffer), _bits(came))

    def _target_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and buffer.is_floating_point() else buffer.dtype


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
