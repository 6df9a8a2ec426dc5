"""Buffers of a model (running statistics, masks): small, on the compute device, in the compute
dtype, inside the block.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn

from infinity.materialize import Values


class BufferConversion:
    """Context manager: converts on entry as ``module.to(device, dtype)`` does, back on exit with
    the values they have.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype | None, values: Values
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self._values = values
        self._before: list[tuple[nn.Module, str, torch.device, torch.dtype]] = []

    def __enter__(self) -> None:
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                self._before.append((module, name, buffer.device, buffer.dtype))
                full = f"{prefix}.{name}" if prefix else name
                real = self._values.buffer(full, buffer)
                module._buffers[name] = real.to(self._device, self._target_dtype(real))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, name, device, dtype in self._before:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(device, dtype)

    def _target_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and buffer.is_floating_point() else buffer.dtype
