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
    the values they have. What nothing changed meanwhile is then the tensor that it was.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype | None, values: Values
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self._values = values
        self._before: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                self._before.append((module, name, buffer))
                full = f"{prefix}.{name}" if prefix else name
                real = self._values.buffer(full, buffer)
                module._buffers[name] = real.to(self._device, self._target_dtype(real))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, name, before in self._before:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer is not before:
                is_same = not before.is_meta and self._is_as_it_came(buffer, before)
                module._buffers[name] = (
                    before if is_same else buffer.to(before.device, before.dtype)
                )

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
