"""Models whose blocks are compiled, and what counts the graphs that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

Compile = Callable[[nn.ModuleList, Any], None]

QUIET = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The .grad attribute of a Tensor that is not a leaf",
        r"`torch\.jit\.script_method` is deprecated:DeprecationWarning",
    )
]
"""Marks of tests: what torch warns of while it compiles, of its own code."""


class Graphs:
    """A backend of torch.compile that counts what it is given to compile."""

    def __init__(self, backend: str = "eager") -> None:
        self.backend = backend
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return lookup_backend(self.backend)(graph, inputs)


def by_call(layers: nn.ModuleList, backend: Any) -> None:
    for layer in layers:
        layer.compile(backend=backend)


def by_wrapper(layers: nn.ModuleList, backend: Any) -> None:
    for position, layer in enumerate(layers):
        compiled: Any = torch.compile(layer, backend=backend)
        layers[position] = compiled


def by_forward(layers: nn.ModuleList, backend: Any) -> None:
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


WAYS: dict[str, Compile] = {
    "layer.compile()": by_call,
    "torch.compile(layer)": by_wrapper,
    "torch.compile(layer.forward)": by_forward,
}
