"""Saved views of weights come back as what they were: dtype, conjugation, negation, layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.activations.views import View, bytes_of
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of

WIDTH = 192
Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


USES: dict[str, Use] = {
    "complex": lambda w, x: torch.view_as_real(_as_complex(w) * _as_complex(x)).flatten(-2),
    "conjugate": lambda w, x: torch.view_as_real(_as_complex(w).conj() * _as_complex(x)).flatten(
        -2
    ),
    "imaginary part of a conjugate": lambda w, x: (
        _as_complex(w).conj().imag * x[..., ::2]
    ).repeat_interleave(2, -1),
    "product of complex matrices": lambda w, x: torch.view_as_real(
        _as_complex(x) @ _as_complex(w)[: WIDTH // 2].mH
    ).flatten(-2),
    "transposed": lambda w, x: x @ w.t(),
    "a diagonal": lambda w, x: w.diagonal() * x,
    "a part, expanded": lambda w, x: w[3:4, :].expand(WIDTH, -1).sum(0) * x * w[5, 0].expand(WIDTH),
    "bits of another dtype": lambda w, x: x * w.view(torch.int32).sign().float() * w[0],
}


class _Uses(nn.Module):
    """Uses one weight after the other, each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 16 for _ in range(16))
        self.small = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, use in zip(self.weights, 2 * [*USES.values()], strict=True):
            used = use(weight, x)
            if used.shape != x.shape:
                used = used.repeat_interleave(x.shape[-1] // used.shape[-1], -1)
            x = x + 0.1 * torch.tanh(used)
        return torch.view_as_real(_as_complex(self.small).conj() * _as_complex(x)).flatten(-2)


def _make() -> _Uses:
    torch.manual_seed(5)
    return _Uses()


def _train(model: nn.Module, step: Callable[[], object]) -> None:
    for number in range(2):
        rng = torch.Generator().manual_seed(number)
        model(torch.randn(WIDTH, WIDTH, generator=rng)).square().mean().backward()
        step()


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def test_views_of_weights_train_as_in_plain_pytorch(nvme: Path) -> None:
    plain = _make()
    optimizer = _sgd([*plain.parameters()])

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    _train(plain, step)
    expected = values_of(plain)
    for host_memory in (WHOLE, least_budget(_make, nvme, optimizer=_sgd)):
        model = _make()
        with infinity.offload(model, nvme, optimizer=_sgd, host_memory=host_memory) as offloaded:
            _train(model, offloaded.step)
        different = {
            key for key, value in values_of(model).items() if not same_bits(value, expected[key])
        }
        assert different == set()


@pytest.mark.parametrize("use", [*USES.values()])
def test_a_view_made_again_over_other_memory_is_the_same(use: Use) -> None:
    memory = torch.randn(7 + WIDTH * WIDTH)
    weight = memory[6:-1].view(WIDTH, WIDTH).requires_grad_()
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        use(weight, torch.ones(WIDTH, WIDTH, requires_grad=True))
    inside = [t for t in saved if t.untyped_storage()._cdata == memory.untyped_storage()._cdata]
    assert inside
    for tensor in inside:
        assert 6 * 4 <= bytes_of(tensor)[0] < bytes_of(tensor)[1] <= (6 + WIDTH * WIDTH) * 4
        view = View.of(tensor.detach(), 6 * 4)
        for start in (0, 2, 3):
            other = torch.zeros(start + WIDTH * WIDTH)
            other[start:] = weight.detach().view(-1)
            again = view.over(other[start:])
            assert same_bits(again.resolve_conj(), tensor.detach().resolve_conj())
            assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
            assert again.stride() == tensor.stride()


def test_a_weight_changed_between_forward_and_backward_is_refused(nvme: Path) -> None:
    for host_memory in (WHOLE, least_budget(_make, nvme)):
        model = _make()
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            loss = model(torch.randn(WIDTH, WIDTH)).sum()
            with offloaded.gathered(modify=True):
                for parameter in model.parameters():
                    nn.init.zeros_(parameter)
            with pytest.raises(RuntimeError, match="was changed in place after the forward pass"):
                loss.backward()


class _Leaves(nn.Module):
    """Makes parameters of its own over its weights in each forward pass, as PEFT's DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(320, 320) for _ in range(16))
        self.made: list[nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            weight: Any = layer.weight
            leaf = nn.Parameter(weight.T if number % 3 else weight.detach())
            self.made.append(leaf)
            x = x + torch.tanh(nn.functional.linear(x, leaf) if number % 2 else x * leaf)
        return x


def test_leaves_made_of_weights_hold_no_memory_of_the_budget(nvme: Path) -> None:
    def make() -> _Leaves:
        torch.manual_seed(5)
        return _Leaves()

    plain, model = make(), make()
    x = torch.randn(320, 320, generator=torch.Generator().manual_seed(0))
    plain(x).square().mean().backward()
    with infinity.offload(model, nvme, host_memory=least_budget(make, nvme)):
        model(x).square().mean().backward()
        assert len(model.made) == 16
        for leaf, expected in zip(model.made, plain.made, strict=True):
            assert same_bits(leaf.detach(), expected.detach())
            assert leaf.grad is not None
            assert expected.grad is not None
            assert same_bits(leaf.grad, expected.grad)
        model.made.clear()


class _Holder(nn.Module):
    """Takes a view of a weight, computes with others, and uses it then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(320, 320, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = map(self._transposed, self.layers)
        held = first()
        for other in others:
            x = x + torch.tanh(x @ other())
        return x + torch.tanh(x @ held)

    @staticmethod
    def _transposed(layer: Any) -> Callable[[], torch.Tensor]:
        return lambda: layer.weight.t()


def test_views_that_outlast_their_weights_in_memory_hold_nothing_after(nvme: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(*(_Holder() for _ in range(8)))

    results = []
    for host_memory in (WHOLE, least_budget(make, nvme)):
        model = make()
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(3):
                x = torch.randn(4, 320, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                offloaded.step()
        results.append(values_of(model))
    assert same_values(results[0], results[1])
