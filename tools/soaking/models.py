"""Models of tasks, their batches, and an optimizer that is a user's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from soaking.programs import Layer, Task

VOCABULARY = 192
LR = 3e-3
DTYPES = {"": None, "bfloat16": torch.bfloat16}


class Wide(nn.Module):
    """A feed-forward part, wide enough for tiles."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.up(x)))
        return found


class Loose(nn.Module):
    """Parameters of its own, and a buffer that its forward changes."""

    passes: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.randn(width, width) / width)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return (x @ self.rotation) * self.scale


class Convolution(nn.Conv1d):
    """Over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


MADE: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "wide": Wide,
    "norm": nn.LayerNorm,
    "conv": lambda width: Convolution(width, width, 3, padding=1),
    "loose": Loose,
    "dropout": lambda width: nn.Dropout(0.2),
}


class Net(nn.Module):
    """Logits for token ids, through the layers of a task. `again` is the layer before once more."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.plan = task.layers
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList()
        for layer in task.layers:
            again = self.layers[-1] if layer.kind == "again" and self.layers else None
            module = again or MADE.get(layer.kind, MADE["linear"])(width)
            if layer.is_frozen and again is None:
                module.requires_grad_(False)
            self.layers.append(module)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if task.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        x = self.embedding(ids)
        for layer, module in zip(self.plan, self.layers, strict=True):
            if not (layer.is_skipped and number % 2):
                x = x + self._through(layer, module, x)
        found: torch.Tensor = self.head(self.norm(x))
        return found

    def _through(self, layer: Layer, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer.recompute == "no" or not torch.is_grad_enabled():
            return torch.tanh(module(x))
        is_reentrant = layer.recompute == "reentrant"
        return torch.tanh(checkpoint(module, x, use_reentrant=is_reentrant))


def make(task: Task) -> Net:
    """The model of a task, with its first values; the state of the generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(abs(hash_of(task.seed)) % (1 << 31))
        return Net(task)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Cross entropy on the batch of that number."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    logits: torch.Tensor = model(ids[:, :-1], number)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def factor(step: int) -> float:
    """What the scheduler multiplies the rate by after so many steps."""
    return 1.0 / (1 + 0.1 * step)


class Own(torch.optim.Optimizer):
    """Goes by the sign of an average, and keeps a count in its group and one for each parameter."""

    def __init__(self, params: Iterable[Any], lr: float = LR) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["taken"] = state.get("taken", 0) + 1
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                rate = group["lr"] / (group["count"] + state["taken"]) ** 0.5
                parameter.add_(average.sign(), alpha=-rate)


Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
FACTORIES: dict[str, Factory] = {
    "SGD": partial(torch.optim.SGD, lr=LR, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": partial(torch.optim.Adam, lr=LR, amsgrad=True, weight_decay=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=LR, momentum=0.9, centered=True),
    "own": Own,
}
STATE_DTYPES = {
    "AdamW": torch.float32,
    "AdamW bfloat16": torch.bfloat16,
    "AdamW uint8": torch.uint8,
}


def digest(*found: torch.Tensor) -> str:
    """A name for the bits of tensors."""
    hashed = hashlib.sha256()
    for tensor in found:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        hashed.update(flat.numpy().tobytes())
    return hashed.hexdigest()[:16]


def digest_of(model: nn.Module) -> str:
    """Of parameters and buffers, by name; of a model in a block inside `gathered`."""
    state = model.state_dict()
    return digest(*(state[name] for name in sorted(state)))
