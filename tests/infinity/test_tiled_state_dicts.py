"""What ``load_state_dict`` does with a model in tiles is what it does without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import infinity
from tests.support.models import make_tied, seeded
from tests.support.training import same_values

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1 << 18


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_loaded_badly_is_told_as_without_tiles(nvme: Path, strict: bool) -> None:
    """Missing were tiles, and a whole of another shape was passed over if loading is not strict."""
    model, plain = seeded(make_tied), seeded(make_tied)
    with infinity.offload(model, nvme, max_parameter_bytes=BOUND) as offloaded:
        for lacks in ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias"):
            state = {name: value for name, value in plain.state_dict().items() if name != lacks}
            with offloaded.gathered(modify=True):
                told = model.load_state_dict(state, strict=False)
            assert told == plain.load_state_dict(state, strict=False)
            for value in (torch.ones(9, 300), torch.ones(()), torch.ones(1000, 299), 3):
                errors = []
                for loading in (plain, model):
                    with offloaded.gathered(modify=True), pytest.raises(RuntimeError) as caught:
                        loading.load_state_dict({**state, lacks: value}, strict=strict)
                    errors.append(str(caught.value))
                assert errors[0] == errors[1]


def test_a_tied_model_in_tiles_is_loaded_by_safetensors(nvme: Path, tmp_path: Path) -> None:
    """Which looks for what it left out when it saved among the keys that are missing."""
    model, other = seeded(make_tied), seeded(make_tied, 3)
    safetensors.torch.save_model(other, str(tmp_path / "whole"))
    with infinity.offload(model, nvme, max_parameter_bytes=BOUND) as offloaded:
        with offloaded.gathered(modify=True):
            missing, unexpected = safetensors.torch.load_model(model, tmp_path / "whole")
            assert not missing
            assert not unexpected
        with offloaded.gathered():
            assert same_values(model.state_dict(), other.state_dict())
            safetensors.torch.save_model(model, str(tmp_path / "tiles"))
    again = seeded(make_tied, 4)
    missing, unexpected = safetensors.torch.load_model(again, tmp_path / "tiles")
    assert not missing
    assert not unexpected
    assert same_values(again.state_dict(), other.state_dict())


class Converting:
    """Hooks of a program: what an older version of a layer stored is turned round and scaled."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put_on(self, layer: Any) -> None:
        layer.register_load_state_dict_pre_hook(self._convert)
        layer.register_state_dict_post_hook(lambda *args: self._mark(*args))
        layer.register_load_state_dict_post_hook(
            lambda _, keys: self.told.append([*keys.missing_keys])
        )

    def _convert(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        self.told.append([key for key in state if key.startswith(prefix)])
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = 2 * state.pop(f"{prefix}old").t()

    def _mark(self, _: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        self.told.append([key for key in state if key.startswith(prefix)])
        state[f"{prefix}kept"] = state.pop(f"{prefix}weight").sum(1)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_hooks_of_a_program_have_the_whole(nvme: Path, layer: int, inside: bool) -> None:
    """The layer is a table that shares its weight with a head, or a layer of its own."""
    found = []
    for bound in (BOUND, None):
        model, hooks = seeded(make_tied), Converting()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for index in {layer} | ({0, 2} - {layer} if layer != 1 else set()):
            state[f"{index}.old"] = state.pop(f"{index}.weight").t() / 4
        if not inside:
            hooks.put_on(model[layer])
        with infinity.offload(model, nvme, max_parameter_bytes=bound) as offloaded:
            if inside:
                hooks.put_on(model[layer])
            with offloaded.gathered(modify=True):
                keys = model.load_state_dict(state, strict=False)
                stored = {name: value.clone() for name, value in model.state_dict().items()}
        values = {name: value.detach().clone() for name, value in model.named_parameters()}
        found.append((hooks.told, [*map(sorted, keys)], [*stored], stored, values))
        model.load_state_dict(state, strict=False)
        assert len(hooks.told) == 5
    assert found[0][:3] == found[1][:3]
    assert same_values(found[0][3], found[1][3])
    assert same_values(found[0][4], found[1][4])


def test_tiles_of_two_projections_with_one_name_are_loaded_each(nvme: Path) -> None:
    """The key projection of the second got the query projection of the second, too."""

    def make_two() -> Any:
        kinds: Any = {"vdim": 160, "bias": False}
        model: Any = nn.Sequential(*(nn.MultiheadAttention(320, 4, **kinds) for _ in range(2)))
        model[1].k_proj_weight = model[0].q_proj_weight
        return model

    model, plain, other = seeded(make_two), seeded(make_two), seeded(make_two, 3)
    plain.load_state_dict(other.state_dict())
    block = infinity.offload(model, nvme, max_parameter_bytes=BOUND)
    with block as offloaded, offloaded.gathered(modify=True):
        model.load_state_dict(other.state_dict())
        assert same_values(model.state_dict(), plain.state_dict())
    assert same_values(model.state_dict(), plain.state_dict())


def test_variables_of_a_state_dict_are_those_of_the_model(nvme: Path) -> None:
    """They were copies without history: what was frozen or differentiated by them was not."""
    model, plain = seeded(make_tied), seeded(make_tied)
    with infinity.offload(model, nvme, max_parameter_bytes=BOUND) as offloaded:
        for module in (model, plain):
            with offloaded.gathered():
                state = module.state_dict(keep_vars=True)
                assert [*state] == [*plain.state_dict()]
                assert all(value is module.get_parameter(name) for name, value in state.items())
                torch.stack([value.square().sum() for value in state.values()]).sum().backward()
                state["1.weight"].requires_grad_(False)
        for own, other in zip(model[:3], plain[:3], strict=True):
            assert torch.equal(own.weight.grad.clone(), other.weight.grad)
        assert not any(part.requires_grad for part in model[1].weight.tiles)


def test_notes_of_a_state_dict_are_of_the_modules_of_the_model(nvme: Path) -> None:
    """Modules that there are none of without tiles had versions in what a program saves."""
    model: Any = seeded(make_tied)
    before = model.state_dict()._metadata
    block = infinity.offload(model, nvme, max_parameter_bytes=BOUND)
    with block as offloaded, offloaded.gathered():
        assert model.state_dict()._metadata == before
