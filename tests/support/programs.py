"""Programs on a model, as lists of operations, and what becomes of them offloaded and in plain
PyTorch.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from soaking.models import digest
from torch import nn
from torch.nn.utils import parametrizations

import infinity
from tests.support.program_models import WIDTH, Handle, Mixed, PlainHandle, tokens

UNDEFINED = "what it holds now is not defined"
"""What is said of weights that were changed where they must not be."""


class Run:
    """A program at work: what it keeps between operations, and what it has seen."""

    def __init__(self, model: Mixed, handle: Handle, folder: Path) -> None:
        self.model = model
        self.handle = handle
        self.folder = folder
        self.parameters = dict(model.named_parameters())
        self.kept: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.seen: list[Any] = []
        self.hooks: list[Any] = []
        self.pending: list[Any] = []

    def do(self, name: str, *arguments: Any) -> None:
        """Raises what ends the program: errors after which values are not defined any more."""
        try:
            getattr(self, name)(*arguments)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            if UNDEFINED in str(error) or "put into the model" in str(error):
                raise
            self.seen.append(f"{name}: {type(error).__name__}: {error}")

    # Forward and backward passes.

    def loss(self, number: int) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens(number)).float(), tokens(number + 1))

    def evaluate(self, number: int, mode: str) -> None:
        inference = torch.inference_mode if mode == "inference" else torch.no_grad
        self.model.train(mode == "train")
        try:
            with nullcontext() if mode == "train" else inference():
                self.seen.append(digest(self.model(tokens(number))))
        finally:
            self.model.train()

    def backward(self, number: int) -> None:
        loss = self.loss(number)
        self.seen.append(digest(loss))
        self.handle.backward(loss)

    def keep_loss(self, number: int) -> None:
        self.losses.append(self.loss(number))

    def keep_autocast_loss(self, number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            self.losses.append(self.loss(number))

    def keep_loss_saved_on_cpu(self, number: int) -> None:
        with torch.autograd.graph.save_on_cpu():
            self.losses.append(self.loss(number))

    def backward_of_kept(self) -> None:
        if self.losses:
            self.handle.backward(self.losses.pop())

    def backward_of_all(self) -> None:
        losses, self.losses = self.losses, []
        if losses:
            self.handle.backward(torch.stack(losses).sum())

    def backward_twice(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward(retain_graph=True)
        self.handle.step()
        loss.backward()

    def backward_retained(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward(retain_graph=True)
        self.losses.append(loss)

    def differentiate(self, number: int) -> None:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
        layer = self.model.layers[number % 2 + 1]
        assert isinstance(layer, nn.Linear)
        (found,) = torch.autograd.grad(layer(x.to(layer.bias.dtype)).sum(), [layer.bias])
        self.seen.append(digest(found))

    def penalty(self, name: str) -> None:
        if self.parameters[name].requires_grad:
            self.handle.backward(self.parameters[name].float().square().sum() * 1e-3)

    def fail(self, where: int, when: str) -> None:
        """An exception comes out of the middle of a pass."""

        def raise_it(*_: object) -> None:
            raise ValueError(f"failed in layer {where}")

        layer = self.model.layers[where]
        if when == "forward":
            handle = layer.register_forward_hook(raise_it)
        elif when == "before":
            handle = layer.register_forward_pre_hook(raise_it)
        else:
            handle = layer.register_forward_hook(lambda m, a, out: _raising(out, raise_it))
        try:
            self.backward(where)
        finally:
            handle.remove()

    # Steps and gradients.

    def step(self) -> None:
        self.handle.step()

    def only_step(self) -> None:
        self.handle.optimizer.step()

    def zero(self, how: str) -> None:
        if how == "model":
            self.model.zero_grad()
        elif how == "optimizer":
            self.handle.optimizer.zero_grad()
        else:
            for parameter in self.parameters.values():
                parameter.grad = None

    def set_option(self, option: str, value: float) -> None:
        for group in self.handle.optimizer.param_groups:
            if option in group:
                group[option] = value

    def gradient(self, name: str) -> None:
        found = self.handle.gradient(self.parameters[name])
        self.seen.append(None if found is None else digest(found))

    def assign_gradient(self, name: str) -> None:
        self.parameters[name].grad = torch.full_like(self.parameters[name], 0.01)

    def train_part(self, name: str, trained: bool) -> None:
        self.parameters[name].requires_grad_(trained)

    def add_group(self) -> None:
        self.handle.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    # Values.

    def edit(self, name: str, how: str) -> None:
        EDITS[how](self.parameters[name])

    def keep(self, name: str, how: str) -> None:
        self.kept.append(TAKES[how](self.parameters[name]))

    def look_at_kept(self) -> None:
        self.seen.append(digest(*self.kept))

    def gathered(self, name: str, how: str) -> None:
        chosen = None if how == "all" else [self.parameters[name]]
        with self.handle.gathered(chosen, modify=how == "modify"):
            self.seen.append(digest(self.parameters[name]))
            if how == "all":
                self.seen.append(digest(*self.model.state_dict().values()))
            else:
                EDITS["no_grad"](self.parameters[name])
                self.seen.append(digest(self.model.eval()(tokens(0))))
                self.model.train()

    def gathered_with(self, name: str, inner: tuple[Any, ...]) -> None:
        with self.handle.gathered([self.parameters[name]], modify=True):
            self.do(*inner)

    def save(self, block: bool) -> None:
        pending = self.handle.save(self.folder / "saved", block=block)
        if not block and pending is not None:
            self.pending.append(pending)

    def load(self) -> None:
        if self.pending:
            self.pending.pop().result()
        if (self.folder / "saved").exists():
            self.handle.load(self.folder / "saved")

    def export(self) -> None:
        for path in self.handle.export(self.folder / "exported") or ():
            self.seen.append(hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16])

    # What a program does to modules.

    def hook(self, where: int, kind: str) -> None:
        self.hooks.append(HOOKS[kind](self.model.layers[where], self.seen))

    def unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def add_buffer(self, where: int, persistent: bool) -> None:
        values = torch.full((WIDTH,), 0.5)
        self.model.layers[where].register_buffer("late", values, persistent=persistent)

    def change_buffer(self) -> None:
        assert isinstance(self.model.passes, torch.Tensor)
        self.model.passes = self.model.passes * 2
        with torch.no_grad():
            assert isinstance(self.model.norm.running_mean, torch.Tensor)
            self.model.norm.running_mean.mul_(0.5)

    def replace(self, how: str) -> None:
        PUTS[how](self.model)

    def misuse(self, how: str) -> None:
        MISUSES[how](self.model)


def _raising(out: torch.Tensor, raise_it: Callable[..., None]) -> torch.Tensor:
    out.register_hook(raise_it)
    return out


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
    "vector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
}
TAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "row": _no_grad(lambda p: p[0]),
    "flat": lambda p: p.detach().view(-1),
    "clone": lambda p: p.detach().clone(),
    "copied": lambda p: copy.deepcopy(p).detach(),
}
PUTS: dict[str, Callable[[Mixed], Any]] = {
    "module": lambda model: model.layers.append(nn.Linear(WIDTH, WIDTH)),
    "parameter": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1))),
    "head": lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(4, WIDTH))),
    "parametrization": lambda model: parametrizations.weight_norm(model.layers[2]),
}
MISUSES: dict[str, Callable[[Mixed], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}),
    "copy": copy.deepcopy,
    "copy of a layer": lambda model: copy.deepcopy(model.layers[2]),
    "functional": lambda model: torch.func.functional_call(
        model, {"rotation": torch.zeros(WIDTH, WIDTH)}, (tokens(0),)
    ),
    "vmap": lambda model: torch.func.vmap(model.layers[2])(torch.ones(2, 3, WIDTH)),
    "grad": lambda model: torch.func.grad(lambda w: model.layers[2](w).sum())(torch.ones(WIDTH)),
    "stack": lambda model: torch.func.stack_module_state([model, model]),
    "half": lambda model: model.half(),
    "double layer": lambda model: model.layers[1].double(),
    "traced": lambda model: torch.jit.trace(model.layers[1], torch.ones(2, WIDTH)),
    "compiled": lambda model: model.layers[1].compile(),
    "shared": lambda model: model.share_memory(),
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
}


def _hook_on_weight(kind: str) -> Callable[[nn.Module, list[Any]], Any]:
    def register(layer: nn.Module, seen: list[Any]) -> Any:
        weight = next(layer.parameters())
        if kind == "tensor":
            return weight.register_hook(lambda grad: grad * 0.5)
        return weight.register_post_accumulate_grad_hook(lambda p: seen.append("arrived"))

    return register


def _halve(module: nn.Module, grads: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda layer, seen: layer.register_forward_hook(lambda m, a, out: out * 0.75),
    "before": lambda layer, seen: layer.register_forward_pre_hook(lambda m, a: (a[0] + 0.125,)),
    "looking": lambda layer, seen: layer.register_forward_hook(
        lambda m, a, out: seen.append(digest(next(m.parameters())))
    ),
    "backward": lambda layer, seen: layer.register_full_backward_hook(_halve),
    "tensor": _hook_on_weight("tensor"),
    "post": _hook_on_weight("post"),
}

Program = list[tuple[Any, ...]]


def offloaded_outcome(
    program: Program, nvme: Path, host_memory: int, make: Callable[[], Mixed], **options: Any
) -> tuple[Any, ...]:
    """What a program saw, the values after it, and the error that ended it."""
    model, seen = make(), []
    torch.manual_seed(3)
    try:
        with infinity.offload(model, nvme, host_memory=host_memory, **options) as offloaded:
            run = Run(model, offloaded, nvme.parent)
            seen = run.seen
            for operation in program:
                run.do(*operation)
    except (RuntimeError, ValueError) as error:
        return (*seen, f"ended: {type(error).__name__}: {error}")
    return (*seen, digest(*model.state_dict().values()))


def plain_outcome(program: Program, folder: Path, make: Callable[[], Mixed]) -> tuple[Any, ...]:
    """The same of a program in memory, with torch's optimizer."""
    model = make()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run = Run(model, PlainHandle(model, optimizer), folder)
    for operation in program:
        run.do(*operation)
    return (*run.seen, digest(*model.state_dict().values()))


def errors_in(outcome: tuple[Any, ...]) -> list[str]:
    return [seen for seen in outcome if isinstance(seen, str) and "Error: " in seen]
