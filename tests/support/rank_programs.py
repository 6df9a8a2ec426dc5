"""Random programs over ranks. Whatever budget and mode a block has, and however ranks came to where
they are (by steps, or by a load of a save that was made there), what they see has the same bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.values import loading
from tests.support.rank_jobs import DTYPES, least_budget, world

WIDTH = 160
Way = tuple[str, ...]
"""What has been done to the model since it was made."""
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: infinity.AdamW(lr=1e-2),
    "uint8": lambda: infinity.AdamW(lr=1e-2, state_dtype=torch.uint8),
    "sgd": lambda: lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}
_SAVES = ("one", "two", "three")


class StoppedError(Exception):
    """What a program raises out of a block."""


class Net(nn.Module):
    """Ties, a frozen layer, a branch that some passes leave out, dropout, and buffers of which two
    are one, that ranks have their own values of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.branch = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.back = nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.drop = nn.Dropout(0.2)
        self.passes = nn.Buffer(torch.zeros(1))
        self.same_passes = self.passes

    def forward(self, x: torch.Tensor, *, takes_branch: bool = True) -> torch.Tensor:
        if self.training:
            self.passes.add_(1)
        x = self.norm(torch.relu(self.first(x))).to(x.dtype)
        x = self.drop(torch.relu(self.frozen(x)))
        if takes_branch:
            x = x + self.back(torch.relu(self.branch(x)))
        found: torch.Tensor = self.last(x)
        return found


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def make_on_meta() -> Net:
    """One without weights; buffers that no function initialises have to be real."""
    with torch.device("meta"):
        model = Net()
    for module, real in zip(model.modules(), make().modules(), strict=True):
        module._buffers = real._buffers
    return model


def bits(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


def run_program(rank: int, folder: Path, *, seed: int, num_blocks: int) -> dict[str, Any]:
    """What is wrong on this rank, and how much was compared; all ranks draw the same program."""
    program = _Program(rank, folder, random.Random(seed))
    for _ in range(num_blocks):
        program.run_block()
    return {"wrong": program.wrong, "compared": program.num_compared}


class _Program:
    def __init__(self, rank: int, folder: Path, drawn: random.Random) -> None:
        self._rank, self._folder, self._drawn = rank, folder, drawn
        self._dtype = DTYPES[drawn.choice(["float32", "float32", "bfloat16"])]
        self._optimizer = OPTIMIZERS[drawn.choice(sorted(OPTIMIZERS))]
        self._max_grad_norm = drawn.choice([None, 0.1])
        self._model: Net = make()
        self._saves: dict[str, Way] = {}
        self._way: Way = ()
        self._seen: dict[tuple[Way, str], Any] = {}
        self._is_mixed = False
        self.wrong: list[str] = []
        self.num_compared = 0
        torch.manual_seed(40 + rank)

    def run_block(self) -> None:
        """One block; after it the model is what it left, is made anew, or is on meta."""
        self._is_mixed = False
        try:
            with self._entered() as offloaded:
                if self._saves:
                    self._load(offloaded)
                else:
                    self._save(offloaded)
                for _ in range(self._drawn.randrange(3, 10)):
                    self._do(offloaded)
        except (StoppedError, infinity.RankFailedError) as stop:
            if "StoppedError" not in f"{type(stop).__name__}: {stop}":
                self.wrong.append(f"{self._way}: {stop}")
        except infinity.MixedStateError as mixed:
            if not self._is_mixed:
                self.wrong.append(f"{self._way}: {mixed}")
        after = self._drawn.choice(["as it is", "as it is", "anew", "on meta"])
        if after != "as it is":
            self._model = make() if after == "anew" else make_on_meta()

    def _entered(self) -> Any:
        options: dict[str, Any] = {
            "compute_dtype": self._dtype,
            "max_grad_norm": self._max_grad_norm,
            "optimizer": self._optimizer(),
            "overlap": self._drawn.random() < 0.5,
            "verify_swap": self._drawn.random() < 0.5,
            "activations": self._drawn.choice(["keep", "nvme"]),
        }
        budget: int | str = "256MiB"
        if self._drawn.random() < 0.7:
            budget = least_budget(make, self._folder, **options)
        return infinity.offload(
            self._model, self._folder, host_memory=budget, process_group=world(), **options
        )

    def _do(self, offloaded: Any) -> None:
        ways = [self._step] * 4 + [self._save, self._load, self._evaluate, self._weights]
        ways += [self._change, self._stop_load, self._stop_save, self._raise_on_one]
        self._drawn.choice(ways)(offloaded)

    def _see(self, what: str, value: Any) -> None:
        key = (self._way, what)
        self.num_compared += key in self._seen
        before = self._seen.setdefault(key, value)
        if before != value:
            self.wrong.append(f"{what} after {self._way}: {value}, before {before}")

    def _batch(self, number: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(10 * number + self._rank)
        return torch.randn(5, WIDTH, generator=own, dtype=self._dtype or torch.float32)

    # What programs do.

    def _step(self, offloaded: Any) -> None:
        self._take_step(offloaded, self._drawn.choice(["whole", "without branch", "of two passes"]))

    def _go_on(self, offloaded: Any) -> None:
        """As after each save, so that what a load of it leaves of the optimizer is compared."""
        self._take_step(offloaded, "whole")
        self._weights(offloaded)

    def _take_step(self, offloaded: Any, kind: str) -> None:
        for number in range(2 if kind == "of two passes" else 1):
            found = self._model(self._batch(number), takes_branch=kind != "without branch")
            loss = found.float().square().mean()
            loss.backward()
        offloaded.step()
        self._way += (kind,)
        self._see("loss", loss.item())

    def _save(self, offloaded: Any) -> None:
        name = self._drawn.choice(_SAVES)
        self._saves.pop(name, None)
        is_behind = self._drawn.random() < 0.5
        offloaded.save(self._folder / name, block=not is_behind, extra=[name, self._rank])
        self._saves[name] = self._way
        self._see("buffers", bits(self._model.buffers()))
        self._weights(offloaded)
        self._go_on(offloaded)

    def _load(self, offloaded: Any) -> None:
        name = self._drawn.choice(sorted(self._saves))
        extra = offloaded.load(self._folder / name)
        if extra != [name, self._rank]:
            self.wrong.append(f"{name} has the extra {extra}")
        self._way = self._saves[name]
        self._see("buffers", bits(self._model.buffers()))
        self._weights(offloaded)
        if self._drawn.random() < 0.7:
            self._go_on(offloaded)

    def _evaluate(self, offloaded: Any) -> None:
        self._model.eval()
        with torch.no_grad():
            self._see("output", self._model(self._batch(7)).float().sum().item())
        self._model.train()

    def _weights(self, offloaded: Any) -> None:
        with offloaded.gathered():
            self._see("weights", bits(self._model.parameters()))

    def _change(self, offloaded: Any) -> None:
        changed = [self._model.branch.weight, self._model.norm.weight]
        with offloaded.gathered(changed, modify=True), torch.no_grad():
            for weight in changed:
                weight.mul_(0.5)
        self._way += ("change",)

    def _stop_load(self, offloaded: Any) -> None:
        whose = self._drawn.randrange(dist.get_world_size())
        name = self._drawn.choice(["_load_own", "load_buffers", "_load_values"])
        error = self._drawn.choice([OSError("disk"), KeyboardInterrupt()])
        goes_on = self._drawn.random() < 0.8
        real = getattr(loading, name)
        with (
            patch.object(loading, name, side_effect=error if self._rank == whose else real),
            suppress(OSError, KeyboardInterrupt, infinity.RankFailedError),
        ):
            self._load(offloaded)
            self.wrong.append(f"a load that rank {whose} could not make was made")
        if not goes_on:
            self._is_mixed = True  # which the block may end in
            raise StoppedError
        self._load(offloaded)

    def _stop_save(self, offloaded: Any) -> None:
        whose = self._drawn.randrange(dist.get_world_size())
        extra: Any = (lambda: 0) if self._rank == whose else 1
        with suppress(TypeError, infinity.RankFailedError):
            offloaded.save(self._folder / sorted(self._saves)[0], extra=extra)
            self.wrong.append(f"a save that rank {whose} could not make was made")

    def _raise_on_one(self, offloaded: Any) -> None:
        """The others go on, and are told."""
        if self._rank == self._drawn.randrange(dist.get_world_size()):
            raise StoppedError
        self._model(self._batch(0)).float().square().mean().backward()
        offloaded.step()
        offloaded.save(self._folder / "never")
        self.wrong.append("a save of which one rank knows nothing was made")
