"""A block that is stopped as it is entered: the model is as it was, whatever it was to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity import training
from infinity.optim import accumulated
from tests.support.models import seeded
from tests.support.training import least_budget, same_bits, same_values, values_of

WIDTH = 300


def _model() -> Any:
    layers: list[Any] = [
        layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    ]
    layers[0].weight.data = layers[0].weight.data.t()
    return nn.Sequential(*layers)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    values = {name: value + 1 for name, value in seeded(_model).state_dict().items()}
    save_file({name: value.contiguous() for name, value in values.items()}, path)
    return path


class _Stopping:
    """Calls what it stands for until its turn comes to raise."""

    def __init__(self, call: Any, turn: int, error: type[BaseException]) -> None:
        self._call, self._left, self._error = call, turn, error

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise self._error("as the block begins")
        return self._call(*arguments)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(
    ("place", "turn"),
    [
        ((training, "become_offloaded"), 1),
        ((training, "become_offloaded"), 5),
        ((training.Training, "watch_gradients"), 3),
        ((accumulated.Accumulated, "add"), 2),
    ],
)
@pytest.mark.parametrize("kind", ["weights", "bfloat16", "tiles"])
def test_model_of_a_block_that_is_stopped_as_it_begins_is_as_it_was(
    place: tuple[Any, str],
    turn: int,
    error: type[BaseException],
    kind: str,
    weights: Path,
    nvme: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "weights": {"weights": weights},
        "bfloat16": {"compute_dtype": torch.bfloat16},
        "tiles": {"weights": weights, "max_parameter_bytes": 1 << 18},
    }
    options = kinds[kind]
    least = least_budget(_model, nvme, **options)
    model = seeded(_model)
    model(torch.randn(4, WIDTH)).sum().backward()
    before, memory = values_of(model), [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    call = getattr(*place)
    stopping = _Stopping(call, turn, error)
    # A function, or it would not be given the object that it is called on.
    monkeypatch.setattr(*place, lambda *arguments: stopping(*arguments))
    with pytest.raises(error, match="as the block begins"):
        infinity.offload(model, nvme, host_memory=least, **options).__enter__()
    assert same_values(before, values_of(model))
    assert all(map(same_bits, gradients, (p.grad for p in model.parameters())))
    if kind != "tiles":
        assert memory == [p.data_ptr() for p in model.parameters()]
    monkeypatch.undo()
    with infinity.offload(model, nvme, host_memory=least, **options):
        pass
    assert same_values(before, values_of(model)) is (kind == "bfloat16")
