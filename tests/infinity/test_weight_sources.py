"""Stored weights that are not the model's by name, dtype or value: refused, never mixed up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import checkpoint
import infinity
from tests.support.training import same_bits

HOST_MEMORY = "64MiB"


class Nested(nn.Module):
    """Has a name with and without the ``model.`` that stored names may begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8, bias=False)
        self.model = nn.ModuleDict({"encoder": nn.Linear(8, 8, bias=False)})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight


def store(tensors: dict[str, torch.Tensor], folder: Path, kind: str) -> Path:
    path = folder / ("stored" if kind == "checkpoint" else "stored.safetensors")
    if kind == "checkpoint":
        checkpoint.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


def loaded(kind: type[nn.Module], weights: Path, nvme: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = kind()
    with (
        infinity.offload(model, nvme, weights=weights, host_memory=HOST_MEMORY) as offloaded,
        offloaded.gathered(),
    ):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_names_with_and_without_a_prefix_keep_their_own_values(tmp_path: Path, kind: str) -> None:
    state = Nested().state_dict()
    found = loaded(Nested, store(state, tmp_path, kind), tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
@pytest.mark.parametrize("missing", ["encoder.weight", "model.encoder.weight"])
def test_one_stored_tensor_is_never_that_of_two_parameters(
    tmp_path: Path, kind: str, missing: str
) -> None:
    state = Nested().state_dict()
    del state[missing]
    with pytest.raises(ValueError, match=r"missing: (model\.)?encoder\.weight"):
        loaded(Nested, store(state, tmp_path, kind), tmp_path)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_codes_of_quantised_weights_are_not_taken_for_weights(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    state = {name: torch.zeros(8, 8).to(dtype) for name in Nested().state_dict()}
    with pytest.raises(ValueError, match=rf"encoder.weight \({dtype}, torch.float32 in the model"):
        loaded(Nested, store(state, tmp_path, kind), tmp_path)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_tied_names_of_different_values_are_refused(tmp_path: Path, kind: str) -> None:
    equal = torch.randn(8, 8)
    equal[0, 0] = float("nan")
    same = store({"a.weight": equal, "b.weight": equal.clone()}, tmp_path, kind)
    assert same_bits(loaded(Tied, same, tmp_path)["a.weight"], equal)
    (tmp_path / "other").mkdir()
    other = {"a.weight": equal, "b.weight": equal + 1}
    with pytest.raises(ValueError, match=r"a\.weight.*b\.weight are one tied parameter"):
        loaded(Tied, store(other, tmp_path / "other", kind), tmp_path)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_stored_tensors_that_a_model_has_not_are_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored = store({**Nested().state_dict(), "head.weight": torch.zeros(3)}, tmp_path, kind)
    with caplog.at_level(logging.WARNING):
        loaded(Nested, stored, tmp_path)
    assert "head.weight" in caplog.text


def test_an_index_of_no_names_is_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(ValueError, match=r"index\.json is no index"):
        loaded(Nested, tmp_path, tmp_path)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_on_meta_compute_what_they_compute_in_memory(
    tmp_path: Path, kind: type[nn.LSTM] | type[nn.GRU]
) -> None:
    expected = kind(16, 16)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    batch = torch.randn(3, 2, 16)
    with torch.device("meta"):
        model = kind(16, 16)
    weights = tmp_path / "model.safetensors"
    with infinity.offload(model, tmp_path, weights=weights, host_memory=HOST_MEMORY) as offloaded:
        output = model(batch)[0]
        output.sum().backward()
        offloaded.step()
    assert torch.equal(output, expected(batch)[0])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(weight.is_meta for weight in model._flat_weights if weight is not None)
