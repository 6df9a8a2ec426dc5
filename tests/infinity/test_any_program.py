"""Whatever a program does inside the block, it gives the same bits or the same error under every
budget.

Programs are drawn as lists of operations on a model with tied, frozen, complex, checkpointed and
buffered parts. An error ends a program; it has to name a parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.support.models import seeded
from tests.support.training import WHOLE, least_budget

WIDTH = 160
DEPTH = 18
TOKENS = 128


class _Mixed(nn.Module):
    """Tied embedding and head, every third layer frozen, one by its complex view, one
    recomputed, and a buffer that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.rotation = nn.Parameter(torch.randn(WIDTH, WIDTH) / 12)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        for layer in self.layers[::3]:
            layer.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number % 5 == 4:
                x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + torch.tanh(layer(x))
        turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * torch.view_as_complex(
            self.rotation.view(WIDTH, -1, 2)
        ).conj().sum(0)
        x = self.norm(torch.view_as_real(turned).flatten(-2))
        x = x + x @ self.layers[1].weight.t()  # type: ignore[operator]
        logits: torch.Tensor = self.head(x)
        return logits


def _tokens(number: int) -> torch.Tensor:
    return torch.randint(0, TOKENS, (6,), generator=torch.Generator().manual_seed(number))


def _digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class _Run:
    """A program at work: what it keeps between operations, and what it has seen."""

    def __init__(self, model: _Mixed, offloaded: infinity.OffloadedModel, folder: Path) -> None:
        self.model = model
        self.offloaded = offloaded
        self.folder = folder
        self.parameters = dict(model.named_parameters())
        self.kept: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.seen: list[Any] = []

    def loss(self, number: int) -> torch.Tensor:
        return F.cross_entropy(self.model(_tokens(number)), _tokens(number + 1))

    def evaluate(self, number: int, mode: str) -> None:
        inference = torch.inference_mode if mode == "inference" else torch.no_grad
        self.model.train(mode == "train")
        with nullcontext() if mode == "train" else inference():
            self.seen.append(_digest(self.model(_tokens(number))))
        self.model.train()

    def backward(self, number: int) -> None:
        loss = self.loss(number)
        self.seen.append(_digest(loss))
        loss.backward()

    def keep_loss(self, number: int) -> None:
        self.losses.append(self.loss(number))

    def backward_of_kept(self) -> None:
        if self.losses:
            self.losses.pop().backward()

    def step(self) -> None:
        self.offloaded.step()

    def zero(self) -> None:
        self.model.zero_grad()

    def edit(self, name: str, how: str) -> None:
        EDITS[how](self.parameters[name])

    def keep(self, name: str, how: str) -> None:
        self.kept.append(TAKES[how](self.parameters[name]))

    def look_at_kept(self) -> None:
        self.seen.append(_digest(*self.kept))

    def gradient(self, name: str) -> None:
        found = self.offloaded.gradient(self.parameters[name])
        self.seen.append(None if found is None else _digest(found))

    def gathered(self, name: str, how: str) -> None:
        chosen = None if how == "all" else [self.parameters[name]]
        with self.offloaded.gathered(chosen, modify=how == "modify"):
            self.seen.append(_digest(self.parameters[name]))
            if how != "all":
                EDITS["no_grad"](self.parameters[name])
                self.seen.append(_digest(self.model.eval()(_tokens(0))))
                self.model.train()

    def save(self) -> None:
        self.offloaded.save(self.folder / "saved")

    def load(self) -> None:
        if (self.folder / "saved").exists():
            self.offloaded.load(self.folder / "saved")

    def replace(self, how: str) -> None:
        PUTS[how](self.model)


def _no_grad(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return torch.no_grad()(change)


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no_grad": _no_grad(lambda p: p.mul_(1.5)),
    "inference": torch.inference_mode()(lambda p: p.add_(1e-3)),
    "data": lambda p: p.data.mul_(2),
    "detached": lambda p: p.detach().zero_(),
    "row": _no_grad(lambda p: p[0].fill_(0.25)),
    "init": lambda p: nn.init.constant_(p, 0.125),
    "foreach": _no_grad(lambda p: torch._foreach_add_([p], 0.5)),
    "replaced data": lambda p: setattr(p, "data", torch.zeros_like(p)),
}
TAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "row": _no_grad(lambda p: p[0]),
    "flat": lambda p: p.detach().view(-1),
    "clone": lambda p: p.detach().clone(),
}
PUTS: dict[str, Callable[[_Mixed], Any]] = {
    "module": lambda model: model.layers.append(nn.Linear(WIDTH, WIDTH)),
    "parameter": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1))),
    "head": lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(4, WIDTH))),
}

NAMES = ("embedding.weight", "layers.0.weight", "layers.1.weight", "layers.4.weight", "rotation")
_numbers = st.integers(0, 3)
_names = st.sampled_from((*NAMES, "norm.weight"))


def _op(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *arguments)


_TRAINING = st.one_of(
    _op("backward", _numbers),
    _op("step"),
    _op("evaluate", _numbers, st.sampled_from(["train", "no_grad", "inference"])),
)
_OTHERS = st.one_of(
    _op("keep_loss", _numbers),
    _op("backward_of_kept"),
    _op("zero"),
    _op("keep", _names, st.sampled_from([*TAKES])),
    _op("look_at_kept"),
    _op("gradient", _names),
    _op("gathered", _names, st.sampled_from(["modify", "scratch", "all"])),
    _op("save"),
    _op("load"),
)
_WRONG = st.one_of(
    _op("edit", _names, st.sampled_from([*EDITS])), _op("replace", st.sampled_from([*PUTS]))
)
PROGRAMS = st.lists(st.one_of(_TRAINING, _TRAINING, _OTHERS, _OTHERS, _WRONG), max_size=10)


def _outcome(
    program: list[tuple[Any, ...]], nvme: Path, host_memory: int, optimizer: Any, number: int
) -> tuple[Any, ...]:
    """What a program saw, the values after it, and the error that ended it."""
    model = seeded(_Mixed)
    folder = nvme.parent / f"run-{number}"
    torch.manual_seed(3)
    seen: list[Any] = []
    try:
        with infinity.offload(
            model, nvme, optimizer=optimizer, host_memory=host_memory
        ) as offloaded:
            run = _Run(model, offloaded, folder)
            seen = run.seen
            for name, *arguments in program:
                getattr(run, name)(*arguments)
    except (RuntimeError, ValueError) as error:
        return (*seen, f"{type(error).__name__}: {error}")
    return (*seen, _digest(*model.state_dict().values()))


@cache
def _least(optimizer: Any, nvme: Path) -> int:
    return least_budget(_Mixed, nvme, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [infinity.AdamW(lr=1e-2), None], ids=["trained", "inference"])
def test_any_program_is_the_same_under_every_budget(
    optimizer: infinity.AdamW | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nvme = tmp_path_factory.mktemp("nvme")
    least = _least(optimizer, nvme)

    @settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(PROGRAMS)
    def check(program: list[tuple[Any, ...]]) -> None:
        outcomes: list[tuple[Any, ...]] = []
        for host_memory in (WHOLE, least):
            folder = tmp_path_factory.mktemp("program") / "nvme"
            folder.mkdir()
            outcomes.append(_outcome(program, folder, host_memory, optimizer, len(outcomes)))
            assert not any(folder.iterdir())
        assert outcomes[0] == outcomes[1]
        last = outcomes[0][-1]
        if "Error: " in last and "optimizer=None" not in last:
            assert any(name in last for name in (*NAMES, "norm.weight", "layers.18", "scale")), last

    check()
